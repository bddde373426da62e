"""The counts of ``summary.json``: of workers and servers, by parameter set and together; pure.

    counts_of_run(status, reports, built)     # status: RunStatus; reports: RankReports

docs/reference/run-directory.md names the fields that users rely on. After a failure, a count that
is not known is null.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psdist.history.writers import RunRecord
from psdist.protocol.checkpoints import number_of
from psdist.protocol.partition import Partition
from psdist.ranks.reporting.coding import coding_of, coding_together
from psdist.ranks.reporting.rank_reports import RankReports
from psdist.ranks.reporting.run_status import RunStatus

_TOLD_TWICE = {"pipeline", "checksum_every"}
"""Fields of run.json that summary.json repeats."""
_LARGEST = {"most_slots_used"}
"""Counts of a server whose total is the largest of its sets; others are added."""
_ADDED = (
    *("chunks", "updates_applied", "bytes_pushed", "bytes_pulled"),
    *("early_pushes", "local_steps", "rounds_cut"),
)
"""Counts of a set that are added over the sets."""


@dataclass(frozen=True, kw_only=True)
class BuiltSet:
    """A parameter set that the chief has described."""

    partition: Partition
    empty_servers: list[int]
    uncounted: frozenset[str]
    """Counts that are None, because their feature is off."""
    promised: RunRecord | None
    """Its run.json; None without a history."""
    is_of_tables: bool = False


def dropped_samples(reports: RankReports) -> int | None:
    """Return the samples in the parts of failed workers of the batches that the chief has used
    since it learned of the failures; None while a worker is training, and if spares take places."""
    if not reports.all_workers or reports.roles.num_substitutes:
        return None
    left = reports.workers.keys() - reports.out
    return int(reports.workers[min(left)]["dropped_samples"]) if left else 0


def bytes_sent(reports: RankReports) -> int | None:
    """Return the bytes of all messages, with headers and control messages; None before each worker
    and server has sent its statistics."""
    if not (reports.all_workers and reports.all_servers):
        return None
    statistics = (*reports.workers.values(), *reports.servers.values())
    return sum(int(each["bytes_sent"]) for each in statistics)


def counts_of_run(
    status: RunStatus, reports: RankReports, built: Sequence[BuiltSet]
) -> dict[str, Any]:
    """Return what summary.json has of the whole run, as far as ranks have reported it."""
    roles, workers = reports.roles, reports.workers.values()
    sets = [counts_of_set(reports, each, index) for index, each in enumerate(built)]
    sets = sets or [counts_of_set(reports, None, 0)]
    of_tables = {n for n, each in enumerate(built) if each.is_of_tables}
    sets = [
        each | {"modes": status.modes_of_set(n, is_of_tables=n in of_tables)}
        for n, each in enumerate(sets)
    ]
    samples = sum(each["samples"] for each in workers)
    trained_s = max((each["trained_s"] for each in workers), default=0.0)
    per_s = round(samples / trained_s, 1) if trained_s else 0.0
    return {
        "mode": status.first_mode.mode,
        "staleness": status.first_mode.staleness,
        "servers": roles.num_servers,
        "workers": roles.num_beginning,
        "spares": len(roles.waiting_ranks),
        "groups": roles.num_groups_beginning,
        **together(sets),
        "codecs": status.codecs,
        "steps_by_loss": status.steps_by_loss,
        "bytes_sent": bytes_sent(reports),
        "samples": samples if reports.all_workers else None,
        "dropped_samples": dropped_samples(reports),
        "samples_per_s": per_s if reports.all_workers else None,
        "deaths": status.deaths,
        "joined": status.joined,
        "alone": status.alone,
        "sets": sets,
    }


def counts_of_set(reports: RankReports, built: BuiltSet | None, index: int) -> dict[str, Any]:
    """Return what summary.json has of one set; ``built``: None before the chief describes it."""
    workers = {
        worker: each["sets"][index]
        for worker, each in reports.workers.items()
        if index < len(each["sets"])
    }
    servers = [
        reports.servers[key]["sets"][index]
        for key in sorted(reports.servers)
        if index < len(reports.servers[key]["sets"])
    ]
    staleness: Counter[int] = Counter()
    for each in workers.values():
        staleness.update({int(key): int(n) for key, n in each["staleness"].items()})
    clocks = []
    contained = reports.contained[index] if index < len(reports.contained) else ()
    for group, members in enumerate(reports.roles.groups):
        known = [workers[w]["clock"] for w in members if w in workers]
        if not reports.all_workers:
            known += contained[group : group + 1]
        if not index:
            known += [reports.progress[w].clock for w in members if w in reports.progress]
        clocks.append(max(known, default=0))
    updates = min((each["updates"] for each in servers if each["num_chunks"]), default=0)
    is_known = reports.all_workers
    while clocks and reports.roles.groups[len(clocks) - 1][0] in reports.not_joined:
        clocks.pop()  # only the last ones: a clock's place is its group's number
    return {
        "empty_servers": built and built.empty_servers,
        "chunks": built and len(built.partition.chunks),
        "clocks": clocks,
        "updates_applied": updates if reports.all_servers else None,
        "max_staleness_seen": max(staleness, default=0) if is_known else None,
        "staleness_seen": {str(key): staleness[key] for key in sorted(staleness)},
        "bytes_pushed": _sum(workers, "bytes_pushed") if is_known else None,
        "bytes_pulled": _sum(workers, "bytes_pulled") if is_known else None,
        "early_pushes": _sum(workers, "early_pushes") if is_known else None,
        "local_steps": _sum(workers, "local_steps") if is_known else None,
        "rounds_cut": _sum(workers, "rounds_cut") if is_known else None,
        "rounds_missed": _rounds_missed(reports, workers, built) if is_known else None,
        "coding": coding_of(workers) if is_known else None,
        "recorded": built and built.promised and built.promised.model_dump(include=_TOLD_TWICE),
        "per_server": servers,
    }


def _rounds_missed(
    reports: RankReports, workers: Mapping[int, Mapping[str, Any]], built: BuiltSet | None
) -> list[int] | None:
    """Return the count of each group; None if no group may miss a round."""
    if built is None or "rounds_missed" in built.uncounted:
        return None
    return [workers[members[0]]["rounds_missed"] for members in reports.roles.groups]


def share_line(summary: Mapping[str, Any]) -> list[str]:
    """Return the report's line on the part of its rounds that each group has contributed to; empty
    if no group may miss a round."""
    missed = summary["rounds_missed"]
    if missed is None:
        return []
    first = number_of(summary["resumed_from"] or "") or 0
    rounds = [clock - first for clock in summary["clocks"]]
    pairs = zip(missed, rounds, strict=True)
    shares = [100 * (1 - number / own) if own else 100.0 for number, own in pairs]
    shown = ", ".join(f"{share:.0f}%" for share in shares[:16]) + " ..." * (len(shares) > 16)
    return [f"  contributed    {shown} of the rounds (by group)"]


def _sum(workers: Mapping[int, Mapping[str, Any]], key: str) -> int:
    return sum(each[key] for each in workers.values())


def together(sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what summary.json has of all sets; clocks are the first set's."""
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
    """Return the counts of one server over all sets."""
    keys = dict.fromkeys(key for each in servers for key in each)
    values = {key: [each[key] for each in servers if key in each] for key in keys}
    return {key: max(n) if key in _LARGEST else sum(n) for key, n in values.items()}
