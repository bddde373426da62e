"""The rules that compare summary.json with run.json and with the history.

Owns rule 6 of docs/reference/history.md. Pure.

    check_claims(summary, Shown(...), findings)       # of a whole history only
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.memberships import dead_groups
from psdist.history.rules.log.modes import describe_mode
from psdist.history.rules.log.replay import ServerReplay
from psdist.history.run_record import RunRecord
from psdist.history.summary import ServerSummary, Summary

COMPLETED = "completed"


@dataclass(frozen=True, kw_only=True)
class ShownServer:
    """The counts of a server, as its log shows them."""

    server: int
    num_chunks: int
    num_events: int
    num_checksums: int
    num_applies: int
    num_answered: int
    """Applies of groups that survived until the reply."""
    num_steps: int
    num_updates: int
    has_died: bool
    """True if it failed, and its replica continued."""

    @classmethod
    def of(cls, replay: ServerReplay, num_checksums: int) -> ShownServer:
        num_chunks, num_groups = replay.run.owners.count(replay.server), len(replay.run.groups)
        # Sorted keys instead of a table: groups x chunks may be more than there are applies.
        stride = replay.run.num_chunks
        keys, counts = np.unique(replay.group * stride + replay.chunk, return_counts=True)
        groups = keys // stride
        fewest = np.full(num_groups, replay.num_rows)
        np.minimum.at(fewest, groups, counts)
        fewest[np.bincount(groups, minlength=num_groups) < num_chunks] = 0
        is_alive = np.ones(num_groups, np.bool_)
        is_alive[list(dead_groups(replay))] = False
        lost = [each for one in replay.pushers.lost.values() for each in one]
        is_answered = is_alive[replay.group] & ~replay.is_missed & ~np.isin(replay.pusher, lost)
        return cls(
            server=replay.server,
            num_chunks=num_chunks,
            num_events=replay.num_events,
            num_checksums=num_checksums,
            num_applies=replay.num_applies,
            num_answered=int(np.count_nonzero(is_answered)),
            num_steps=replay.num_changes,
            num_updates=int(fewest.sum()),
            has_died=replay.unwritten_until >= 0,
        )


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The claims of summary.json, as a whole history shows them."""

    servers: tuple[ShownServer, ...]
    clocks: tuple[int | None, ...]
    """Clock of each group; None if it left no server."""
    staleness: dict[int, int]
    """Uses by staleness of the workers' first slices."""
    max_staleness: int
    """The greatest of all uses."""
    knows_staleness: bool = True
    """False if a worker failed in a group that continued: its successor counted 0 for its chunks
    until the next reply, so the history shows a bound only."""
    rounds_missed: tuple[int, ...] = ()
    """Rounds that each group had missed when it left."""
    modes: tuple[tuple[int, str], ...] = ()
    """(first round, mode) of every mode."""


def _compare(pairs: Iterable[tuple[str, object, object]], source: str, findings: Findings) -> None:
    """Compare each (name, claim of summary.json, value of the ``source``)."""
    for name, claimed, seen in pairs:
        if claimed != seen:
            findings[Rule.SUMMARY].add(f"summary.json says {name} {claimed}, {source} {seen}")


def check_promises(summary: Summary, run: RunRecord, findings: Findings) -> None:
    """Require that run.json and summary.json are of one run."""
    owners = set(run.owners)
    empty = tuple(server for server in range(run.num_servers) if server not in owners)
    told = summary.modes[0] if run.is_of_rows and summary.modes else summary
    pairs: list[tuple[str, object, object]] = [
        ("mode", told.mode, run.mode),
        ("staleness", told.staleness, run.staleness),
        ("servers", summary.servers, run.num_servers),
        ("workers", summary.workers, run.num_beginning),
        ("groups", summary.groups, run.first_substitute),
        ("chunks", summary.chunks, run.num_chunks),
        ("empty_servers", summary.empty_servers, empty),
        ("pipeline", summary.recorded and summary.recorded.pipeline, run.pipeline),
        (
            "checksum_every",
            summary.recorded and summary.recorded.checksum_every,
            run.checksum_every,
        ),
    ]
    if not run.is_of_rows:  # summary.json tells the codecs of parameters
        told_codecs, promised = (
            [(each.round, each.push, each.pull) for each in codecs]
            for codecs in (summary.codecs, run.codecs)
        )
        pairs.append(("codecs", told_codecs, promised))
    _compare(pairs, "run.json says", findings)


def check_sets(summary: Summary, runs: Sequence[RunRecord], findings: Findings) -> None:
    """Require that the counts of the run are those of its sets together, and that each set has a
    history."""
    sets = summary.sets
    if max(1, len(sets)) != len(runs):
        findings[Rule.SUMMARY].add(
            f"summary.json says {max(1, len(sets))} parameter sets, there are histories of "
            f"{len(runs)}"
        )
    if not sets:
        return
    staleness: Counter[str] = Counter()
    for each in sets:
        staleness.update(each.staleness_seen)
    pairs: list[tuple[str, object, object]] = [
        ("clocks", summary.clocks, sets[0].clocks),
        ("chunks", summary.chunks, _added(each.chunks for each in sets)),
        ("updates_applied", summary.updates_applied, _added(each.updates_applied for each in sets)),
        ("staleness_seen", +Counter(summary.staleness_seen), +staleness),
    ]
    for name in ServerSummary.model_fields:
        told = [getattr(each, name) for each in summary.per_server]
        by_set = [[getattr(server, name) for server in each.per_server] for each in sets]
        pairs.append(
            (f"{name} of servers", told, [sum(each) for each in zip(*by_set, strict=False)])
        )
    _compare(pairs, "of its sets together", findings)


def _added(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def check_claims(summary: Summary, shown: Shown, findings: Findings) -> None:
    """Require that the counts are those that the history shows. A failed run may lack some."""
    updates = (server.num_updates for server in shown.servers if server.num_chunks)
    pairs: list[tuple[str, object, object]] = [
        ("updates_applied", summary.updates_applied, min(updates, default=0)),
    ]
    if shown.knows_staleness:
        pairs.append(("max_staleness_seen", summary.max_staleness_seen, shown.max_staleness))
    else:
        _check_staleness_between(summary, shown, findings)
    if summary.rounds_missed is not None:
        pairs.append(("rounds_missed", summary.rounds_missed, shown.rounds_missed))
    if summary.max_staleness_seen is not None and shown.knows_staleness:
        seen = Counter({str(key): count for key, count in shown.staleness.items()})
        pairs += [
            (f"staleness_seen of {key}", summary.staleness_seen.get(key, 0), seen[key])
            for key in sorted(seen.keys() | summary.staleness_seen.keys())
        ]
    if summary.modes or len(shown.modes) > 1:
        parts = ((each.round, describe_mode(each.mode, each.staleness)) for each in summary.modes)
        pairs.append(("modes", tuple(parts), shown.modes))
    pairs += [
        (f"clock of group {group}", claimed, clock)
        for group, (claimed, clock) in enumerate(zip(summary.clocks, shown.clocks, strict=False))
        if clock is not None
    ]
    if summary.per_server or summary.exit == COMPLETED:
        pairs.append(("number of servers", len(summary.per_server), len(shown.servers)))
    is_completed = summary.exit == COMPLETED
    known = [each for each in pairs if each[1] is not None or is_completed]
    _compare(known, "the history shows", findings)
    for told, server in zip(summary.per_server, shown.servers, strict=False):
        _check_server(told, server, findings)


def _check_staleness_between(summary: Summary, shown: Shown, findings: Findings) -> None:
    """Require that the counts of surviving workers are at least those of their first slices, and
    no staler than any use."""
    broken = findings[Rule.SUMMARY]
    claimed, least = summary.max_staleness_seen, max(shown.staleness, default=0)
    if claimed is None:
        if summary.exit == COMPLETED:
            broken.add("summary.json says max_staleness_seen None of a whole run")
        return
    if not least <= claimed <= shown.max_staleness:
        broken.add(
            f"summary.json says max_staleness_seen {claimed}, the history shows {least} to "
            f"{shown.max_staleness}"
        )
    for key, count in sorted(shown.staleness.items()):
        told = Counter(summary.staleness_seen)[str(key)]
        if told < count:
            broken.add(
                f"summary.json says staleness_seen of {key} {told}, the history shows {count} at "
                "least"
            )


def _check_server(told: ServerSummary, shown: ShownServer, findings: Findings) -> None:
    broken = findings[Rule.SUMMARY]
    exact = [
        ("num_chunks", told.num_chunks, shown.num_chunks),
        ("position", told.position, shown.num_events),
        ("checksums", told.checksums, shown.num_checksums),
        ("pushes", told.pushes, shown.num_applies),
        ("steps", told.steps, shown.num_steps),
        ("updates", told.updates, shown.num_updates),
    ]
    where = f"summary.json says of server {shown.server}:"
    for name, claimed, seen in exact:
        is_unknown = name == "checksums" and shown.has_died  # counted by the failed server
        if claimed != seen and not is_unknown:
            broken.add(f"{where} {name} {claimed}, its log shows {seen}")
    num_checksums = 0 if shown.has_died else shown.num_checksums
    if told.replies < max(shown.num_answered, num_checksums):
        broken.add(
            f"{where} replies {told.replies}; it answered {shown.num_answered} pushes, and "
            f"{shown.num_checksums} replies have a checksum"
        )
    if told.copies_on_write > told.steps:
        broken.add(f"{where} copies_on_write {told.copies_on_write} of {told.steps} steps")
