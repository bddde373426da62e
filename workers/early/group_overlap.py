"""Overlap of one parameter set in a group of several, which has reduced a part of its gradients.

In ``step()`` a table says how far anybody has come, and all get there. If what has left is right on
every worker, the rest is reduced and pushed. If it is not, on any of them, the whole gradient is
reduced once more, as without overlap, and each owner compares what it has pushed with that: where
that is another, all workers of the group raise :class:`UsageError`.

    overlap = GroupOverlap("auto", ..., group=group, sums=sums)
    absent, terms = overlap.collect(terms, scale=1.0)
    table = ...                                       # psdist.workers.step_table
    yield from overlap.catch_up(table)
    yield from overlap.reduce(share)                  # of what has not left, or of everything
    yield from overlap.settle_in_group(absent=..., is_skipped=...)
    empty = overlap.settle(empty, absent=..., is_skipped=...)

Own chunks are pushed out of ``sums``: the flat gradients stay this worker's alone.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final

import torch

from psdist.protocol.events import Frame
from psdist.protocol.memory import allocate, as_bytes, as_tensor
from psdist.protocol.partition import Chunk, Partition, Span
from psdist.workers.early.early_pushes import Terms
from psdist.workers.early.group_pushes import GroupPushes
from psdist.workers.early.overlap import RETERMED, SKIPPED, UNFOLLOWED, WATCHED, Overlap
from psdist.workers.group.channel import GroupChannel, Slices
from psdist.workers.loop import Wait
from psdist.workers.model.flat import FlatModel
from psdist.workers.step_table import Row, in_group

BUCKET_S: Final = 3e-3
"""Seconds of a backward pass, for each bucket, from which on reducing by bucket pays. If cores are
short, a bucket costs each worker 1 to 1.5 ms (docs/performance.md)."""


class GroupPace:
    """Decides if a group reduces its gradients bucket by bucket during backward; pure.

    Each bucket costs an agreement, a hand-over and a copy. The workers of a group exchange the
    lengths of their backward passes, so that all of them judge by the same figures.
    """

    def __init__(self, *, num_buckets: int, num_watched: int) -> None:
        """``num_watched``: iterations that are judged by."""
        self._least_s = BUCKET_S * num_buckets
        self._num_watched = num_watched
        self._shortest_s: list[float] = []
        """By iteration, of the worker whose backward pass was shortest."""

    def watch(self, backward_s: Sequence[float]) -> None:
        """Seconds from each worker's first gradient to ``step()``; 0: it does not watch. The first
        iterations count that every worker has watched."""
        if all(backward_s) and len(self._shortest_s) < self._num_watched:
            self._shortest_s.append(min(backward_s))

    def why_not(self) -> str:
        """Why gradients should wait for ``step()``, for people; "" where they need not."""
        if not self._shortest_s or (usual_s := median(self._shortest_s)) >= self._least_s:
            return ""
        return (
            f"gradients are complete {usual_s * 1e3:.1f} ms after the first one, and reducing them "
            f"bucket by bucket pays from {self._least_s * 1e3:.0f} ms on"
        )


_CALL = "optimizer.step"


class Sums:
    """Memory for the group's gradient of a worker's own chunks; what its pushes send."""

    def __init__(self, flat: FlatModel, partition: Partition, chunks: Sequence[int]) -> None:
        """``chunks``: ascending."""
        self._flat = flat
        self.by_chunk: dict[int, torch.Tensor] = {}
        for index in chunks:
            chunk = partition.chunks[index]
            self.by_chunk[index] = as_tensor(allocate(chunk.num_bytes), chunk.dtype, chunk.length)

    def gradient_frame(self, chunk: Chunk) -> Frame:
        """See :class:`psdist.workers.push_transforms.ChunkFrames`."""
        return Frame(as_bytes(self.by_chunk[chunk.index]))

    def parameter_frame(self, chunk: Chunk) -> Frame:
        """See :class:`psdist.workers.push_transforms.ChunkFrames`."""
        return self._flat.parameter_frame(chunk)


class GroupOverlap(Overlap):
    early: GroupPushes

    def __init__(
        self,
        *args: Any,
        group: GroupChannel,
        slices: Sequence[Sequence[int]],
        sums: Mapping[int, torch.Tensor],
        early: GroupPushes,
        **more: Any,
    ) -> None:
        """``slices``: the chunks of each worker of the group, ascending; ``sums``: by own chunk;
        the rest as in :class:`Overlap`."""
        super().__init__(*args, early=early, **more)
        self.early = early
        self._group = group
        self._slices = slices
        self._sums = sums
        self._all = self._spans_of(range(len(self._partition.chunks)))
        self.has_left = False
        """Whether buckets of this iteration left before step(), once all have caught up."""
        self._num_ended = 0
        """Iterations: the same on all workers of the group."""
        self.is_redone = False
        """Whether all of the gradient is reduced once more."""
        num_buckets = early.buckets.num_within(len(early.order))
        self._pace = GroupPace(num_buckets=num_buckets, num_watched=WATCHED)

    def _spans_of(self, chunks: Iterable[int]) -> Slices:
        """A span of each of these chunks, by place."""
        wanted = set(chunks)
        return [
            [
                Span(chunk.buffer, chunk.start, chunk.start + chunk.length)
                for chunk in (self._partition.chunks[index] for index in its)
                if chunk.index in wanted
            ]
            for its in self._slices
        ]

    @property
    def num_begun(self) -> int:
        return self.early.buckets.num_begun

    def collect(
        self,
        now: Terms,
        *,
        scale: float,
        is_skipped: bool = False,
        has_scaler: bool = False,
        is_clipped: bool = False,
    ) -> tuple[list[int], Terms]:
        self._look(now, has_scaler=has_scaler, is_clipped=is_clipped)
        kept: Collection[int] = ()
        self.is_changed = self.is_retermed = False
        if self.is_half_pushed:
            self.is_retermed = self._is_retermed(now)
            is_other = is_skipped or is_clipped or scale != 1.0
            self.is_changed = is_other or not self._is_as_sent()
            if not self.is_changed:
                kept = self._given_pieces()
        return self._flat.collect_gradients(scale=scale, kept=kept), now

    # -- in the group --------------------------------------------------------------------------

    def watch_group(self, table: Sequence[Row]) -> None:
        """What all bring to an iteration."""
        self._pace.watch([row.backward_s for row in table])

    def _switch_on(self) -> None:
        self._reason = self._pace.why_not()
        if self._reason:
            self._switch_off()
        else:
            super()._switch_on()

    def catch_up(self, table: Sequence[Row]) -> Generator[Wait, None, None]:
        """Begin every bucket that any worker of ``table`` has begun. All gradients are collected.
        Raises :class:`UsageError` if buckets have left under other terms than those of ``step()``,
        or from a worker that has ended without a ``step()``."""
        index = self._loop.core.set_index
        yield from self._catch_up(max(row.num_begun_in(index) for row in table), _CALL)
        if not self.has_left:
            return
        if any(row.has_ended for row in table):
            raise self.sent_too_soon(UNFOLLOWED)
        if any(row.is_retermed for row in table):
            raise self.sent_too_soon(RETERMED)
        self.is_redone = any(row.is_changed for row in table)

    def _catch_up(self, most: int, call: str) -> Generator[Wait, None, None]:
        self.has_left = self.is_redone = False
        buckets = self.early.buckets
        if not most:
            return
        if not buckets.num_begun:
            self.early.open(self._terms(), num_buckets=0)
        yield from in_group(buckets.catching_up(most), call)
        self.has_left = most > 1

    def reduce(self, share: float) -> Generator[Wait, None, None]:
        """What has not left becomes the group's mean, of this worker's slice. ``share``: this
        worker's part in it."""
        flats = self._flat.gradients
        if self.has_left and not self.is_redone:
            begun = set(self.early.buckets.chunks_begun)
            rest = [each for each in range(len(self._partition.chunks)) if each not in begun]
            if rest:
                for index in rest:
                    self._flat.gradient_part(self._partition.chunks[index]).mul_(share)
                sums = [its for chunk, its in self._sums.items() if chunk not in begun]
                pending = self._group.reduce_scatter(flats, self._spans_of(rest), sums)
                yield from in_group(pending, _CALL)
            return
        for flat in flats:
            flat.mul_(share)
        into = None if self.is_redone else list(self._sums.values())
        yield from in_group(self._group.reduce_scatter(flats, self._all, into), _CALL)

    def _own_part(self, chunk: int) -> torch.Tensor:
        """Where the group's gradient of an own chunk lies."""
        if self.is_redone:
            return self._flat.gradient_part(self._partition.chunks[chunk])
        return self._sums[chunk]

    def own_parts(self) -> list[torch.Tensor]:
        """The group's gradient, of this worker's chunks."""
        return [self._own_part(chunk) for chunk in self._sums]

    def settle_in_group(
        self, *, absent: Collection[int], is_skipped: bool
    ) -> Generator[Wait, None, None]:
        """As :meth:`settle`, together: all workers of the group raise where one of them has pushed
        what is another now."""
        if self.has_left and is_skipped:
            raise self.sent_too_soon(SKIPPED)
        if not self.is_redone:
            return
        self._reason = self._reason or "gradients change between backward and step()"
        changed: set[int] = set()
        for chunk, total in self._sums.items():
            wanted = self._own_part(chunk)
            if chunk in self.early.sent:
                changed.update(self.pieces_unlike(chunk, wanted, total, absent))
            else:
                total.copy_(wanted)
        table = yield from in_group(self._group.agree(_CALL, sorted(changed)), _CALL)
        pieces = sorted({int(piece) for row in table for piece in row})
        if pieces:
            raise self.sent_too_soon(self.describe_changed(pieces))

    # -- the end -------------------------------------------------------------------------------

    def meet_at_end(self) -> Generator[Wait, None, None]:
        table = yield from in_group(self._group.agree("finish", [self.num_begun]), "finish")
        yield from self._catch_up(int(max(begun for (begun,) in table)), "finish")
        if self.has_left:
            raise self.sent_too_soon(UNFOLLOWED)

    def meet_dropped(self, call: str) -> Generator[Wait, None, None]:
        if self._num_ended < WATCHED:
            return
        has_kept = self._is_expected and not self.is_dropped
        row = [self.num_begun, float(has_kept), float(self.is_dropped)]
        table = yield from in_group(self._group.agree(call, row), call)
        most, kept, dropped = (int(max(column)) for column in zip(*table, strict=True))
        if kept or not dropped:
            return
        yield from self._catch_up(most, call)
        if self.has_left:
            raise self.sent_too_soon(UNFOLLOWED)
        self.early.reset()
        self.expect_nothing()

    def end_iteration(self) -> None:
        super().end_iteration()
        self._num_ended += 1
        self.has_left = self.is_redone = False
