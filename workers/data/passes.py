"""Whether a worker's iterations were all made of psdist loaders of one and the same length; pure.

Workers whose loaders have equally many batches come to every collective after the same iteration:
one that does not has missed a call. Whoever brings batches of its own may come when it likes.

    passes = EqualPasses()
    passes.on_batch(12)           # of a loader with 12 batches in a pass
    passes.end_iteration()
    passes.num_batches, passes.until         # 12, 1
"""

from __future__ import annotations


class EqualPasses:
    """``num_batches`` is that of the loaders of all iterations before ``until``; as long as it is
    still so, ``until`` is the number of finished iterations."""

    def __init__(self, first: int = 0) -> None:
        """``first``: iterations before this run, of a checkpoint; they are taken to be alike."""
        self.num_batches = 0
        self.until = self._first = first
        self._is_over = False
        self._in_iteration: set[int] = set()

    def on_batch(self, num_batches: int) -> None:
        """A batch for training, of a loader with ``num_batches`` in a pass."""
        self._in_iteration.add(num_batches)

    def miss(self, rounds: int) -> None:
        """The group misses so many rounds, and leaves out their batches."""
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
