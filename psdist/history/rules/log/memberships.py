"""The rules on a server's membership events: a group joins, suspends, resumes, leaves or fails.

Owns the first part of rule 1 of docs/reference/history.md. Pure.

    check_membership(ServerReplay(run, log), findings)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from psdist.history import EventKind, Ints
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.log.reformed import check_reforms
from psdist.history.rules.log.replay import ServerReplay

_ALLOWED_AFTER = {
    None: {EventKind.JOIN},
    EventKind.JOIN: {EventKind.SUSPEND, EventKind.LEAVE, EventKind.DEATH, EventKind.REFORM},
    EventKind.SUSPEND: {EventKind.RESUME, EventKind.DEATH, EventKind.REFORM},
    EventKind.RESUME: {EventKind.SUSPEND, EventKind.LEAVE, EventKind.DEATH, EventKind.REFORM},
    EventKind.LEAVE: set(),
    EventKind.DEATH: set(),
}
"""Allowed next events of a group, by its last event other than REFORM."""


def check_membership(replay: ServerReplay, findings: Findings) -> None:
    """Require that a group joins once, at 0 or at its clock in a checkpoint, or as a substitute
    after a failure; that SUSPEND and RESUME alternate; that no event follows LEAVE or DEATH; that
    clocks do not go back and fit the updates; that events have the workers of run.json; and that a
    whole log ends after all groups have left."""
    broken = findings[Rule.MEMBERSHIP]
    latest: dict[int, EventKind] = {}
    stated: dict[int, int] = {}  # the clock of each group's last SUSPEND or LEAVE
    members = zip(
        replay.member_position.tolist(),
        replay.members["kind"].tolist(),
        replay.members["group"].tolist(),
        replay.members["clock"].tolist(),
        replay.members["weight"].tolist(),
        replay.members["lr_scale"].tolist(),
        strict=True,
    )
    num_lost: Counter[int] = Counter()
    for position, kind, group, clock, weight, lr_scale in members:
        event = EventKind(kind)
        num_lost[group] += event == EventKind.REFORM
        problems = [
            _wrong_order(event, latest.get(group)),
            _wrong_clock(event, clock, stated.get(group, clock), int(replay.first[group])),
            None
            if event == EventKind.REFORM
            else _wrong_workers(weight, len(replay.run.groups[group]), num_lost[group]),
            None if lr_scale == 1.0 else f"with lr_scale {lr_scale}; it is 1 except for updates",
        ]
        for problem in filter(None, problems):
            broken.add(
                f"server {replay.server}, position {position}: {event.name} of group {group}: "
                f"{problem}"
            )
        if event != EventKind.REFORM:
            latest[group] = event
        if event in (EventKind.SUSPEND, EventKind.LEAVE):
            stated[group] = clock
    _check_joins(replay, findings)
    _check_stated_clocks(replay, findings)
    _check_deaths(replay, findings)
    check_reforms(replay, findings)
    _check_inherited(replay, findings)
    if replay.is_complete:
        for group in unfinished_groups(replay):
            broken.add(
                f"server {replay.server}: its log was closed, but group {group} has neither left "
                "nor failed"
            )


def _wrong_order(event: EventKind, before: EventKind | None) -> str | None:
    if event in _ALLOWED_AFTER[before]:
        return None
    if before is None:
        return "the group has not joined"
    if before in (EventKind.LEAVE, EventKind.DEATH):
        return f"after its {before.name}"
    if event == EventKind.JOIN:
        return "the group had joined already"
    if before == EventKind.SUSPEND:
        return "the group is suspended, and was not resumed"
    return "the group is not suspended"


def _wrong_clock(event: EventKind, clock: int, stated: int, first: int) -> str | None:
    if event == EventKind.JOIN and clock != first:
        return f"at clock {clock}; a group begins with {first}"
    if event == EventKind.RESUME and clock != 0:
        return f"at clock {clock}; it is stamped with 0"
    if event in (EventKind.SUSPEND, EventKind.LEAVE) and clock < stated:
        return f"after {clock} iterations, but it had finished {stated} before"
    return None


def _wrong_workers(weight: float, num_workers: int, num_lost: int) -> str | None:
    if weight == num_workers - num_lost:
        return None
    died = f", and {num_lost} of them had failed" if num_lost else ""
    return f"with {weight} workers; run.json says that the group has {num_workers}{died}"


def _check_joins(replay: ServerReplay, findings: Findings) -> None:
    """Require that at most as many substitutes join as groups have failed, each at a round without
    an update of another group."""
    broken = findings[Rule.MEMBERSHIP]
    is_late = replay.members["group"] >= replay.run.first_substitute
    joins = np.flatnonzero(is_late & (replay.members["kind"] == EventKind.JOIN))
    for num_joined, index in enumerate(joins.tolist(), start=1):
        position, clock = int(replay.member_position[index]), int(replay.members["clock"][index])
        where = f"server {replay.server}, position {position}: JOIN of group "
        where += f"{replay.members['group'][index]}"
        died = replay.members["kind"][:index] == EventKind.DEATH
        dead = set(replay.members["group"][:index][died].tolist())
        if num_joined > len(dead):
            broken.add(
                f"{where}: substitute number {num_joined}, but {len(dead)} groups had failed"
            )
        before = (replay.position < position) & ~np.isin(replay.group, sorted(dead))
        latest = int(replay.clock[before].max(initial=-1))
        if latest >= clock:
            broken.add(
                f"{where}: at clock {clock}, but a chunk contains update {latest} of an active "
                "group before"
            )


def check_same_joins(joins: Mapping[int, Mapping[int, int]], findings: Findings) -> None:
    """Require that a substitute joins all servers at one clock. ``joins``: the clocks at which
    substitutes joined, by server and group."""
    first: dict[int, tuple[int, int]] = {}
    for server, clocks in joins.items():
        for group, clock in clocks.items():
            other, there = first.setdefault(group, (server, clock))
            if there != clock:
                findings[Rule.MEMBERSHIP].add(
                    f"group {group} joined server {other} at clock {there}, server {server} at "
                    f"clock {clock}"
                )


def _check_stated_clocks(replay: ServerReplay, findings: Findings) -> None:
    """Require no earlier updates beyond the clock of SUSPEND and LEAVE: other groups do not wait
    for them, so a clock that is too low would loosen the bound."""
    for group, (rows, stated) in enumerate(
        zip(replay.rows_of_group, stated_by_group(replay), strict=True)
    ):
        rows = rows[~replay.is_missed[rows]]  # the group may not know of missed rounds
        positions, highest = replay.position[rows], np.maximum.accumulate(replay.clock[rows])
        for index in stated:
            position, clock = replay.member_position[index], replay.members["clock"][index]
            before = highest[: np.searchsorted(positions, position)]
            if len(before) and before[-1] >= clock:
                findings[Rule.MEMBERSHIP].add(
                    f"server {replay.server}, position {position}: "
                    f"{EventKind(replay.members['kind'][index]).name} of group {group} "
                    f"after {clock} iterations, but its update {before[-1]} was applied before"
                )


def _check_deaths(replay: ServerReplay, findings: Findings) -> None:
    """Require that DEATH has the fewest updates that a chunk of the server contains."""
    for index in np.flatnonzero(replay.members["kind"] == EventKind.DEATH):
        group, clock = (int(replay.members[name][index]) for name in ("group", "clock"))
        position = replay.member_position[index]
        counts = replay.contained(group, position)[replay.owned]
        if len(counts) and counts.min() != clock:
            findings[Rule.MEMBERSHIP].add(
                f"server {replay.server}, position {position}: DEATH of group {group} stamped "
                f"{clock}, but the fewest updates that a chunk contains of it are {counts.min()}"
            )


def _check_inherited(replay: ServerReplay, findings: Findings) -> None:
    """Require that an INHERIT stands directly before the group's DEATH or REFORM, and is the next
    update that the chunk lacks. A whole log contains the update later, except after a TAKEOVER."""
    ends_of: dict[int, list[int]] = {}
    for index in np.flatnonzero(
        np.isin(replay.members["kind"], (EventKind.DEATH, EventKind.REFORM))
    ):
        ends = ends_of.setdefault(int(replay.members["group"][index]), [])
        ends.append(int(replay.member_position[index]))
    owners = replay.run.owners
    positions = replay.inherited_position.tolist()
    inherited = set(positions)
    next_of: dict[tuple[int, int, int], int] = {}
    for position, chunk, group, clock in zip(
        positions,
        replay.inherited["chunk"].tolist(),
        replay.inherited["group"].tolist(),
        replay.inherited["clock"].tolist(),
        strict=True,
    ):
        rows = replay.rows_of_group[group]
        rows = rows[replay.chunk[rows] == chunk]
        num_before = int(np.count_nonzero(replay.position[rows] < position))
        end = next((each for each in ends_of.get(group, ()) if each > position), -1)
        expected = next_of.get((chunk, group, end), num_before + int(replay.first[group]))
        next_of[chunk, group, end] = clock + 1
        problem = None
        if owners[chunk] != replay.server:
            problem = f"server {owners[chunk]} owns the chunk"
        elif end < position or any(each not in inherited for each in range(position, end)):
            problem = "its DEATH or REFORM does not directly follow it"
        elif clock != expected:
            problem = f"the chunk contains {expected} updates of the group then"
        elif (
            replay.is_complete
            and position > replay.taken_over_at
            and not np.any(replay.clock[rows] == clock)
        ):
            problem = "it was never applied: lost"
        if problem is not None:
            findings[Rule.MEMBERSHIP].add(
                f"server {replay.server}, position {position}, chunk {chunk}: update {clock} of "
                f"group {group} is inherited: {problem}"
            )


def stated_by_group(replay: ServerReplay) -> list[Ints]:
    """Return the SUSPENDs and LEAVEs of each group: indexes into ``replay.members``."""
    is_stated = np.isin(replay.members["kind"], [EventKind.SUSPEND, EventKind.LEAVE])
    return [
        np.flatnonzero(is_stated & (replay.members["group"] == group))
        for group in range(len(replay.run.groups))
    ]


def leave_clocks(replay: ServerReplay) -> dict[int, int]:
    """Return the iterations of each group that left."""
    left = replay.members[replay.members["kind"] == EventKind.LEAVE]
    return dict(zip(left["group"].tolist(), left["clock"].tolist(), strict=True))


def dead_groups(replay: ServerReplay) -> set[int]:
    """Return the groups whose last event is DEATH."""
    last: Mapping[int, int] = dict(
        zip(replay.members["group"].tolist(), replay.members["kind"].tolist(), strict=True)
    )
    return {group for group, kind in last.items() if kind == EventKind.DEATH}


def unfinished_groups(replay: ServerReplay) -> list[int]:
    """Return the groups that joined and neither left nor failed by the end of the log."""
    has_joined = replay.members[replay.members["kind"] == EventKind.JOIN]["group"].tolist()
    last = replay.members[np.isin(replay.members["kind"], [EventKind.LEAVE, EventKind.DEATH])]
    gone = set(last["group"].tolist())
    due = {*range(replay.run.first_substitute), *has_joined}
    return sorted(due - gone)
