"""What a run has by round, as its schedule says; pure.

at_round(first, [(500, second), (900, third)], 700)      # second
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import TypeVar

_T = TypeVar("_T")


def at_round(first: _T, later: Sequence[tuple[int, _T]], clock: int) -> _T:
    """``first`` from round 0 on, each of ``later`` (ascending) from its round on."""
    place = bisect_right(later, clock, key=itemgetter(0))
    return later[place - 1][1] if place else first
