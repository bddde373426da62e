"""From what a pass's order of samples follows, and the random numbers of its loader processes.

A pass has another order than the passes before it, whatever its dataset object is. In job.epochs
the order follows from the epoch and from how many passes of its kind the script has begun in that
epoch, which a resumed run does again. Elsewhere it follows from the pass's number, which a new
dataset object begins with the first one that no pass has had.

    orders = PassOrders()
    orders.start_epoch()
    orders.next_in_epoch(Kind.TRAINING, loop=0, epoch=3)       # Order(3, ())
    Order(3, (0, 1, 0)).seed_of(7)                             # of the second pass in the epoch
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np


class Kind(IntEnum):
    """Passes of one kind are numbered apart: those that workers do not begin together, an
    evaluation on the chief for example, must not shift those that they begin together."""

    TRAINING = 0
    """Passes over samples that workers share out, with gradients enabled."""
    EVALUATION = 1
    WHOLE_TRAINING = 2
    """Passes over all samples on every worker."""
    WHOLE_EVALUATION = 3
    SAMPLER_TRAINING = 4
    """Passes of ``job.sampler``."""
    SAMPLER_EVALUATION = 5

    @classmethod
    def of(cls, *, is_shared: bool, is_training: bool) -> Kind:
        return cls(2 * (not is_shared) + (not is_training))


class Order(NamedTuple):
    epoch: int
    salt: tuple[int, ...] = ()
    """Empty in the first pass of an epoch that trains."""

    def seed_of(self, seed: int) -> int:
        """Return the seed that this pass uses instead of the run's ``seed``."""
        if not self.salt:
            return seed
        first, second = np.random.SeedSequence((seed, *self.salt)).generate_state(2, np.uint32)
        return int(first) << 32 | int(second)


class PassOrders:
    def __init__(self) -> None:
        self._in_epoch = Counter[Kind]()
        """Passes that were begun in this epoch of job.epochs."""
        self._outside = Counter[Kind]()
        """Passes that this process has begun outside job.epochs."""
        self.first_unused = Counter[Kind]()
        """First number that no pass outside job.epochs has had, also in earlier attempts."""
        self._resumed = Counter[Kind]()
        """``_in_epoch`` of the checkpoint that the run resumes."""

    def start_epoch(self, *, is_resumed: bool = False) -> None:
        self._in_epoch.clear()
        if not is_resumed:
            self._resumed.clear()

    def next_in_epoch(self, kind: Kind, *, loop: int, epoch: int) -> Order:
        """``loop``: how many loops over job.epochs the script has begun before."""
        number = max(self._in_epoch[kind], self._resumed.pop(kind, 0))
        self._in_epoch[kind] = number + 1
        salt = loop + self._outside[kind], number, int(kind)
        return Order(epoch, salt if any(salt) else ())

    def next_outside(self, kind: Kind, *, number: int) -> Order:
        """``number``: of the pass, among those over the dataset."""
        self._outside[kind] += 1
        self.first_unused[kind] = max(self.first_unused[kind], number + 1)
        return Order(number, (0, 0, int(kind)) if kind else ())

    # -- checkpoints -----------------------------------------------------------------------------

    def collect(self, *, is_between: bool) -> dict[str, list[list[int]]]:
        """Return a tree of plain values. ``is_between``: no epoch is under way."""
        in_epoch = Counter[Kind]() if is_between else self._in_epoch | self._resumed
        return {"first unused": _told(self.first_unused), "in epoch": _told(in_epoch)}

    def restore(self, tree: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Continue from a tree that :meth:`collect` returned in another process."""
        self.first_unused, self._resumed = (
            Counter({Kind(kind): count for kind, count in tree.get(key, ())})
            for key in ("first unused", "in epoch")
        )


def _told(counts: Counter[Kind]) -> list[list[int]]:
    return [[int(kind), count] for kind, count in sorted(counts.items())]
