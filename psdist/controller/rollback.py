"""When the loss has blown up: how often scripts must say so, and since when.

    guard = RiseGuard(factor=2.0)
    guard.report(round_number=5, count=20, total=31.5)      # None, or a Rise

Losses are looked at in *looks* of :data:`LOOK` rounds at least, each of which has the mean of all
that was reported in it. A look is *high* whose loss is above ``factor`` times the least one of
any above 0, of which there is no multiple; the loss has blown up when :data:`HIGH` looks running
are. It was still good in the last look that had come a quarter of the way there at most: a
checkpoint of that time or earlier is good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from psdist.controller.snapshots import Fields, HasSnapshot

CLOSED: Final = {"extra": "forbid"}
"""As pydantic reads it, of what is kept in files: no other fields."""
LOOK: Final = 4
"""Rounds of a look, at least: of local steps by the loss, which are told so often, exactly."""
HIGH: Final = 3
"""Looks running that must be high."""
GOOD: Final = 0.25
"""Of the way from the least loss to what is high: up to there a loss is good."""


class Rise(NamedTuple):
    loss: float
    """Of the last look,"""
    best: float
    """and the least one of any."""
    good: int
    """A checkpoint of so many rounds or fewer is of before."""


@dataclass(frozen=True, kw_only=True)
class KeptRise:
    """What a checkpoint has of it."""

    __pydantic_config__ = CLOSED
    best: float | None
    good: int


class RiseGuard(HasSnapshot):
    STATE = Fields(
        {
            int: "_count _first _good _num_high",
            float: "_total",
            float | None: "_best",
        }
    )

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._count, self._total = 0, 0.0
        self._first = 0
        """The round with which the look begins."""
        self._best: float | None = None
        self._good = 0
        self._num_high = 0
        """Looks running."""

    def report(self, round_number: int, count: int, total: float) -> Rise | None:
        """A script has reported so many losses, each 0 or more, with this sum, before it came to
        this round."""
        self._count += count
        self._total += total
        if round_number < self._first + LOOK:
            return None
        loss = self._total / self._count
        self._count, self._total, self._first = 0, 0.0, round_number
        if self._best is None:  # whether that was good the next ones say
            self._best = loss or None
            return None
        best = self._best = min(self._best, loss or self._best)
        if loss > self._factor * best:
            self._num_high += 1
            return Rise(loss, best, self._good) if self._num_high == HIGH else None
        self._num_high = 0
        if loss <= (1 + GOOD * (self._factor - 1)) * best:
            self._good = max(self._good, round_number - 1)
        return None

    def kept(self) -> KeptRise:
        """For a checkpoint; looks that are under way or high are not kept."""
        return KeptRise(best=self._best, good=self._good)

    def go_on(self, kept: KeptRise | None, first_round: int) -> None:
        """From a checkpoint of ``first_round`` rounds. Raises ValueError for what none has. None
        where nobody had looked until then: the checkpoint is taken as good, for nothing else is
        known of it, and losses are compared with those to come."""
        if kept is None:
            kept = KeptRise(best=None, good=first_round)
        if not 0 <= (kept.best or 0.0) < float("inf") or kept.good < 0:
            raise ValueError("of a loss that there is not")
        self._best, self._first = kept.best or None, first_round
        self._good = min(kept.good, first_round)
