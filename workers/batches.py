"""Which batches an iteration has used, and what it weighs: events in, weights out; no torch.

A batch is used by a forward pass, and counts where backward follows. Loops may fetch ahead of the
forward pass, skip batches, or evaluate in between, so a pass is attributed to a batch by, in this
order:

1. a storage that the pass has in common with a batch, also one of an earlier iteration;
2. the number of samples, where it fits the outstanding batches of exactly one weight;
3. first handed out, first used.

Where 2 and 3 disagree and the number of samples has not fitted in every earlier pass, the iteration
that counts such a pass ends in an error. Outstanding batches of equal weight never do.

    batches = Batches()
    batches.hand_out(8, 16.0, source=loader, storages=refs)
    batches.use(8, storages=refs)             # a forward pass
    confirm = batches.await_backward()        # counts when confirm() is called
    batches.weight                            # 0.5: half of a full batch
    batches.end_forwards()                    # the step
    batches.end_iteration()
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from psdist.errors import UsageError

MAX_OUTSTANDING: Final = 65_536
"""Per loader. Beyond it the oldest is forgotten: batches that no forward pass ever uses."""
_MAX_OPEN: Final = 64
"""Forward passes without backward that an iteration falls back on where no pass has had one."""
_MIN_PURGED: Final = 256


class Storage(Hashable, Protocol):
    """A tensor's storage. While it is kept, no later storage is equal to it, whatever its address
    (``torch.multiprocessing.reductions.StorageWeakRef``)."""

    def expired(self) -> bool: ...


@dataclass(eq=False, slots=True)
class _Batch:
    samples: int
    nominal: float
    source: Hashable
    number: int
    """In the order in which batches were handed out."""
    iteration: int
    """In which it was."""

    @property
    def weight(self) -> float:
        return self.samples / self.nominal if self.nominal else 1.0


@dataclass(eq=False, slots=True)
class _Forward:
    batches: Sequence[_Batch]
    samples: int
    is_sure: bool


class _Known:
    """Batches by the storages of their tensors, until these are freed."""

    def __init__(self) -> None:
        self._batches: dict[Storage, _Batch | None] = {}
        """None: batches of different weight have had the storage, so it identifies none."""
        self._limit = _MIN_PURGED

    def add(self, storages: Iterable[Storage], batch: _Batch) -> None:
        for storage in storages:
            before = self._batches.get(storage, batch)
            is_one = before is not None and before.weight == batch.weight
            self._batches[storage] = batch if is_one else None
        if len(self._batches) > self._limit:
            self._batches = {key: its for key, its in self._batches.items() if not key.expired()}
            self._limit = max(_MIN_PURGED, 2 * len(self._batches))

    def find(self, storages: Iterable[Storage]) -> list[_Batch]:
        found = (self._batches.get(each) for each in storages)
        return [*dict.fromkeys(each for each in found if each is not None)]

    def __len__(self) -> int:
        return len(self._batches)


class _Queue:
    """Outstanding batches of one loader, the oldest first."""

    def __init__(self) -> None:
        self._batches: dict[_Batch, None] = {}
        self.sizes = Counter[tuple[int, float]]()
        """Number of batches by (samples, samples of a full batch)."""
        self.samples = 0

    def add(self, batch: _Batch) -> None:
        if len(self._batches) == MAX_OUTSTANDING:
            self.remove(self.first)
        self._batches[batch] = None
        self.sizes[batch.samples, batch.nominal] += 1
        self.samples += batch.samples

    def remove(self, batch: _Batch) -> None:
        if batch not in self._batches:
            return
        del self._batches[batch]
        self.samples -= batch.samples
        key = batch.samples, batch.nominal
        self.sizes[key] -= 1
        if not self.sizes[key]:
            del self.sizes[key]

    @property
    def first(self) -> _Batch:
        return next(iter(self._batches))

    def __iter__(self) -> Iterator[_Batch]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class Batches:
    def __init__(self) -> None:
        self.samples = 0
        """Samples of finished iterations."""
        self._known = _Known()
        self._queues: dict[Hashable, _Queue] = {}
        """Outstanding batches by loader."""
        self._num_handed_out = 0
        self._iteration = 0
        self._spent: dict[Hashable, _Batch] = {}
        """By loader, the batch that this iteration has used last, until the next is handed out:
        further forward passes are of the same one."""
        self._has_fitted: bool | None = None
        """True if every pass had the samples of its batch; None before the first."""
        self._undecided: _Forward | None = None
        """The last pass, until it is known whether its backward can be seen."""
        self._open: deque[_Forward] = deque(maxlen=_MAX_OPEN)
        """Passes of this iteration whose backward has not come."""
        self._counted: dict[_Batch, None] = {}
        """Batches of forward passes that a backward pass has followed."""
        self._dropped: dict[_Batch, None] = {}
        """Batches of such passes whose gradients the script has dropped, or keeps elsewhere."""
        self._own_samples = 0
        """Samples of such passes, where the script has batches of its own."""
        self._has_counted = False
        self._is_sure = True
        self._unseen_before: Sequence[_Batch] = ()
        """Batches of the last iteration without a pass that was seen."""
        self._num_unseen: int | None = None
        """As many batches were handed out for the first such iteration."""

    # -- events --------------------------------------------------------------------------------

    def hand_out(
        self,
        num_samples: int,
        nominal: float,
        *,
        source: Hashable = None,
        storages: Iterable[Storage] = (),
    ) -> None:
        """``nominal``: samples of a full batch; ``source``: the loader."""
        number, self._num_handed_out = self._num_handed_out, self._num_handed_out + 1
        batch = _Batch(num_samples, nominal, source, number, self._iteration)
        self._known.add(storages, batch)
        self._queues.setdefault(source, _Queue()).add(batch)
        self._spent.pop(source, None)

    def use(self, num_samples: int, storages: Iterable[Storage] = ()) -> None:
        """Note a forward pass of ``num_samples`` by its first input (0: unknown). It counts at once
        unless :meth:`await_backward` follows."""
        self._decide()
        batches, is_sure = self._known.find(storages), True
        if not batches:
            batches, is_sure = self._guess(num_samples)
        self._take(batches)
        self._undecided = _Forward(batches, num_samples, is_sure)

    def await_backward(self) -> Callable[..., None] | None:
        """Let the last pass count at its backward only: return what is to be called then, or None
        where the pass counts already."""
        forward, self._undecided = self._undecided, None
        if forward is None:
            return None
        self._open.append(forward)

        def confirm(*_gradients: object) -> None:
            self._count(forward)

        return confirm

    def drop(self) -> None:
        """Forget the last pass, which has failed."""
        self._undecided = None

    @property
    def has_counted(self) -> bool:
        """True if the backward of a pass of this iteration has come."""
        return bool(self._counted)

    def drop_gradients(self) -> None:
        """Forget the batches that have counted: no gradient is left of their backward passes."""
        self._dropped.update(self._counted)
        self._counted.clear()
        self._own_samples = 0

    def end_forwards(self) -> None:
        """Begin the step. Raises :class:`UsageError` where it is unknown which batches it used."""
        self._decide()
        self._require_sure_drops()
        if not self._is_used:
            batches = self._handed_out_now()
            self._require_rhythm(batches)
            self._take(batches)
            self._count(_Forward(batches, 0, is_sure=True))
        elif not (self._is_sure if self._has_counted else all(e.is_sure for e in self._open)):
            raise UsageError(
                "optimizer.step: it is unknown which of several batches the forward pass used, and "
                "they weigh differently. Leave out short batches (drop_last=True), or pass the "
                "loader's tensors, or views of them, to the model"
            )

    def end_iteration(self) -> None:
        used = self._used()
        own = self._own_samples if self._has_counted else sum(each.samples for each in self._open)
        self.samples += sum(each.samples for each in used) if self._num_handed_out else own
        self._iteration += 1
        self._undecided = None
        self._open.clear()
        self._counted.clear()
        self._dropped.clear()
        self._spent.clear()
        self._own_samples = 0
        self._has_counted, self._is_sure = False, True

    # -- weights -------------------------------------------------------------------------------

    @property
    def weight(self) -> float:
        """The weight of the iteration, in full batches of one worker, if it ended now."""
        self._decide()
        used = self._used() if self._is_used else self._handed_out_now()
        return _weight(used)

    @property
    def num_kept(self) -> int:
        """Batches and storages that are remembered."""
        return len(self._known) + sum(map(len, self._queues.values()))

    @property
    def _is_used(self) -> bool:
        """True if a forward pass of this iteration was seen."""
        return self._has_counted or bool(self._open)

    def _used(self) -> Sequence[_Batch]:
        if self._has_counted:
            return list(self._counted)
        # Gradients that no backward of a pass has made (assigned by the script): of all passes.
        return list(dict.fromkeys(batch for each in self._open for batch in each.batches))

    def _decide(self) -> None:
        """The backward of the last pass cannot be seen: it counts."""
        forward, self._undecided = self._undecided, None
        if forward is not None:
            self._count(forward)

    def _count(self, forward: _Forward) -> None:
        if forward in self._open:
            self._open.remove(forward)
        self._counted.update(dict.fromkeys(forward.batches))
        self._own_samples += forward.samples
        self._has_counted = True
        self._is_sure &= forward.is_sure

    def _require_sure_drops(self) -> None:
        """Raises :class:`UsageError` if the weight depends on whether the script has dropped
        gradients or adds them itself (gradient surgery)."""
        everything = list(self._dropped | self._counted)
        if self._dropped and _weight(everything) != _weight(list(self._counted)):
            raise UsageError(
                "optimizer.step: an earlier backward pass of this iteration has left no gradient "
                "(zero_grad() without a step), and its batch has another weight than the batch of "
                "the step. Leave out short batches (drop_last=True), or skip a batch before "
                "backward()"
            )

    # -- attribution ---------------------------------------------------------------------------

    def _take(self, batches: Sequence[_Batch]) -> None:
        """These are not outstanding any more."""
        for batch in batches:
            self._spent[batch.source] = batch
            queue = self._queues.get(batch.source)
            if queue is not None:
                queue.remove(batch)
                if not queue:
                    del self._queues[batch.source]

    def _guess(self, num_samples: int) -> tuple[list[_Batch], bool]:
        """The batches of a pass that has no storage in common with any; False: others of another
        weight are as likely."""
        used = list(self._spent.values())
        queues = [its for source, its in self._queues.items() if source not in self._spent]
        if not queues:
            return used, True
        heads = [queue.first for queue in queues]
        if joined := self._joined(num_samples, heads, queues):
            return joined, True
        first = _oldest(heads)
        assert first is not None
        sizes = {size for queue in queues for size in queue.sizes}
        fitting = {size for size in sizes if size[0] == num_samples}
        weights = {samples / nominal for samples, nominal in sizes}
        fits = first if first.samples == num_samples else _first_of(fitting, queues)
        if len(weights) == 1:
            if fits is None and used and self._has_fitted:
                return used, True  # another pass over the same batch, not one fetched ahead
            self._note_fit(num_samples, fits is not None)
            return [fits or first], True
        if fits is None or len({samples / nominal for samples, nominal in fitting}) > 1:
            return (used if used and self._has_fitted else [first]), True
        is_sure = fits.weight == first.weight or bool(self._has_fitted)
        return [fits if is_sure else first], is_sure

    def _joined(
        self, num_samples: int, heads: list[_Batch], queues: Sequence[_Queue]
    ) -> list[_Batch]:
        """Return the batches that the script has joined for the pass (the next of each loader, or
        all), or none."""
        if self._has_fitted is False or not num_samples:
            return []
        if len(heads) > 1 and sum(each.samples for each in heads) == num_samples:
            return heads
        num_outstanding = sum(map(len, queues))
        if num_outstanding > 1 and sum(each.samples for each in queues) == num_samples:
            return [batch for queue in queues for batch in queue]
        return []

    def _note_fit(self, num_samples: int, has_fitted: bool) -> None:
        if num_samples:
            self._has_fitted = has_fitted and self._has_fitted is not False

    def _handed_out_now(self) -> list[_Batch]:
        """For this iteration, and outstanding."""
        return [
            batch
            for queue in self._queues.values()
            for batch in queue
            if batch.iteration == self._iteration
        ]

    def _require_rhythm(self, batches: Sequence[_Batch]) -> None:
        """Raises :class:`UsageError` where an iteration without a pass that was seen may have used
        other batches than those that were handed out for it."""
        before, self._unseen_before = self._unseen_before, batches
        if self._num_unseen is None:
            self._num_unseen = len(batches)
        weights = {each.weight for each in (*before, *batches)}
        if len(batches) != self._num_unseen and len(weights) > 1:
            raise UsageError(
                f"optimizer.step: {len(batches)} batches were handed out for this iteration, "
                f"{self._num_unseen} for an earlier one, they weigh differently, and the prepared "
                "model was not called, so it is unknown which of them were used. Call the model "
                "that job.prepare returned, or leave out short batches (drop_last=True)"
            )


def _weight(batches: Sequence[_Batch]) -> float:
    nominal = sum(each.nominal for each in batches)
    return sum(each.samples for each in batches) / nominal if nominal else 1.0


def _first_of(sizes: set[tuple[int, float]], queues: Iterable[_Queue]) -> _Batch | None:
    """Return the batch of one of these sizes that was handed out first."""
    found = (
        next(batch for batch in queue if (batch.samples, batch.nominal) in sizes)
        for queue in queues
        if not sizes.isdisjoint(queue.sizes)
    )
    return _oldest(found)


def _oldest(batches: Iterable[_Batch]) -> _Batch | None:
    # Not min(key=...): torch.compile traces this where it traces the model's hooks, and warns.
    oldest: _Batch | None = None
    for each in batches:
        if oldest is None or each.number < oldest.number:
            oldest = each
    return oldest
