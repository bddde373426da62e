"""The loader that brings a worker its part of every epoch, in batches whose size is known.

:func:`shard_loader` makes the loaders of ``job.loader``. A loader sends nothing to other workers.
The samples of each worker follow from the plan (``sharding``), from a sampler that all workers draw
in the same way (``samplers``), or from ``stream`` for a dataset without indices.

    epochs = EpochCounter()
    feed = Feed(
        seed=0, worker=1, num_workers=4, next_pass=lambda: epochs.start_pass(dataset),
        on_batch=lambda num_samples, batch_size, batch: None,
    )
    loader = shard_loader(dataset, feed, batch_size=64, shuffle=True, drop_last=False)
    for x, y in loader: ...     # again: the next epoch, in another order

Longer than other modules: a pass from its order of samples to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, Self

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from psdist.errors import UsageError
from psdist.workers.data.assignments import AssignedBatches, refuse_allocation
from psdist.workers.data.position import length_of
from psdist.workers.data.processes import (
    SeededDataset,
    ends_with_its_rank,
    seeded_batches,
    told_of,
)
from psdist.workers.data.seen import Pass
from psdist.workers.data.sharding import (
    BatchPlan,
    check_batch_size,
    random_of,
    require_joint_batches,
)
from psdist.workers.data.stream import split_stream


class Watch:
    """The observer of a loader's passes. This one does nothing."""

    def before_batch(self, a_pass: Pass) -> None:
        """The script requests the next batch, and has finished its work on the last one."""

    def leaves_out(self, a_pass: Pass) -> bool:  # noqa: ARG002 - the base class's
        """True if the next batch belongs to a round that the group has missed."""
        return False

    def leave_out(self, a_pass: Pass) -> None:
        """That batch was skipped."""

    def hand_out(self, a_pass: Pass) -> None:
        """The script receives a batch."""

    def use_up(self, a_pass: Pass) -> None:
        """The script has requested the next batch, and there is none."""

    def end(self, a_pass: Pass) -> None:
        """The pass has ended: no batch is left, or the script has left it."""


Assign = Callable[..., AssignedBatches]
"""Called with (dataset, batch_size=, drop_last=, shuffle=, seed=, worker=)."""

OnBatch = Callable[[int, float, Any], None]
"""Called with (samples of this worker in the batch, samples of a full one, the batch) before the
script receives the batch."""


@dataclass(frozen=True, kw_only=True)
class Feed:
    """The worker that a loader feeds."""

    seed: int
    worker: int
    num_workers: int
    """Workers of the job."""
    next_pass: Callable[[], Pass | int]
    """Begin a pass, or resume one, or return the epoch of a new one."""
    on_batch: OnBatch
    on_end: Callable[[], None] = lambda: None
    """Called at the end of a pass if other workers may have more batches."""
    watch: Watch = Watch()  # noqa: RUF009 - it has no state


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


@dataclass(kw_only=True, eq=False)
class PlannedBatches:
    """Every sample once, by the plan, in the order of the dataset or of (seed, epoch)."""

    dataset: Any
    batch_size: int
    global_batch: int | None
    drop_last: bool
    shuffle: bool
    seed: int
    worker: int
    num_workers: int

    def __post_init__(self) -> None:
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
        return BatchPlan(
            num_samples=len(self.dataset) - start,  # a dataset may grow
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            drop_last=self.drop_last,
            global_batch=self.global_batch,
        )

    def require_joint_batches(self) -> None:
        """Raises UsageError for a dataset that has no such joint batches."""
        self._plan_from(0)
        require_joint_batches(
            len(self.dataset),
            global_batch=self.global_batch,
            num_workers=self.num_workers,
            drop_last=self.drop_last,
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
        parts = (plan.part(each, self.worker) for each in range(self._pass.seen, plan.num_batches))
        return (range(start + part.start, start + part.stop) for part in parts)

    def __iter__(self) -> Iterator[list[int]]:
        return seeded_batches(
            self._parts(),
            num_samples=len(self.dataset),
            shuffle=self.shuffle,
            seed=self._pass.seed_of(self.seed),
            epoch=self._pass.epoch,
            worker=self.worker,
        )

    def __len__(self) -> int:
        if self._pass.is_over:
            return self._plan_from(0).num_batches
        return self._plan.num_batches if self._plan is not None else 0


class _CountSamples:
    """A collate_fn that also returns the number of samples. A class, so that it can be sent to
    loader processes."""

    def __init__(self, collate: Callable[[Any], Any], *, is_batched: bool) -> None:
        """``is_batched``: the dataset makes its own batches, and each counts as one sample."""
        self._collate = collate
        self._is_batched = is_batched

    def __call__(self, samples: Any) -> tuple[int, Any]:
        return 1 if self._is_batched else len(samples), self._collate(samples)


class _ReadAhead:
    """The batches of a pass; some may be read before the script receives them."""

    def __init__(self, sized: Iterator[tuple[tuple[int, float], Any]]) -> None:
        self._sized = sized
        self._read: deque[tuple[tuple[int, float], Any]] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[tuple[int, float], Any]:
        return self._read.popleft() if self._read else next(self._sized)

    def peek(self, number: int) -> Any:
        """Return the ``number``-th of the next batches, from 1; None if there are fewer."""
        self._read.extend(islice(self._sized, max(0, number - len(self._read))))
        return self._read[number - 1][1] if number <= len(self._read) else None


class EpochLoader:
    """The batches of one worker; iterating again is the next pass. Made by :func:`shard_loader`."""

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: Batches | None,
        feed: Feed,
        *,
        batch_size: int | None,
        is_uneven: bool,
    ) -> None:
        """``batches``: None for a dataset without indices. ``is_uneven``: other workers may have
        more batches."""
        self._loader = loader
        self._batches = batches
        self._feed = feed
        self._is_uneven = is_uneven
        self.batch_size = batch_size
        """Maximum samples per worker in a full batch; None where the script's own dataset or batch
        sampler makes the batches."""

    @property
    def dataset(self) -> Any:
        dataset = self._loader.dataset
        return dataset.dataset if isinstance(dataset, SeededDataset) else dataset

    def __len__(self) -> int:
        """Return the batches in a pass, the same on every worker. Raises TypeError if unknown."""
        if self._is_uneven:
            raise TypeError("the batches of a dataset without indices cannot be counted beforehand")
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: the pass starts, and is counted, with iter() and not at the first batch.
        begun = self._feed.next_pass()
        a_pass = begun if isinstance(begun, Pass) else Pass(epoch=begun)
        epoch = a_pass.epoch
        if type(epoch) is not int or epoch < 0:
            raise UsageError(f"epoch must be a whole number >= 0, got {epoch!r}")
        if a_pass.is_over:
            return iter(())
        assert self._loader.generator is not None  # DataLoader seeds its processes from it
        keys = a_pass.seed_of(self._feed.seed), epoch, self._feed.worker
        self._loader.generator.manual_seed(int(random_of(*keys).integers(2**62)))
        if self._batches is None:
            counted = iter(self._loader)
            sized = (((size, self.batch_size or 1), batch) for size, batch in counted)
            return self._hand_out(a_pass, sized, skip=a_pass.seen)
        return self._hand_out(a_pass, self._rest_of(a_pass, self._batches))

    def _rest_of(self, a_pass: Pass, batches: Batches) -> Iterator[tuple[tuple[int, float], Any]]:
        """Begin the rest of the pass. Yield ((samples, samples of a full batch), batch)."""
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
        self, a_pass: Pass, sized: Iterator[tuple[tuple[int, float], Any]], skip: int = 0
    ) -> Iterator[Any]:
        """``skip``: used batches, which a stream has to read again."""
        watch, sized_batches = self._feed.watch, _ReadAhead(sized)
        try:
            for _ in islice(sized, skip):
                pass
            a_pass.peek = sized_batches.peek
            while True:
                while watch.leaves_out(a_pass) and next(sized_batches, None) is not None:
                    watch.leave_out(a_pass)
                # After the last batch there is no boundary yet: the work that the script does after
                # its loop must not be missing from a checkpoint.
                if a_pass.seen != a_pass.num_batches or a_pass.is_resume_point:
                    watch.before_batch(a_pass)
                found = next(sized_batches, None)
                if found is None:
                    break
                (num_samples, nominal), batch = found
                self._feed.on_batch(num_samples, nominal, batch)
                watch.hand_out(a_pass)
                yield batch
            if self._is_uneven:
                self._feed.on_end()
            watch.use_up(a_pass)
        finally:
            a_pass.peek = lambda _number: None
            watch.end(a_pass)


def shard_loader(
    dataset: Any,
    feed: Feed,
    *,
    batch_size: int,
    shuffle: bool,
    drop_last: bool,
    shard: bool = True,
    loader_options: Mapping[str, Any] | None = None,
    global_batch: int | None = None,
    assign: Assign | None = None,
) -> EpochLoader:
    """Return a loader of this worker's part of ``dataset`` (all of it with ``shard=False``).

    ``global_batch``: samples of a batch of all workers, instead of ``batch_size`` of each; parts
    differ by at most one. ``assign``: makes the batches if each group gets one per local
    step.

    DataLoader's own options (its ``num_workers``: loader processes, ``collate_fn``, ``pin_memory``,
    ...) go into ``loader_options``. Loader processes start by forkserver, and their random numbers
    follow from (seed, epoch, worker, batch); with ``persistent_workers`` they end with the loader,
    so make the loader once, before the epochs.

    An IterableDataset is split by worker and loader process (``stream``), so that workers may have
    different numbers of batches: ``feed.on_end`` is called when this worker's are used up.

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
        batch_size = -(-global_batch // feed.num_workers)
    batches: PlannedBatches | AssignedBatches | None = None
    if isinstance(dataset, IterableDataset):
        refuse_allocation(assign if shard else None, "a dataset without indices")
        if global_batch is not None and global_batch % feed.num_workers:
            raise UsageError(
                f"training.global_batch = {global_batch}: expected a multiple of "
                f"{feed.num_workers}, the number of workers, since all batches of a dataset "
                "without indices have the same size; change it"
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
        if assign is not None and shard:
            batches = assign(
                dataset,
                batch_size=batch_size,
                drop_last=drop_last,
                shuffle=shuffle,
                seed=feed.seed,
                worker=feed.worker,
            )
        else:
            batches = PlannedBatches(
                dataset=dataset,
                batch_size=batch_size,
                global_batch=global_batch,
                drop_last=drop_last,
                shuffle=shuffle,
                seed=feed.seed,
                worker=feed.worker if shard else 0,
                num_workers=feed.num_workers if shard else 1,
            )
        # A dataset that is too small is refused here, not at the first pass.
        batches.require_joint_batches()
    return make_loader(
        dataset, batches, feed, batch_size=batch_size, options=options, is_split=shard
    )


def make_loader(
    dataset: Any,
    batches: Batches | None,
    feed: Feed,
    *,
    batch_size: int | None,
    options: dict[str, Any],
    is_split: bool = True,
) -> EpochLoader:
    """``batches``: None for a dataset without indices, which is split by worker (``is_split``).
    ``batch_size``: None where dataset or batch sampler make the batches. ``options``: of torch's
    DataLoader, without sampler, generator and batch size."""
    _start_processes_without_fork(options)
    # Without a generator, DataLoader would seed its processes from the global one, and the random
    # numbers of the model would depend on the number of passes.
    options["generator"] = torch.Generator()
    if options.get("num_workers"):
        options["worker_init_fn"] = ends_with_its_rank(options.get("worker_init_fn"))
    is_uneven = batches is None and is_split and feed.num_workers > 1
    if batches is not None:
        options["batch_sampler"] = batches
        if options.get("num_workers"):
            dataset = SeededDataset(dataset)
            options["worker_init_fn"] = told_of(options.get("worker_init_fn"))
    else:
        options["batch_size"] = batch_size
        is_batched = batch_size is None
        collate = options.get("collate_fn") or (default_convert if is_batched else default_collate)
        options["collate_fn"] = _CountSamples(collate, is_batched=is_batched)
        if is_uneven:
            dataset = split_stream(dataset, feed.worker, feed.num_workers)
    loader: DataLoader[Any] = DataLoader(dataset, **options)
    return EpochLoader(loader, batches, feed, batch_size=batch_size, is_uneven=is_uneven)


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
