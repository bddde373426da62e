"""Which samples a worker sees in an epoch, and the loader that brings them.

Owns the arithmetic of sharding (:class:`BatchPlan`, :func:`epoch_order`: no torch in there), the
loader that ``job.loader`` hands out (:func:`shard_loader`), and the count of passes over a
dataset (:class:`EpochCounter`). It never talks to another worker: every worker computes the same
plan from (seed, epoch) and takes its part, so that the W workers together see, batch by batch,
what one process with a batch W times as large would see.

    epochs = EpochCounter()
    loader = shard_loader(
        dataset, batch_size=64, shuffle=True, drop_last=False, shard=True,
        epoch=lambda: epochs.start_pass(dataset), seed=0, worker=1, num_workers=4,
        on_batch=lambda num_samples, batch_size: None, loader_options={"num_workers": 2},
    )
    for x, y in loader: ...     # again: the next epoch, in another order
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from psdist.errors import UsageError

OnBatch = Callable[[int, int], None]
"""Called with (samples of this worker in the batch, batch_size) before the batch is handed out."""

REFUSED_OPTIONS = {
    "sampler": "the workers share the samples out among themselves; to choose samples, pass "
    "torch.utils.data.Subset(dataset, indices) as the dataset",
    "batch_sampler": "the workers share the samples out among themselves; to choose samples, pass "
    "torch.utils.data.Subset(dataset, indices) as the dataset",
    "generator": "the order must be the same on all workers and follows from the run's seed and "
    "the epoch; set the seed of the run instead",
    "in_order": "each batch is weighted by its own number of samples, so the order must hold",
}
"""DataLoader options that would undo the sharding, each with the reason."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How an epoch of ``num_samples`` positions is cut into batches for ``num_workers`` workers.

    Joint batch i is positions [i * W * B, (i + 1) * W * B); worker w takes its w-th part. Sizes
    of the parts differ by at most one. A last joint batch with fewer samples than workers would
    leave some worker without a batch, so its samples join the batch before it, whose parts then
    have up to B + 1 samples. All workers have the same number of batches, none of them empty.
    """

    num_samples: int
    batch_size: int
    """Samples per worker."""
    num_workers: int
    drop_last: bool = False
    """Leave out the last joint batch when it is incomplete."""

    def __post_init__(self) -> None:
        _check_batch_size(self.batch_size)
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
                f"one batch of all workers takes {self._joint_size} (batch_size "
                f"{self.batch_size} x {self.num_workers} workers); use a smaller batch_size or "
                f"drop_last=False"
            )

    @property
    def _joint_size(self) -> int:
        return self.batch_size * self.num_workers

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

    def part(self, index: int, worker: int) -> range:
        """The positions of joint batch ``index`` that belong to ``worker``."""
        joint = self.joint_batch(index)
        # floor(n (w + 1) / W) - floor(n w / W) takes two neighbouring values only, and the parts
        # of a full batch are exactly batch_size.
        first = len(joint) * worker // self.num_workers
        last = len(joint) * (worker + 1) // self.num_workers
        return joint[first:last]


def _check_batch_size(batch_size: object) -> None:
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
    return cast(Sequence[int], _random(seed, epoch).permutation(num_samples))


def _random(seed: int, epoch: int, *more: int) -> np.random.Generator:
    """A generator for each key; ``spawn_key`` keeps (1, 0) and (1,) apart, a list would not."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch, *more)))


class EpochCounter:
    """The number of earlier passes over each dataset object.

    A pass counts when its iteration starts, finished or not. Passes with ``shard=False`` have a
    count of their own: an evaluation on the chief alone must not shift the chief's epoch, or the
    workers would no longer agree on the order and samples would be lost.
    """

    def __init__(self) -> None:
        # Datasets may be unhashable (a list), so the key is id(). An id is used again after its
        # object is gone: the entry goes with the object where that can be watched, and keeps the
        # object alive where it cannot.
        self._passes: dict[tuple[int, bool], int] = {}
        self._keepers: dict[int, object] = {}

    def start_pass(self, dataset: object, *, shard: bool = True, epoch: int | None = None) -> int:
        """Count a pass over ``dataset``; returns its epoch: ``epoch``, or the passes before it."""
        key = (id(dataset), shard)
        if id(dataset) not in self._keepers:
            self._keepers[id(dataset)] = self._keeper(dataset)
        num_earlier = self._passes.get(key, 0)
        self._passes[key] = num_earlier + 1
        return num_earlier if epoch is None else epoch

    def _keeper(self, dataset: object) -> object:
        try:
            return weakref.ref(dataset, partial(self._forget, id(dataset)))
        except TypeError:  # lists and other types without weak references
            return dataset

    def _forget(self, dataset_id: int, _dead: object) -> None:
        self._keepers.pop(dataset_id, None)
        self._passes.pop((dataset_id, True), None)
        self._passes.pop((dataset_id, False), None)


class _BatchSampler:
    """The index lists of one worker; each ``iter`` is the epoch that was set before it."""

    def __init__(
        self,
        dataset: Any,
        *,
        plan: Callable[[int], BatchPlan],
        shuffle: bool,
        seed: int,
        worker: int,
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._shuffle = shuffle
        self._seed = seed
        self._worker = worker
        self.epoch = 0

    @property
    def plan(self) -> BatchPlan:
        return self._plan(len(self._dataset))  # asked each time: a dataset may grow

    def sizes(self) -> Iterator[int]:
        plan = self.plan
        return (len(plan.part(index, self._worker)) for index in range(plan.num_batches))

    def __iter__(self) -> Iterator[list[int]]:
        plan = self.plan
        order = epoch_order(
            num_samples=plan.num_samples, shuffle=self._shuffle, seed=self._seed, epoch=self.epoch
        )
        parts = (plan.part(index, self._worker) for index in range(plan.num_batches))
        return ([int(sample) for sample in order[part.start : part.stop]] for part in parts)

    def __len__(self) -> int:
        return self.plan.num_batches


class _CountSamples:
    """A collate_fn that says how many samples it collated. A class, so that it can be sent to
    loader processes."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        return len(samples), self._collate(samples)


class EpochLoader:
    """The batches of one worker; iterating again is the next pass. Made by :func:`shard_loader`."""

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: _BatchSampler | None,
        *,
        batch_size: int,
        next_epoch: Callable[[], int],
        generator: torch.Generator,
        generator_seed: Callable[[int], int],
        on_batch: OnBatch,
    ) -> None:
        self._loader = loader
        self._sampler = sampler
        self._next_epoch = next_epoch
        self._generator = generator
        self._generator_seed = generator_seed
        self._on_batch = on_batch
        self.batch_size = batch_size
        """Samples per worker in a full batch."""

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    def __len__(self) -> int:
        """Batches in a pass, the same on every worker. TypeError for a dataset without len()."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: the pass starts, and is counted, with iter() and not at the first batch.
        epoch = self._next_epoch()
        if type(epoch) is not int or epoch < 0:
            raise UsageError(f"epoch must be a whole number >= 0, got {epoch!r}")
        self._generator.manual_seed(self._generator_seed(epoch))
        if self._sampler is None:
            return self._hand_out(iter(self._loader))
        self._sampler.epoch = epoch
        # The sizes are the plan's and not counted in the collate_fn, which may get anything from
        # a dataset with __getitems__.
        return self._hand_out(zip(self._sampler.sizes(), iter(self._loader), strict=True))

    def _hand_out(self, sized_batches: Iterable[tuple[int, Any]]) -> Iterator[Any]:
        for num_samples, batch in sized_batches:
            self._on_batch(num_samples, self.batch_size)
            yield batch


def shard_loader(
    dataset: Any,
    *,
    batch_size: int,
    shuffle: bool,
    drop_last: bool,
    shard: bool,
    epoch: int | Callable[[], int],
    seed: int,
    worker: int,
    num_workers: int,
    on_batch: OnBatch,
    loader_options: Mapping[str, Any] | None = None,
) -> EpochLoader:
    """A loader of this worker's part of ``dataset`` (all of it with ``shard=False``).

    ``worker`` of ``num_workers`` are the job's; DataLoader's own options (its ``num_workers``:
    loader processes, ``collate_fn``, ``pin_memory``, ...) go into ``loader_options``. ``epoch``
    is asked at the start of each pass when it is callable. Loader processes start by forkserver,
    and their random numbers follow from (seed, epoch, worker); with ``persistent_workers`` they
    live as long as the loader, so make the loader once, before the epochs.

    An IterableDataset needs ``shard=False`` and splits itself.

    Raises UsageError for options that would undo the sharding, for a dataset that is too small
    for the workers, and for loader processes by fork.
    """
    options = dict(loader_options or {})
    for name, reason in REFUSED_OPTIONS.items():
        value = options.pop(name, None)
        is_default = value is None or (name == "in_order" and value)
        if not is_default:
            raise UsageError(f"job.loader does not take {name}: {reason}")
    _start_processes_without_fork(options)
    # DataLoader draws the seeds of its processes from this; without it, from the global generator,
    # and the random numbers of the model would depend on the number of passes.
    generator = options["generator"] = torch.Generator()

    sampler = None
    if isinstance(dataset, IterableDataset):
        _check_iterable(shard=shard, shuffle=shuffle)
        _check_batch_size(batch_size)
        options["collate_fn"] = _CountSamples(options.get("collate_fn") or default_collate)
        options |= {"batch_size": batch_size, "drop_last": drop_last}
    else:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UsageError(
                f"job.loader cannot share out a {type(dataset).__name__}: it needs len(dataset) "
                f"and dataset[i], or must be a torch.utils.data.IterableDataset with shard=False"
            )
        sampler = _BatchSampler(
            dataset,
            plan=lambda num_samples: BatchPlan(
                num_samples=num_samples,
                batch_size=batch_size,
                num_workers=num_workers if shard else 1,
                drop_last=drop_last,
            ),
            shuffle=shuffle,
            seed=seed,
            worker=worker if shard else 0,
        )
        len(sampler)  # a dataset that is too small is refused here, not at the first pass
        options["batch_sampler"] = sampler

    return EpochLoader(
        DataLoader(dataset, **options),
        sampler,
        batch_size=batch_size,
        next_epoch=epoch if callable(epoch) else lambda: epoch,
        generator=generator,
        generator_seed=lambda epoch: int(_random(seed, epoch, worker).integers(2**62)),
        on_batch=on_batch,
    )


def _check_iterable(*, shard: bool, shuffle: bool) -> None:
    if shard:
        raise UsageError(
            "job.loader cannot share out an IterableDataset, which has no indices: let its "
            "__iter__ yield only the part of worker job.worker of job.num_workers, and pass "
            "shard=False"
        )
    if shuffle:
        raise UsageError(
            "job.loader cannot shuffle an IterableDataset, which has no indices: let the dataset "
            "shuffle, and pass shuffle=False"
        )


def _start_processes_without_fork(options: dict[str, Any]) -> None:
    """A process in which MPI has started must not be forked: its network does not survive it."""
    if not options.get("num_workers"):
        return
    context = options.get("multiprocessing_context") or "forkserver"
    method = context if isinstance(context, str) else context.get_start_method()
    if method == "fork":
        raise UsageError(
            "job.loader cannot start loader processes by fork, because MPI has started in this "
            "process: leave multiprocessing_context out (forkserver), or use 'spawn'"
        )
    options["multiprocessing_context"] = context
