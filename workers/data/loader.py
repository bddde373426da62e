"""The loader that brings a worker its part of every epoch, in batches whose size is known.

Owns what ``job.loader`` hands out (:func:`shard_loader`). It never talks to another worker: which
samples are whose is the plan's (``sharding``), a sampler's that all workers draw alike
(``samplers``), or for a dataset without indices that of ``stream``.

    epochs = EpochCounter()
    loader = shard_loader(
        dataset, batch_size=64, shuffle=True, drop_last=False, shard=True,
        epoch=lambda: epochs.start_pass(dataset), seed=0, worker=1, num_workers=4,
        on_batch=lambda num_samples, batch_size, batch: None, loader_options={"num_workers": 2},
    )
    for x, y in loader: ...     # again: the next epoch, in another order

Longer than other modules: a pass from its order of samples to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from psdist.errors import UsageError
from psdist.workers.data.hands import HandBatches, refuse_dealing
from psdist.workers.data.position import length_of
from psdist.workers.data.processes import SeededDataset, SeededIndices, ends_with_its_rank, told_of
from psdist.workers.data.seen import Pass
from psdist.workers.data.sharding import (
    BatchPlan,
    check_batch_size,
    epoch_order,
    random_of,
    require_joint_batches,
)
from psdist.workers.data.stream import split_stream


class Watch(Protocol):
    """The observer of a loader's passes."""

    def before_batch(self, a_pass: Pass) -> None:
        """The script asks for the next batch, and has finished its work on the last one."""
        ...

    def leaves_out(self, a_pass: Pass) -> bool:
        """True if the next batch belongs to a round that the group has missed."""
        ...

    def leave_out(self, a_pass: Pass) -> None:
        """That batch was skipped."""
        ...

    def hand_out(self, a_pass: Pass) -> None:
        """The script receives a batch."""
        ...

    def use_up(self, a_pass: Pass) -> None:
        """The script has asked for the next batch, and there is none."""
        ...

    def end(self, a_pass: Pass) -> None:
        """The pass has ended: no batch is left, or the script has left it."""
        ...


class Unwatched:
    def before_batch(self, a_pass: Pass) -> None: ...

    def leaves_out(self, a_pass: Pass) -> bool:  # noqa: ARG002 - no round is missed
        return False

    def leave_out(self, a_pass: Pass) -> None: ...

    def hand_out(self, a_pass: Pass) -> None: ...

    def use_up(self, a_pass: Pass) -> None: ...

    def end(self, a_pass: Pass) -> None: ...


Deal = Callable[..., HandBatches]
"""Of (dataset, batch_size=, drop_last=, shuffle=, seed=, worker=)."""

OnBatch = Callable[[int, float, Any], None]
"""Called with (samples of this worker in the batch, samples of a full one, the batch) before the
batch is handed out."""

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

    def start_pass(self, a_pass: Pass) -> None:
        """Begin this pass at position ``start`` of its epoch's order, after its first ``seen``
        batches."""
        ...

    def has_any(self) -> bool:
        """True if every worker gets a batch of what remains after ``start``."""
        ...

    def consumed(self, a_pass: Pass) -> int | None:
        """Return the positions of the epoch's order that all workers have used after the batches
        of this pass that were handed out. This may be the ``start`` of another pass. None if it is
        unknown."""
        ...

    def size_of(self, a_pass: Pass, worker: int) -> int:
        """Return the samples of ``worker`` in the next batch of this pass; 0 if unknown."""
        ...

    def sizes(self) -> Iterator[tuple[int, float]]:
        """Return the samples of each remaining batch, and the samples of a full one."""
        ...

    def __iter__(self) -> Iterator[list[Any]]: ...

    def __len__(self) -> int:
        """Return the batches of a pass. Raises TypeError if they are unknown."""
        ...


class PlannedBatches:
    """By the plan: every sample once, in the order of the dataset or of (seed, epoch)."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        global_batch: int | None,
        drop_last: bool,
        shuffle: bool,
        seed: int,
        worker: int,
        num_workers: int,
    ) -> None:
        self._dataset = dataset
        self._global_batch = global_batch
        self._drop_last = drop_last
        self._shuffle = shuffle
        self._seed = seed
        self._worker = worker
        self._num_workers = num_workers
        self._plan_of = partial(
            BatchPlan,
            batch_size=batch_size,
            num_workers=num_workers,
            drop_last=drop_last,
            global_batch=global_batch,
        )
        self._pass = Pass(epoch=0, is_over=True)
        """The last pass that began."""
        self._plan: BatchPlan | None = None
        """Its batches after ``start``; None if too few samples remain for the workers."""

    def start_pass(self, a_pass: Pass) -> None:
        if not a_pass.start:  # any number of samples may remain of a pass of other workers
            self.require_joint_batches()
        self._pass = a_pass
        try:
            self._plan = self._plan_from(a_pass.start)
        except UsageError:
            if not a_pass.start:
                raise
            self._plan = None

    def _plan_from(self, start: int) -> BatchPlan:
        """Raises UsageError if too few samples remain."""
        return self._plan_of(num_samples=len(self._dataset) - start)  # a dataset may grow

    def require_joint_batches(self) -> None:
        """Raises UsageError for a dataset that has no such joint batches."""
        self._plan_from(0)
        require_joint_batches(
            len(self._dataset),
            global_batch=self._global_batch,
            num_workers=self._num_workers,
            drop_last=self._drop_last,
        )

    def has_any(self) -> bool:
        return self._plan is not None

    def consumed(self, a_pass: Pass) -> int:
        return a_pass.start + self._plan_from(a_pass.start).num_taken(a_pass.seen)

    def size_of(self, a_pass: Pass, worker: int) -> int:
        return len(self._plan_from(a_pass.start).part(a_pass.seen, worker))

    def sizes(self) -> Iterator[tuple[int, float]]:
        nominal = self._plan.nominal if self._plan is not None else 0.0
        return ((len(part), nominal) for part in self._parts())

    def _parts(self) -> Iterator[range]:
        """This worker's positions in the epoch's order, batch by batch."""
        plan, start = self._plan, self._pass.start
        if plan is None:
            return iter(())
        parts = (plan.part(each, self._worker) for each in range(self._pass.seen, plan.num_batches))
        return (range(start + part.start, start + part.stop) for part in parts)

    def __iter__(self) -> Iterator[list[int]]:
        a_pass = self._pass
        seed = a_pass.seed_of(self._seed)
        order = epoch_order(
            num_samples=len(self._dataset), shuffle=self._shuffle, seed=seed, epoch=a_pass.epoch
        )
        keys = (seed, a_pass.epoch, self._worker)
        return (
            SeededIndices(map(int, order[part.start : part.stop]), (*keys, part.start))
            for part in self._parts()
        )

    def __len__(self) -> int:
        if self._pass.is_over:
            return self._plan_from(0).num_batches
        return self._plan.num_batches if self._plan is not None else 0


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
        next_pass: Callable[[], Pass | int],
        generator: torch.Generator,
        generator_seed: Callable[[Pass], int],
        on_batch: OnBatch,
        on_end: Callable[[], None] | None = None,
        watch: Watch | None = None,
    ) -> None:
        """``batches``: None for a dataset without indices. ``next_pass()``: begin a pass, or resume
        one, or return the epoch of a new one. ``on_end``: called at the end of a pass if other
        workers may have more batches."""
        self._loader = loader
        self._batches = batches
        self._on_end = on_end
        self._next_pass = next_pass
        self._generator = generator
        self._generator_seed = generator_seed
        self._on_batch = on_batch
        self._watch = watch or Unwatched()
        self.batch_size = batch_size
        """Samples per worker in a full batch, the most of any worker; None where the script's own
        dataset or batch sampler makes the batches."""

    @property
    def dataset(self) -> Any:
        dataset = self._loader.dataset
        return dataset.dataset if isinstance(dataset, SeededDataset) else dataset

    def __len__(self) -> int:
        """Return the batches in a pass, the same on every worker. Raises TypeError if unknown."""
        if self._batches is None and self._on_end is not None:
            raise TypeError("the batches of a dataset without indices cannot be counted beforehand")
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: the pass starts, and is counted, with iter() and not at the first batch.
        begun = self._next_pass()
        a_pass = begun if isinstance(begun, Pass) else Pass(epoch=begun)
        epoch = a_pass.epoch
        if type(epoch) is not int or epoch < 0:
            raise UsageError(f"epoch must be a whole number >= 0, got {epoch!r}")
        if a_pass.is_over:
            return iter(())
        self._generator.manual_seed(self._generator_seed(a_pass))
        if self._batches is None:
            counted = iter(self._loader)
            sized = (((size, self.batch_size or 1), batch) for size, batch in counted)
            return self._hand_out(a_pass, sized, skip=a_pass.seen)
        return self._hand_out(a_pass, self._rest_of(a_pass, self._batches))

    def _rest_of(self, a_pass: Pass, batches: Batches) -> Iterator[tuple[tuple[int, float], Any]]:
        """Begin the rest of the pass: of each batch its samples, the samples of a full one, and the
        batch."""
        batches.start_pass(a_pass)
        if a_pass.start and not batches.has_any():
            return iter(())  # fewer samples remain than there are workers
        a_pass.num_batches = length_of(batches) or None
        a_pass.consumed = lambda: batches.consumed(a_pass)
        a_pass.size_of = lambda worker: batches.size_of(a_pass, worker)
        # The sizes are those of the index lists and not counted in the collate_fn, which may get
        # anything from a dataset with __getitems__.
        return zip(batches.sizes(), iter(self._loader), strict=True)

    def _hand_out(
        self, a_pass: Pass, sized_batches: Iterator[tuple[tuple[int, float], Any]], skip: int = 0
    ) -> Iterator[Any]:
        """``skip``: used batches, which a stream has to read again."""
        try:
            for _ in islice(sized_batches, skip):
                pass
            while True:
                while self._watch.leaves_out(a_pass) and next(sized_batches, None) is not None:
                    self._watch.leave_out(a_pass)
                # After the last batch there is no boundary yet: the work that the script does after
                # its loop must not be missing from a checkpoint.
                if a_pass.seen != a_pass.num_batches or a_pass.is_resume_point:
                    self._watch.before_batch(a_pass)
                found = next(sized_batches, None)
                if found is None:
                    break
                (num_samples, nominal), batch = found
                self._on_batch(num_samples, nominal, batch)
                self._watch.hand_out(a_pass)
                yield batch
            if self._on_end is not None:
                self._on_end()
            self._watch.use_up(a_pass)
        finally:
            self._watch.end(a_pass)


def shard_loader(
    dataset: Any,
    *,
    batch_size: int,
    shuffle: bool,
    drop_last: bool,
    shard: bool = True,
    epoch: int | Callable[[], Pass | int],
    seed: int,
    worker: int,
    num_workers: int,
    on_batch: OnBatch,
    on_end: Callable[[], None] = lambda: None,
    watch: Watch | None = None,
    loader_options: Mapping[str, Any] | None = None,
    global_batch: int | None = None,
    deal: Deal | None = None,
) -> EpochLoader:
    """A loader of this worker's part of ``dataset`` (all of it with ``shard=False``).

    ``global_batch``: samples of a batch of all workers, instead of ``batch_size`` of each; parts
    differ by one if it cannot be divided. ``deal``: makes the batches
    if each group gets as many as it makes local steps.

    ``worker`` of ``num_workers`` are the job's; DataLoader's own options (its ``num_workers``:
    loader processes, ``collate_fn``, ``pin_memory``, ...) go into ``loader_options``. ``epoch``
    is asked at the start of each pass when it is callable. Loader processes start by forkserver,
    and their random numbers follow from (seed, epoch, worker, batch); with ``persistent_workers``
    they end with the loader, so make the loader once, before the epochs.

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
    global_batch = global_batch if shard else None
    if global_batch is not None:
        batch_size = -(-global_batch // num_workers)
    batches: PlannedBatches | HandBatches | None = None
    if isinstance(dataset, IterableDataset):
        refuse_dealing(deal if shard else None, "a dataset without indices")
        if global_batch is not None and global_batch % num_workers:
            raise UsageError(
                f"training.global_batch = {global_batch}: expected a multiple of {num_workers}, "
                "the number of workers, since all batches of a dataset without indices have the "
                "same size; change it"
            )
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
        if deal is not None and shard:
            batches = deal(
                dataset,
                batch_size=batch_size,
                drop_last=drop_last,
                shuffle=shuffle,
                seed=seed,
                worker=worker,
            )
        else:
            batches = PlannedBatches(
                dataset,
                batch_size=batch_size,
                global_batch=global_batch,
                drop_last=drop_last,
                shuffle=shuffle,
                seed=seed,
                worker=worker if shard else 0,
                num_workers=num_workers if shard else 1,
            )
            len(batches)
        # A dataset that is too small is refused here, not at the first pass.
        batches.require_joint_batches()
    return make_loader(
        dataset,
        batches,
        batch_size=batch_size,
        options=options,
        seed=seed,
        worker=worker,
        num_workers=num_workers,
        shard=shard,
        next_pass=epoch if callable(epoch) else lambda: epoch,
        on_batch=on_batch,
        on_end=on_end,
        watch=watch,
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
    next_pass: Callable[[], Pass | int],
    on_batch: OnBatch,
    on_end: Callable[[], None],
    watch: Watch | None = None,
) -> EpochLoader:
    """``batches``: None for a dataset without indices, which is split by worker.
    ``batch_size``: None where dataset or batch sampler make the batches. ``options``: of torch's
    DataLoader, without sampler, generator and batch size."""
    _start_processes_without_fork(options)
    # DataLoader draws the seeds of its processes from this; without it, from the global generator,
    # and the random numbers of the model would depend on the number of passes.
    generator = options["generator"] = torch.Generator()
    if options.get("num_workers"):
        options["worker_init_fn"] = ends_with_its_rank(options.get("worker_init_fn"))
    is_uneven = batches is None and shard and num_workers > 1
    if batches is not None:
        options["batch_sampler"] = batches
        if options.get("num_workers"):
            dataset = SeededDataset(dataset)
            options["worker_init_fn"] = told_of(options.get("worker_init_fn"))
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
        next_pass=next_pass,
        generator=generator,
        generator_seed=lambda a_pass: int(
            random_of(a_pass.seed_of(seed), a_pass.epoch, worker).integers(2**62)
        ),
        on_batch=on_batch,
        on_end=on_end if is_uneven else None,
        watch=watch,
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
