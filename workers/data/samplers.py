"""Samplers and DataLoaders of the user's own, shared out among the workers.

Every worker draws what the user's sampler gives, with the random numbers of (seed, epoch), and
takes its part: so W workers together see, batch by batch, what one process would see with batches W
times as large. That all have drawn the same is compared.

    loader = share_out(user_loader, epoch=..., seed=0, worker=1, num_workers=4, ...)
    sampler = WorkerSampler(dataset, shuffle=True, ...)      # for a DataLoader of the user's own
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Unpack

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
from psdist.workers.data.hands import refuse_dealing
from psdist.workers.data.loader import (
    Deal,
    EpochLoader,
    OnBatch,
    Watch,
    make_loader,
    shard_loader,
)
from psdist.workers.data.orders import Order
from psdist.workers.data.processes import SeededIndices
from psdist.workers.data.seen import Pass
from psdist.workers.data.sharding import (
    BatchPlan,
    Share,
    epoch_order,
    random_of,
    require_joint_batches,
)

_OPTIONS: Final = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device"),
)
"""Of torch's DataLoader, which it keeps as attributes of these names."""

Compare = Callable[[bytes], None]
"""Called with a digest of what was drawn in a pass; an error if another worker drew another."""


def share_out(
    loader: DataLoader[Any],
    *,
    epoch: Callable[[], Pass | int],
    on_batch: OnBatch,
    on_end: Callable[[], None],
    compare: Compare,
    watch: Watch | None = None,
    global_batch: int | None = None,
    deal: Deal | None = None,
    **share: Unpack[Share],
) -> EpochLoader:
    """The part of ``loader``'s batches that is ``worker``'s; its batch size is now per worker, or
    ``global_batch`` the samples of a batch of all workers; ``deal`` as in :func:`shard_loader`.

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
    make = partial(
        make_loader,
        loader.dataset,
        options=options,
        next_pass=epoch,
        on_batch=on_batch,
        on_end=on_end,
        watch=watch,
        **share,
    )
    if loader.batch_sampler is None:
        if not isinstance(loader.dataset, IterableDataset):
            raise UsageError(
                "job.prepare cannot share out a DataLoader with batch_size=None over a dataset "
                "with indices: psdist would not know the samples in a batch; give it a batch size"
            )
        refuse_global_batch(global_batch, "a DataLoader with batch_size=None")
        refuse_dealing(deal, "a DataLoader with batch_size=None")
        return make(None, batch_size=None)
    # A loader that was given torch's own batch sampler says neither batch size nor sampler itself.
    whole: Any = loader.batch_sampler
    is_torchs = type(whole) is BatchSampler
    sampler: Any = whole.sampler if is_torchs else whole
    batch_size: int = whole.batch_size if is_torchs else 1
    drop_last: bool = whole.drop_last if is_torchs else False
    planned = partial(
        shard_loader,
        loader.dataset,
        batch_size=batch_size,
        drop_last=drop_last,
        epoch=epoch,
        on_batch=on_batch,
        on_end=on_end,
        watch=watch,
        loader_options=options,
        global_batch=global_batch,
        deal=deal,
        **share,
    )
    if isinstance(loader.dataset, IterableDataset):
        return planned(shuffle=False)
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            "job.prepare: this DataLoader has a DistributedSampler, which would share the samples "
            "out a second time: leave the sampler out (shuffle=True in its place)"
        )
    if type(sampler) is SequentialSampler:
        return planned(shuffle=False)
    if type(sampler) is RandomSampler and _takes_each_once(sampler):
        return planned(shuffle=True)
    refuse_dealing(deal, f"a DataLoader with the sampler {type(sampler).__name__}")
    if not is_torchs:
        refuse_global_batch(global_batch, f"the batch sampler {type(whole).__name__}")
    elif global_batch is not None:
        batch_size = -(-global_batch // share["num_workers"])
    dealt = DealtBatches(
        sampler,
        batch_size=batch_size if is_torchs else None,
        drop_last=drop_last,
        compare=compare,
        global_batch=global_batch,
        **share,
    )
    return make(dealt, batch_size=batch_size if is_torchs else None)


def refuse_global_batch(global_batch: int | None, what: str) -> None:
    """``what`` makes the batches itself. Raises UsageError where there is a global batch."""
    if global_batch is not None:
        raise UsageError(
            f"training.global_batch = {global_batch}: {what} makes its batches itself; unset it, "
            "or let job.loader make them"
        )


def _takes_each_once(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


class DealtBatches:
    """A pass of a user's sampler or batch sampler, dealt to the workers."""

    def __init__(
        self,
        sampler: Any,
        *,
        batch_size: int | None,
        drop_last: bool,
        seed: int,
        worker: int,
        num_workers: int,
        compare: Compare,
        global_batch: int | None = None,
    ) -> None:
        """``batch_size``: None where the sampler gives whole batches."""
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._seed = seed
        self._worker = worker
        self._num_workers = num_workers
        self._compare = compare
        self._global_batch = global_batch
        self._num_drawn = 0
        self._parts: list[tuple[SeededIndices, float]] = []
        """Of this pass: the samples of a batch, and how many a full one has."""

    def start_pass(self, a_pass: Pass) -> None:
        start, epoch = a_pass.start, a_pass.epoch
        seed = a_pass.seed_of(self._seed)
        drawn = _draw(self._sampler, seed=seed, epoch=epoch)
        self._compare(hashlib.sha256(repr(drawn).encode()).digest())
        self._num_drawn = len(drawn)
        if not start % (self._global_batch or 1):
            require_joint_batches(
                len(drawn),
                global_batch=self._global_batch,
                num_workers=self._num_workers,
                drop_last=self._drop_last,
            )
        drawn = drawn[start:]
        deal = self._rounds if self._batch_size is None else self._planned
        try:
            parts = deal(drawn)
        except UsageError:
            if not start:
                raise
            parts = []  # the rest of a pass that other workers have begun
        keys = (seed, epoch, self._worker)
        self._parts = [
            (SeededIndices(part, (*keys, start + number)), nominal)
            for number, (part, nominal) in enumerate(parts)
        ][a_pass.seen :]

    def has_any(self) -> bool:
        return bool(self._parts)

    def consumed(self, a_pass: Pass) -> int:
        start, seen = a_pass.start, a_pass.seen
        num_left = self._num_drawn - start
        if self._batch_size is None:
            return start + min(num_left, seen * self._num_workers)
        return start + self._plan(num_left).num_taken(seen)

    def size_of(self, a_pass: Pass, worker: int) -> int:
        if self._batch_size is None:
            return 0  # the batches of other workers are not stored
        return len(self._plan(self._num_drawn - a_pass.start).part(a_pass.seen, worker))

    def sizes(self) -> Iterator[tuple[int, float]]:
        return ((len(part), nominal) for part, nominal in self._parts)

    def __iter__(self) -> Iterator[list[Any]]:
        return (part for part, _ in self._parts)

    def __len__(self) -> int:
        """Batches in the next pass, if the sampler says how long it is; else TypeError."""
        length = len(self._sampler)
        if self._batch_size is not None:
            return self._plan(length).num_batches
        return length // self._num_workers + (length % self._num_workers > 0)

    def _plan(self, num_samples: int) -> BatchPlan:
        assert self._batch_size is not None
        return BatchPlan(
            num_samples=num_samples,
            batch_size=self._batch_size,
            num_workers=self._num_workers,
            drop_last=self._drop_last,
            global_batch=self._global_batch,
        )

    def _planned(self, drawn: Sequence[Any]) -> list[tuple[list[Any], float]]:
        plan = self._plan(len(drawn))
        parts = (plan.part(index, self._worker) for index in range(plan.num_batches))
        return [(list(drawn[part.start : part.stop]), plan.nominal) for part in parts]

    def _rounds(self, batches: Sequence[Sequence[Any]]) -> list[tuple[list[Any], float]]:
        """A batch for each worker, again and again; what is left at the end is one joint batch, of
        which each worker takes its part."""
        width = self._num_workers
        num_full, num_left = divmod(len(batches), width)
        parts = [
            (list(batches[at + self._worker]), sum(map(len, batches[at : at + width])) / width)
            for at in range(0, num_full * width, width)
        ]
        left = [sample for batch in batches[num_full * width :] for sample in batch]
        if num_left and len(left) < width:
            raise UsageError(
                f"the batch sampler {type(self._sampler).__name__} leaves {len(left)} samples in "
                f"its last {num_left} batches for {width} workers: each needs at least one; let it "
                "leave out short batches"
            )
        if num_left:
            first, last = (len(left) * each // width for each in (self._worker, self._worker + 1))
            parts.append((left[first:last], len(left) / width))
        return parts


def _draw(sampler: Iterable[Any], *, seed: int, epoch: int) -> list[Any]:
    """What the sampler gives with the random numbers of (seed, epoch): torch's, numpy's and
    Python's, which are as before afterwards, and its own generator."""
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

    The same number on every worker, so that all have the same number of batches: as with torch's
    DistributedSampler some samples come twice at the end of a pass, or with ``drop_last`` are left
    out.
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
