"""The batches that this worker has used since its epoch began, as checkpoints record them.

A resumed run executes the script from its start, and repeats the epoch in which the checkpoint was
made. Passes that had trained are not repeated: a complete pass gives no batches, and an open pass
gives the remaining ones. Passes without a step (an evaluation before training) are repeated in the
same order of samples.

    seen = SeenPasses()
    a_pass = seen.start(dataset, is_shared=True)      # iter(loader)
    seen.hand_out(a_pass, is_training=True)
    seen.end_iteration()
    tree = seen.collect(at=a_pass)                    # and in another process:
    seen.restore(tree, is_moved=False)

Longer than other modules: the state of a pass and its place in a checkpoint are one subject.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from psdist.errors import UsageError
from psdist.workers.data.orders import Kind, Order, PassOrders
from psdist.workers.data.position import length_of
from psdist.workers.data.sharding import EpochCounter


def _unknown() -> int | None:
    return None


def _unknown_size(_worker: int) -> int:
    return 0


def _no_batch(_number: int) -> None:
    return None


@dataclass(eq=False, kw_only=True)
class PassAllocation:
    """The progress of a pass by assignments (psdist.workers.data.assignments)."""

    loader: int
    """The loader in whose allocation windows the coordinator fixes local steps."""
    number: int
    """Number of the pass over this loader."""
    assignment: int = 0
    """Number of the next assignment."""
    start: int = 0
    """Its first position in the epoch's order."""
    is_between: bool = True
    """True if this worker has received every assignment whole."""


@dataclass(eq=False, kw_only=True)
class Pass:
    """One pass of a loader."""

    dataset: int = 0
    """Number of the dataset, in the order in which the script has passed datasets to psdist."""
    is_shared: bool = True
    epoch: int
    salt: tuple[int, ...] = ()
    """With ``epoch`` the key of the order (:class:`psdist.workers.data.orders.Order`)."""
    kind: int = Kind.TRAINING
    is_outside: bool = True
    """True if the script had no loop over job.epochs."""
    length: int | None = None
    """Samples of the dataset; None if it has no length."""
    start: int = 0
    """First position of the order of samples: workers of another layout had used those before."""
    allocation: PassAllocation | None = None
    """None unless the pass is shared out by assignments."""
    seen: int = 0
    """Batches that the script has received."""
    num_batches: int | None = None
    """Batches of the whole pass; None if unknown."""
    steps: int = 0
    """Iterations that have used batches of this pass."""
    begun_at: int = 0
    """Iterations of this worker in this process before the pass."""
    is_used_up: bool = False
    """True if the script has used the last batch and requested another."""
    is_over: bool = False
    is_resumed: bool = False
    """True if it began before the checkpoint."""
    is_resume_point: bool = False
    """True if training continues with its next batch."""
    consumed: Callable[[], int | None] = _unknown
    """Return the positions of the order of samples that all workers have used; None if unknown."""
    peek: Callable[[int], Any] = _no_batch
    """Return the n-th batch after those that the script has received, which is read for it; None
    if there is none."""
    size_of: Callable[[int], int] = _unknown_size
    """Samples of another worker in the next batch; 0 if they are unknown."""

    def seed_of(self, seed: int) -> int:
        """The seed of this pass in a run with ``seed``."""
        return Order(self.epoch, self.salt).seed_of(seed)


Key = tuple[int, bool]


def nested_pass() -> UsageError:
    """Return the error of a pass inside another pass over the same dataset. Groups of different
    speed would begin the inner pass at different times. Its order of samples would differ, and the
    coordinator (psdist.servers.protocol.steps) would drop the windows of the outer pass too early.
    """
    return UsageError(
        "local.steps_by = speed: the script begins a pass over a dataset inside another pass over "
        "it, which groups of different speed would do at different times; make the loader of the "
        "inner one of a dataset of its own (torch.utils.data.Subset of the same one will do), or, "
        "if the outer pass has ended, delete its iterator first"
    )


class SeenPasses:
    def __init__(self, *, is_allocating: bool = False) -> None:
        """``is_allocating``: passes are shared out by assignments."""
        self._is_allocating = is_allocating
        self.num_allocated = Counter[int]()
        """Loader -> passes by assignments."""
        self._counter = EpochCounter()
        self._orders = PassOrders()
        self._passes: list[Pass] = []
        """Since the epoch began."""
        self._mark: Counter[Key] = Counter()
        """Passes over each dataset before that."""
        self._handed_out: list[Pass] = []
        """Since the last iteration ended."""
        self._last: Pass | None = None
        """The pass of the last batch for training."""
        self._replay: list[Pass] = []
        """Passes of the checkpoint that the script has not begun yet in this epoch."""
        self.has_epochs = False
        """True if the script iterates over job.epochs."""

    def register(self, dataset: object, *, is_shared: bool) -> None:
        """The script has made a loader of this dataset."""
        self._counter.register(dataset, shard=is_shared)

    def count_pass(
        self,
        dataset: object,
        *,
        epoch: int | None,
        is_training: bool,
        within: tuple[int, int] | None = None,
    ) -> Order:
        """Count a pass of ``job.sampler``; return its order."""
        kind = Kind.SAMPLER_TRAINING if is_training else Kind.SAMPLER_EVALUATION
        return self._order(dataset, kind, epoch=epoch, within=within)

    def _order(
        self, dataset: object, kind: Kind, *, epoch: int | None, within: tuple[int, int] | None
    ) -> Order:
        is_shared = kind not in (Kind.WHOLE_TRAINING, Kind.WHOLE_EVALUATION)
        number = self._counter.start_pass(
            dataset,
            shard=is_shared,
            first=self._orders.first_unused[kind] if within is None else 0,
        )
        if within is None:
            order = self._orders.next_outside(kind, number=number)
        else:
            order = self._orders.next_in_epoch(kind, loop=within[0], epoch=within[1])
        return order if epoch is None else Order(epoch)

    def start(
        self,
        dataset: object,
        *,
        is_shared: bool,
        epoch: int | None = None,
        is_training: bool = True,
        within: tuple[int, int] | None = None,
    ) -> Pass:
        """Begin a pass. ``epoch``: the script's number; None: a number of its own. ``within``: the
        loop and the epoch of job.epochs that the script is in.

        Raises :class:`UsageError` if the checkpoint was made in another pass. Raises it also for a
        pass by assignments inside another pass over the same dataset.
        """
        kind = Kind.of(is_shared=is_shared, is_training=is_training)
        self._counter.register(dataset, shard=is_shared)
        key = (self._counter.index_of(dataset, shard=is_shared), is_shared)
        length = length_of(dataset) or None
        found = self._recorded(key, epoch, kind=kind if within is not None else None, length=length)
        if found is None:
            order = self._order(dataset, kind, epoch=epoch, within=within)
        else:
            number = self._counter.start_pass(dataset, shard=is_shared)
            if within is None:
                self._orders.next_outside(kind, number=number)
        if self._is_allocating and is_shared and self._is_under_way(key):
            raise nested_pass()
        is_inside = any(each.steps and not each.is_over for each in self._passes)
        is_new = found is None
        if found is None:
            found = Pass(
                dataset=key[0],
                is_shared=is_shared,
                epoch=order.epoch,
                salt=order.salt,
                kind=kind,
                is_outside=within is None,
                length=length,
            )
        if is_new and is_inside:  # a resumed run does not repeat the outer pass
            self._mark[key] += 1
            return found
        if not self.has_epochs:
            over = [each for each in self._passes if each.is_over]
            self._mark.update((each.dataset, each.is_shared) for each in over)
            self._passes = [each for each in self._passes if not each.is_over]
        self._passes.append(found)
        return found

    def _is_under_way(self, key: Key) -> bool:
        return any(
            (each.dataset, each.is_shared) == key and each.seen and not each.is_over
            for each in self._passes
        )

    def _recorded(
        self, key: Key, epoch: int | None, *, kind: Kind | None, length: int | None
    ) -> Pass | None:
        """Return the pass of the checkpoint that the script repeats, if any. ``kind``: within
        job.epochs, whose passes repeat in the same order even with new dataset objects; None: the
        passes of the same dataset."""
        for place, each in enumerate(self._replay):
            is_it = (each.dataset, each.is_shared) == key
            if kind is not None and not each.is_outside:
                is_it = (each.kind, each.length) == (kind, length)
            if is_it:
                del self._replay[place]
                if epoch is not None and each.epoch != epoch:
                    raise UsageError(
                        f"the checkpoint was made in pass {each.epoch} over a dataset that the "
                        f"script now begins with pass {epoch}: let job.epochs(n) count, or count "
                        "on from what job.state says"
                    )
                return each
        return None

    def hand_out(self, a_pass: Pass, *, is_training: bool) -> None:
        a_pass.seen += 1
        if is_training:
            self._last = a_pass
            if a_pass not in self._handed_out:
                self._handed_out.append(a_pass)

    def end_iteration(self) -> None:
        for each in self._handed_out:
            each.steps += 1
        self._handed_out.clear()

    @property
    def is_between(self) -> bool:
        """True if the script has received no batch since the last iteration ended."""
        return not self._handed_out

    def may_cut_at(self, a_pass: Pass) -> bool:
        """True if a checkpoint before the next batch of this pass would record the whole epoch."""
        return self.is_between and a_pass in self._passes

    def end(self, a_pass: Pass) -> None:
        a_pass.is_over = True
        # They would keep the loader, and the number of its dataset.
        a_pass.consumed, a_pass.size_of = _unknown, _unknown_size
        if a_pass in self._handed_out and not a_pass.steps:
            self._handed_out.remove(a_pass)

    def start_epoch(self, *, is_resumed: bool) -> None:
        """Begin the script's next epoch, and forget the passes of the last one. ``is_resumed``:
        the checkpoint was made in this epoch."""
        self.has_epochs = True
        self._orders.start_epoch(is_resumed=is_resumed)
        if is_resumed:
            return
        self._mark = self._counter.counts()
        self._passes.clear()
        self._replay.clear()
        self._last = None

    @property
    def newest(self) -> Pass | None:
        """The pass of the last batch for training."""
        return self._last

    @property
    def open_pass(self) -> Pass | None:
        """The pass that trains, if it has more batches."""
        last = self._last
        return last if last is not None and last.steps and not last.is_over else None

    @property
    def is_between_assignments(self) -> bool:
        """True if this worker has received each assignment whole, or no batch of it."""
        coming = [*self._passes, *([] if self._last is None else [self._last])]
        return all(
            each.is_over or each.allocation is None or each.allocation.is_between for each in coming
        )

    @property
    def awaits_pass(self) -> bool:
        """True if the script has not yet reached the pass in which the checkpoint was made."""
        return any(each.is_resume_point for each in (*self._replay, *self._passes))

    # -- checkpoints -----------------------------------------------------------------------------

    def collect(self, *, at: Pass | None) -> dict[str, Any]:
        """Return a tree of plain values. ``at``: training continues with the next batch of this
        pass; None between two epochs."""
        counts = self._counter.counts() if at is None else self._mark
        allocated = [[loader, number] for loader, number in sorted(self.num_allocated.items())]
        return {
            **({"dealt": allocated} if allocated else {}),
            "orders": self._orders.collect(is_between=at is None),
            "counts": [[*key, count] for key, count in sorted(counts.items())],
            "passes": [] if at is None else [_told(each, each is at) for each in self._passes],
        }

    def restore(self, tree: Mapping[str, Any], *, is_moved: bool) -> list[str]:
        """Restore a tree of :meth:`collect`. ``is_moved``: the workers are others, and so are their
        batches. Return one line for each loss."""
        counts = {(index, is_shared): count for index, is_shared, count in tree["counts"]}
        self._mark = Counter(counts)
        self._counter.restore(counts)
        self._orders.restore(tree.get("orders", {}))
        self.num_allocated.update(dict(tree.get("dealt", [])))
        found, lost = [], []
        for told in tree["passes"]:
            kept = {key: told[key] for key in _KEPT if key in told}  # older checkpoints have fewer
            kept["salt"] = tuple(kept.get("salt", ()))
            each = Pass(is_resumed=True, **kept)
            allocation = told.get("dealing")
            is_assigned = allocation is not None and self._is_allocating
            is_anew = is_moved or allocation is not None or (self._is_allocating and each.is_shared)
            if not each.steps and not each.is_resume_point:
                each.seen, each.is_over = 0, False
                if is_assigned:  # keeps its number, which the other workers use for this pass
                    each.allocation = PassAllocation(
                        loader=allocation[0], number=allocation[1], start=each.start
                    )
            elif is_anew and not each.is_over:
                if told["consumed"] is None:
                    lost.append(
                        f"pass {each.epoch} over a dataset without indices begins again: batch "
                        f"{each.seen} of another number of workers cannot be found"
                    )
                each.start, each.seen = told["consumed"] or 0, 0
                if is_assigned:
                    loader, number, assignment = allocation
                    each.allocation = PassAllocation(
                        loader=loader,
                        number=number,
                        assignment=assignment,
                        start=each.start,
                    )
            found.append(each)
        self._replay = found
        return lost


_KEPT = (
    *("dataset", "is_shared", "epoch", "salt", "kind", "is_outside", "length"),
    *("start", "seen", "steps", "is_over", "is_resume_point"),
)


def has_returned_samples(tree: Mapping[str, Any]) -> bool:
    """True if other workers had received samples of a failed worker in this epoch, as psdist did
    until November 2026."""
    spans = (told.get(key) for told in tree["passes"] for key in ("left", "rest"))
    return any(each is not None for each in spans)


def _told(a_pass: Pass, is_resume_point: bool) -> dict[str, Any]:
    plain = {key: getattr(a_pass, key) for key in _KEPT}
    plain["salt"], plain["kind"] = list(a_pass.salt), int(a_pass.kind)
    allocation = a_pass.allocation
    if allocation is not None:
        plain["dealing"] = [allocation.loader, allocation.number, allocation.assignment]
    return {
        **plain,
        "is_resume_point": is_resume_point,
        "consumed": a_pass.consumed(),
    }
