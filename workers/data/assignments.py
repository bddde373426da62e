"""A pass shared out by the speed of groups: each gets one batch per local step.

An *assignment* is the data of one round: the next stretch of the epoch's order, in which each
worker has a part. Every sample is in one assignment, and every group has a part of every
assignment. So no group ends a pass before the others. The batches of each group are fixed for one
*allocation window* at a time (:class:`psdist.controller.steps.Term`), the same on all workers.

    found = assign(0, 1000, steps=(2, 6), sizes=(1, 1), batch_size=8, drop_last=False)
    found.positions                              # range(0, 64)
    found.batches(group=1, place=0)              # range(16, 24), range(24, 32), ...
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from typing import Any

from psdist.controller.steps import Term, window_of
from psdist.errors import UsageError
from psdist.workers.data.processes import seeded_batches
from psdist.workers.data.seen import Pass, PassAllocation, nested_pass
from psdist.workers.data.sharding import BatchPlan


@dataclass(frozen=True, kw_only=True)
class Assignment:
    positions: range
    """Positions in the epoch's order."""
    steps: tuple[int, ...]
    """[groups]: batches of each worker of the group."""
    sizes: tuple[int, ...]
    """[groups]: workers."""
    is_last: bool
    """True if the pass ends with it."""

    def batches(self, *, group: int, place: int) -> list[range]:
        """Return the batches of one worker, in order. The sizes of all batches of an assignment
        differ by at most one."""
        mine = self.steps[group]
        first = sum(map(mul, self.steps[:group], self.sizes)) + place * mine
        whole, num_parts = self.positions, sum(map(mul, self.steps, self.sizes))
        cuts = [len(whole) * (first + each) // num_parts for each in range(mine + 1)]
        return [whole[start:stop] for start, stop in pairwise(cuts)]


def assign(
    start: int,
    num_samples: int,
    *,
    steps: Sequence[int],
    sizes: Sequence[int],
    batch_size: int,
    drop_last: bool,
) -> Assignment | None:
    """Return the assignment from ``start`` in an order of ``num_samples``; None if too few samples
    remain for a batch of every worker.

    All assignments except the last one have full batches and all ``steps``. The last one has the
    fewest batches that hold the rest, in proportion to ``steps``, at least one for each worker; a
    rest with fewer samples than workers joins the assignment before. With ``drop_last`` the last
    one has full batches only, and a rest below a batch of every worker is dropped.
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
    return Assignment(
        positions=range(start, stop), steps=taken, sizes=tuple(sizes), is_last=is_last
    )


def _spread(paces: Sequence[float], sizes: Sequence[int], total: int) -> tuple[int, ...]:
    """Return the steps of each group, at least one each and at least ``total`` together, that
    minimise the largest product of steps and pace.

    ``paces``: [groups], time of a step, > 0; ``sizes``: [groups], weight of a step.
    """
    # A lower bound of that product: each step below it belongs to the answer.
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
    """Return the batches of each group, in proportion to ``steps``: ``wanted`` together, and never
    more than ``at_most``, at least one for each worker."""
    paces = [1 / each for each in steps]
    taken = list(_spread(paces, sizes, wanted))
    while sum(map(mul, taken, sizes)) > at_most:
        ends = (n * pace if n > 1 else 0.0 for n, pace in zip(taken, paces, strict=True))
        last = max(enumerate(ends), key=lambda each: each[1])[0]
        taken[last] -= 1
    return tuple(taken)


@dataclass(frozen=True, kw_only=True)
class AssignedPart:
    """This worker's part of an assignment, reported with its last batch."""

    loader: int
    number: int
    """Number of the pass over this loader."""
    hand: int
    """Number of the assignment in the pass, under its older name in histories."""
    start: int
    stop: int
    """End of its positions in the epoch's order, which begin at ``start``."""
    batches: int
    end: int
    """End of the pass in the epoch's order; -1 except in the last assignment."""
    left: int
    """Samples that are dropped after that."""
    may_leave: int
    """Maximum samples that may be dropped: 0 without ``drop_last``."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """How passes are shared out by speed, and the observer of the assignments."""

    sizes: tuple[int, ...]
    """[groups]: workers."""
    group: int
    place: int
    """Place in the group."""
    steps_of: Callable[[Term], Sequence[int]]
    """Return the local steps of a window, [groups]. Called once for each window."""
    on_batch: Callable[[AssignedPart | None], None]
    """Called before each batch, with the whole part before its last batch."""


@dataclass(kw_only=True, eq=False)
class AssignedBatches:
    """As :class:`psdist.workers.data.loader.PlannedBatches`, by assignments. The batches of a pass
    are counted at its end."""

    dataset: Any
    loader: int
    allocation: Allocation
    num_allocated: Counter[int]
    """Loader -> passes so far. This object counts its own."""
    batch_size: int
    drop_last: bool
    shuffle: bool
    seed: int
    worker: int

    def __post_init__(self) -> None:
        self._pass = Pass(epoch=0)
        self._at = PassAllocation(loader=self.loader, number=0)
        self._known: dict[int, Sequence[int]] = {}
        """Window of this pass -> local steps, from the window of the next batch on."""

    def start_pass(self, a_pass: Pass) -> None:
        assert not a_pass.seen  # a resumed pass starts after the batches that all had used
        self.require_joint_batches()
        if a_pass.allocation is None:
            number = self.num_allocated[self.loader]
            self.num_allocated[self.loader] += 1
            a_pass.allocation = PassAllocation(
                loader=self.loader, number=number, start=a_pass.start
            )
        self._pass, self._at, self._known = a_pass, a_pass.allocation, {}

    def require_joint_batches(self) -> None:
        """Raises UsageError if the dataset has too few samples for the workers."""
        BatchPlan(
            num_samples=len(self.dataset),
            batch_size=self.batch_size,
            num_workers=sum(self.allocation.sizes),
            drop_last=self.drop_last,
        )

    def has_any(self) -> bool:
        of_worker = self.batch_size if self.drop_last else 1
        return len(self.dataset) - self._at.start >= of_worker * sum(self.allocation.sizes)

    def consumed(self, a_pass: Pass) -> int | None:
        """Known between two assignments, if all groups are in the same one."""
        at = a_pass.allocation
        return at.start if at is not None and at.is_between else None

    def size_of(self, a_pass: Pass, worker: int) -> int:  # noqa: ARG002 - needs max_deaths = 0
        return 0

    def _coming(
        self,
        at: PassAllocation,
        number: int,
        start: int,
        known: dict[int, Sequence[int]],
        *,
        is_handing_out: bool,
    ) -> Iterator[tuple[int, Assignment]]:
        """The assignments from ``number`` on, whose first one begins at ``start``."""
        num_samples = len(self.dataset)
        while True:
            window = window_of(number)
            if window not in known:
                known[window] = self.allocation.steps_of(Term(at.loader, at.number, window))
            found = assign(
                start,
                num_samples,
                steps=known[window],
                sizes=self.allocation.sizes,
                batch_size=self.batch_size,
                drop_last=self.drop_last,
            )
            assert found is not None  # the one before was the last
            yield number, found
            if found.is_last:
                return
            start = found.positions.stop
            number += 1
            if is_handing_out and window_of(number) != window:
                del known[window]

    def _mine(self, assignment: Assignment) -> list[range]:
        return assignment.batches(group=self.allocation.group, place=self.allocation.place)

    def sizes(self) -> Iterator[tuple[int, float]]:
        at = self._at
        coming = self._coming(at, at.assignment, at.start, self._known, is_handing_out=True)
        return self._hand_out(self._pass, at, coming)

    def _hand_out(
        self, a_pass: Pass, at: PassAllocation, coming: Iterator[tuple[int, Assignment]]
    ) -> Iterator[tuple[int, float]]:
        num_samples = len(self.dataset)
        for number, assignment in coming:
            if self._pass is not a_pass:
                raise nested_pass()
            mine = self._mine(assignment)
            for part in mine[:-1]:
                at.is_between = False
                self.allocation.on_batch(None)
                yield len(part), self.batch_size
            assigned = AssignedPart(
                loader=at.loader,
                number=at.number,
                hand=number,
                start=mine[0].start,
                stop=mine[-1].stop,
                batches=len(mine),
                end=assignment.positions.stop if assignment.is_last else -1,
                left=num_samples - assignment.positions.stop if assignment.is_last else 0,
                may_leave=self.drop_last * (self.batch_size * sum(assignment.sizes) - 1),
            )
            at.assignment, at.start, at.is_between = number + 1, assignment.positions.stop, True
            if assignment.is_last:
                a_pass.num_batches = a_pass.seen + 1
            self.allocation.on_batch(assigned)
            yield len(mine[-1]), self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        at = self._at
        coming = self._coming(at, at.assignment, at.start, self._known, is_handing_out=False)
        return seeded_batches(
            (part for _, each in coming for part in self._mine(each)),
            num_samples=len(self.dataset),
            shuffle=self.shuffle,
            seed=self._pass.seed_of(self.seed),
            epoch=self._pass.epoch,
            worker=self.worker,
        )

    def __len__(self) -> int:
        raise TypeError(
            "how many batches a worker gets of a pass follows from the speed of its group "
            "(local.steps_by = speed): loop over the loader, and count by epochs or by samples"
        )


def refuse_allocation(assign_batches: Callable[..., AssignedBatches] | None, what: str) -> None:
    """Raise UsageError with ``steps_by = speed``: ``what`` gives all workers equal parts."""
    if assign_batches is not None:
        raise UsageError(
            f"local.steps_by = speed: {what} gives all workers as many samples, and groups of "
            "different speed would come to the end at different times; use job.loader, or "
            "local.steps_by = count"
        )
