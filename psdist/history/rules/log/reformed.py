"""The worker that pushed each update, in groups that continue without failed workers.

Owns the part of rule 1 of docs/reference/history.md on REFORM events. A chunk of a failed worker
goes to the first survivor in an order of the others, which follows from the chunk's rank among the
worker's first chunks. Pure.

    Pushers.of(run, members).of_rows(groups, chunks, positions)  # [n] workers
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from psdist.history import EventKind, History, Ints, Records
from psdist.history.rules.findings import Findings, Rule
from psdist.history.run_record import RunRecord

if TYPE_CHECKING:
    from psdist.history.rules.log.replay import ServerReplay


class Pushers:
    """The workers that pushed each chunk of each group, one after the other, by a server's log."""

    def __init__(self, run: RunRecord, lost: dict[int, list[tuple[int, int]]]) -> None:
        """``lost``: (position, worker) of each REFORM event, by group."""
        self._run = run
        self.lost = {group: [worker for _, worker in each] for group, each in lost.items()}
        """The failed workers of each group that continued, in the order of the log."""
        self.positions = {group: [at for at, _ in each] for group, each in lost.items()}
        self._tables = {group: self._table(group, gone) for group, gone in self.lost.items()}

    @classmethod
    def of(cls, run: RunRecord, events: Records) -> Pushers:
        """Return the workers by the events, without impossible ones (:func:`check_reforms`)."""
        lost: dict[int, list[tuple[int, int]]] = {}
        for at in np.flatnonzero(events["kind"] == EventKind.REFORM).tolist():
            group, worker = int(events["group"][at]), events["weight"][at].item()
            gone = [each for _, each in lost.get(group, ())]
            left = set(run.groups[group]) - set(gone)
            if worker in left and len(left) > 1:
                lost.setdefault(group, []).append((at, int(worker)))
        return cls(run, lost)

    def _table(self, group: int, gone: list[int]) -> Ints:
        """[failures + 1, chunks]: the worker of each chunk after that number of failures."""
        members = list(self._run.groups[group])
        places = self._run.slices[len(members) - 1]
        ranks = [0] * len(members)
        rows = np.zeros((len(gone) + 1, self._run.num_chunks), np.int64)
        for chunk, place in enumerate(places):
            for number in range(len(gone) + 1):
                rows[number, chunk] = _first_alive(place, ranks[place], members, gone[:number])
            ranks[place] += 1
        return rows

    def of_rows(self, groups: Ints, chunks: Ints, positions: Ints) -> Ints:
        """Return the workers that pushed the updates at these ``positions``."""
        found: Ints = self._run.slice_owner(groups, chunks)
        for group, table in self._tables.items():
            mine = np.flatnonzero(groups == group)
            number = np.searchsorted(self.positions[group], positions[mine])
            found[mine] = table[number, chunks[mine]]
        return found

    def ever(self, group: int) -> list[Ints]:
        """Return [chunks], their workers, for each number of failures."""
        if group in self._tables:
            return list(self._tables[group])
        chunks = np.arange(self._run.num_chunks)
        return [self._run.slice_owner(np.full(len(chunks), group), chunks)]


def _first_alive(place: int, rank: int, members: list[int], gone: Collection[int]) -> int:
    """Return the worker at ``place`` if it survives, else the first survivor in the order of the
    chunk's ``rank``: number rank of the others, in a ring; then, of the rest, the one at the number
    of whole turns, and so on."""
    worker = members[place]
    others = members[:place] + members[place + 1 :]
    while worker in gone:
        rank, index = divmod(rank, len(others))
        worker = others[index]
        del others[index]
    return worker


def lost_workers(history: History) -> dict[int, list[set[int]]]:
    """Return the failed workers of each group that continued, by each server that logged them."""
    found: dict[int, list[set[int]]] = {}
    for log in history.servers:
        for group, gone in Pushers.of(history.run, log.events).lost.items():
            found.setdefault(group, []).append(set(gone))
    return found


def stamps_of(history: History) -> dict[int, dict[int, set[int]]]:
    """Return the clocks of the REFORM events, by group and failed worker: some chunks may lack
    these iterations. Servers without a chunk are left out, because their clocks mean nothing."""
    found: dict[int, dict[int, set[int]]] = {}
    owners = set(history.run.owners)
    for log in history.servers:
        events = log.events[log.events["kind"] == EventKind.REFORM]
        if log.server not in owners:
            continue
        for group, worker, clock in events[["group", "weight", "clock"]].tolist():
            found.setdefault(group, {}).setdefault(int(worker), set()).add(clock)
    return found


def check_reforms(replay: ServerReplay, findings: Findings) -> None:
    """Require that REFORM names a surviving worker of the group, not the last one, and has the
    fewest updates of the group that a chunk contains, or the group's first clock if the server has
    no chunk."""
    events, run = replay.members, replay.run
    gone: dict[int, set[int]] = {}
    for index in np.flatnonzero(events["kind"] == EventKind.REFORM).tolist():
        group, clock = (int(events[name][index]) for name in ("group", "clock"))
        position, worker = int(replay.member_position[index]), events["weight"][index].item()
        lost = gone.setdefault(group, set())
        left = set(run.groups[group]) - lost
        problem = ""
        if worker not in left or len(left) == 1:
            problem = f"without worker {worker:g}, when {sorted(left)} were left of it"
        lost.add(worker)
        counts = replay.contained(group, position)[replay.owned]
        fewest = int(counts.min() if len(counts) else replay.first[group])
        if not problem and fewest != clock:
            problem = (
                f"stamped {clock}, but the fewest updates that a chunk contains of it are {fewest}"
                if len(counts)
                else f"stamped {clock}, but the server owns no chunk: {fewest} belongs there"
            )
        if problem:
            findings[Rule.MEMBERSHIP].add(
                f"server {replay.server}, position {position}: REFORM of group {group}: {problem}"
            )


@dataclass(frozen=True, kw_only=True)
class ToldDeaths:
    """The failures in groups that continued, by a server's log."""

    stamps: dict[int, int | None]
    """Clock of the REFORM of each failed worker; None if the server has no chunk."""
    left: dict[int, int]
    """Iterations of each group that has left."""
    dead: set[int]
    """Groups that have failed as a whole."""

    @classmethod
    def of(cls, replay: ServerReplay, *, left: dict[int, int], dead: set[int]) -> ToldDeaths:
        owns = replay.server in replay.run.owners
        positions, clocks = replay.pushers.positions, replay.clock_of_event
        stamps = {
            worker: int(clocks[position]) if owns else None
            for group, workers in replay.pushers.lost.items()
            for worker, position in zip(workers, positions[group], strict=True)
        }
        return cls(stamps=stamps, left=left, dead=dead)


def check_same_reforms(run: RunRecord, told: Mapping[int, ToldDeaths], findings: Findings) -> None:
    """Require the same failed workers on all servers with closed logs. A server that evicted the
    whole group need not name them; nor need a server that the group had left before, if all chunks
    of the others contained its iterations by then."""
    group_of = run.group_of_worker()
    by_worker: dict[int, dict[int, int | None]] = {}
    for server, each in told.items():
        for worker, clock in each.stamps.items():
            by_worker.setdefault(worker, {})[server] = clock
    for worker, stamps in sorted(by_worker.items()):
        group = int(group_of[worker])
        fewest = min((clock for clock in stamps.values() if clock is not None), default=None)
        for server, each in told.items():
            if server in stamps or group in each.dead:
                continue
            left = each.left.get(group)
            if left is not None and (fewest is None or fewest >= left):
                continue
            findings[Rule.MEMBERSHIP].add(
                f"server {min(stamps)} says that worker {worker} of group {group} has failed, "
                f"server {server} that the group had all its workers"
            )


def is_in_place_of_the_dead(replay: ServerReplay) -> Ints:
    """[rows]: True for an empty push in the place of a failed worker that had pushed nothing: the
    first of the chunk after a REFORM, with the same clock."""
    found = np.zeros(replay.num_rows, np.bool_)
    for group, positions in replay.pushers.positions.items():
        rows = np.flatnonzero(replay.group == group)  # by chunk, then by position
        pushed_at, chunk, pusher = (
            each[rows] for each in (replay.pushed_at, replay.chunk, replay.pusher)
        )
        number = np.searchsorted(positions, pushed_at)
        stamps = replay.clock_of_event[positions]
        is_first = np.zeros(len(rows), np.bool_)
        is_first[1:] = (chunk[1:] == chunk[:-1]) & (pusher[1:] != pusher[:-1])
        is_first[:1] = True
        is_first[1:] |= chunk[1:] != chunk[:-1]
        is_nothing = replay.is_empty[rows] & (replay.weight[rows] == 0)
        is_there = (number > 0) & (replay.clock[rows] == stamps[np.maximum(number - 1, 0)])
        found[rows] = is_first & is_nothing & is_there
    return found
