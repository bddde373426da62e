"""The rules that a server's log must keep by itself: applies and optimizer steps.

Owns the applies of rule 1 and the steps of rule 2 of docs/reference/history.md. Pure.

    check_applies(ServerReplay(run, log), findings)
"""

from __future__ import annotations

import numpy as np

from psdist.history import Ints
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.memberships import leave_clocks, stated_by_group
from psdist.history.rules.log.replay import ServerReplay


def check_applies(replay: ServerReplay, findings: Findings) -> None:
    """Require the applies of each (chunk, group) to be numbered 0, 1, 2 ... (or from a checkpoint
    on), of this server's chunks, while the group is in the job, and complete when it stops."""
    broken = findings[Rule.APPLIES]
    owners = replay.owners
    broken.add_where(
        owners[replay.chunk] != replay.server,
        lambda row: f"{replay.line(row)}: applied, but server {owners[replay.chunk[row]]} owns it",
    )
    epochs = replay.epoch_of(replay.position)
    limit = replay.limits[epochs, replay.group]
    if len(replay.inherited):
        at = np.arange(replay.num_rows)
        limit = replay.limits_at(epochs, replay.chunk)[at, replay.group]
    broken.add_where(
        (limit <= replay.clock) & ~replay.is_missed,
        lambda row: (
            f"{replay.line(row)}: applied while others wait for its first {limit[row]} updates "
            "only (not joined, suspended, left or dead)"
        ),
    )
    _check_late(replay, findings)

    num_groups = len(replay.run.groups)
    pair = replay.chunk * num_groups + replay.group
    order = np.argsort(pair, kind="stable")
    pair, clock = pair[order], replay.clock[order]
    expected = replay.first[replay.group[order]].astype(np.int64)
    expected[1:] = np.where(pair[1:] == pair[:-1], clock[:-1] + 1, expected[1:])

    def sequence(i: int) -> str:
        line = f"{replay.line(int(order[i]))}: "
        if clock[i] > expected[i]:
            return line + f"its updates {expected[i]} to {clock[i] - 1} are missing before it: lost"
        return line + f"comes after its update {expected[i] - 1}: applied twice or out of order"

    broken.add_where(clock != expected, sequence)
    if replay.is_complete or not replay.run.pipeline:
        for group, left_after in leave_clocks(replay).items():
            _check_total(replay, findings, pair, group, left_after)


def _check_late(replay: ServerReplay, findings: Findings) -> None:
    """Require that the iterations of a SUSPEND or LEAVE were applied before it: a worker waits for
    all replies except ``pipeline``."""
    for rows, stated in zip(replay.rows_of_group, stated_by_group(replay), strict=True):
        num_before = np.searchsorted(replay.member_position[stated], replay.position[rows])
        rows, num_before = rows[num_before > 0], num_before[num_before > 0]
        finished = replay.members["clock"][stated[num_before - 1]]
        is_late = replay.clock[rows] < finished - replay.run.pipeline

        def late(i: int, late: Ints = rows[is_late], finished: Ints = finished[is_late]) -> str:
            return (
                f"{replay.line(late[i])}: applied after the group had said that it had finished "
                f"{finished[i]} iterations and waited for their replies"
            )

        findings[Rule.APPLIES].add_each(np.arange(np.count_nonzero(is_late)), late)


def _check_total(
    replay: ServerReplay, findings: Findings, pair: Ints, group: int, left_after: int
) -> None:
    """``pair``: chunk * groups + group of every apply, sorted."""
    owned = replay.owned
    expected = owned * len(replay.run.groups) + group
    num = np.searchsorted(pair, expected, side="right") - np.searchsorted(pair, expected)
    num = num + replay.first[group]
    findings[Rule.APPLIES].add_where(
        num < left_after,
        lambda i: (
            f"server {replay.server}, chunk {owned[i]}: holds {num[i]} updates of group {group}, "
            f"which left after {left_after} iterations: lost"
        ),
    )


def check_steps(replay: ServerReplay, findings: Findings) -> None:
    """Require, in sync, that a step's contributions stand together, in group order, one of every
    group that the step waits for; in other modes, that every apply is a step."""
    broken = findings[Rule.STEPS]
    start_of = replay.step_of
    is_gathered = replay.rules.is_gathered(replay.clock[start_of])
    broken.add_where(
        ~replay.is_last & ~is_gathered,
        lambda row: f"{replay.line(row)}: not a whole step, as every apply is in this mode",
    )
    if not is_gathered.any():
        return
    is_start = start_of == np.arange(replay.num_rows)
    starts = np.flatnonzero(is_start & is_gathered)

    same = np.flatnonzero(~is_start & is_gathered)
    broken.add_each(
        same[replay.position[same] != replay.position[same - 1] + 1],
        lambda row: f"{replay.line(row)}: other events stand between it and the step it belongs to",
    )
    # Groups that missed the round stand before those that contributed.
    is_first = ~replay.is_missed[same] & replay.is_missed[same - 1]
    is_behind = replay.is_missed[same] & ~replay.is_missed[same - 1]
    broken.add_each(
        same[((replay.group[same] <= replay.group[same - 1]) & ~is_first) | is_behind],
        lambda row: f"{replay.line(row)}: summed after group {replay.group[row - 1]}",
    )
    broken.add_each(
        same[replay.clock[same] != replay.clock[start_of[same]]],
        lambda row: (
            f"{replay.line(row)}: in one step with update {replay.clock[start_of[row]]} of group "
            f"{replay.group[start_of[row]]}"
        ),
    )

    every = np.append(np.flatnonzero(is_start), replay.num_rows)
    ends = every[np.searchsorted(every, starts, side="right")]
    is_whole = replay.is_last[ends - 1]
    # A log that ends early may end inside a step, but only there.
    is_tail = replay.position[ends - 1] == replay.num_events - 1
    broken.add_each(
        starts[~is_whole & (replay.is_complete | ~is_tail)],
        lambda row: f"{replay.line(row)}: the step that begins here was never completed",
    )
    _check_contributors(replay, findings, starts[is_whole], ends[is_whole])


def _check_contributors(replay: ServerReplay, findings: Findings, starts: Ints, ends: Ints) -> None:
    """Require that rows ``starts[i]`` to ``ends[i]`` are one apply of each group that the step
    waits for and whose count stands at its clock."""
    for part, counts in replay.counts(replay.chunk[starts], starts):
        first, clock = starts[part], replay.clock[starts[part], None]
        limits = replay.limits_at(replay.epoch_of(replay.position[first]), replay.chunk[first])
        is_due = (limits > clock) & (counts == clock)
        lengths = ends[part] - first
        step = np.repeat(np.arange(len(first)), lengths)
        row = np.arange(len(step)) + np.repeat(first - np.cumsum(lengths) + lengths, lengths)
        is_in = np.zeros_like(is_due)
        is_in[step, replay.group[row]] = True
        # The server that decides on missed rounds may not have received the stop yet.
        has_missed = np.zeros_like(is_due)
        has_missed[step, replay.group[row]] = replay.is_missed[row]
        is_due |= has_missed & (counts == clock)

        def wrong(i: int, first: Ints = first, due: Ints = is_due, seen: Ints = is_in) -> str:
            return (
                f"{replay.line(int(first[i]))}: the step was made of groups "
                f"{np.flatnonzero(seen[i]).tolist()} where {np.flatnonzero(due[i]).tolist()} belong"
            )

        findings[Rule.STEPS].add_where((is_due != is_in).any(axis=1), wrong)
