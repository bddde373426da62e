"""Which samples of an epoch are whose, also where workers have died in it: arithmetic, no torch.

A pass over a dataset is a row of joint batches (``sharding``). When workers have died, those who
live cut it at one place for all (psdist.servers.protocol.returns says where), and what nobody has
brought of it by then is dealt to them in joint batches of their number. It may be cut again.

    deals = Deals()
    deals.add(told)                                   # a Return: what all who live were told
    layout = PassLayout([(0, num_samples)], plan_of=..., workers=range(3))
    for cut in deals.cuts(dataset=0, ordinal=2):
        layout.cut(cut)
    layout.num_batches
    layout.part(17, worker=2)                         # positions in the epoch's order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from psdist.protocol.returns import Return
from psdist.workers.data.sharding import BatchPlan

Spans = Sequence[Sequence[int]]
"""Positions in an order of samples, as [first, end) ascending."""

_Mask = npt.NDArray[np.bool_]

_ALL: Final = 2**62


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Of a pass, behind ``at`` of its batches."""

    at: int
    living: tuple[int, ...]
    """To whom the rest is dealt."""
    brought: Mapping[int, int] = field(default_factory=dict)
    """Of those who have died, how many batches they have brought,"""
    others: int = 0
    """and how many of one that is in neither."""


@dataclass(eq=False)
class _Stretch:
    """Joint batches, dealt to the same workers."""

    first: int
    """The number of its first batch in the pass."""
    positions: Sequence[int]
    plan: BatchPlan | None
    """None where too few are left for so many workers."""
    workers: Sequence[int]
    until: int = _ALL
    """Where those who live have gone on with a later one."""
    brought: dict[int, int] = field(default_factory=dict)
    """Of those who have died, up to which batch they have brought theirs."""

    @property
    def end(self) -> int:
        """Behind its last batch, as it was planned."""
        return self.first + (self.plan.num_batches if self.plan is not None else 0)

    def part(self, index: int, worker: int) -> Sequence[int]:
        assert self.plan is not None
        part = self.plan.part(index - self.first, self.workers.index(worker))
        return self.positions[part.start : part.stop]

    def joint(self, first: int, end: int) -> Sequence[int]:
        """The positions of several batches on end."""
        if self.plan is None or first >= end:
            return ()
        begin = self.plan.joint_batch(first - self.first).start
        return self.positions[begin : self.plan.joint_batch(end - 1 - self.first).stop]

    def cut(self, cut: Cut) -> None:
        for worker in self.workers:
            if worker not in cut.living and worker not in self.brought:
                self.brought[worker] = min(cut.brought.get(worker, cut.others), self.until)
        self.until = min(self.until, cut.at)

    def take_brought(self, is_left: _Mask, seen: int) -> None:
        """Take out what was brought of it, when those who live have brought ``seen`` batches."""
        ends = {each: self.brought.get(each, min(self.until, seen)) for each in self.workers}
        by_all = min(self.end, max(self.first, min(ends.values())))
        _take(is_left, self.joint(self.first, by_all))
        for index in range(by_all, min(self.end, max(ends.values()))):
            for worker, end in ends.items():
                if index < end:
                    _take(is_left, self.part(index, worker))


class PassLayout:
    """Of one pass."""

    def __init__(
        self,
        spans: Spans,
        *,
        plan_of: Callable[[int, int], BatchPlan | None],
        workers: Sequence[int],
    ) -> None:
        """``spans``: of the epoch's order what is left, all of it but in a run that goes on from a
        checkpoint; ``plan_of(samples, workers)``: how so many are dealt to so many, None where they
        are too few; ``workers``: to whom."""
        self._spans = [(first, end) for first, end in spans if first < end]
        self._plan_of = plan_of
        positions = _positions(self._spans)
        plan = plan_of(len(positions), len(workers))
        self._stretches = [_Stretch(0, positions, plan, workers)]
        """In the order in which they were dealt: what begins behind a later one is not handed
        out any more."""

    def cut(self, cut: Cut) -> None:
        """What is left behind ``cut.at`` batches is dealt anew."""
        for each in self._stretches:
            each.cut(cut)
        left = cast(Sequence[int], np.flatnonzero(self._left(cut.at)))
        plan = self._plan_of(len(left), len(cut.living))
        self._stretches.append(_Stretch(cut.at, left, plan, cut.living))

    def _left(self, seen: int) -> _Mask:
        """By position, whether nobody has brought it when those who live have brought ``seen``
        batches each."""
        is_left = np.zeros(max((end for _, end in self._spans), default=0), bool)
        for first, end in self._spans:
            is_left[first:end] = True
        for each in self._stretches:
            each.take_brought(is_left, seen)
        return is_left

    @property
    def num_batches(self) -> int:
        return self._stretches[-1].end

    @property
    def is_cut(self) -> bool:
        return len(self._stretches) > 1

    def part(self, index: int, worker: int) -> Sequence[int]:
        """The positions of batch ``index`` that are ``worker``'s."""
        return self._of(index).part(index, worker)

    def nominal(self, index: int) -> float:
        """Samples per worker in a full batch, where batch ``index`` is."""
        plan = self._of(index).plan
        assert plan is not None
        return plan.nominal

    def _of(self, index: int) -> _Stretch:
        return next(each for each in reversed(self._stretches) if each.first <= index)

    def left(self, seen: int) -> list[list[int]]:
        """The spans that nobody has brought when those who live have brought ``seen`` batches."""
        edges = np.flatnonzero(np.diff(self._left(seen), prepend=False, append=False))
        found: list[list[int]] = edges.reshape(-1, 2).tolist()
        return found


def _positions(spans: Spans) -> Sequence[int]:
    if len(spans) == 1:
        return range(*spans[0])
    return cast(Sequence[int], np.concatenate([np.arange(0), *(np.arange(*s) for s in spans)]))


def _take(is_left: _Mask, positions: Sequence[int]) -> None:
    if isinstance(positions, range):
        is_left[positions.start : positions.stop] = False
    elif len(positions):
        is_left[positions] = False


class Deals:
    """How passes are dealt, as far as deaths have changed that."""

    def __init__(self) -> None:
        self._returns: list[Return] = []

    def add(self, told: Return) -> None:
        """All who live were told this, in this order."""
        self._returns.append(told)

    def cuts(self, dataset: int, ordinal: int) -> Iterator[Cut]:
        """Of the pass over this dataset before which there were ``ordinal`` ones."""
        for told in self._returns:
            if dataset != told.dataset:
                if dataset >= len(told.counts) or ordinal >= told.counts[dataset]:
                    yield Cut(at=0, living=told.living)
            elif ordinal == told.ordinal:
                # Of whose death nothing had followed before, nothing follows in this pass.
                yield Cut(at=told.at, living=told.living, brought=dict(told.brought), others=_ALL)
            elif ordinal > told.ordinal:
                # Who has died may have been passes ahead of all who live.
                before = (ordinal - told.ordinal) * (told.num_batches or _ALL)
                brought = {worker: max(0, count - before) for worker, count in told.brought}
                yield Cut(at=0, living=told.living, brought=brought)
