"""The losses that a worker's script has reported and the coordinator has not received.

losses = Losses(skips_nonfinite=False, may_be_negative=False)
losses.add(0.5)
losses.take()                       # (1, 0.5): how many since the last time, and their sum
"""

from __future__ import annotations

from psdist.controller.loss_steps import MOST_LOSS
from psdist.errors import UsageError


class Losses:
    def __init__(
        self, *, skips_nonfinite: bool, may_be_negative: bool, counts_nonfinite: bool = False
    ) -> None:
        """``skips_nonfinite``: a loss of NaN or infinity is left out, as its step is;
        ``counts_nonfinite``: it is the largest that there may be."""
        self._skips_nonfinite = skips_nonfinite
        self._counts_nonfinite = counts_nonfinite
        self._may_be_negative = may_be_negative
        self._count, self._total = 0, 0.0

    def add(self, loss: float) -> None:
        """Raises :class:`UsageError` for what is no loss."""
        if self._counts_nonfinite and not abs(loss) <= MOST_LOSS and not loss < 0:
            loss = MOST_LOSS
        if abs(loss) <= MOST_LOSS and (loss >= 0 or self._may_be_negative):
            self._count += 1
            self._total += loss
        elif loss < 0 and not self._may_be_negative:
            raise UsageError(
                f"job.report: a loss of {loss!r}; expected 0 or more, since losses are compared by "
                "their ratio (local.steps_by = loss, training.rollback): report another one, or "
                "leave those settings out"
            )
        elif not self._skips_nonfinite:
            raise UsageError(
                f"job.report: a loss of {loss!r}, by which nothing can be decided: the training "
                "has gone wrong; look at the step before (training.on_nonfinite = skip leaves such "
                "steps and losses out)"
            )

    def take(self) -> tuple[int, float]:
        """How many since this was called last, and their sum."""
        count, total = self._count, self._total
        self._count, self._total = 0, 0.0
        return count, total
