"""The samples of each worker in an epoch: arithmetic, without torch and messages.

Every worker computes the same plan from (seed, epoch) and takes its part, so that the W workers
together see, batch by batch, the samples of one process with a batch W times as large.

    plan = BatchPlan(num_samples=1000, batch_size=64, num_workers=4)
    order = epoch_order(num_samples=1000, shuffle=True, seed=0, epoch=3)
    part = plan.part(0, worker=1)
    order[part.start : part.stop]             # the samples of worker 1's first batch
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from psdist.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How an epoch of ``num_samples`` positions is cut into batches for ``num_workers`` workers.

    Joint batch i is positions [i * W * B, (i + 1) * W * B); worker w takes its w-th part. Sizes
    of the parts differ by at most one. A last joint batch with fewer samples than workers would
    leave some worker without a batch, so its samples join the batch before it, whose parts then
    have up to B + 1 samples. All workers have the same number of batches. No batch is empty.

    With ``global_batch`` a joint batch has that many samples for any W and B.
    """

    num_samples: int
    batch_size: int
    """Samples per worker."""
    num_workers: int
    drop_last: bool = False
    """Leave out the last joint batch when it is incomplete."""
    global_batch: int | None = None
    """Samples of a joint batch, instead of W x B."""

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
        if self.global_batch is not None and self.global_batch < self.num_workers:
            raise UsageError(
                f"training.global_batch = {self.global_batch}: expected at least "
                f"{self.num_workers}, one sample for each worker; start fewer workers, or set a "
                "larger one"
            )
        if self.num_samples == 0:
            raise UsageError("the dataset is empty: job.loader needs at least one sample")
        if self.num_samples < self.num_workers:
            raise UsageError(
                f"the dataset has {self.num_samples} samples and the job {self.num_workers} "
                f"workers: each needs at least one; start fewer workers, or pass shard=False to "
                f"give every worker all samples"
            )
        if self.num_batches == 0:
            raise UsageError(
                f"drop_last=True leaves no batch: the dataset has {self.num_samples} samples and "
                f"one batch of all workers takes {self._joint_size} ({self._joint_words}); use a "
                f"smaller one or drop_last=False"
            )

    @property
    def _joint_size(self) -> int:
        return self.global_batch or self.batch_size * self.num_workers

    @property
    def _joint_words(self) -> str:
        if self.global_batch:
            return "global_batch"
        return f"batch_size {self.batch_size} x {self.num_workers} workers"

    @property
    def nominal(self) -> float:
        """Samples per worker in a full batch; with ``global_batch`` perhaps no whole number."""
        return self._joint_size / self.num_workers

    @property
    def num_batches(self) -> int:
        """Batches of the epoch: the same for every worker."""
        full, rest = divmod(self.num_samples, self._joint_size)
        return full if self.drop_last or rest < self.num_workers else full + 1

    def joint_batch(self, index: int) -> range:
        """Positions in the epoch's order that all workers together take as their batch ``index``.

        Raises IndexError beyond the last batch.
        """
        if not 0 <= index < self.num_batches:
            raise IndexError(f"batch {index} of {self.num_batches}")
        start = index * self._joint_size
        takes_the_rest = index == self.num_batches - 1 and not self.drop_last
        return range(start, self.num_samples if takes_the_rest else start + self._joint_size)

    def num_taken(self, num_batches: int) -> int:
        """Positions in the first ``num_batches``."""
        return self.joint_batch(num_batches - 1).stop if num_batches else 0

    def part(self, index: int, worker: int) -> range:
        """The positions of joint batch ``index`` that belong to ``worker``."""
        joint = self.joint_batch(index)
        # floor(n (w + 1) / W) - floor(n w / W) takes two neighbouring values only, and the parts
        # of a full batch are exactly batch_size.
        first = len(joint) * worker // self.num_workers
        last = len(joint) * (worker + 1) // self.num_workers
        return joint[first:last]


def require_joint_batches(
    num_samples: int, *, global_batch: int | None, num_workers: int, drop_last: bool
) -> None:
    """With ``global_batch`` every joint batch of an epoch must be the same for any number of
    workers, so none may join the one before it. Raises UsageError."""
    if global_batch is None or drop_last:
        return
    rest = num_samples % global_batch
    if 0 < rest < num_workers:
        raise UsageError(
            f"training.global_batch = {global_batch}: the dataset's {num_samples} samples leave "
            f"{rest} for the last joint batch and there are {num_workers} workers; set "
            "drop_last=True or another training.global_batch, or start fewer workers"
        )


def check_batch_size(batch_size: object) -> None:
    if type(batch_size) is not int or batch_size < 1:
        raise UsageError(
            f"batch_size must be a whole number >= 1 (samples per worker), got {batch_size!r}"
        )


def epoch_order(*, num_samples: int, shuffle: bool, seed: int, epoch: int) -> Sequence[int]:
    """The samples in the order of this epoch: a permutation by (seed, epoch), or 0, 1, 2, ...

    The same on every worker. Takes 8 bytes per sample when shuffled, nothing otherwise.
    """
    if not shuffle:
        return range(num_samples)
    # To a type checker an array is no Sequence; it has what samplers use, a length and items.
    return cast(Sequence[int], random_of(seed, epoch).permutation(num_samples))


def random_of(seed: int, epoch: int, *more: int) -> np.random.Generator:
    """A generator for each key; ``spawn_key`` keeps (1, 0) and (1,) apart, a list would not."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch, *more)))


class EpochCounter:
    """The number of the next pass over each dataset object.

    A pass counts when its iteration starts, finished or not. Passes with ``shard=False`` have a
    count of their own: an evaluation on the chief alone must not shift the chief's epoch, or the
    workers would no longer agree on the order and samples would be lost.

    In another process a dataset is identified by its number: the order in which the script has
    passed datasets to psdist.
    """

    def __init__(self) -> None:
        # Datasets may be unhashable (a list), so the key is id(). Python reuses an id after the
        # object is gone. So the entry goes with the object, or keeps an object alive that has no
        # weak references.
        self._passes: dict[tuple[int, bool], int] = {}
        self._keepers: dict[tuple[int, bool], object] = {}
        self._restored: Mapping[tuple[int, bool], int] = {}
        self._num_registered = Counter[bool]()

    def register(self, dataset: object, *, shard: bool = True) -> None:
        """Number the dataset, once."""
        key = (id(dataset), shard)
        if key not in self._keepers:
            self._keepers[key] = self._keeper(dataset, key)
            place = self._num_registered[shard]
            self._num_registered[shard] += 1
            self._passes[key] = self._restored.get((place, shard), 0)

    def index_of(self, dataset: object, *, shard: bool = True) -> int:
        """Return the number of the dataset."""
        self.register(dataset, shard=shard)
        alike = [each for each in self._keepers if each[1] == shard]
        return alike.index((id(dataset), shard))

    def counts(self) -> Counter[tuple[int, bool]]:
        """Return the passes by (number, ``shard``)."""
        found: Counter[tuple[int, bool]] = Counter()
        places = Counter[bool]()
        for key in self._keepers:
            found[(places[key[1]], key[1])] = self._passes[key]
            places[key[1]] += 1
        return found

    def restore(self, counts: Mapping[tuple[int, bool], int]) -> None:
        """Restore the result of :meth:`counts` in another process, for known and later datasets."""
        self._restored = dict(counts)
        places = Counter[bool]()
        for key in self._keepers:
            self._passes[key] = self._restored.get((places[key[1]], key[1]), 0)
            places[key[1]] += 1

    def start_pass(self, dataset: object, *, shard: bool = True, first: int = 0) -> int:
        """Count a pass over ``dataset``; returns its number: ``first`` and the passes before it.

        A dataset that was passed over already keeps the ``first`` of that pass.
        """
        self.register(dataset, shard=shard)
        key = (id(dataset), shard)
        number = self._passes[key] or first
        self._passes[key] = number + 1
        return number

    def _keeper(self, dataset: object, key: tuple[int, bool]) -> object:
        try:
            return weakref.ref(dataset, partial(self._forget, key))
        except TypeError:  # lists and other types without weak references
            return dataset

    def _forget(self, key: tuple[int, bool], _dead: object) -> None:
        self._keepers.pop(key, None)
        self._passes.pop(key, None)
