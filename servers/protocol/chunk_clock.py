"""A chunk's vector of clocks, kept so that a message costs the same for 2 and for 2,000 groups.

``done[g]`` is the number of group g's updates that the chunk contains: iterations 0 .. done[g]-1.
``min_done`` is the minimum over the groups that count: every group from its join until it is
suspended or has left at clock n *and* all its updates before n are contained. (Stamping the
suspension with a clock makes it independent of the order in which messages arrive.)

    clock = ChunkClock()
    clock.join(0, done=0)
    clock.advance(0)
    clock.min_done       # 1
"""

from __future__ import annotations

from collections import Counter

from psdist.errors import InvariantError
from psdist.protocol.header import NEVER


class ChunkClock:
    __slots__ = ("_how_many", "counted", "done", "limit", "min_done")

    def __init__(self) -> None:
        self.done: list[int] = []
        self.limit: list[int] = []
        """Iterations from this one on need not be waited for; NEVER for an active group."""
        self.counted: list[bool] = []
        """Whether the group is in ``_how_many``, that is: whether min_done waits for it."""
        self._how_many: Counter[int] = Counter()  # done -> number of counted groups there
        self.min_done = NEVER

    def join(self, group: int, *, done: int) -> None:
        """``group`` counts from now on, with ``done`` iterations finished."""
        while len(self.done) <= group:
            self.done.append(0)
            self.limit.append(0)
            self.counted.append(False)
        if self.counted[group]:
            raise InvariantError(f"group {group} joined a chunk twice")
        self.done[group] = done
        self.limit[group] = NEVER
        self._count(group)

    def advance(self, group: int) -> None:
        """One more update of ``group`` is contained."""
        before = self.done[group]
        after = before + 1
        self.done[group] = after
        if not self.counted[group]:
            return
        how_many = self._how_many
        how_many[before] -= 1
        emptied = not how_many[before]
        if emptied:
            del how_many[before]
        if after < self.limit[group]:
            how_many[after] += 1
            if emptied and before == self.min_done:
                self.min_done = after
        else:
            self.counted[group] = False
            if emptied and before == self.min_done:
                self.min_done = min(how_many, default=NEVER)

    def release_from(self, group: int, clock: int) -> None:
        """Stop waiting for ``group``'s iterations from ``clock`` on (suspended, left)."""
        self.limit[group] = clock
        if self.counted[group] and self.done[group] >= clock:
            self.counted[group] = False
            at = self.done[group]
            self._how_many[at] -= 1
            if not self._how_many[at]:
                del self._how_many[at]
                if at == self.min_done:
                    self.min_done = min(self._how_many, default=NEVER)

    def resume(self, group: int) -> None:
        """``group`` counts again; ``min_done`` may go back."""
        self.limit[group] = NEVER
        if not self.counted[group]:
            self._count(group)

    def _count(self, group: int) -> None:
        self.counted[group] = True
        self._how_many[self.done[group]] += 1
        self.min_done = min(self.min_done, self.done[group])

    def is_required(self, group: int) -> bool:
        """Whether the next contribution to iteration ``min_done`` waits for ``group``."""
        return self.counted[group] and self.done[group] == self.min_done

    def missing(self) -> list[int]:
        """The groups that hold ``min_done`` back; for people, linear in the groups."""
        return [group for group in range(len(self.done)) if self.is_required(group)]

    def check_invariants(self) -> None:
        counted = [done for done, is_in in zip(self.done, self.counted, strict=True) if is_in]
        if self.min_done != min(counted, default=NEVER) or Counter(counted) != self._how_many:
            raise InvariantError(
                f"clock says min_done {self.min_done}, its groups {self.done} "
                f"(counted {self.counted}) say otherwise"
            )
        for group, is_in in enumerate(self.counted):
            if is_in != (self.done[group] < self.limit[group]):
                raise InvariantError(
                    f"group {group} at {self.done[group]}, limit {self.limit[group]}, "
                    f"counted {is_in}"
                )
