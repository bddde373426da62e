"""A chunk's vector of clocks, kept so that a message costs the same for 2 and for 2,000 groups.

``done[g]`` is the number of group g's updates that the chunk contains: iterations 0 .. done[g]-1.
``min_done`` is the minimum over the groups that count.

Which groups count is the same in all chunks of a server: :class:`Limits` says so once for all of
them. A group stops counting (suspended, left) only when every chunk contains exactly its updates
before the clock at which it stops, and counts again from there. So no chunk has to be told: it
knows how many groups stand where, the limits say how many of those have stopped there, and a chunk
that is looked at catches up in a step for each different clock.

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


class Limits:
    """Up to which of its iterations each group is waited for."""

    def __init__(self, first: Sequence[int]) -> None:
        """``first``: by group, where its clock begins: 0, or what a checkpoint contains."""
        self.first = tuple(first)
        num_groups = len(self.first)
        self.of = list(first)
        """By group: NEVER while it counts; n while it has stopped after n iterations. A group that
        has not joined has stopped where it begins."""
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
        clock = self.of[group]
        self.of[group] = NEVER
        left = self.stopped[clock] - 1
        if left:
            self.stopped[clock] = left
        else:
            del self.stopped[clock]
        self.changes, self.admissions = object(), object()
        return clock

    def counts(self, group: int) -> bool:
        return self.of[group] == NEVER

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the limits contradict themselves."""
        if Counter(limit for limit in self.of if limit != NEVER) != self.stopped:
            raise InvariantError(f"limits {self.of}, counted as {self.stopped}")


class ChunkClock:
    __slots__ = ("_how_many", "changes", "done", "limit", "limits", "min_done")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.limit = limits.of
        """By group, see :class:`Limits`: the list itself, which is never replaced."""
        self.done = list(limits.first)
        # done -> number of groups there, whether they count or not
        self._how_many = dict(Counter(self.done))
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
        left = how_many[before] - 1
        if left:
            how_many[before] = left
        else:
            del how_many[before]
        if before == self.min_done and left == self.limits.stopped.get(before, 0):
            self.min_done = after

    def is_required(self, group: int) -> bool:
        """Whether the next contribution to iteration ``min_done`` waits for ``group``."""
        return self.done[group] == self.min_done < self.limit[group]

    def missing(self) -> list[int]:
        """The groups that hold ``min_done`` back; for people, linear in the groups."""
        return [group for group in range(len(self.done)) if self.is_required(group)]

    def check_invariants(self) -> None:
        limits = self.limits.of
        for group, (done, limit) in enumerate(zip(self.done, limits, strict=True)):
            if limit not in (done, NEVER):
                raise InvariantError(f"group {group} has stopped after {limit}, holds {done}")
        if Counter(self.done) != self._how_many:
            raise InvariantError(f"clocks {self.done}, counted as {self._how_many}")
        lowest = min((done for done in self.done_of_counting()), default=NEVER)
        if self.changes is self.limits.changes and self.min_done != lowest:
            raise InvariantError(f"min_done {self.min_done}, but the groups are at {self.done}")

    def done_of_counting(self) -> list[int]:
        """``done`` of the groups that count; linear in the groups."""
        return [done for group, done in enumerate(self.done) if self.limits.counts(group)]
