"""The replay of one server's log: the contents of every version of a chunk.

Owns the updates that a chunk contains by group, the membership at a position, and the versions of a
chunk. It reads only the order of events and the groups of updates; clocks that the server sent to
ranks are ignored. Never judges.

    replay = ServerReplay(run, log)
    rows = replay.row_of(chunks, positions)
    for part, counts in replay.counts(chunks[order], rows[order]): ...   # [queries, groups]

It is numpy over whole logs: ten million records take seconds. The memory is a few arrays of the
length of the log, and blocks of ``BLOCK_CELLS`` counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from psdist.history import (
    OF_MEMBERSHIP,
    EventFlag,
    EventKind,
    Ints,
    Records,
    ServerLog,
    joined_at,
)
from psdist.history.rules.log.modes import ModeRules
from psdist.history.rules.log.reformed import Pushers
from psdist.history.run_record import RunRecord

NEVER = int(np.iinfo(np.int32).max)
"""The limit of an active group: its updates are required without end."""
BLOCK_CELLS = 2**18
"""Counts worked on at a time; a MiB of them stays in a core's cache."""

Counts = npt.NDArray[np.int32]


class ServerReplay:
    """One server's log, its applies ordered by (chunk, position): *rows*."""

    def __init__(self, run: RunRecord, log: ServerLog) -> None:
        events = log.events
        self.run = run
        self.server = log.server
        owners = np.asarray(run.owners, np.int64)
        self.owners = owners
        """[chunks]: the server of each."""
        self.owned: Ints = np.flatnonzero(owners == log.server)
        """Chunks of this server."""
        self.is_complete = log.is_complete
        self.num_events = len(events)
        self.first = run.first.astype(np.int32)
        """[groups]: updates that every chunk contains at the start: those of a checkpoint, and
        those before the first round of a substitute."""
        joined = joined_at(run, events)
        self.first[list(joined)] = list(joined.values())

        positions = np.flatnonzero(np.isin(events["kind"], (EventKind.APPLY, EventKind.MISSED)))
        self.num_rows = len(positions)
        order = np.argsort(events["chunk"][positions], kind="stable")
        self.position: Ints = positions[order]
        """[rows], as all columns below."""
        applies = events[self.position]
        self.chunk: Ints = applies["chunk"].astype(np.int64)
        self.group: Ints = applies["group"].astype(np.int64)
        self.clock: Ints = applies["clock"]
        self.weight: Ints = applies["weight"]
        self.lr_scale: Ints = applies["lr_scale"]
        self.is_last: Ints = (applies["flags"] & EventFlag.LAST) != 0
        self.codec: Ints = applies["codec"].astype(np.int64)
        """Codec of the message that brought the update."""
        self.is_missed: Ints = applies["kind"] == EventKind.MISSED
        """True if the group has missed the round: it counts as contained, without a gradient."""
        self.is_empty: Ints = self.is_missed | ((applies["flags"] & EventFlag.EMPTY) != 0)
        self.first_row: Ints = np.searchsorted(self.chunk, np.arange(run.num_chunks))
        """[chunks]"""
        self.rows_of_group: list[Ints] = self._split_by_group()
        """The rows of each group, in the order of the log."""
        self.step_of: Ints = self._first_rows_of_steps()
        """First row of each row's optimizer step."""
        self.pushers = Pushers.of(run, events)
        self.pushed_at: Ints = self._pushed_at(events)
        """Position at which the update had arrived: that of its INHERIT if a worker of the group
        failed meanwhile, else that of its apply."""
        self.pusher: Ints = self.pushers.of_rows(self.group, self.chunk, self.pushed_at)
        """Worker that pushed the row."""
        self.clock_of_event: Ints = events["clock"]
        self._key = self.key_of(self.chunk, self.position)
        self._num_changes: Ints = np.concatenate([[0], np.cumsum(self._is_change())])

        loads = np.flatnonzero(events["kind"] == EventKind.LOAD)
        loads = loads[np.argsort(events["chunk"][loads], kind="stable")]
        self.load_position: Ints = loads
        """Position of each LOAD, ordered by (chunk, position)."""
        self.load_chunk: Ints = events["chunk"][loads].astype(np.int64)
        self.loads = events[loads]
        self._load_key = self.key_of(self.load_chunk, loads)

        self.kept_position: Ints = np.flatnonzero(
            np.isin(events["kind"], (EventKind.SNAPSHOT, EventKind.RESTORE))
        )
        """Position of each SNAPSHOT and RESTORE."""
        self.kept = events[self.kept_position]
        self.change_position: Ints = np.flatnonzero(events["kind"] == EventKind.MODE)
        """Position of each MODE."""
        self.changes = events[self.change_position]
        self.rules = ModeRules.of(run, self.changes)
        is_later = ~np.isin(events["kind"], (EventKind.JOIN, EventKind.RESTORE))
        self.num_before: int = int(np.argmax(is_later)) if is_later.any() else len(events)
        """Number of JOIN and RESTORE events with which the log begins."""

        self.member_position: Ints = np.flatnonzero(np.isin(events["kind"], OF_MEMBERSHIP))
        self.members = events[self.member_position]
        (taken,) = np.nonzero(events["kind"] == EventKind.TAKEOVER)
        self.taken_over_at: int = int(taken[-1]) if len(taken) else -1
        """Position of the last TAKEOVER, -1 if there is none. Records that the failed server had
        not written are missing."""
        self.unwritten_until: int = len(events) if log.has_died else self.taken_over_at
        """Last position at which checksums of a failed server may be missing; -1: none may."""
        self._turn_position: Ints = np.flatnonzero(
            np.isin(events["kind"], (*OF_MEMBERSHIP, EventKind.TAKEOVER))
        )
        """Positions of the events that may change the limits."""
        self._turns = events[self._turn_position]
        self.limits = self._replay_membership()
        self.num_active_groups, self.num_active_workers = self._count_active()

        is_inherited = events["kind"] == EventKind.INHERIT
        self.inherited_position: Ints = np.flatnonzero(is_inherited)
        """Position of each INHERIT: an update that had arrived whole when its group failed."""
        self.inherited = events[self.inherited_position]
        self._deaths = self._replay_deaths()
        self.joined_at = self._substitutes_joined_at()
        """Position of the JOIN of each substitute's group; the end of the log if it has none."""

    @property
    def num_changes(self) -> int:
        """Number of optimizer steps with a gradient."""
        return int(self._num_changes[-1])

    @property
    def num_applies(self) -> int:
        return int(np.count_nonzero(~self.is_missed))

    def line(self, row: int) -> str:
        """The row in words."""
        return (
            f"server {self.server}, position {self.position[row]}, chunk {self.chunk[row]}: "
            f"update {self.clock[row]} of group {self.group[row]}"
        )

    def epoch_of(self, positions: Ints) -> Ints:
        """Return the number of membership and TAKEOVER events before each position: an index into
        ``limits``."""
        epochs: Ints = np.searchsorted(self._turn_position, positions)
        return epochs

    def limits_at(self, epochs: Ints, chunks: Ints) -> Counts:
        """[n, groups]: updates of a group that others must wait for in these chunks and epochs; of
        a failed group those with an INHERIT."""
        limits: Counts = self.limits[epochs]
        for epoch, group, until in self._deaths:
            rows = np.flatnonzero(epochs >= epoch)
            limits[rows, group] = until[chunks[rows]]
        return limits

    @property
    def is_inherited(self) -> Ints:
        """[rows]: True if the update had arrived whole when its group failed."""
        names = ("chunk", "group", "clock")
        inherited = self.update_of(*(self.inherited[name] for name in names))
        found: Ints = np.isin(self.update_of(self.chunk, self.group, self.clock), inherited)
        return found

    @property
    def deaths(self) -> list[tuple[int, int]]:
        """First epoch and group of each failure."""
        first: dict[int, int] = {}
        for epoch, group, _ in self._deaths:
            first.setdefault(group, epoch)
        return [(epoch, group) for group, epoch in first.items()]

    def update_of(self, chunks: Ints, groups: Ints, clocks: Ints) -> Ints:
        """Return a number for each update of a group to a chunk."""
        pairs = chunks.astype(np.int64) * len(self.run.groups) + groups
        numbers: Ints = (pairs << 32) + clocks
        return numbers

    def key_of(self, chunks: Ints, positions: Ints) -> Ints:
        """Return a number for each, in the order of chunk, then position. The end of the log in one
        chunk is its beginning in the next: both are the next one's first row."""
        keys: Ints = chunks * self.num_events + positions
        return keys

    def row_of(self, chunks: Ints, positions: Ints) -> Ints:
        """Return the first row after all applies to the chunk before the position."""
        rows: Ints = np.searchsorted(self._key, self.key_of(chunks, positions))
        return rows

    def version_of(self, chunks: Ints, positions: Ints) -> Ints:
        """Return the chunk's steps with a gradient plus its LOADs before the position, minus 1: its
        bytes change with these alone."""
        rows = self.row_of(chunks, positions)
        steps = self._num_changes[rows] - self._num_changes[self.first_row[chunks]]
        first = np.searchsorted(self.load_chunk, chunks)
        versions: Ints = steps + self.load_of(chunks, positions) - first
        return versions

    def load_of(self, chunks: Ints, positions: Ints) -> Ints:
        """Return the last LOAD of the chunk before the position, or one of an earlier chunk."""
        loads: Ints = np.searchsorted(self._load_key, self.key_of(chunks, positions)) - 1
        return loads

    def is_inside_a_step(self, chunks: Ints, rows: Ints) -> Ints:
        """Return True if the chunk's last apply before the row left its step unfinished."""
        is_inside: Ints = rows > self.first_row[chunks]
        is_inside[is_inside] = ~self.is_last[rows[is_inside] - 1]
        return is_inside

    def counts(self, chunks: Ints, rows: Ints) -> Iterator[tuple[slice, Counts]]:
        """Yield the updates of each group that a chunk contained before a row.

        ``chunks`` [n] and ``rows`` [n], sorted by row; yields slices of 0..n in order, with
        counts [length of the slice, groups].
        """
        num_groups = len(self.run.groups)
        block = max(1, BLOCK_CELLS // num_groups)
        carry = np.zeros(num_groups, np.int32)
        stop = begin = 0
        is_over = False
        while not is_over:
            first, table = stop, self._count_block(slice(stop, stop + block), carry)
            stop += len(table)
            end = int(np.searchsorted(rows, stop, side="right"))
            for start in range(begin, end, block):
                part = slice(start, min(start + block, end))
                is_first = rows[part] == self.first_row[chunks[part]]
                counts = np.zeros((len(is_first), num_groups), np.int32)
                counts[~is_first] = table[rows[part][~is_first] - 1 - first]
                yield part, counts + self.first
            begin = end
            is_over = stop == self.num_rows
            if not is_over:
                carry = table[-1] * (self.chunk[stop] == self.chunk[stop - 1])

    def _count_block(self, rows: slice, carry: Counts) -> Counts:
        """Counts *after* each of the rows, within its chunk; ``carry``: those before the first."""
        groups, chunks = self.group[rows], self.chunk[rows]
        table = np.zeros((len(groups), len(carry)), np.int32)
        table[np.arange(len(groups)), groups] = 1
        table[:1] += carry
        np.cumsum(table, axis=0, dtype=np.int32, out=table)
        starts = np.flatnonzero(chunks[1:] != chunks[:-1]) + 1
        earlier = np.concatenate([np.zeros((1, len(carry)), np.int32), table[starts - 1]])
        table -= np.repeat(earlier, np.diff(starts, prepend=0, append=len(table)), axis=0)
        return table

    def _pushed_at(self, events: Records) -> Ints:
        found: Ints = self.position.copy()
        if not self.pushers.lost:
            return found
        inherited = np.flatnonzero(events["kind"] == EventKind.INHERIT)
        names = ("chunk", "group", "clock")
        keys = zip(*(events[name][inherited].tolist() for name in names), strict=True)
        first_at: dict[tuple[int, ...], int] = {}
        for key, at in zip(keys, inherited.tolist(), strict=True):
            first_at.setdefault(key, at)
        rows = zip(self.chunk.tolist(), self.group.tolist(), self.clock.tolist(), strict=True)
        for row, key in enumerate(rows):
            found[row] = min(first_at.get(key, self.num_events), found[row])
        return found

    def _split_by_group(self) -> list[Ints]:
        order = np.lexsort((self.position, self.group))
        groups = np.arange(len(self.run.groups))
        return np.split(order, np.searchsorted(self.group[order], groups))[1:]

    def _first_rows_of_steps(self) -> Ints:
        is_first = np.ones(self.num_rows, np.bool_)
        is_first[1:] = self.is_last[:-1] | (self.chunk[1:] != self.chunk[:-1])
        rows: Ints = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
        return rows

    def _is_change(self) -> Ints:
        """[rows]: True if the row completes a step with a gradient."""
        is_gradient = ~self.is_empty
        so_far = np.cumsum(is_gradient)
        is_change: Ints = self.is_last & (so_far > (so_far - is_gradient)[self.step_of])
        return is_change

    def _count_active(self) -> tuple[Ints, Ints]:
        """[epochs]: groups in the job, and the number of their workers by the recorded weights."""
        present: dict[int, float] = {}
        groups, active = [0], [0.0]
        turns = self._turns[["kind", "group", "weight"]].tolist()
        for kind, group, weight in turns:
            if kind == EventKind.JOIN:
                present[group] = weight
            elif kind in (EventKind.LEAVE, EventKind.DEATH):
                present.pop(group, None)
            elif kind == EventKind.REFORM and group in present:
                present[group] -= 1
            groups.append(len(present))
            active.append(sum(present.values()))
        return np.asarray(groups), np.asarray(active)

    def _replay_deaths(self) -> list[tuple[int, int, Counts]]:
        """Return, for each failure, its first epoch, the group, and [chunks] the updates of the
        group that others wait for from then on. A TAKEOVER repeats it, because updates that the
        failed server had not applied are lost."""
        deaths: list[tuple[int, int, Counts]] = []
        for index, turn in enumerate(self._turns):
            if turn["kind"] == EventKind.DEATH:
                group = int(turn["group"])
                until = np.full(self.run.num_chunks, turn["clock"], np.int32)
                mine = self.inherited[self.inherited["group"] == group]
                np.maximum.at(until, mine["chunk"], mine["clock"].astype(np.int32) + 1)
                deaths.append((index + 1, group, until))
            elif turn["kind"] == EventKind.TAKEOVER:
                for _, group, until in tuple(deaths):
                    contained = self.contained(group, int(self._turn_position[index]))
                    deaths.append((index + 1, group, np.minimum(until, contained)))
        return deaths

    def _substitutes_joined_at(self) -> list[int]:
        joins = self.members["kind"] == EventKind.JOIN
        positions = {
            int(group): int(position)
            for group, position in zip(
                self.members["group"][joins], self.member_position[joins], strict=True
            )
        }
        substitutes = range(self.run.first_substitute, len(self.run.groups))
        return [positions.get(group, self.num_events) for group in substitutes]

    def contained(self, group: int, position: int) -> Counts:
        """[chunks]: the number of updates of the group that they contain at the position."""
        rows = self.rows_of_group[group]
        rows = rows[self.position[rows] < position]
        counts = np.bincount(self.chunk[rows], minlength=self.run.num_chunks)
        contained: Counts = (counts + self.first[group]).astype(np.int32)
        return contained

    def _replay_membership(self) -> Counts:
        """[epochs, groups]: updates of a group that others must wait for.

        NEVER for an active group; the first clock of a group that has not joined; n for a group
        that is suspended, left or failed after n iterations.
        """
        limits = [self.first.copy()]
        for event in self._turns:
            limits.append(limits[-1].copy())
            if event["kind"] in (EventKind.TAKEOVER, EventKind.REFORM):
                continue
            is_active = event["kind"] in (EventKind.JOIN, EventKind.RESUME)
            limits[-1][event["group"]] = NEVER if is_active else event["clock"]
        return np.stack(limits)
