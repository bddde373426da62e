"""How many local steps each group makes in a round: decided from what its steps have taken.

Pure: numbers in, decisions out. The coordinator runs it (``steps_by = speed``), and ``psdist
check`` feeds it what was recorded and must get the same decisions.

    control = StepControl(sizes=[1, 1, 2], local_steps=16)
    control.observe(group, step_us)          # of a round, as groups report
    control.choose()                         # Choice((16, 16, 16), "")
    control.go_on(kept)                      # another run's control.kept(), from a checkpoint

The slowest group makes a whole number of steps, and every other group the largest number that fits
into that time. A round then has about the samples of a round with ``local_steps`` on every group:
so the cost of the exchange per sample stays the same.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul, truediv
from typing import Annotated, Final, NamedTuple

from pydantic import AfterValidator

from psdist.controller.kept import KeptPaces
from psdist.controller.snapshots import Fields, HasSnapshot

KEPT: Final = 3
"""Rounds of a group whose median is its pace."""
LEAST_GAIN: Final = 0.05
"""Part of a step's time that new numbers must save, as predicted, to be chosen."""

ASSIGNMENTS: Final = 4
"""Assignments in an allocation window; the first window of a pass has one."""


class Term(NamedTuple):
    """Rounds for which the coordinator fixes the steps of every group."""

    loader: int
    """Number of the script's loader, from 1; 0: rounds with batches of the script's own."""
    number: int
    """Number of the pass over it."""
    block: int
    """Number of the allocation window in the pass, under its older name in histories and messages.
    The first window has one assignment, each other window :data:`ASSIGNMENTS`."""


def window_of(number: int) -> int:
    """Return the allocation window of an assignment of a pass, or of a round with the script's own
    batches. Both are counted from 0."""
    return (number + ASSIGNMENTS - 1) // ASSIGNMENTS


def first_of(window: int) -> int:
    """Return the first assignment, or round, of a window."""
    return 1 + ASSIGNMENTS * (window - 1) if window else 0


@dataclass(frozen=True, slots=True)
class Choice:
    steps: tuple[int, ...]
    """[groups]"""
    why: str
    """For people; "" where nothing has changed."""


def _last(step_us: Iterable[int] = ()) -> deque[int]:
    return deque(step_us, maxlen=KEPT)


class StepControl(HasSnapshot):
    STATE = Fields(
        {
            tuple[int, ...]: "_steps",
            list[Annotated[deque[int], AfterValidator(_last)]]: "_step_us",
            bool: "_is_fixed",
        }
    )

    def __init__(self, *, sizes: Sequence[int], local_steps: int) -> None:
        """``sizes``: [groups], their workers; ``local_steps``: of each until speeds are known."""
        self._sizes = tuple(sizes)
        self._total = local_steps * sum(sizes)
        self._steps = (local_steps,) * len(self._sizes)
        self._step_us: list[deque[int]] = [_last() for _ in self._sizes]
        """By group: what a step has taken, in its last rounds."""
        self._is_fixed = False
        """Whether nothing was observed since the checkpoint: what comes first may be a term that
        had begun when it was made."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """[groups]: workers."""
        return self._sizes

    def kept(self) -> KeptPaces:
        """For a checkpoint, without passes."""
        return KeptPaces(
            sizes=self._sizes,
            total=self._total,
            steps=self._steps,
            step_us=tuple(map(tuple, self._step_us)),
        )

    def go_on(self, kept: KeptPaces) -> None:
        """Restore from a checkpoint, before anything is observed. Until then terms have the steps
        chosen last. With another total of steps they are chosen again; other groups start without
        observations. Raises ValueError for what no such run has."""
        if (
            not len(kept.sizes) == len(kept.steps) == len(kept.step_us)
            or min(*kept.sizes, *kept.steps) < 1
            or any(len(each) > KEPT or min(each, default=1) < 1 for each in kept.step_us)
            or not all(each.is_of(len(kept.sizes)) for each in kept.passes)
        ):
            raise ValueError("of groups that there cannot be, or not whole")
        if kept.sizes != self._sizes:
            return
        for mine, its in zip(self._step_us, kept.step_us, strict=True):
            mine.extend(its)
        if kept.total == self._total:
            self._steps, self._is_fixed = kept.steps, True

    def observe(self, group: int, step_us: int) -> None:
        """In a round of this group a step has taken so many microseconds."""
        self._is_fixed = False
        self._step_us[group].append(max(1, step_us))

    def choose(self) -> Choice:
        """Return the steps of each group from now on: unchanged until all groups have reported, and
        while other numbers would not save :data:`LEAST_GAIN`."""
        if self._is_fixed or not all(self._step_us):
            return Choice(self._steps, "")
        paces = [statistics.median_low(each) for each in self._step_us]
        round_us = self._total / sum(map(truediv, self._sizes, paces))  # if steps were divisible
        slowest = max(paces)
        time_us = max(1, round(round_us / slowest)) * slowest
        steps = tuple(time_us // pace for pace in paces)
        before_us, after_us = self._mean_us(self._steps, paces), self._mean_us(steps, paces)
        if after_us > (1 - LEAST_GAIN) * before_us:
            return Choice(self._steps, "")
        self._steps = steps
        return Choice(
            steps, f"a step takes {after_us / 1e3:.2f} ms in the mean, not {before_us / 1e3:.2f} ms"
        )

    def _mean_us(self, steps: Sequence[int], paces: Sequence[int]) -> float:
        """A round's time by the steps of a worker in it."""
        num_steps: int = sum(map(mul, steps, self._sizes))
        time_us: int = max(map(mul, steps, paces))
        return time_us * sum(self._sizes) / num_steps
