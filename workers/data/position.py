"""Where a worker is in its training data: for displays, never for what is computed.

position = Position(epochs=5)
position.start_pass(epoch=0, num_batches=469)
position.use_batch()
position.epoch, position.batch       # 1, 1
"""

from __future__ import annotations

from collections.abc import Sized
from typing import cast


class Position:
    """One loader's. Counts that are not known are 0."""

    def __init__(self, *, epochs: int | None = None) -> None:
        self.epochs = epochs or 0
        """How many passes the script will make, if it says so."""
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


def length_of(loader: object) -> int:
    """Batches of a pass, or samples of a dataset; 0 where it does not know its length."""
    try:
        return len(cast(Sized, loader))
    except TypeError:
        return 0
