"""All loaders of one worker. They make and count passes and report the position of each.

loaders = Loaders(seed=0, worker=1, num_workers=4, on_batch=..., on_end=..., collective=...)
loader = loaders.make(dataset, batch_size=64, shuffle=True)
loader = loaders.share_out(user_loader)
sampler = loaders.sampler(dataset)
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from math import ceil
from typing import Any

from torch.utils.data import DataLoader

from psdist.errors import CollectiveError, UsageError
from psdist.protocol.collected import Brought
from psdist.protocol.ids import describe_workers
from psdist.workers.data.assignments import Allocation, AssignedBatches, refuse_allocation
from psdist.workers.data.loader import Assign, EpochLoader, Feed, Watch, shard_loader
from psdist.workers.data.position import Position, length_of
from psdist.workers.data.samplers import WorkerSampler, refuse_global_batch, share_out
from psdist.workers.data.seen import Pass, SeenPasses


class Loaders(Watch):
    def __init__(
        self,
        *,
        seed: int,
        worker: int,
        num_workers: int,
        on_batch: Callable[[Position, int, float, Any], None],
        on_end: Callable[[], None],
        collective: Callable[[str, bytes], Brought],
        is_training: Callable[[], bool] = lambda: True,
        on_boundary: Callable[[Pass | None], None] = lambda _pass: None,
        on_trained: Callable[[bool, int], None] = lambda _is_whole, _num_steps: None,
        num_epochs: Callable[[], int | None] = lambda: None,
        epoch_now: Callable[[], tuple[int, int] | None] = lambda: None,
        global_batch: int | None = None,
        allocation: Allocation | None = None,
        dropped: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """``on_batch(position, samples, samples of a full batch, batch)``: a loader that divides
        its samples among the workers is about to return a batch.
        ``on_end()``: the pass has no more batches here, and may have more on other workers.
        ``collective(name, payload)``: return the payloads of all workers.
        ``is_training()``: True if the next batch is for training.
        ``on_boundary(pass)``: the script has finished its iteration and asks for the next batch of
        this pass, or begins a pass (None).
        ``on_trained(is_whole, iterations)``: a divided pass with iterations has ended;
        ``iterations`` counts those of the run. ``is_whole``: after its last batch. Otherwise the
        script has left it, and the call comes with the next batch of another pass.
        ``num_epochs()``: epochs of the current loop over job.epochs.
        ``epoch_now()``: that loop and its epoch; None outside.
        ``global_batch``: samples of a batch of all workers, instead of batch sizes per worker.
        ``allocation``: each group gets one batch per local step.
        ``dropped()``: failed workers, whose samples are dropped."""
        self._share = {"seed": seed, "worker": worker, "num_workers": num_workers}
        self._on_batch = on_batch
        self._on_end = on_end
        self._collective = collective
        self._is_training = is_training
        self._on_boundary = on_boundary
        self._on_trained = on_trained
        self._num_steps = 0
        """Iterations that this worker has made in this process."""
        self._num_left: int | None = None
        """Their number when the script left a pass that had trained."""
        self._num_epochs = num_epochs
        self._epoch_now = epoch_now
        self._global_batch = global_batch
        self._allocation = allocation
        self._num_allocated = 0
        """Loaders whose passes are shared out by assignments."""
        self.seen = SeenPasses(is_allocating=allocation is not None)
        self._num_in_round = 0
        """Batches for training that the script has received since the last iteration ended."""
        self.batches_per_round = 1
        """Batches of the last iteration."""
        self._left_out: Counter[tuple[int, bool]] = Counter()
        """Dataset, as in a pass -> batches to skip, of rounds that the group has missed."""
        self._num_to_skip = 0
        self._dropped = dropped
        self.num_dropped = 0
        """Samples for training that were assigned to workers of ``dropped()``."""

    def make(
        self,
        dataset: Any,
        *,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        shard: bool,
        epoch: int | None,
        epochs: int | None,
        options: Mapping[str, Any],
    ) -> EpochLoader:
        """See :meth:`psdist.job.Job.loader`."""
        return self._follow(
            partial(
                shard_loader,
                dataset,
                batch_size=batch_size,
                shuffle=shuffle,
                drop_last=drop_last,
                shard=shard,
                loader_options=options,
                global_batch=self._global_batch,
                assign=self._assign() if shard else None,
            ),
            dataset,
            Position(epochs=epochs),
            shard=shard,
            epoch=epoch,
        )

    def share_out(self, loader: object) -> EpochLoader:
        """Return a loader of this worker's part of ``loader``'s batches. A loader that was made
        here is returned as it is."""
        if isinstance(loader, EpochLoader):
            return loader
        if not isinstance(loader, DataLoader):
            raise UsageError(
                "job.prepare(model, optimizer, ...) takes DataLoaders after the optimizer, not a "
                f"{type(loader).__name__}; schedulers and losses stay as they are in your script"
            )
        return self._follow(
            partial(
                share_out,
                loader,
                compare=self._compare_order,
                global_batch=self._global_batch,
                assign=self._assign(),
            ),
            loader.dataset,
            Position(),
        )

    def _assign(self) -> Assign | None:
        """Return a maker of the next loader's batches, if they are shared out by assignments."""
        if (allocation := self._allocation) is None:
            return None
        self._num_allocated += 1
        loader = self._num_allocated
        return lambda dataset, **options: AssignedBatches(
            dataset=dataset,
            loader=loader,
            allocation=allocation,
            num_allocated=self.seen.num_allocated,
            **options,
        )

    def _compare_order(self, digest: bytes) -> None:
        drawn = self._collective("loader", digest)
        if others := drawn.unlike(drawn.payloads[0]):
            raise CollectiveError(
                f"{describe_workers([0])} and {describe_workers(others[:1])} have drawn different "
                "samples from the sampler of a prepared DataLoader: it must depend on nothing but "
                "the random numbers of torch, numpy and Python and its own generator"
            )

    def peek(self, number: int) -> Any:
        """Return the ``number``-th of the next batches of the newest pass for training; None if
        there are fewer."""
        return None if self.seen.newest is None else self.seen.newest.peek(number)

    def skip(self, num_batches: int) -> None:
        """Skip the next ``num_batches`` batches for training, of any loader: those of iterations
        that this worker does not make."""
        self._num_to_skip = num_batches

    def end_iteration(self) -> None:
        self._num_steps += 1
        self.batches_per_round = max(1, self._num_in_round)
        self._num_in_round = 0
        self.seen.end_iteration()

    def miss(self, rounds: int) -> None:
        """Skip the batches of ``rounds`` rounds that the group misses after this iteration, which
        is about to end. Each round takes the number of batches of this iteration, so the passes of
        all groups end together."""
        if (of := self.seen.newest) is not None:
            self._left_out[of.dataset, of.is_shared] += rounds * max(1, self._num_in_round)

    def collect_missed(self, *, clock: int) -> dict[str, Any]:
        """Return the batches still to skip, as a tree of plain values for a checkpoint. ``clock``:
        rounds that this worker has finished."""
        newest = self.seen.newest
        return {
            "clock": clock,
            "left out": [[*key, number] for key, number in sorted((+self._left_out).items())],
            "newest": [] if newest is None else [newest.dataset, newest.is_shared],
            "batches": self.batches_per_round,
        }

    def restore_missed(self, tree: Mapping[str, Any], *, clock: int, share: float) -> None:
        """Restore a tree of :meth:`collect_missed`. ``clock``: rounds of the checkpoint, which may
        be more than the worker had finished. ``share``: batches of this worker for each batch of
        the worker that wrote the tree."""
        left_out = Counter({(key, shared): num for key, shared, num in tree["left out"]})
        rounds = clock - tree["clock"]
        if rounds and tree["newest"]:
            number, is_shared = tree["newest"]
            left_out[number, is_shared] += rounds * tree["batches"]
        self._left_out = Counter({key: ceil(num * share) for key, num in left_out.items()})

    def sampler(
        self, dataset: Any, *, shuffle: bool, drop_last: bool, epoch: int | None
    ) -> WorkerSampler:
        """See :meth:`psdist.job.Job.sampler`."""
        refuse_global_batch(self._global_batch, "a DataLoader of the script's own (job.sampler)")
        refuse_allocation(self._assign(), "job.sampler")
        self.seen.register(dataset, is_shared=True)
        return WorkerSampler(
            dataset,
            shuffle=shuffle,
            drop_last=drop_last,
            order=lambda: self.seen.count_pass(
                dataset, epoch=epoch, is_training=self._is_training(), within=self._epoch_now()
            ),
            **self._share,
        )

    def _follow(
        self,
        make: Callable[..., EpochLoader],
        dataset: Any,
        position: Position,
        *,
        shard: bool = True,
        epoch: int | None = None,
    ) -> EpochLoader:
        self.seen.register(dataset, is_shared=shard)

        def start_pass() -> Pass:
            if self._is_training() and not self.seen.has_epochs and self.seen.is_between:
                self._on_boundary(None)
            found = self.seen.start(
                dataset,
                is_shared=shard,
                epoch=epoch,
                is_training=self._is_training(),
                within=self._epoch_now(),
            )
            found.begun_at = self._num_steps
            if not position.epochs:
                position.epochs = self._num_epochs() or 0
            made = itself()
            assert made is not None  # it begins this pass
            position.start_pass(epoch=found.epoch, num_batches=length_of(made))
            position.batch = found.seen
            return found

        feed = Feed(
            next_pass=start_pass,
            # Validation batches of a whole dataset neither weigh nor count.
            on_batch=partial(self._on_batch, position) if shard else lambda *_: None,
            on_end=self._on_end,
            watch=self,
            **self._share,
        )
        loader = make(feed=feed)
        itself = weakref.ref(loader)  # a cycle would keep the dataset for a while
        return loader

    # -- the observer of passes --------------------------------------------------------------------

    def before_batch(self, a_pass: Pass) -> None:
        if self._num_left is not None and self._is_training():
            num_steps, self._num_left = self._num_left, None
            self._on_trained(False, num_steps)
        if a_pass.is_resume_point or (self._is_training() and self.seen.may_cut_at(a_pass)):
            self._on_boundary(a_pass)

    def leaves_out(self, a_pass: Pass) -> bool:
        is_left_out = self._left_out[a_pass.dataset, a_pass.is_shared] > 0
        return (self._num_to_skip > 0 or is_left_out) and self._is_training()

    def leave_out(self, a_pass: Pass) -> None:
        if self._num_to_skip:
            self._num_to_skip -= 1
        else:
            self._left_out[a_pass.dataset, a_pass.is_shared] -= 1
        a_pass.seen += 1

    def hand_out(self, a_pass: Pass) -> None:
        is_training = self._is_training()
        self._num_in_round += is_training
        if is_training and a_pass.is_shared:
            self.num_dropped += sum(map(a_pass.size_of, self._dropped()))
        self.seen.hand_out(a_pass, is_training=is_training)

    def use_up(self, a_pass: Pass) -> None:
        a_pass.is_used_up = True
        if self._is_training() and self._has_trained(a_pass):
            self._on_trained(True, self._num_steps)

    def end(self, a_pass: Pass) -> None:
        self.seen.end(a_pass)
        if not a_pass.is_used_up and self._has_trained(a_pass):
            self._num_left = self._num_steps

    def _has_trained(self, a_pass: Pass) -> bool:
        """The same on all workers of a group: a worker without a batch joins the others' steps."""
        return a_pass.is_shared and a_pass.begun_at != self._num_steps
