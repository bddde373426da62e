"""The position of a worker in its training data. Pure.

position = Position(epochs=5)              # for displays; no computation depends on it
position.start_pass(epoch=0, num_batches=469)
position.use_batch()
position.epoch, position.batch             # 1, 1

passes = EqualPasses()                     # do all iterations use loaders of the same length?
passes.on_batch(12)                        # of a loader with 12 batches in a pass
passes.end_iteration()
passes.num_batches, passes.until           # 12, 1
"""

from __future__ import annotations

from collections.abc import Sized
from typing import cast


class Position:
    """The position of one loader. Unknown counts are 0."""

    def __init__(self, *, epochs: int | None = None) -> None:
        self.epochs = epochs or 0
        """Passes that the script will make; 0 if unknown."""
        self.epoch = 0
        """The pass, counted from 1."""
        self.batch = 0
        """Batches of this pass that were used."""
        self.batches = 0
        """Batches that this pass has."""

    def start_pass(self, *, epoch: int, num_batches: int) -> None:
        """``epoch``: counted from 0, as loaders do."""
        self.epoch = epoch + 1
        self.batch = 0
        self.batches = num_batches

    def use_batch(self) -> None:
        self.batch += 1


class EqualPasses:
    """All iterations before ``until`` used loaders of psdist with ``num_batches`` batches.

    While this holds, ``until`` is the number of finished iterations. Workers whose loaders have
    equally many batches enter every collective after the same iteration: a worker that does not has
    missed a call. A worker that uses batches of its own may enter at any time."""

    def __init__(self, first: int = 0) -> None:
        """``first``: iterations of a checkpoint before this run; they count as equal."""
        self.num_batches = 0
        self.until = self._first = first
        self._is_over = False
        self._in_iteration: set[int] = set()

    def on_batch(self, num_batches: int) -> None:
        """A batch for training, of a loader with ``num_batches`` in a pass."""
        self._in_iteration.add(num_batches)

    def miss(self, rounds: int) -> None:
        """The group misses ``rounds`` rounds, and leaves out their batches."""
        if not self._is_over and self.until > self._first:
            self.until += rounds

    def end_iteration(self) -> None:
        used, self._in_iteration = self._in_iteration, set()
        if self._is_over:
            return
        wanted = {self.num_batches} if self.until > self._first else used
        if len(used) != 1 or used != wanted:
            self._is_over = True
            return
        (self.num_batches,) = used
        self.until += 1


def length_of(loader: object) -> int:
    """Return the batches of a pass, or the samples of a dataset; 0 if it has no length."""
    try:
        return len(cast(Sized, loader))
    except TypeError:
        return 0
