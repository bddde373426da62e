"""A chunk's vector of clocks, kept so that a message costs the same for 2 and for 2,000 groups.

``done[g]`` is the number of group g's updates that the chunk contains: iterations 0 .. done[g]-1.
``min_done`` is the minimum over the groups that count.

The same groups count in all chunks of a server, so one :class:`Limits` serves all of them. A group
stops counting (suspended, left) only when every chunk contains exactly its updates before the clock
at which it stops. It counts again from there. So no chunk is notified: a chunk counts the groups at
each clock, and the limits count the groups that have stopped at each clock. A chunk catches up when
it is used next, in one step for each different clock.

A group that joins a running job has its first clock there (``Limits.begin``). Every chunk is
notified before the group counts (``ChunkClock.begin``).

A group whose worker failed stops at any clock, so each chunk is notified too (``evict``). The
group is *draining* in a chunk that still waits for its updates that have arrived whole; the chunk
waits for no later update of the group.

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
    """By group, the clock at which chunks stop waiting for it."""

    def __init__(self, first: Sequence[int]) -> None:
        """``first``: by group, its first clock: 0, or its updates in the checkpoint."""
        self.first = tuple(first)
        num_groups = len(self.first)
        self.of = list(first)
        """By group: NEVER while it counts; n while it has stopped after n iterations; DEAD. A group
        that has not joined has stopped at its first clock."""
        self.stopped: dict[int, int] = dict(Counter(first))
        """n -> groups that have stopped after n iterations."""
        self.contained = [0] * num_groups
        """By group: its updates from ``first`` on that the chunks contain, summed over them."""
        self.revision = object()
        """A new object whenever a group has stopped or counts again."""
        self.admissions = object()
        """A new object whenever a group counts again."""

    def stop(self, group: int, clock: int) -> None:
        """Every chunk contains ``clock`` updates of ``group``, and waits for no more of them."""
        self.of[group] = clock
        self.stopped[clock] = self.stopped.get(clock, 0) + 1
        self.revision = object()

    def count(self, group: int) -> int:
        """``group`` counts from now on. Return the clock at which it had stopped."""
        clock = self._forget_stop(group)
        self.of[group] = NEVER
        self.revision, self.admissions = object(), object()
        return clock

    def begin(self, group: int, clock: int) -> None:
        """``group``, which has not joined, begins at ``clock``. Call :meth:`ChunkClock.begin` of
        every chunk before the group counts."""
        first = list(self.first)
        self._forget_stop(group)
        first[group] = clock
        self.first = tuple(first)
        self.stop(group, clock)

    def evict(self, group: int) -> None:
        """``group`` never counts again. Call :meth:`ChunkClock.evict` of every chunk."""
        if self.of[group] != NEVER:
            self._forget_stop(group)
        self.of[group] = DEAD
        self.revision = object()

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
    __slots__ = ("_how_many", "done", "draining", "limit", "limits", "min_done", "revision")

    def __init__(self, limits: Limits, done: Sequence[int] = ()) -> None:
        """``done``: updates in the chunk, by group; empty: each group's first clock."""
        self.limits = limits
        self.limit = limits.of
        """By group, see :class:`Limits`: the list itself, which is never replaced."""
        self.done = list(done or limits.first)
        # done -> number of groups at that clock, counting or stopped; evicted groups are left out
        self._how_many = dict(Counter(self.done))
        self.draining: dict[int, int] = {}
        """Failed group -> updates of it that the chunk will contain, more than now."""
        self.revision: object = None
        """``Limits.revision`` when this chunk last caught up."""
        self.catch_up()

    def catch_up(self) -> None:
        """Update ``min_done`` if groups have stopped or count again since the last call."""
        if self.revision is self.limits.revision:
            return
        self.revision, stopped = self.limits.revision, self.limits.stopped
        self.min_done = min(
            (done for done, groups in self._how_many.items() if groups != stopped.get(done)),
            default=NEVER,
        )

    def advance(self, group: int) -> None:
        """The chunk contains one more update of ``group``, which counts."""
        before = self.done[group]
        self.done[group] = after = before + 1
        self.limits.contained[group] += 1
        how_many = self._how_many
        how_many[after] = how_many.get(after, 0) + 1
        left = self._take_out(before)
        if before == self.min_done and left == self.limits.stopped.get(before, 0):
            self.min_done = after
        if self.draining and self.draining.get(group) == after:
            del self.draining[group]
            self._leave_out(group)

    def _take_out(self, done: int) -> int:
        """Remove a group from clock ``done``. Return the number of groups left there."""
        left = self._how_many[done] - 1
        if left:
            self._how_many[done] = left
        else:
            del self._how_many[done]
        return left

    def begin(self, group: int) -> None:
        """``group``, which has no update in the chunk, begins at its clock in the limits
        (:meth:`Limits.begin`)."""
        self._take_out(self.done[group])
        self.done[group] = clock = self.limits.first[group]
        self._how_many[clock] = self._how_many.get(clock, 0) + 1
        self.revision = None
        self.catch_up()

    def evict(self, group: int, *, num_arrived: int) -> None:
        """``group`` failed. ``num_arrived``: its updates that arrived and are not applied yet."""
        if num_arrived:
            self.draining[group] = self.done[group] + num_arrived
            self.revision = None
        else:
            self._leave_out(group)

    def _leave_out(self, group: int) -> None:
        self._take_out(self.done[group])
        self.revision = None
        self.catch_up()

    def is_required(self, group: int) -> bool:
        """True if iteration ``min_done`` of this chunk waits for ``group``."""
        min_done = self.min_done
        return self.done[group] == min_done and (
            min_done < self.limit[group] or group in self.draining
        )

    def missing(self) -> list[int]:
        """Return the groups that hold ``min_done`` back, for messages; linear in the groups."""
        return [group for group in range(len(self.done)) if self.is_required(group)]

    def check_invariants(self) -> None:
        limits = self.limits.of
        for group, (done, limit) in enumerate(zip(self.done, limits, strict=True)):
            if limit not in (done, NEVER, DEAD):
                raise InvariantError(f"group {group} has stopped after {limit}, holds {done}")
            if group in self.draining and (limit != DEAD or self.draining[group] <= done):
                raise InvariantError(f"drains {self.draining} with the clocks {self.done}")
        there = [
            done
            for group, done in enumerate(self.done)
            if limits[group] != DEAD or group in self.draining
        ]
        if Counter(there) != self._how_many:
            raise InvariantError(f"clocks {self.done}, counted as {self._how_many}")
        lowest = min((done for done in self.done_of_counting()), default=NEVER)
        if self.revision is self.limits.revision and self.min_done != lowest:
            raise InvariantError(f"min_done {self.min_done}, but the groups are at {self.done}")

    def done_of_counting(self) -> list[int]:
        """Return ``done`` of the groups that the chunk waits for; linear in the groups."""
        return [
            done
            for group, done in enumerate(self.done)
            if self.limits.counts(group) or group in self.draining
        ]
