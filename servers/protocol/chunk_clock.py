"""A chunk's vector of clocks, kept so that a message costs the same for 2 and for 2,000 groups.

``done[g]`` is the number of group g's updates that the chunk contains: iterations 0 .. done[g]-1.
``min_done`` is the minimum over the groups that count.

Which groups count is the same in all chunks of a server: :class:`Limits` says so once for all of
them. A group stops counting (suspended, left) only when every chunk contains exactly its updates
before the clock at which it stops, and counts again from there. So no chunk has to be told: it
knows how many groups stand where, the limits say how many of those have stopped there, and a chunk
that is looked at catches up in a step for each different clock.

A group that joins a running job (``Limits.begin``, ``ChunkClock.begin``) has its first clock there,
which every chunk is told before the group counts.

A group whose worker has died is the other exception: it stops wherever it is, so each chunk is told
(``bury``). Updates of it that have arrived whole are *inherited*: the chunk waits for them as if
the group lived, and for nothing behind them.

    limits = Limits([0, 0])
    clock = ChunkClock(limits)
    limits.count(0)
    clock.catch_up()
    clock.advance(0)
    clock.min_done       # 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from psdist.errors import InvariantError
from psdist.protocol.header import NEVER

DEAD = -1
"""Limit of a group that is not waited for at any clock."""


class Limits:
    """Up to which of its iterations each group is waited for."""

    def __init__(self, first: Sequence[int]) -> None:
        """``first``: by group, where its clock begins: 0, or what a checkpoint contains."""
        self.first = tuple(first)
        num_groups = len(self.first)
        self.of = list(first)
        """By group: NEVER while it counts; n while it has stopped after n iterations; DEAD. A group
        that has not joined has stopped where it begins."""
        self.stopped: dict[int, int] = dict(Counter(first))
        """n -> groups that have stopped after n iterations."""
        self.contained = [0] * num_groups
        """By group: its updates from ``first`` on that the chunks contain, summed over them."""
        self.changes = object()
        """Another one whenever a group has stopped or counts again."""
        self.admissions = object()
        """Another one whenever a group counts again."""

    def stop(self, group: int, clock: int) -> None:
        """Every chunk contains ``clock`` updates of ``group``: nobody waits for more of them."""
        self.of[group] = clock
        self.stopped[clock] = self.stopped.get(clock, 0) + 1
        self.changes = object()

    def count(self, group: int) -> int:
        """``group`` counts from now on; returns the clock that it had stopped at."""
        clock = self._forget_stop(group)
        self.of[group] = NEVER
        self.changes, self.admissions = object(), object()
        return clock

    def begin(self, group: int, clock: int) -> None:
        """``group``, which has not joined, begins at ``clock``; every chunk is to be told
        (:meth:`ChunkClock.begin`) before it counts."""
        first = list(self.first)
        self._forget_stop(group)
        first[group] = clock
        self.first = tuple(first)
        self.stop(group, clock)

    def bury(self, group: int) -> None:
        """``group`` never counts again; every chunk is to be told (:meth:`ChunkClock.bury`)."""
        if self.of[group] != NEVER:
            self._forget_stop(group)
        self.of[group] = DEAD
        self.changes = object()

    def _forget_stop(self, group: int) -> int:
        clock = self.of[group]
        left = self.stopped[clock] - 1
        if left:
            self.stopped[clock] = left
        else:
            del self.stopped[clock]
        return clock

    def counts(self, group: int) -> bool:
        return self.of[group] == NEVER

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the limits contradict themselves."""
        if Counter(limit for limit in self.of if limit not in (NEVER, DEAD)) != self.stopped:
            raise InvariantError(f"limits {self.of}, counted as {self.stopped}")


class ChunkClock:
    __slots__ = ("_how_many", "changes", "done", "inherited", "limit", "limits", "min_done")

    def __init__(self, limits: Limits, done: Sequence[int] = ()) -> None:
        """``done``: what the chunk contains; nothing for what every group begins with."""
        self.limits = limits
        self.limit = limits.of
        """By group, see :class:`Limits`: the list itself, which is never replaced."""
        self.done = list(done or limits.first)
        # done -> number of groups there, whether they count or not; without those that are buried
        self._how_many = dict(Counter(self.done))
        self.inherited: dict[int, int] = {}
        """Group that is dead -> so many updates of it the chunk will contain; more than now."""
        self.changes: object = None
        """Of the limits, when this chunk was last looked at."""
        self.catch_up()

    def catch_up(self) -> None:
        """Groups may have stopped, or count again, since this chunk was last looked at."""
        if self.changes is self.limits.changes:
            return
        self.changes, stopped = self.limits.changes, self.limits.stopped
        self.min_done = min(
            (done for done, groups in self._how_many.items() if groups != stopped.get(done)),
            default=NEVER,
        )

    def advance(self, group: int) -> None:
        """One more update of ``group``, which counts, is contained."""
        before = self.done[group]
        self.done[group] = after = before + 1
        self.limits.contained[group] += 1
        how_many = self._how_many
        how_many[after] = how_many.get(after, 0) + 1
        left = self._take_out(before)
        if before == self.min_done and left == self.limits.stopped.get(before, 0):
            self.min_done = after
        if self.inherited and self.inherited.get(group) == after:
            del self.inherited[group]
            self._leave_out(group)

    def _take_out(self, done: int) -> int:
        """One group less stands at ``done``; how many are left there."""
        left = self._how_many[done] - 1
        if left:
            self._how_many[done] = left
        else:
            del self._how_many[done]
        return left

    def begin(self, group: int) -> None:
        """``group``, of which the chunk contains nothing, begins where the limits say
        (:meth:`Limits.begin`)."""
        self._take_out(self.done[group])
        self.done[group] = clock = self.limits.first[group]
        self._how_many[clock] = self._how_many.get(clock, 0) + 1
        self.changes = None
        self.catch_up()

    def bury(self, group: int, *, inherited: int) -> None:
        """``group`` has died, and so many of its updates have arrived that are not contained."""
        if inherited:
            self.inherited[group] = self.done[group] + inherited
            self.changes = None
        else:
            self._leave_out(group)

    def _leave_out(self, group: int) -> None:
        self._take_out(self.done[group])
        self.changes = None
        self.catch_up()

    def is_required(self, group: int) -> bool:
        """Whether the next contribution to iteration ``min_done`` waits for ``group``."""
        min_done = self.min_done
        return self.done[group] == min_done and (
            min_done < self.limit[group] or group in self.inherited
        )

    def missing(self) -> list[int]:
        """The groups that hold ``min_done`` back; for people, linear in the groups."""
        return [group for group in range(len(self.done)) if self.is_required(group)]

    def check_invariants(self) -> None:
        limits = self.limits.of
        for group, (done, limit) in enumerate(zip(self.done, limits, strict=True)):
            if limit not in (done, NEVER, DEAD):
                raise InvariantError(f"group {group} has stopped after {limit}, holds {done}")
            if group in self.inherited and (limit != DEAD or self.inherited[group] <= done):
                raise InvariantError(f"inherits {self.inherited} with the clocks {self.done}")
        there = [
            done
            for group, done in enumerate(self.done)
            if limits[group] != DEAD or group in self.inherited
        ]
        if Counter(there) != self._how_many:
            raise InvariantError(f"clocks {self.done}, counted as {self._how_many}")
        lowest = min((done for done in self.done_of_counting()), default=NEVER)
        if self.changes is self.limits.changes and self.min_done != lowest:
            raise InvariantError(f"min_done {self.min_done}, but the groups are at {self.done}")

    def done_of_counting(self) -> list[int]:
        """``done`` of the groups that are waited for; linear in the groups."""
        return [
            done
            for group, done in enumerate(self.done)
            if self.limits.counts(group) or group in self.inherited
        ]
