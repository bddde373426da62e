"""A pass dealt to groups of different speed: each gets as many batches as it makes local steps.

A *hand* is what all workers get for one round: of the epoch's order the next stretch, of which each
worker's part is one stretch, too. Every sample is in one hand, and every group has a part of every
hand, so that fast groups neither run out nor wait for slow ones at the end of a pass. How many
batches each group gets in a hand is asked term by term (:class:`psdist.controller.steps.Term`), and
all workers get the same answer.

    hand = deal(0, 1000, steps=(2, 6), sizes=(1, 1), batch_size=8, drop_last=False)
    hand.positions                                  # range(0, 64)
    hand.batches(group=1, place=0)              # range(16, 24), range(24, 32), ...
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from typing import Any

from psdist.controller.steps import Term, block_of
from psdist.errors import UsageError
from psdist.workers.data.processes import SeededIndices
from psdist.workers.data.seen import Pass, PassDealing, nested_pass
from psdist.workers.data.sharding import BatchPlan, epoch_order


@dataclass(frozen=True, kw_only=True)
class Hand:
    positions: range
    """Of the epoch's order."""
    steps: tuple[int, ...]
    """[groups]: batches of each of a group's workers."""
    sizes: tuple[int, ...]
    """[groups]: workers."""
    is_last: bool
    """Whether the pass ends with it."""

    def batches(self, *, group: int, place: int) -> list[range]:
        """Of the worker at this place of this group, in order; their sizes differ by one at most
        from those of all others."""
        mine = self.steps[group]
        first = sum(map(mul, self.steps[:group], self.sizes)) + place * mine
        whole, num_parts = self.positions, sum(map(mul, self.steps, self.sizes))
        cuts = [len(whole) * (first + each) // num_parts for each in range(mine + 1)]
        return [whole[start:stop] for start, stop in pairwise(cuts)]


def deal(
    start: int,
    num_samples: int,
    *,
    steps: Sequence[int],
    sizes: Sequence[int],
    batch_size: int,
    drop_last: bool,
) -> Hand | None:
    """The hand that begins at ``start`` of an order of ``num_samples``; None where nothing is left
    for a batch of every worker.

    Full batches and all ``steps``, but for the last hand. That has the fewest batches that hold
    what is left, shared out in proportion to ``steps``, one at least for each worker; fewer samples
    than workers join the hand before. With ``drop_last`` it has as many full batches as there are,
    and what is left then, less than a batch of every worker, is left out.
    """
    left, num_workers = num_samples - start, sum(sizes)
    full = batch_size * sum(map(mul, steps, sizes))
    least = num_workers * (batch_size if drop_last else 1)
    if left < least:
        return None
    taken = tuple(steps)
    if left < full:
        of_batch = batch_size if drop_last else 1
        taken = _fewer(steps, sizes, wanted=-(-left // batch_size), at_most=left // of_batch)
    is_last = left - full < least
    count = min(full, batch_size * sum(map(mul, taken, sizes)))
    stop = num_samples if is_last and not drop_last else start + count
    return Hand(positions=range(start, stop), steps=taken, sizes=tuple(sizes), is_last=is_last)


def _spread(paces: Sequence[float], sizes: Sequence[int], total: int) -> tuple[int, ...]:
    """Steps of each group, one at least, ``total`` at least together, so that the largest product
    of steps and pace is the least there is.

    ``paces``: [groups], what a step takes, > 0; ``sizes``: [groups], what a step counts for.
    """
    # With no less than this the last group comes; each step below it belongs to the answer.
    least = total / sum(size / pace for size, pace in zip(sizes, paces, strict=True))
    steps = [max(1, int(least / pace)) for pace in paces]
    missing = total - sum(map(mul, steps, sizes))
    ends = [
        ((n + 1) * pace, group) for group, (n, pace) in enumerate(zip(steps, paces, strict=True))
    ]
    heapq.heapify(ends)
    while missing > 0:
        _, group = ends[0]
        steps[group] += 1
        missing -= sizes[group]
        heapq.heapreplace(ends, ((steps[group] + 1) * paces[group], group))
    return tuple(steps)


def _fewer(
    steps: Sequence[int], sizes: Sequence[int], *, wanted: int, at_most: int
) -> tuple[int, ...]:
    """As many batches as ``wanted`` and no more than ``at_most``, in the proportion of ``steps``,
    one at least for each worker."""
    paces = [1 / each for each in steps]
    taken = list(_spread(paces, sizes, wanted))
    while sum(map(mul, taken, sizes)) > at_most:
        ends = (n * pace if n > 1 else 0.0 for n, pace in zip(taken, paces, strict=True))
        last = max(enumerate(ends), key=lambda each: each[1])[0]
        taken[last] -= 1
    return tuple(taken)


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """This worker's part of a hand of a pass, of which it gets the last batch now."""

    loader: int
    number: int
    """Of the pass over this loader."""
    hand: int
    start: int
    stop: int
    """Of the epoch's order."""
    batches: int
    end: int
    """Where the pass ends in the epoch's order; -1 but in the last hand."""
    left: int
    """Samples that are left out behind that,"""
    may_leave: int
    """and as many at most: none without ``drop_last``."""


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """How passes are dealt, and who hears of it."""

    sizes: tuple[int, ...]
    """[groups]: workers."""
    group: int
    place: int
    """In the group."""
    steps_of: Callable[[Term], Sequence[int]]
    """[groups], of a term of this loader of which nobody has asked here before."""
    on_batch: Callable[[Dealt | None], None]
    """A batch is about to be handed out; the last one of a hand is told by what that was."""


class HandBatches:
    """As :class:`psdist.workers.data.loader.PlannedBatches`, dealt by hands. How many batches a
    pass has is known when it is over."""

    def __init__(
        self,
        dataset: Any,
        *,
        loader: int,
        dealing: Dealing,
        num_dealt: Counter[int],
        batch_size: int,
        drop_last: bool,
        shuffle: bool,
        seed: int,
        worker: int,
    ) -> None:
        """``num_dealt``: passes so far, by loader; that of this one is counted here."""
        self._dataset = dataset
        self._loader = loader
        self._dealing = dealing
        self._num_dealt = num_dealt
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._shuffle = shuffle
        self._seed = seed
        self._worker = worker
        self._pass = Pass(epoch=0)
        self._at = PassDealing(loader=loader, number=0)
        self._known: dict[int, Sequence[int]] = {}
        """Steps by block of this pass, from that on whose batches are being handed out."""

    def start_pass(self, a_pass: Pass) -> None:
        assert not a_pass.seen  # a pass that goes on begins behind what all had seen
        self.require_joint_batches()
        if a_pass.dealing is None:
            number = self._num_dealt[self._loader]
            self._num_dealt[self._loader] += 1
            a_pass.dealing = PassDealing(loader=self._loader, number=number, start=a_pass.start)
        self._pass, self._at, self._known = a_pass, a_pass.dealing, {}

    def require_joint_batches(self) -> None:
        """Raises UsageError for a dataset of which not every worker gets a batch."""
        BatchPlan(
            num_samples=len(self._dataset),
            batch_size=self._batch_size,
            num_workers=sum(self._dealing.sizes),
            drop_last=self._drop_last,
        )

    def has_any(self) -> bool:
        of_worker = self._batch_size if self._drop_last else 1
        return len(self._dataset) - self._at.start >= of_worker * sum(self._dealing.sizes)

    def consumed(self, a_pass: Pass) -> int | None:
        """Between two hands, where all groups are in the same one."""
        at = a_pass.dealing
        return at.start if at is not None and at.is_between else None

    def size_of(self, a_pass: Pass, worker: int) -> int:  # noqa: ARG002 - needs max_deaths = 0
        return 0

    def _steps(self, term: Term, known: dict[int, Sequence[int]]) -> Sequence[int]:
        if term.block not in known:
            known[term.block] = self._dealing.steps_of(term)
        return known[term.block]

    def _hands(
        self,
        at: PassDealing,
        hand: int,
        start: int,
        known: dict[int, Sequence[int]],
        *,
        is_handing_out: bool,
    ) -> Iterator[tuple[int, Hand]]:
        """From this hand on, which begins at ``start``."""
        num_samples = len(self._dataset)
        while True:
            found = deal(
                start,
                num_samples,
                steps=self._steps(Term(at.loader, at.number, block_of(hand)), known),
                sizes=self._dealing.sizes,
                batch_size=self._batch_size,
                drop_last=self._drop_last,
            )
            assert found is not None  # the one before was the last
            yield hand, found
            if found.is_last:
                return
            start = found.positions.stop
            hand += 1
            if is_handing_out and block_of(hand) != block_of(hand - 1):
                del known[block_of(hand - 1)]

    def _mine(self, hand: Hand) -> list[range]:
        return hand.batches(group=self._dealing.group, place=self._dealing.place)

    def sizes(self) -> Iterator[tuple[int, float]]:
        at = self._at
        coming = self._hands(at, at.hand, at.start, self._known, is_handing_out=True)
        return self._hand_out(self._pass, at, coming)

    def _hand_out(
        self, a_pass: Pass, at: PassDealing, coming: Iterator[tuple[int, Hand]]
    ) -> Iterator[tuple[int, float]]:
        num_samples = len(self._dataset)
        for index, hand in coming:
            if self._pass is not a_pass:
                raise nested_pass()
            mine = self._mine(hand)
            for part in mine[:-1]:
                at.is_between = False
                self._dealing.on_batch(None)
                yield len(part), self._batch_size
            dealt = Dealt(
                loader=at.loader,
                number=at.number,
                hand=index,
                start=mine[0].start,
                stop=mine[-1].stop,
                batches=len(mine),
                end=hand.positions.stop if hand.is_last else -1,
                left=num_samples - hand.positions.stop if hand.is_last else 0,
                may_leave=self._drop_last * (self._batch_size * sum(hand.sizes) - 1),
            )
            at.hand, at.start, at.is_between = index + 1, hand.positions.stop, True
            if hand.is_last:
                a_pass.num_batches = a_pass.seen + 1
            self._dealing.on_batch(dealt)
            yield len(mine[-1]), self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(
            num_samples=len(self._dataset),
            shuffle=self._shuffle,
            seed=self._pass.seed_of(self._seed),
            epoch=self._pass.epoch,
        )
        keys = self._pass.seed_of(self._seed), self._pass.epoch, self._worker
        at = self._at
        return (
            SeededIndices(map(int, order[part.start : part.stop]), (*keys, part.start))
            for _, hand in self._hands(at, at.hand, at.start, self._known, is_handing_out=False)
            for part in self._mine(hand)
        )

    def __len__(self) -> int:
        raise TypeError(
            "how many batches a worker gets of a pass follows from the speed of its group "
            "(local.steps_by = speed): loop over the loader, and count by epochs or by samples"
        )


def refuse_dealing(deal: Callable[..., HandBatches] | None, what: str) -> None:
    """``what`` shares samples out in equal parts. Raises UsageError with ``steps_by = speed``."""
    if deal is not None:
        raise UsageError(
            f"local.steps_by = speed: {what} gives all workers as many samples, and groups of "
            "different speed would come to the end at different times; use job.loader, or "
            "local.steps_by = count"
        )
