"""The loader that brings a worker its part of every epoch, in batches whose size is known.

Owns what ``job.loader`` hands out (:func:`shard_loader`). It never talks to another worker: which
samples are whose is the plan's (``sharding``), a sampler's that all workers draw alike
(``samplers``), or for a dataset without indices that of ``stream``.

    epochs = EpochCounter()
    loader = shard_loader(
        dataset, batch_size=64, shuffle=True, drop_last=False, shard=True,
        epoch=lambda: epochs.start_pass(dataset), seed=0, worker=1, num_workers=4,
        on_batch=lambda num_samples, batch_size: None, loader_options={"num_workers": 2},
    )
    for x, y in loader: ...     # again: the next epoch, in another order
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from psdist.errors import UsageError
from psdist.workers.data.sharding import BatchPlan, check_batch_size, epoch_order, random_of
from psdist.workers.data.stream import split_stream

OnBatch = Callable[[int, float], None]
"""Called with (samples of this worker in the batch, samples of a full one) before the batch is
handed out."""

REFUSED_OPTIONS = {
    "sampler": "the workers share the samples out among themselves; give a DataLoader that has the "
    "sampler to job.prepare, or pass torch.utils.data.Subset(dataset, indices) as the dataset",
    "batch_sampler": "the workers share the samples out among themselves; give a DataLoader that "
    "has it to job.prepare",
    "generator": "the order must be the same on all workers and follows from the run's seed and "
    "the epoch; set the seed of the run instead",
    "in_order": "each batch is weighted by its own number of samples, so the order must hold",
}
"""DataLoader options that would undo the sharding, each with the reason."""


class Batches(Protocol):
    """The index lists of one worker, pass by pass; a batch sampler of torch's."""

    def start_pass(self, epoch: int) -> None:
        """What follows is of this epoch."""
        ...

    def sizes(self) -> Iterator[tuple[int, float]]:
        """Of each batch: samples, and samples of a full one."""
        ...

    def __iter__(self) -> Iterator[list[Any]]: ...

    def __len__(self) -> int: ...


class PlannedBatches:
    """By the plan: every sample once, in the order of the dataset or of (seed, epoch)."""

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
        self._epoch = 0

    @property
    def plan(self) -> BatchPlan:
        return self._plan(len(self._dataset))  # asked each time: a dataset may grow

    def start_pass(self, epoch: int) -> None:
        self._epoch = epoch

    def sizes(self) -> Iterator[tuple[int, float]]:
        plan = self.plan
        parts = (plan.part(index, self._worker) for index in range(plan.num_batches))
        return ((len(part), plan.batch_size) for part in parts)

    def __iter__(self) -> Iterator[list[int]]:
        plan = self.plan
        order = epoch_order(
            num_samples=plan.num_samples, shuffle=self._shuffle, seed=self._seed, epoch=self._epoch
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


class _CountOne:
    """For a dataset that makes its own batches: each counts as one sample."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, batch: Any) -> tuple[int, Any]:
        return 1, self._convert(batch)


class EpochLoader:
    """The batches of one worker; iterating again is the next pass. Made by :func:`shard_loader`."""

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: Batches | None,
        *,
        batch_size: int | None,
        next_epoch: Callable[[], int],
        generator: torch.Generator,
        generator_seed: Callable[[int], int],
        on_batch: OnBatch,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """``batches``: None for a dataset without indices; ``on_end`` is called at the end of a
        pass, where workers may not have equally many batches."""
        self._loader = loader
        self._batches = batches
        self._on_end = on_end
        self._next_epoch = next_epoch
        self._generator = generator
        self._generator_seed = generator_seed
        self._on_batch = on_batch
        self.batch_size = batch_size
        """Samples per worker in a full batch; None where the script's own dataset or batch sampler
        makes the batches."""

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    def __len__(self) -> int:
        """Batches in a pass, the same on every worker. TypeError where nobody knows."""
        if self._batches is None and self._on_end is not None:
            raise TypeError("the batches of a dataset without indices cannot be counted beforehand")
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: the pass starts, and is counted, with iter() and not at the first batch.
        epoch = self._next_epoch()
        if type(epoch) is not int or epoch < 0:
            raise UsageError(f"epoch must be a whole number >= 0, got {epoch!r}")
        self._generator.manual_seed(self._generator_seed(epoch))
        if self._batches is None:
            counted = iter(self._loader)
            return self._hand_out(((size, self.batch_size or 1), batch) for size, batch in counted)
        self._batches.start_pass(epoch)
        # The sizes are those of the index lists and not counted in the collate_fn, which may get
        # anything from a dataset with __getitems__.
        return self._hand_out(zip(self._batches.sizes(), iter(self._loader), strict=True))

    def _hand_out(self, sized_batches: Iterable[tuple[tuple[int, float], Any]]) -> Iterator[Any]:
        for (num_samples, nominal), batch in sized_batches:
            self._on_batch(num_samples, nominal)
            yield batch
        if self._on_end is not None:
            self._on_end()


def shard_loader(
    dataset: Any,
    *,
    batch_size: int,
    shuffle: bool,
    drop_last: bool,
    shard: bool = True,
    epoch: int | Callable[[], int],
    seed: int,
    worker: int,
    num_workers: int,
    on_batch: OnBatch,
    on_end: Callable[[], None] = lambda: None,
    loader_options: Mapping[str, Any] | None = None,
) -> EpochLoader:
    """A loader of this worker's part of ``dataset`` (all of it with ``shard=False``).

    ``worker`` of ``num_workers`` are the job's; DataLoader's own options (its ``num_workers``:
    loader processes, ``collate_fn``, ``pin_memory``, ...) go into ``loader_options``. ``epoch``
    is asked at the start of each pass when it is callable. Loader processes start by forkserver,
    and their random numbers follow from (seed, epoch, worker); with ``persistent_workers`` they
    live as long as the loader, so make the loader once, before the epochs.

    An IterableDataset is split by worker and loader process (``stream``), so that workers may have
    different numbers of batches: ``on_end`` is called when this one's are used up.

    Raises UsageError for options that would undo the sharding, for a dataset that is too small
    for the workers, and for loader processes by fork.
    """
    options = dict(loader_options or {})
    for name, reason in REFUSED_OPTIONS.items():
        value = options.pop(name, None)
        is_default = value is None or (name == "in_order" and value)
        if not is_default:
            raise UsageError(f"job.loader does not take {name}: {reason}")
    check_batch_size(batch_size)
    batches = None
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise UsageError(
                "job.loader cannot shuffle an IterableDataset, which has no indices: let the "
                "dataset shuffle, and pass shuffle=False"
            )
        options["drop_last"] = drop_last
    else:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UsageError(
                f"job.loader cannot share out a {type(dataset).__name__}: it needs len(dataset) "
                f"and dataset[i], or must be a torch.utils.data.IterableDataset"
            )
        batches = PlannedBatches(
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
        len(batches)  # a dataset that is too small is refused here, not at the first pass
    return make_loader(
        dataset,
        batches,
        batch_size=batch_size,
        options=options,
        seed=seed,
        worker=worker,
        num_workers=num_workers,
        shard=shard,
        next_epoch=epoch if callable(epoch) else lambda: epoch,
        on_batch=on_batch,
        on_end=on_end,
    )


def make_loader(
    dataset: Any,
    batches: Batches | None,
    *,
    batch_size: int | None,
    options: dict[str, Any],
    seed: int,
    worker: int,
    num_workers: int,
    shard: bool = True,
    next_epoch: Callable[[], int],
    on_batch: OnBatch,
    on_end: Callable[[], None],
) -> EpochLoader:
    """``batches``: None for a dataset without indices, of which this worker takes its part.
    ``batch_size``: None where dataset or batch sampler make the batches. ``options``: of torch's
    DataLoader, without sampler, generator and batch size."""
    _start_processes_without_fork(options)
    # DataLoader draws the seeds of its processes from this; without it, from the global generator,
    # and the random numbers of the model would depend on the number of passes.
    generator = options["generator"] = torch.Generator()
    is_uneven = batches is None and shard and num_workers > 1
    if batches is not None:
        options["batch_sampler"] = batches
    else:
        options["batch_size"] = batch_size
        count = _CountOne if batch_size is None else _CountSamples
        default = default_convert if batch_size is None else default_collate
        options["collate_fn"] = count(options.get("collate_fn") or default)
        if is_uneven:
            dataset = split_stream(dataset, worker, num_workers)
    return EpochLoader(
        DataLoader(dataset, **options),
        batches,
        batch_size=batch_size,
        next_epoch=next_epoch,
        generator=generator,
        generator_seed=lambda epoch: int(random_of(seed, epoch, worker).integers(2**62)),
        on_batch=on_batch,
        on_end=on_end if is_uneven else None,
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
