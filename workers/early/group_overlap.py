"""Gradients that leave during backward in a group of several, bucket by bucket.

In ``step()`` a table says how far each worker has come, and all catch up. If what has left is right
on every worker, the rest is reduced and pushed. Otherwise the whole gradient is reduced once more,
as without overlap, and each owner compares it with what it has pushed: if they differ, all workers
of the group raise :class:`UsageError`.

    strategy = GroupEarlyPush(parts, driver=..., is_training=..., other_end=..., sums=sums)

Own chunks are pushed out of ``sums``: the flat gradients stay this worker's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Final

import torch

from psdist.protocol.events import Frame
from psdist.protocol.memory import allocate, as_bytes, as_tensor
from psdist.protocol.partition import Chunk, Partition, Span
from psdist.workers.blocking import Parts
from psdist.workers.early.group_pushes import GroupPushes
from psdist.workers.early.overlap import RETERMED, SKIPPED, UNFOLLOWED, WATCHED, EarlyPush, Pace
from psdist.workers.early.progress import Driver
from psdist.workers.group.buckets import Buckets
from psdist.workers.group.channel import GroupChannel, Slices
from psdist.workers.loop import Wait
from psdist.workers.model.flat import FlatModel
from psdist.workers.reduction import CALL, Reduced, Row, Terms, in_group

BUCKET_S: Final = 3e-3
"""Least seconds of a backward pass, for each bucket, for which reducing by bucket pays. If cores
are short, a bucket costs each worker 1 to 1.5 ms."""


class Sums:
    """Memory for the group's gradient of a worker's own chunks; what its pushes send."""

    def __init__(self, flat: FlatModel, partition: Partition, chunks: Sequence[int]) -> None:
        """``chunks``: ascending."""
        self._flat = flat
        self.by_chunk: dict[int, torch.Tensor] = {}
        # One allocation gets huge pages, which other processes read faster.
        memory = allocate(sum(partition.chunks[index].num_bytes for index in chunks))
        start = 0
        for index in chunks:
            chunk = partition.chunks[index]
            self.by_chunk[index] = as_tensor(memory[start:], chunk.dtype, chunk.length)
            start += chunk.num_bytes

    def gradient_frame(self, chunk: Chunk) -> Frame:
        """See :class:`psdist.workers.push_transforms.ChunkFrames`."""
        return Frame(as_bytes(self.by_chunk[chunk.index]))

    def parameter_frame(self, chunk: Chunk) -> Frame:
        """See :class:`psdist.workers.push_transforms.ChunkFrames`."""
        return self._flat.parameter_frame(chunk)


class GroupEarlyPush(EarlyPush):
    early: GroupPushes

    def __init__(
        self,
        parts: Parts,
        *,
        driver: Driver,
        is_training: Callable[[], bool],
        other_end: GroupChannel,
        sums: Sums,
        free_s: Callable[[], float],
    ) -> None:
        """``other_end``: of the group; ``sums``: of this worker's chunks; ``free_s()``: seconds, a
        clock that stops while this process uses cores that are short; the rest as in
        :class:`EarlyPush`."""
        _, group, flat, *_ = parts
        buckets = Buckets(
            other_end,
            group.partition,
            group.order.chunks,
            gradients=flat.gradients,
            sums=sums.by_chunk,
        )
        early = GroupPushes(parts, buckets)
        super().__init__(parts, early=early, driver=driver, is_training=is_training)
        self._sums = sums.by_chunk
        self._free_s = free_s
        self._all = self._spans_of(range(len(self._chunks)))
        self._has_left = False
        """True if buckets of this iteration left before step(), after all have caught up."""
        self._num_ended = 0
        """Finished iterations: the same on all workers of the group."""
        self._is_redone = False
        """True if the whole gradient is reduced once more."""
        num_buckets = early.buckets.num_within(len(early.order))
        self._pace = Pace(BUCKET_S * num_buckets)

    def _spans_of(self, chunks: Iterable[int]) -> Slices:
        """Return a span of each of these chunks, by place."""
        wanted = set(chunks)
        return [
            [
                Span(chunk.buffer, chunk.start, chunk.start + chunk.length)
                for chunk in (self._chunks[index] for index in its)
                if chunk.index in wanted
            ]
            for its in self.group.by_place
        ]

    @property
    def num_begun(self) -> int:  # type: ignore[override]
        return self.early.buckets.num_begun

    def _kept(self, now: Terms, *, is_other: bool) -> Collection[int]:
        self.is_retermed = self._is_retermed(now)
        self.is_changed = is_other or not self._is_as_sent()
        return () if self.is_changed else self._given_pieces()

    # -- in the group --------------------------------------------------------------------------

    def _now_s(self) -> float:
        return self._free_s()

    def catch_up(self, table: Sequence[Row]) -> Generator[Wait, None, bool]:
        """See :meth:`Blocking.catch_up`. Raises :class:`UsageError` if buckets have left under
        other terms than those of ``step()``, or from a worker that has ended without ``step()``."""
        yield from super().catch_up(table)
        if not all(row.is_finite for row in table):
            return False
        index = self.loop.core.set_index
        yield from self._catch_up(max(row.num_begun_in(index) for row in table), CALL)
        if self._has_left:
            if any(row.has_ended for row in table):
                raise self.sent_too_soon(UNFOLLOWED)
            if any(row.is_retermed for row in table):
                raise self.sent_too_soon(RETERMED)
            self._is_redone = any(row.is_changed for row in table)
        return self._has_left

    def _catch_up(self, most: int, call: str) -> Generator[Wait, None, None]:
        self._has_left = self._is_redone = False
        buckets = self.early.buckets
        if not most:
            return
        if not buckets.num_begun:
            self.early.open(self.iteration.terms(), num_buckets=0)
        yield from in_group(buckets.catching_up(most), call)
        self._has_left = most > 1

    def average(self, share: float) -> Generator[Wait, None, None]:
        flats, channel = self.flat.gradients, self.group.channel
        if self._has_left and not self._is_redone:
            begun = set(self.early.buckets.chunks_begun)
            rest = [each for each in range(len(self._chunks)) if each not in begun]
            if rest:
                for index in rest:
                    self.flat.gradient_part(self._chunks[index]).mul_(share)
                sums = [its for chunk, its in self._sums.items() if chunk not in begun]
                pending = channel.reduce_scatter(flats, self._spans_of(rest), sums)
                yield from in_group(pending, CALL)
            return
        for flat in flats:
            flat.mul_(share)
        into = None if self._is_redone else list(self._sums.values())
        yield from in_group(channel.reduce_scatter(flats, self._all, into), CALL)

    def _own_part(self, chunk: int) -> torch.Tensor:
        """Return the group's gradient of an own chunk."""
        if self._is_redone:
            return self.flat.gradient_part(self._chunks[chunk])
        return self._sums[chunk]

    def own_parts(self) -> Sequence[torch.Tensor]:
        return [self._own_part(chunk) for chunk in self._sums]

    def exchange(self, reduced: Reduced) -> Generator[Wait, None, None]:
        yield from self._settle_in_group(reduced)
        yield from super().exchange(reduced)

    def _settle_in_group(self, reduced: Reduced) -> Generator[Wait, None, None]:
        """Raise on all workers of the group if one of them has pushed what differs now."""
        if self._has_left and reduced.is_skipped:
            raise self.sent_too_soon(SKIPPED)
        if not self._is_redone:
            return
        self._reason = self._reason or "gradients change between backward and step()"
        changed: set[int] = set()
        for chunk, total in self._sums.items():
            wanted = self._own_part(chunk)
            if chunk in self.early.sent:
                changed.update(self.pieces_unlike(chunk, wanted, total, reduced.absent))
            else:
                total.copy_(wanted)
        table = yield from in_group(self.group.channel.agree(CALL, sorted(changed)), CALL)
        pieces = sorted({int(piece) for row in table for piece in row})
        if pieces:
            raise self.sent_too_soon(self.describe_changed(pieces))

    # -- the end -------------------------------------------------------------------------------

    def meet_at_end(self) -> Generator[Wait, None, None]:
        agreed = self.group.channel.agree("finish", [self.num_begun])
        table = yield from in_group(agreed, "finish")
        yield from self._catch_up(int(max(begun for (begun,) in table)), "finish")
        if self._has_left:
            raise self.sent_too_soon(UNFOLLOWED)

    def meet_dropped(self, call: str) -> Generator[Wait, None, None]:
        if self._num_ended < WATCHED:
            return
        has_kept = self._is_expected and not self.is_dropped
        row = [self.num_begun, float(has_kept), float(self.is_dropped)]
        table = yield from in_group(self.group.channel.agree(call, row), call)
        most, kept, dropped = (int(max(column)) for column in zip(*table, strict=True))
        if kept or not dropped:
            return
        yield from self._catch_up(most, call)
        if self._has_left:
            raise self.sent_too_soon(UNFOLLOWED)
        self.early.reset()
        self.expect_nothing()

    def _end(self) -> None:
        super()._end()
        self._num_ended += 1
        self._has_left = self._is_redone = False
