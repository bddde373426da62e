"""What ``summary.json`` says: counts of workers and servers, by parameter set and together.

    sets = [counts_of_set(told, built[index], index) for index in range(len(built))]
    together(sets)

Pure: takes what the registrar has been told, and what is known of the sets. docs/design.md names
the fields that users rely on. Where the run failed it says what is known by then, and null for what
is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psdist.history.writers import RunRecord
from psdist.protocol.checkpoints import number_of
from psdist.protocol.control import Progress
from psdist.protocol.partition import Partition
from psdist.protocol.roles import Roles
from psdist.ranks.telling.coding import coding_of, coding_together

_TOLD_TWICE = {"pipeline", "checksum_every"}
"""What summary.json repeats of run.json, beside what it says of every run."""
_LARGEST = {"most_slots_used"}
"""Counts of a server that are the largest of its sets, not their sum."""
_ADDED = (
    *("chunks", "updates_applied", "bytes_pushed", "bytes_pulled"),
    *("early_pushes", "local_steps", "rounds_cut"),
)
"""What the sets of a run come to together."""


@dataclass(frozen=True, kw_only=True)
class BuiltSet:
    """A parameter set, once its chief has described it."""

    partition: Partition
    empty_servers: list[int]
    may_miss: bool
    """Whether rounds may close without some groups."""
    promised: RunRecord | None
    """What its history says was promised, where there is one."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the registrar has heard."""

    roles: Roles
    workers: Mapping[int, Mapping[str, Any]]
    """Statistics of workers whose script has finished; ``sets`` has those of each set."""
    servers: Mapping[int, Mapping[str, Any]]
    """Statistics of servers that have finished; ``sets`` has those of each set."""
    progress: Mapping[int, Progress]
    contained: Sequence[Sequence[int]] = ()
    """By set, by group: iterations that the registrar's own chunks contain; none where it has no
    chunks of a set. Of a run that failed: workers tell how far they are only now and then."""
    out: frozenset[int] = frozenset()
    """Workers that are not in the job: what they did is in no sum."""
    not_joined: frozenset[int] = frozenset()
    """Substitutes that have never been."""

    @property
    def all_workers(self) -> bool:
        """Each says what it has done when it is done: a part of them is no sum."""
        return set(range(self.roles.num_workers)) - self.out <= set(self.workers)

    @property
    def all_servers(self) -> bool:
        return len(self.servers) == self.roles.num_servers

    @property
    def dropped_samples(self) -> int | None:
        """Samples in the parts of failed workers of the batches that the chief has used since it
        learned of the failures. None while a worker is training, and if spares take places."""
        if not self.all_workers or self.roles.num_substitutes:
            return None
        left = self.workers.keys() - self.out
        return int(self.workers[min(left)]["dropped_samples"]) if left else 0

    @property
    def bytes_sent(self) -> int | None:
        """All messages of those that have told what they have done, their headers and control
        messages with them; None while one of them has not."""
        if not (self.all_workers and self.all_servers):
            return None
        told = (*self.workers.values(), *self.servers.values())
        return sum(int(each["bytes_sent"]) for each in told)


def counts_of_set(told: Told, built: BuiltSet | None, index: int) -> dict[str, Any]:
    """What summary.json says of one set; ``built``: None before it was described."""
    workers = {
        worker: each["sets"][index]
        for worker, each in told.workers.items()
        if index < len(each["sets"])
    }
    servers = [
        told.servers[key]["sets"][index]
        for key in sorted(told.servers)
        if index < len(told.servers[key]["sets"])
    ]
    staleness: Counter[int] = Counter()
    for each in workers.values():
        staleness.update({int(key): int(n) for key, n in each["staleness"].items()})
    clocks = []
    contained = told.contained[index] if index < len(told.contained) else ()
    for group, members in enumerate(told.roles.groups):
        known = [workers[w]["clock"] for w in members if w in workers]
        if not told.all_workers:
            known += contained[group : group + 1]
        if not index:
            known += [told.progress[w].clock for w in members if w in told.progress]
        clocks.append(max(known, default=0))
    updates = min((each["updates"] for each in servers if each["num_chunks"]), default=0)
    is_known = told.all_workers
    while clocks and told.roles.groups[len(clocks) - 1][0] in told.not_joined:
        clocks.pop()  # only the last ones: a clock's place is its group's number
    return {
        "empty_servers": built and built.empty_servers,
        "chunks": built and len(built.partition.chunks),
        "clocks": clocks,
        "updates_applied": updates if told.all_servers else None,
        "max_staleness_seen": max(staleness, default=0) if is_known else None,
        "staleness_seen": {str(key): staleness[key] for key in sorted(staleness)},
        "bytes_pushed": _sum(workers, "bytes_pushed") if is_known else None,
        "bytes_pulled": _sum(workers, "bytes_pulled") if is_known else None,
        "early_pushes": _sum(workers, "early_pushes") if is_known else None,
        "local_steps": _sum(workers, "local_steps") if is_known else None,
        "rounds_cut": _sum(workers, "rounds_cut") if is_known else None,
        "rounds_missed": _rounds_missed(told, workers, built) if is_known else None,
        "coding": coding_of(workers) if is_known else None,
        "recorded": built and built.promised and built.promised.model_dump(include=_TOLD_TWICE),
        "per_server": servers,
    }


def _rounds_missed(
    told: Told, workers: Mapping[int, Mapping[str, Any]], built: BuiltSet | None
) -> list[int] | None:
    """By group; None where no group may miss any."""
    if built is None or not built.may_miss:
        return None
    return [workers[members[0]]["rounds_missed"] for members in told.roles.groups]


def share_line(summary: Mapping[str, Any]) -> list[str]:
    """For the report: to which part of its rounds each group has contributed; nothing where all
    were waited for."""
    missed = summary["rounds_missed"]
    if missed is None:
        return []
    first = number_of(summary["resumed_from"] or "") or 0
    rounds = [clock - first for clock in summary["clocks"]]
    pairs = zip(missed, rounds, strict=True)
    shares = [100 * (1 - number / own) if own else 100.0 for number, own in pairs]
    told = ", ".join(f"{share:.0f}%" for share in shares[:16]) + " ..." * (len(shares) > 16)
    return [f"  contributed    {told} of the rounds (by group)"]


def _sum(workers: Mapping[int, Mapping[str, Any]], key: str) -> int:
    return sum(each[key] for each in workers.values())


def together(sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What summary.json says of all sets; clocks are the first set's."""
    first = sets[0]
    if len(sets) == 1:
        return dict(first)
    staleness: Counter[str] = Counter()
    for each in sets:
        staleness.update(each["staleness_seen"])
    empty = [set(each["empty_servers"]) for each in sets if each["empty_servers"] is not None]
    most = [each["max_staleness_seen"] for each in sets]
    return {
        "empty_servers": sorted(set.intersection(*empty)) if empty else None,
        **{key: _added(each[key] for each in sets) for key in _ADDED},
        "coding": coding_together([each["coding"] for each in sets]),
        "clocks": first["clocks"],
        "modes": first["modes"],
        "rounds_missed": first["rounds_missed"],
        "max_staleness_seen": None if None in most else max(most),
        "staleness_seen": {str(key): staleness[str(key)] for key in sorted(map(int, staleness))},
        "recorded": first["recorded"],
        "per_server": [
            _server_together(servers)
            for servers in zip(*(each["per_server"] for each in sets), strict=False)
        ],
    }


def _added(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _server_together(servers: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Counts of one server, of all its sets."""
    keys = dict.fromkeys(key for each in servers for key in each)
    values = {key: [each[key] for each in servers if key in each] for key in keys}
    return {key: max(n) if key in _LARGEST else sum(n) for key, n in values.items()}
