"""Who of a group has pushed what, where groups go on without workers that have died.

Owns the part of rule 1 of docs/history.md that REFORM events must keep, and says for every update
which worker has pushed it. A chunk goes from a worker that has died to the first that lives in an
order of the others, which follows from its rank among those that the dead one had at first. Pure.

    pushers = Pushers.of(run, members)          # of one server's log
    pushers.of_rows(groups, chunks, positions)  # [n] workers
    check_reforms(replay, findings)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from psdist.history.records import EventKind, History, Ints, Records
from psdist.history.rules.findings import Findings, Rule
from psdist.history.run_record import RunRecord

if TYPE_CHECKING:
    from psdist.history.rules.replay import ServerReplay


class Pushers:
    """Of one server: the workers that have pushed each chunk of each group, by turns."""

    def __init__(self, run: RunRecord, lost: dict[int, list[tuple[int, int]]]) -> None:
        """``lost``: by group that goes on, (position, worker) of each of its REFORM events."""
        self._run = run
        self.lost = {group: [worker for _, worker in each] for group, each in lost.items()}
        """By group that goes on, who of it has died, in the order of the log."""
        self.positions = {group: [at for at, _ in each] for group, each in lost.items()}
        self._tables = {group: self._table(group, gone) for group, gone in self.lost.items()}

    @classmethod
    def of(cls, run: RunRecord, events: Records) -> Pushers:
        """Of what the events say; REFORM events that cannot be are left out
        (:func:`check_reforms`)."""
        lost: dict[int, list[tuple[int, int]]] = {}
        for at in np.flatnonzero(events["kind"] == EventKind.REFORM).tolist():
            group, worker = int(events["group"][at]), events["weight"][at].item()
            gone = [each for _, each in lost.get(group, ())]
            left = set(run.groups[group]) - set(gone)
            if worker in left and len(left) > 1:
                lost.setdefault(group, []).append((at, int(worker)))
        return cls(run, lost)

    def _table(self, group: int, gone: list[int]) -> Ints:
        """[deaths + 1, chunks]: who has each chunk after so many deaths."""
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
        """Who has pushed what stands at these ``positions``."""
        found: Ints = self._run.slice_owner(groups, chunks)
        for group, table in self._tables.items():
            mine = np.flatnonzero(groups == group)
            number = np.searchsorted(self.positions[group], positions[mine])
            found[mine] = table[number, chunks[mine]]
        return found

    def ever(self, group: int) -> list[Ints]:
        """[chunks], for each number of deaths, who has them."""
        if group in self._tables:
            return list(self._tables[group])
        chunks = np.arange(self._run.num_chunks)
        return [self._run.slice_owner(np.full(len(chunks), group), chunks)]


def _first_alive(place: int, rank: int, members: list[int], gone: Collection[int]) -> int:
    """The worker at ``place`` if it lives; else the first that does, in the order that the chunk's
    ``rank`` gives the others: number rank of them, in a ring; of those that are left then the one
    at the number of whole turns, and so on."""
    worker = members[place]
    others = members[:place] + members[place + 1 :]
    while worker in gone:
        rank, index = divmod(rank, len(others))
        worker = others[index]
        del others[index]
    return worker


def lost_workers(history: History) -> dict[int, list[set[int]]]:
    """By group that goes on, for each server that says so who of it has died."""
    found: dict[int, list[set[int]]] = {}
    for log in history.servers:
        for group, gone in Pushers.of(history.run, log.events).lost.items():
            found.setdefault(group, []).append(set(gone))
    return found


def stamps_of(history: History) -> dict[int, set[int]]:
    """By group that goes on, the clocks of its REFORM events: iterations of which some chunks may
    have nothing."""
    found: dict[int, set[int]] = {}
    for log in history.servers:
        events = log.events[log.events["kind"] == EventKind.REFORM]
        for group, clock in events[["group", "clock"]].tolist():
            found.setdefault(group, set()).add(clock)
    return found


def check_reforms(replay: ServerReplay, findings: Findings) -> None:
    """REFORM names a worker of the group that has not died before, and not the last one; it is
    stamped with the fewest updates of the group that a chunk contains."""
    events, run = replay.members, replay.run
    owned = np.flatnonzero(np.asarray(run.owners, np.int64) == replay.server)
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
        rows = replay.rows_of_group[group]
        before = rows[: np.searchsorted(replay.position[rows], position)]
        counts = np.bincount(replay.chunk[before], minlength=run.num_chunks)[owned]
        counts = counts + replay.first[group]
        if not problem and len(owned) and counts.min() != clock:
            problem = (
                f"stamped {clock}, but the fewest updates that a chunk contains of it are "
                f"{counts.min()}"
            )
        if problem:
            findings.add(
                Rule.MEMBERSHIP,
                f"server {replay.server}, position {position}: REFORM of group {group}: {problem}",
            )


def is_in_place_of_the_dead(replay: ServerReplay) -> Ints:
    """[rows]: whether it is what a worker pushed, without a gradient, of a chunk that it has from
    one that has died, and of which that had pushed nothing: the first of the chunk behind a REFORM,
    stamped as that."""
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
