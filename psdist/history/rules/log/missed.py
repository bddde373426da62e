"""The rules on rounds that groups have missed (backup groups, docs/guides/backup.md).

Owns rule 9 of docs/reference/history.md; ``applies`` checks that all other groups are in the step.
Pure.

    by_chunk = check_missed(replay, uses, findings)     # of one server
    check_same_missed({0: {(1, 5)}, 1: {(1, 5)}}, findings)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from psdist.history import Ints
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.replay import ServerReplay
from psdist.history.rules.values.uses import Uses
from psdist.history.run_record import RunRecord

Missed = frozenset[tuple[int, int]]
"""(group, round)"""


def check_missed(replay: ServerReplay, uses: Uses, findings: Findings) -> dict[int, Missed]:
    """At most ``backup`` groups miss a round, and none misses ``backup_every`` rounds in a row.
    Return the groups that have missed a round, by chunk of this server."""
    broken = findings[Rule.MISSED]
    if replay.run.backup:
        _check_own_round(replay, uses, findings)
    run, missed = replay.run, np.flatnonzero(replay.is_missed)
    owned = replay.owned.tolist()
    if not len(missed):
        return dict.fromkeys(owned, frozenset())
    if not run.backup:
        broken.add(
            f"{replay.line(int(missed[0]))}: missed in a run in which all groups are waited for"
        )
    starts, counts = np.unique(replay.step_of[missed], return_counts=True)
    broken.add_where(
        counts > run.backup,
        lambda i: (
            f"{replay.line(int(starts[i]))}: {counts[i]} groups have missed the round, backup is "
            f"{run.backup}"
        ),
    )
    for group, rows in enumerate(replay.rows_of_group):
        _check_running(replay, group, rows[np.argsort(replay.chunk[rows], kind="stable")], findings)
    pairs = zip(
        replay.chunk[missed].tolist(),
        replay.group[missed].tolist(),
        replay.clock[missed].tolist(),
        strict=True,
    )
    found: dict[int, set[tuple[int, int]]] = {chunk: set() for chunk in owned}
    for chunk, group, clock in pairs:
        found.setdefault(chunk, set()).add((group, clock))
    return {chunk: frozenset(each) for chunk, each in found.items()}


def _check_running(replay: ServerReplay, group: int, rows: Ints, findings: Findings) -> None:
    """``rows``: those of the group, by chunk and then in the order of the log."""
    is_missed, is_first = replay.is_missed[rows], _is_first(replay, rows)
    running = _running(replay, group, rows)
    most = replay.run.backup_every
    # A resumed run may begin with more missed rounds than it allows.
    findings[Rule.MISSED].add_where(
        is_missed & ((running == most) | (is_first & (running > most))),
        lambda i: (
            f"{replay.line(int(rows[i]))}: missed, the {most}th round running of group {group}; "
            f"it contributes to one in {most}"
        ),
    )


def _is_first(replay: ServerReplay, rows: Ints) -> Ints:
    """Return True for each row, of one group and by chunk, that is the first of its chunk."""
    chunk = replay.chunk[rows]
    found: Ints = np.append(True, chunk[1:] != chunk[:-1])[: len(rows)]
    return found


def _running(replay: ServerReplay, group: int, rows: Ints) -> Ints:
    """Return, for each row, the rounds in a row that the group has missed; ``rows`` as in
    :func:`_check_running`."""
    is_missed = replay.is_missed[rows]
    at = np.arange(len(rows))
    last = np.maximum.accumulate(np.where(~is_missed | _is_first(replay, rows), at, 0))
    before = replay.run.missed_running[group] if replay.run.missed_running else 0
    found: Ints = at - last + is_missed[last] * (1 + before)
    return found


def running_at(replay: ServerReplay, chunks: Ints, positions: Ints) -> Ints:
    """[n, groups]: rounds in a row of these chunks that each group had missed before these
    positions of the log."""
    wanted, num_groups = replay.key_of(chunks, positions), len(replay.run.groups)
    found = np.zeros((len(wanted), num_groups), np.int64)
    if replay.run.missed_running:
        found += replay.run.missed_running
    for group, its in enumerate(replay.rows_of_group):
        rows = its[np.argsort(replay.chunk[its], kind="stable")]
        its_chunk = replay.chunk[rows]
        last = np.searchsorted(replay.key_of(its_chunk, replay.position[rows]), wanted) - 1
        at = np.flatnonzero(last >= 0)
        at = at[its_chunk[last[at]] == chunks[at]]
        found[at, group] = _running(replay, group, rows)[last[at]]
    return found


def _check_own_round(replay: ServerReplay, uses: Uses, findings: Findings) -> None:
    """Require that contributions to a round were computed on its parameters; a group that missed
    the round may have used later ones."""
    rows = replay.row_of(uses.chunk, uses.position)
    own = np.zeros(len(rows), np.int64)
    for part, counts in replay.counts(uses.chunk, rows):
        own[part] = counts[np.arange(len(counts)), uses.group[part]]
    keys = replay.update_of
    at = np.flatnonzero(replay.is_missed)
    missed = keys(replay.chunk[at], replay.group[at], replay.clock[at])
    contributed = keys(replay.chunk, replay.group, replay.clock)
    mine = keys(uses.chunk, uses.group, uses.iteration)
    is_wrong = (own > uses.iteration) & ~np.isin(mine, missed) & np.isin(mine, contributed)
    findings[Rule.MISSED].add_where(
        is_wrong,
        lambda use: (
            f"{uses.line(use)}: contributed, and was computed on parameters of round {own[use]}"
        ),
    )


def check_same_missed(by_chunk: Mapping[int, Missed], findings: Findings) -> None:
    """Require the same missed rounds for all chunks of closed logs."""
    first = min(by_chunk, default=0)
    for chunk, missed in sorted(by_chunk.items()):
        for group, clock in sorted(missed ^ by_chunk[first]):
            has = chunk if (group, clock) in missed else first
            findings[Rule.MISSED].add(
                f"group {group} has missed round {clock} of chunk {has}, and not of chunk "
                f"{first if has == chunk else chunk}"
            )


def rounds_missed(run: RunRecord, missed: Missed, clocks: tuple[int | None, ...]) -> Ints:
    """[groups]: rounds that each has missed before it left."""
    found = np.zeros(len(run.groups), np.int64)
    for group, clock in missed:
        until = clocks[group]
        found[group] += until is not None and clock < until
    return found


def step_of_cut(run: RunRecord, cut: Sequence[int]) -> int:
    """Return the iteration of a checkpoint that has these updates, by group: the fewest. If groups
    may miss rounds, the most, because all of them resume where the last one is."""
    return max(cut) if run.backup else min(cut)


def resumes_together(run: RunRecord) -> bool:
    """True if all groups resume from a checkpoint of ``run`` at the same iteration."""
    return run.backup > 0


def missed_running_at(run: RunRecord, made: RunRecord, running: Sequence[int]) -> Sequence[int]:
    """Return the rounds in a row, by group, that ``run`` begins with from a checkpoint of ``made``,
    at which they were ``running``; empty if no group of ``run`` may miss a round."""
    if not run.backup:
        return ()
    counts_on = made.backup and made.groups == run.groups
    return running if counts_on else (0,) * len(run.groups)
