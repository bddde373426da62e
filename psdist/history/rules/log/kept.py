"""The rules on checkpoints: each is one cut of all chunks, and a resumed run begins with it.

Owns rule 7 of docs/reference/history.md. Pure.

    kept = check_kept(replay, findings)                     # of one server
    check_same_cut(run, [kept, ...], findings)              # of all servers of a set
    check_attempts({1: histories, 2: histories}, findings)  # of a run that was resumed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from psdist.history import EventFlag, EventKind, History
from psdist.history.rules.choices.resumed_modes import (
    are_apart_in_sync,
    check_modes_went_on,
    judging_mode,
)
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.missed import (
    missed_running_at,
    resumes_together,
    running_at,
    step_of_cut,
)
from psdist.history.rules.log.replay import NEVER, ServerReplay
from psdist.history.run_record import RunRecord

Cut = tuple[int, ...]
"""Updates that a chunk contains, by group."""
Crc = int | None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A chunk in a checkpoint, by the server's log."""

    number: int
    cut: Cut
    crc: Crc
    dead: frozenset[int] = frozenset()
    """Groups that had failed or not joined."""
    running: tuple[int, ...] = ()
    """Rounds in a row that each group had missed."""


@dataclass(frozen=True, kw_only=True)
class KeptByServer:
    server: int
    is_complete: bool
    snapshots: Mapping[int, tuple[Kept, ...]]
    """The chunk in each checkpoint, in order."""
    restored: Mapping[int, Crc]
    """The checksums of restored chunks."""


def check_kept(replay: ServerReplay, findings: Findings) -> KeptByServer:
    """Require that the owner of a chunk keeps it, all chunks for the same checkpoints, and that it
    restores them once, before any update, as run.json says."""
    broken = findings[Rule.KEPT]
    run, events, positions = replay.run, replay.kept, replay.kept_position
    chunk = events["chunk"].astype(np.int64)
    owners = replay.owners
    is_restore = events["kind"] == EventKind.RESTORE

    def line(i: int) -> str:
        return (
            f"server {replay.server}, position {positions[i]}, chunk {chunk[i]}: "
            f"{EventKind(events['kind'][i]).name} of step {events['clock'][i]}"
        )

    broken.add_where(
        owners[chunk] != replay.server,
        lambda i: f"{line(i)}: server {owners[chunk[i]]} owns the chunk",
    )
    broken.add_where(
        (events["group"] != 0) | (events["lr_scale"] != 1),
        lambda i: f"{line(i)}: it is of no group, and scaled by nothing",
    )
    mine = replay.owned.tolist()
    wanted = [int(run.restored.removeprefix("step-"))] if run.restored else []
    broken.add_where(
        is_restore & (positions >= replay.num_before),
        lambda i: f"{line(i)}: comes after other events; a run begins with it",
    )
    restored: dict[int, Crc] = {}
    for each in mine:
        its = np.flatnonzero(is_restore & (chunk == each))
        numbers = events["clock"][its].tolist()
        if numbers != wanted and (replay.is_complete or replay.num_before < replay.num_events):
            broken.add(
                f"server {replay.server}, chunk {each}: restored from steps {numbers}, run.json "
                f"says {run.restored or 'none'}"
            )
        elif len(its):
            restored[each] = _crc(events[its[0]])
    snapshots = _snapshots(replay, mine, np.flatnonzero(~is_restore).tolist())
    numbers_of = {each: [kept.number for kept in its] for each, its in snapshots.items()}
    first = numbers_of[mine[0]] if mine else []
    for each, numbers in numbers_of.items():
        # A log that ends early may lack the last one.
        if numbers != first and (replay.is_complete or numbers != first[: len(numbers)]):
            broken.add(
                f"server {replay.server}, chunk {each}: kept for steps {numbers}, chunk {mine[0]} "
                f"for steps {first}"
            )
    return KeptByServer(
        server=replay.server,
        is_complete=replay.is_complete,
        snapshots=snapshots,
        restored=restored,
    )


def _snapshots(
    replay: ServerReplay, mine: Sequence[int], which: Sequence[int]
) -> dict[int, tuple[Kept, ...]]:
    events, found = replay.kept[which], dict[int, list[Kept]]()
    chunk, position = events["chunk"].astype(np.int64), replay.kept_position[which]
    rows = replay.row_of(chunk, position)
    order = np.argsort(rows, kind="stable")
    cuts = np.zeros((len(rows), len(replay.run.groups)), np.int64)
    for part, counts in replay.counts(chunk[order], rows[order]):
        cuts[order[part]] = counts
    # Chunks may contain different updates of failed groups, and none of substitutes before they
    # join. A resumed run places these groups where the lowest of the others is.
    is_dead = np.zeros(cuts.shape, np.bool_)
    for epoch, group in replay.deaths:
        is_dead[:, group] = replay.epoch_of(position) >= epoch
    for group, begin in enumerate(replay.joined_at, start=replay.run.first_substitute):
        is_dead[:, group] |= position < begin
    lowest = np.where(is_dead, NEVER, cuts).min(axis=1, keepdims=True)
    cuts = np.where(is_dead, lowest, cuts)
    running = running_at(replay, chunk, position)
    for i, event in enumerate(events):
        kept = Kept(
            number=int(event["clock"]),
            cut=tuple(cuts[i].tolist()),
            crc=_crc(event),
            dead=frozenset(np.flatnonzero(is_dead[i]).tolist()),
            running=tuple(running[i].tolist()),
        )
        found.setdefault(int(chunk[i]), []).append(kept)
    return {each: tuple(found.get(each, ())) for each in mine}


def _crc(event: np.void) -> Crc:
    return int(event["weight"]) if event["flags"] & EventFlag.CRC else None


def check_same_cut(run: RunRecord, servers: Sequence[KeptByServer], findings: Findings) -> None:
    """Every chunk of a checkpoint contains the same updates, on all servers. The name of the
    checkpoint is the iteration of the first set."""
    broken = findings[Rule.KEPT]
    chunks = [
        (server.server, chunk, its)
        for server in servers
        for chunk, its in sorted(server.snapshots.items())
    ]
    if not chunks:
        return
    _, first_chunk, first = max(chunks, key=lambda each: len(each[2]))
    is_whole = all(server.is_complete for server in servers)
    for server, chunk, its in chunks:
        where = f"server {server}, chunk {chunk}"
        if is_whole and len(its) != len(first):
            broken.add(f"{where}: kept {len(its)} times, chunk {first_chunk} {len(first)} times")
        for mine, other in zip(its, first, strict=False):
            if (mine.number, mine.cut) != (other.number, other.cut):
                broken.add(
                    f"{where}: kept for step {mine.number} with the updates {list(mine.cut)} of "
                    f"the groups, chunk {first_chunk} for step {other.number} with "
                    f"{list(other.cut)}"
                )
            elif not run.set_index and mine.number != step_of_cut(run, mine.cut):
                broken.add(
                    f"{where}: kept for step {mine.number}, and contains {list(mine.cut)} updates"
                )


# -- across attempts -------------------------------------------------------------------------------


def check_attempts(attempts: Mapping[int, Sequence[History]], findings: Findings) -> list[str]:
    """Require that each resumed attempt begins with its checkpoint. ``attempts``: the histories of
    all sets, by number. Return a line for each point that cannot be proved."""
    notes: list[str] = []
    for number, histories in sorted(attempts.items()):
        for history in histories:
            run = history.run
            if not run.restored:
                continue
            where = f"attempt {number}, set {run.set_index}"
            before = attempts.get(run.restored_attempt, ())
            if run.attempt != number or run.restored_attempt >= number:
                findings[Rule.KEPT].add(
                    f"{where}: run.json says that it is attempt {run.attempt}, resumed from "
                    f"{run.restored} of attempt {run.restored_attempt}"
                )
            elif not before:
                notes.append(
                    f"{where}: that it began with {run.restored} of attempt "
                    f"{run.restored_attempt} is not proved: that attempt was not recorded"
                )
            else:
                notes += _check_restored(where, histories, history, before, findings)
    return notes


def _begins_at(run: RunRecord, made: RunRecord, kept: Kept, *, is_apart: bool) -> bool:
    """Return True if the groups of ``run`` begin where those of ``made`` were. With the same layout
    each begins where it was, or where the substitute of a failed group was. ``is_apart``: some
    groups would be ahead in rounds that all make together, so all begin at the lowest."""
    cut, groups = kept.cut, run.groups[: run.first_substitute]
    clocks, late = run.first_clocks[: len(groups)], run.first_clocks[len(groups) :]
    if any(late):
        return False
    if resumes_together(made):
        return clocks == (max(cut),) * len(groups)
    is_other = made.groups[: made.first_substitute] != groups
    if is_other or is_apart or judging_mode(made) != judging_mode(run):
        return clocks == (min(cut),) * len(groups)
    substitutes = {cut[each] for each in range(made.first_substitute, len(cut))}
    return all(
        clock == at or (group in kept.dead and clock in substitutes)
        for group, (clock, at) in enumerate(zip(clocks, cut, strict=False))
    )


def _kept_as(made: History | None, number: int) -> dict[int, list[Kept]]:
    """Return the chunks in the checkpoint of this number; empty if it lacks a chunk."""
    if made is None:
        return {}
    kept: dict[int, list[Kept]] = {}
    for log in made.servers:
        its = check_kept(ServerReplay(made.run, log), Findings(max_listed_per_rule=0))
        for chunk, all_kept in its.snapshots.items():
            kept[chunk] = [each for each in all_kept if each.number == number]
    return kept if all(kept.values()) else {}


def _are_apart(histories: Sequence[History], before: Sequence[History], number: int) -> bool:
    """Return True if a group would be ahead in rounds that all make together, in any set."""
    return any(
        are_apart_in_sync(history, kept[0][-1].cut)
        for history, made in zip(histories, before, strict=False)
        if (kept := _kept_as(made, number))
    )


def _check_restored(
    where: str,
    histories: Sequence[History],
    history: History,
    before: Sequence[History],
    findings: Findings,
) -> list[str]:
    broken = findings[Rule.KEPT]
    run, unheard = history.run, Findings(max_listed_per_rule=0)
    source = f"{run.restored} of attempt {run.restored_attempt}"
    made = before[run.set_index] if run.set_index < len(before) else None
    number = int(run.restored.removeprefix("step-"))
    kept = _kept_as(made, number)
    if made is None or not kept:
        broken.add(f"{where}: resumes from {source}, which that attempt did not keep")
        return []
    check_modes_went_on(where, history, made, number, findings)
    cut = kept[0][-1].cut
    is_apart = run.mode_by != "run" and _are_apart(histories, before, number)
    if not _begins_at(run, made.run, kept[0][-1], is_apart=is_apart):
        broken.add(
            f"{where}: its groups begin at clocks {list(run.first_clocks)}; {source} contains "
            f"{list(cut)} updates of the groups then"
        )
    _check_missed_running(where, source, run, made.run, kept, findings)
    if run.cut != made.run.cut:
        return [
            f"{where}: that its values are those of {source} is not proved: chunks are cut "
            "otherwise"
        ]
    for log in history.servers:
        its = check_kept(ServerReplay(run, log), unheard)
        for chunk, crc in its.restored.items():
            known = {each.crc for each in kept[chunk]} - {None}
            if crc is not None and known and crc not in known:
                broken.add(
                    f"{where}, server {log.server}, chunk {chunk}: begins with values of the "
                    f"checksum {crc:08x}, {source} has kept {kept[chunk][-1].crc:08x}"
                )
    return []


def _check_missed_running(
    where: str,
    source: str,
    run: RunRecord,
    made: RunRecord,
    kept: Mapping[int, Sequence[Kept]],
    findings: Findings,
) -> None:
    """Require that the run begins with the missed rounds of the checkpoint."""
    for chunk, its in sorted(kept.items()):
        expected = missed_running_at(run, made, its[-1].running)
        if run.missed_running != expected:
            findings[Rule.MISSED].add(
                f"{where}: begins with groups that have missed {list(run.missed_running)} rounds "
                f"running; by chunk {chunk} of {source} it is {list(expected)}"
            )
            return
