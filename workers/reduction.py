"""The group's gradient of an iteration: its weighted mean, of each worker's slice on that worker.

reduction = Reduction(partition, flat, group, steps, slices=slices, overlap=None)
reduced = yield from reduction.run(table, mine, clock=7)       # the gradients are collected
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from psdist.errors import GroupReformedError
from psdist.protocol.partition import Partition
from psdist.workers.early.group_overlap import GroupOverlap
from psdist.workers.group.channel import GroupChannel
from psdist.workers.loop import Wait
from psdist.workers.model.flat import FlatModel
from psdist.workers.step_table import Row, StepTable, in_group, max_norm_of


@dataclass(slots=True, kw_only=True)
class Reduced:
    """An iteration between the reduction in the group and the push."""

    weight: float
    """This worker's."""
    group_weight: float
    """What is pushed weighs so much."""
    hyper: bytes
    absent: frozenset[int]
    """Pieces of which no worker of the group has a gradient."""
    is_skipped: bool = False
    """Whether nothing of the group's gradients counts."""
    norm: float = math.nan
    """Of the group's gradient before it was clipped, where it was."""
    problem: str = ""
    """Why nothing may be pushed, if ``on_nonfinite`` is an error."""


class Reduction:
    def __init__(
        self,
        partition: Partition,
        flat: FlatModel,
        group: GroupChannel,
        steps: StepTable,
        *,
        slices: Sequence[Sequence[int]],
        overlap: GroupOverlap | None,
    ) -> None:
        """``slices``: the chunks of each worker of the group, ascending; ``overlap``: where parts
        may have been reduced during backward."""
        self._partition = partition
        self._flat = flat
        self._group = group
        self._steps = steps
        self._overlap = overlap
        self.take_slices(slices)

    def take_slices(self, slices: Sequence[Sequence[int]]) -> None:
        """From now on these are the chunks of each worker."""
        self._mine = slices[self._group.place]
        self._spans = [self._partition.spans(chunks) for chunks in slices]

    def run(self, table: Sequence[Row], mine: Row, *, clock: int) -> Generator[Wait, None, Reduced]:
        """This worker's slice of the gradients becomes the group's weighted mean, clipped where
        that is asked for. ``table``: what all bring."""
        is_finite = all(row.is_finite for row in table)
        has_left = False
        if self._overlap is not None:
            self._overlap.watch_group(table)
            if is_finite:
                yield from self._overlap.catch_up(table)
                has_left = self._overlap.has_left
        hyper = mine.hyper  # where gradients have left, the group has compared it before
        if not has_left:
            hyper = yield from self._steps.hyperparameters(table, mine.hyper, clock=clock)
        total = sum(row.weight for row in table)
        is_usable = is_finite and not any(row.is_skipped for row in table)
        reduced = Reduced(
            weight=mine.weight,
            group_weight=total if is_usable else 0.0,
            hyper=hyper,
            absent=frozenset.intersection(*(row.absent for row in table if not row.has_ended)),
            is_skipped=not (is_usable and total),
        )
        max_norm = max_norm_of(table, clock=clock)
        if reduced.is_skipped:
            return reduced
        try:
            yield from self._average(share=mine.weight / total)
        except GroupReformedError:
            # What is nobody's sum yet counts for nothing; what others have pushed counts.
            reduced.is_skipped, reduced.group_weight = True, 0.0
            return reduced
        if max_norm:
            yield from self._clip(reduced, max_norm)
        return reduced

    def _average(self, share: float) -> Generator[Wait, None, None]:
        """This worker's slice becomes the group's mean. ``share`` is this worker's, all shares add
        up to 1."""
        if self._overlap is not None:
            yield from self._overlap.reduce(share)
        elif self._group.size > 1:
            for flat in self._flat.gradients:
                flat.mul_(share)
            pending = self._group.reduce_scatter(self._flat.gradients, self._spans)
            yield from in_group(pending, "optimizer.step")

    def _clip(self, reduced: Reduced, max_norm: float) -> Generator[Wait, None, None]:
        own = self._own_parts()
        squares = [float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in own]
        reduced.norm = math.sqrt((yield from self._steps.total(self._mine, squares)))
        coefficient = max_norm / (reduced.norm + 1e-6)
        if coefficient < 1:
            for part in own:
                part.mul_(coefficient)

    def _own_parts(self) -> list[torch.Tensor]:
        """The group's gradient, of this worker's chunks."""
        if self._overlap is not None:
            return self._overlap.own_parts()
        return [self._flat.gradient_part(self._partition.chunks[chunk]) for chunk in self._mine]
