"""Whether the loss that scripts report stands still under the level of now.

    guard = LossGuard(patience=3)
    guard.report(20, 31.5)              # so many losses, with this sum
    guard.stands_still()                # at the end of a window

A window's loss is the mean of all reports since the window before it; one without reports says
nothing. It is lower than before if it is below the least one until then by a part of
:data:`LEAST_FALL`; the loss stands still when ``patience`` windows running under one level are not
(the rule, and the number, of torch.optim.lr_scheduler.ReduceLROnPlateau).
"""

from __future__ import annotations

import math
from typing import Final

from psdist.controller.kept import KeptGuard
from psdist.controller.snapshots import Fields, HasSnapshot

LEAST_FALL: Final = 1e-4
"""Part of the least loss: a fall by less does not count."""


class LossGuard(HasSnapshot):
    STATE = Fields({int: "_count _num_vain", float: "_total", float | None: "_least"})

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._count, self._total = 0, 0.0
        self._least: float | None = None
        self._num_vain = 0
        """Windows running without a lower loss."""

    def report(self, count: int, total: float) -> None:
        self._count += count
        self._total += total

    def stands_still(self) -> bool:
        """Asked once at the end of each window."""
        if not self._count:
            return False
        loss = self._total / self._count
        self._count, self._total = 0, 0.0
        if self._least is None or loss < self._least - LEAST_FALL * abs(self._least):
            self._least, self._num_vain = loss, 0
            return False
        self._num_vain += 1
        return self._num_vain >= self._patience

    def begin(self) -> None:
        """Start at another level: reports under the level before do not count for it."""
        self._count, self._total, self._num_vain = 0, 0.0, 0

    def kept(self) -> KeptGuard:
        """For a checkpoint."""
        return KeptGuard(
            count=self._count, total=self._total, least=self._least, num_vain=self._num_vain
        )

    def go_on(self, kept: KeptGuard) -> None:
        """From a checkpoint. Raises ValueError for what none has."""
        losses = kept.total, kept.least or 0.0
        if min(kept.count, kept.num_vain) < 0 or not all(map(math.isfinite, losses)):
            raise ValueError("reported losses that are none")
        self._count, self._total = kept.count, kept.total
        self._least, self._num_vain = kept.least, kept.num_vain

    @property
    def words(self) -> str:
        """Describe a loss that does not fall."""
        return f"the loss not below {self._least:.4g} for {self._num_vain} windows"
