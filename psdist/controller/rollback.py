"""When the loss has blown up: how often scripts must say so, and since when.

    guard = RiseGuard(factor=2.0)
    guard.report(round_number=5, count=20, total=31.5)      # None, or a Rise

Losses are compared in *looks* of at least :data:`LOOK` rounds; the loss of a look is the mean of
all reports in it. A look is *high* if its loss is above ``factor`` times the least loss above 0 of
any look. The loss has blown up after :data:`HIGH` high looks in a row. It was still good in the
last look that had come at most a quarter of the way there: a checkpoint of that time or earlier is
good.
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
"""Part of the way from the least loss to a high one: up to there a loss is good."""


class Rise(NamedTuple):
    loss: float
    """Loss of the last look."""
    best: float
    """Least loss of any look."""
    good: int
    """Rounds before the rise: a checkpoint of at most that number is good."""


@dataclass(frozen=True, kw_only=True)
class KeptRise:
    """State of the guard in a checkpoint."""

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
        """Restore from a checkpoint of ``first_round`` rounds. Raises ValueError for what none has.
        None if no guard was active until then: the checkpoint counts as good, since nothing else is
        known of it, and losses are compared with later ones."""
        if kept is None:
            kept = KeptRise(best=None, good=first_round)
        if not 0 <= (kept.best or 0.0) < float("inf") or kept.good < 0:
            raise ValueError("of a loss that there is not")
        self._best, self._first = kept.best or None, first_round
        self._good = min(kept.good, first_round)
