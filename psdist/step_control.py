"""How many local steps each group makes in a round: decided from what its steps have taken.

Pure: numbers in, decisions out. The registrar runs it (``steps_by = speed``), and ``psdist check``
feeds it what was recorded and must get the same decisions.

    control = StepControl(sizes=[1, 1, 2], local_steps=16)
    control.observe(group, step_us)          # of a round, as groups report
    control.choose()                         # Choice((11, 11, 21), "...")

All groups together make ``local_steps`` times as many steps as there are workers, each step counted
for every worker of its group, so that a round is of as many samples as with equal numbers. Among
these numbers are those with which the group that comes last comes earliest (:func:`spread`).
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Final, NamedTuple

KEPT: Final = 8
"""Rounds of a group whose median is its pace."""
LEAST_GAIN: Final = 0.05
"""Of a round's time, predicted, for which the numbers change."""

HANDS: Final = 4
"""Of a term, but of the first of a pass, which has one."""


class Term(NamedTuple):
    """Rounds for which the registrar fixes the steps of every group."""

    loader: int
    """Of the script's, counted from 1; 0: rounds of batches that are the script's own."""
    number: int
    """Of the pass over it."""
    block: int
    """Of the hands that the pass is dealt in, of one hand and then of :data:`HANDS` each."""


def block_of(hand: int) -> int:
    """Of which block of its pass the hand is, or the round of a script's own batches."""
    return (hand + HANDS - 1) // HANDS


def spread(paces: Sequence[float], sizes: Sequence[int], total: int) -> tuple[int, ...]:
    """Steps of each group, one at least, ``total`` at least together, so that the largest product
    of steps and pace is the least there is.

    ``paces``: [groups], what a step takes, > 0; ``sizes``: [groups], what a step counts for.
    """
    # With no less than this the last group comes; each step below it belongs to the answer.
    least = total / sum(size / pace for size, pace in zip(sizes, paces, strict=True))
    steps = [max(1, int(least / pace)) for pace in paces]
    missing = total - sum(map(mul, steps, sizes))
    ends = [
        ((n + 1) * pace, group) for group, (n, pace) in enumerate(zip(steps, paces, strict=True))
    ]
    heapq.heapify(ends)
    while missing > 0:
        _, group = ends[0]
        steps[group] += 1
        missing -= sizes[group]
        heapq.heapreplace(ends, ((steps[group] + 1) * paces[group], group))
    return tuple(steps)


@dataclass(frozen=True, slots=True)
class Choice:
    steps: tuple[int, ...]
    """[groups]"""
    why: str
    """For people; "" where nothing has changed."""


class StepControl:
    def __init__(self, *, sizes: Sequence[int], local_steps: int) -> None:
        """``sizes``: [groups], their workers; ``local_steps``: of each until speeds are known."""
        self._sizes = tuple(sizes)
        self._total = local_steps * sum(sizes)
        self._steps = (local_steps,) * len(self._sizes)
        self._step_us: list[deque[int]] = [deque(maxlen=KEPT) for _ in self._sizes]
        """By group: what a step has taken, in its last rounds."""

    def observe(self, group: int, step_us: int) -> None:
        """In a round of this group a step has taken so many microseconds."""
        self._step_us[group].append(max(1, step_us))

    def choose(self) -> Choice:
        """What each group makes from now on: as before, until all groups have told something, and
        while other numbers would not save :data:`LEAST_GAIN`."""
        if not all(self._step_us):
            return Choice(self._steps, "")
        paces = [statistics.median_low(each) for each in self._step_us]
        steps = spread(paces, self._sizes, self._total)
        before_us, after_us = _longest(self._steps, paces), _longest(steps, paces)
        if after_us > (1 - LEAST_GAIN) * before_us:
            return Choice(self._steps, "")
        self._steps = steps
        return Choice(steps, f"a round takes {after_us / 1e3:.2f} ms, not {before_us / 1e3:.2f} ms")


def _longest(steps: Sequence[int], paces: Sequence[int]) -> int:
    return max(n * pace for n, pace in zip(steps, paces, strict=True))
