"""Values by round: from a schedule, or changed within the run; pure.

at_round(first, [(500, second), (900, third)], 700)      # second
turns = Turns([(0, 0), (500, 1)])                        # which of several things rules: by number
turns.begin(1, 900, 2)                                   # the first change: from round 900 on
turns.at(700)                                            # 1
Turns([(0, 0)], bursts={0: Burst(20, 1)}).at(19)         # 1, and of 39, 59 ...: else 0
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")


def at_round(first: _T, later: Sequence[tuple[int, _T]], clock: int) -> _T:
    """``first`` from round 0 on, each of ``later`` (ascending) from its round on."""
    place = bisect_right(later, clock, key=itemgetter(0))
    return later[place - 1][1] if place else first


class Burst(NamedTuple):
    """Among the rounds that one thing rules each one whose number, counted from 1, is a multiple of
    ``every`` is ruled by another one, ``which``."""

    every: int
    which: int

    def comes(self, clock: int) -> bool:
        return (clock + 1) % self.every == 0


class Turns:
    """Which of several things rules which rounds. All that look things up by one of these change
    together."""

    __slots__ = ("_bursts", "_said", "_starts")

    def __init__(
        self, starts: Sequence[tuple[int, int]], *, bursts: Mapping[int, Burst] | None = None
    ) -> None:
        """(round, which), ascending, the first from round 0 on; ``bursts``: by what rules
        otherwise."""
        self._starts = list(starts)
        self._bursts = bursts or {}
        self._said: list[tuple[int, int]] = []

    def at(self, clock: int) -> int:
        """Return the value in this round."""
        which = self._since(clock)
        burst = self._bursts.get(which)
        return which if burst is None or not burst.comes(clock) else burst.which

    def is_burst(self, clock: int) -> bool:
        """Whether another thing rules it than the rounds around it."""
        burst = self._bursts.get(self._since(clock))
        return burst is not None and burst.comes(clock)

    def _since(self, clock: int) -> int:
        return self._starts[bisect_right(self._starts, clock, key=itemgetter(0)) - 1][1]

    def begin(self, number: int, clock: int, which: int) -> bool:
        """From this round on another value is in force, by the ``number``-th change, counted from
        1. A repeated call changes nothing. Returns False for an impossible change: another change
        of that number, one before the last one's round, or one whose predecessors are unknown."""
        change = clock, which
        if 1 <= number <= len(self._said):
            return self._said[number - 1] == change
        if number != len(self._said) + 1 or clock < self._starts[-1][0]:
            return False
        self._said.append(change)
        self._starts = [*(each for each in self._starts if each[0] < clock), change]
        return True
