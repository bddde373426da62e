"""Samplers and DataLoaders of the user's own, shared out among the workers.

Every worker draws from the user's sampler with the random numbers of (seed, epoch), and takes its
part. So W workers together see, batch by batch, the samples of one process with batches W times as
large. The workers compare digests of their draws.

    loader = share_out(user_loader, feed, compare=compare_digests)
    sampler = WorkerSampler(dataset, shuffle=True, ...)      # for a DataLoader of the user's own
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from psdist.errors import UsageError
from psdist.workers.data.assignments import refuse_allocation
from psdist.workers.data.loader import (
    Assign,
    EpochLoader,
    Feed,
    make_loader,
    shard_loader,
)
from psdist.workers.data.orders import Order
from psdist.workers.data.processes import SeededIndices
from psdist.workers.data.seen import Pass
from psdist.workers.data.sharding import (
    BatchPlan,
    epoch_order,
    random_of,
    require_joint_batches,
)

_OPTIONS: Final = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device"),
)
"""Options of torch's DataLoader, which stores them in attributes of these names."""

Compare = Callable[[bytes], None]
"""Called with a digest of the draws of a pass. Raises an error if the workers' digests differ."""


def share_out(
    loader: DataLoader[Any],
    feed: Feed,
    *,
    compare: Compare,
    global_batch: int | None = None,
    assign: Assign | None = None,
) -> EpochLoader:
    """Return the worker's part of ``loader``'s batches. Its batch size counts per worker, or
    ``global_batch`` is the samples of a batch of all workers; ``assign`` as in
    :func:`shard_loader`.

    Raises :class:`UsageError` for a loader whose batches cannot be shared out.
    """
    name = type(loader).__name__
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"job.prepare cannot share out a {name}, which has an __iter__ of its own: iterate "
            "over the part of worker job.worker of job.num_workers in it, and do not prepare it"
        )
    if not getattr(loader, "in_order", True):
        raise UsageError(
            "job.prepare cannot share out a DataLoader with in_order=False: each batch is weighted "
            "by its own number of samples, so the order must hold"
        )
    options = {option: getattr(loader, option) for option in _OPTIONS if hasattr(loader, option)}
    if not options["num_workers"]:
        del options["multiprocessing_context"]
    if not options.get("pin_memory_device"):
        options.pop("pin_memory_device", None)
    if loader.batch_sampler is None:
        if not isinstance(loader.dataset, IterableDataset):
            raise UsageError(
                "job.prepare cannot share out a DataLoader with batch_size=None over a dataset "
                "with indices: psdist would not know the samples in a batch; give it a batch size"
            )
        refuse_global_batch(global_batch, "a DataLoader with batch_size=None")
        refuse_allocation(assign, "a DataLoader with batch_size=None")
        return make_loader(loader.dataset, None, feed, batch_size=None, options=options)
    # A loader that was given torch's own batch sampler says neither batch size nor sampler itself.
    whole: Any = loader.batch_sampler
    is_torchs = type(whole) is BatchSampler
    sampler: Any = whole.sampler if is_torchs else whole
    batch_size: int = whole.batch_size if is_torchs else 1
    drop_last: bool = whole.drop_last if is_torchs else False
    planned = partial(
        shard_loader,
        loader.dataset,
        feed,
        batch_size=batch_size,
        drop_last=drop_last,
        loader_options=options,
        global_batch=global_batch,
        assign=assign,
    )
    if isinstance(loader.dataset, IterableDataset):
        return planned(shuffle=False)
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            "job.prepare: this DataLoader has a DistributedSampler, which would share the samples "
            "out a second time: leave the sampler out (shuffle=True instead)"
        )
    if type(sampler) is SequentialSampler:
        return planned(shuffle=False)
    if type(sampler) is RandomSampler and _takes_each_once(sampler):
        return planned(shuffle=True)
    refuse_allocation(assign, f"a DataLoader with the sampler {type(sampler).__name__}")
    if not is_torchs:
        refuse_global_batch(global_batch, f"the batch sampler {type(whole).__name__}")
    elif global_batch is not None:
        batch_size = -(-global_batch // feed.num_workers)
    sampled = SampledBatches(
        sampler,
        feed,
        batch_size=batch_size if is_torchs else None,
        drop_last=drop_last,
        compare=compare,
        global_batch=global_batch,
    )
    return make_loader(
        loader.dataset, sampled, feed, batch_size=sampled.batch_size, options=options
    )


def refuse_global_batch(global_batch: int | None, what: str) -> None:
    """Raise UsageError if there is a global batch: ``what`` makes its batches itself."""
    if global_batch is not None:
        raise UsageError(
            f"training.global_batch = {global_batch}: {what} makes its batches itself; unset it, "
            "or let job.loader make them"
        )


def _takes_each_once(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


@dataclass(eq=False)
class SampledBatches:
    """A pass of a user's sampler or batch sampler, shared out to the workers."""

    sampler: Any
    feed: Feed
    _: KW_ONLY
    batch_size: int | None
    """None where the sampler gives whole batches."""
    drop_last: bool
    compare: Compare
    global_batch: int | None = None

    def __post_init__(self) -> None:
        self._num_drawn = 0
        self._parts: list[tuple[SeededIndices, float]] = []
        """(samples of a batch, samples of a full one), of the batches of this pass."""

    def start_pass(self, a_pass: Pass) -> None:
        start, epoch = a_pass.start, a_pass.epoch
        seed = a_pass.seed_of(self.feed.seed)
        drawn = _draw(self.sampler, seed=seed, epoch=epoch)
        self.compare(hashlib.sha256(repr(drawn).encode()).digest())
        self._num_drawn = len(drawn)
        if not start % (self.global_batch or 1):
            require_joint_batches(
                len(drawn),
                global_batch=self.global_batch,
                num_workers=self.feed.num_workers,
                drop_last=self.drop_last,
            )
        drawn = drawn[start:]
        share_out = self._rounds if self.batch_size is None else self._planned
        try:
            parts = share_out(drawn)
        except UsageError:
            if not start:
                raise
            parts = []  # the rest of a pass that other workers have begun
        keys = (seed, epoch, self.feed.worker)
        self._parts = [
            (SeededIndices(part, (*keys, start + number)), nominal)
            for number, (part, nominal) in enumerate(parts)
        ][a_pass.seen :]

    def has_any(self) -> bool:
        return bool(self._parts)

    def consumed(self, a_pass: Pass) -> int:
        start, seen = a_pass.start, a_pass.seen
        num_left = self._num_drawn - start
        if self.batch_size is None:
            return start + min(num_left, seen * self.feed.num_workers)
        return start + self._plan(num_left).num_taken(seen)

    def size_of(self, a_pass: Pass, worker: int) -> int:
        if self.batch_size is None:
            return 0  # the batches of other workers are not stored
        return len(self._plan(self._num_drawn - a_pass.start).part(a_pass.seen, worker))

    def sizes(self) -> Iterator[tuple[int, float]]:
        return ((len(part), nominal) for part, nominal in self._parts)

    def __iter__(self) -> Iterator[list[Any]]:
        return (part for part, _ in self._parts)

    def __len__(self) -> int:
        """Batches in the next pass, if the sampler says how long it is; else TypeError."""
        length = len(self.sampler)
        if self.batch_size is not None:
            return self._plan(length).num_batches
        return length // self.feed.num_workers + (length % self.feed.num_workers > 0)

    def _plan(self, num_samples: int) -> BatchPlan:
        assert self.batch_size is not None
        return BatchPlan(
            num_samples=num_samples,
            batch_size=self.batch_size,
            num_workers=self.feed.num_workers,
            drop_last=self.drop_last,
            global_batch=self.global_batch,
        )

    def _planned(self, drawn: Sequence[Any]) -> list[tuple[list[Any], float]]:
        plan = self._plan(len(drawn))
        parts = (plan.part(index, self.feed.worker) for index in range(plan.num_batches))
        return [(list(drawn[part.start : part.stop]), plan.nominal) for part in parts]

    def _rounds(self, batches: Sequence[Sequence[Any]]) -> list[tuple[list[Any], float]]:
        """Share out whole batches in turn. The rest is one joint batch with a part for each
        worker."""
        width = self.feed.num_workers
        num_full, num_left = divmod(len(batches), width)
        parts = [
            (list(batches[at + self.feed.worker]), sum(map(len, batches[at : at + width])) / width)
            for at in range(0, num_full * width, width)
        ]
        left = [sample for batch in batches[num_full * width :] for sample in batch]
        if num_left and len(left) < width:
            raise UsageError(
                f"the batch sampler {type(self.sampler).__name__} leaves {len(left)} samples in "
                f"its last {num_left} batches for {width} workers: each needs at least one; let it "
                "leave out short batches"
            )
        if num_left:
            first, last = (
                len(left) * each // width for each in (self.feed.worker, self.feed.worker + 1)
            )
            parts.append((left[first:last], len(left) / width))
        return parts


def _draw(sampler: Iterable[Any], *, seed: int, epoch: int) -> list[Any]:
    """Return the sampler's samples with the random numbers of (seed, epoch): those of its own
    generator, torch, numpy and Python. The state of the last three is restored."""
    number = int(random_of(seed, epoch, 0).integers(2**32))
    own = getattr(sampler, "generator", None)
    if isinstance(own, torch.Generator):
        own.manual_seed(number)
    python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(number)
            random.seed(number)
            np.random.seed(number)
            return list(sampler)
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)


class WorkerSampler(Sampler[int]):
    """The samples of one worker, for a DataLoader of the user's own; iterating again is the next
    pass.

    All workers have the same number of samples and batches. As with torch's DistributedSampler some
    samples come twice at the end of a pass, or are dropped with ``drop_last``.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        shuffle: bool,
        drop_last: bool,
        order: Callable[[], Order],
        seed: int,
        worker: int,
        num_workers: int,
    ) -> None:
        self._dataset = dataset
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._order = order
        self._seed = seed
        self._worker = worker
        self._num_workers = num_workers
        if not len(self):
            raise UsageError(
                f"the dataset has {len(dataset)} samples and the job {num_workers} workers: each "
                "needs at least one"
            )

    def __iter__(self) -> Iterator[int]:
        num_samples, begun = len(self._dataset), self._order()
        order = epoch_order(
            num_samples=num_samples,
            shuffle=self._shuffle,
            seed=begun.seed_of(self._seed),
            epoch=begun.epoch,
        )
        at = range(self._worker, len(self) * self._num_workers, self._num_workers)
        return (int(order[place % num_samples]) for place in at)

    def __len__(self) -> int:
        num_samples = len(self._dataset)
        rest = num_samples % self._num_workers
        return num_samples // self._num_workers + (rest > 0 and not self._drop_last)
