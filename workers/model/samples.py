"""A part of the parameters as the servers sent it, to find what the script writes to them.

    samples = ValueSamples(partition, flats)
    samples.take()                             # new values are in place
    samples.take([3, 4])                       # new values of these chunks are in place
    samples.changed(written)                   # pieces that the script has written since then

The part changes each time, and PARTS parts make up all elements. A write that repeats in
every iteration is therefore found, however small it is. A single write may be replaced unseen:
finding it would take a copy of all parameters in every iteration.

torch counts the writes that it sees (``_version``), but not those through ``p.data``, numpy or an
extension. And a write that torch sees may restore what was there before. So memory is compared.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import torch

from psdist.protocol.memory import same_bytes
from psdist.protocol.partition import ALIGN, Partition

_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PARTS: Final = 60
"""Iterations in which every element is compared. Not 64: a block with a difference is compared in
all following iterations, so that its third difference is within 64 iterations."""
_LEAST_BLOCKS: Final = 256
"""Minimum blocks of a part (64 KiB of float32): a small model is compared as a whole."""
_MOST_FOUND: Final = 256
"""Maximum blocks that one comparison adds to those of all following iterations."""

_TOLERANCE: Final = 2
"""Maximum difference of restored values, in units in the last place of the largest value.
``p.add_(e)`` and ``p.sub_(e)`` round once each. With u half a unit of 1 and w the value before,
they leave w + d with |d| <= u (|w + e| + |w|); for |e| <= 2 max |w| that is 4 u max |w|.
A projection that is not pushed, such as clipping, exceeds this limit: in every iteration the
servers' values move further away from the clipped ones."""
_LEAST_SCALE: Final = 0.05
"""... which counts as this large at least. Sharpness-aware minimisation adds an ``e`` of norm 0.05
(Foret et al. 2021) to all parameters, also to those that are still zero or tiny."""


class ValueSamples:
    def __init__(self, partition: Partition, flats: Sequence[torch.Tensor]) -> None:
        """``flats``: the flat parameters of each buffer. They are cut into blocks of ``ALIGN``
        elements. A block belongs to one piece and to one chunk."""
        self._chunks = partition.chunks
        self._pieces = [[piece for piece, _ in each.piece_starts] for each in partition.buffers]
        self._firsts = [
            [start // ALIGN for _, start in each.piece_starts] for each in partition.buffers
        ]
        """By buffer: the first block of each piece, ascending."""
        self._blocks = [flat.view(-1, ALIGN) for flat in flats]
        self._num_blocks = sum(map(len, self._blocks))
        self._num_parts = max(1, min(PARTS, self._num_blocks // _LEAST_BLOCKS))
        self._part = 0
        self._spans = list(self._spans_of(0))
        """The part that is compared next: blocks by buffer."""
        self._in_spans: list[torch.Tensor] = []
        """The values kept of each span; none until new values are in place."""
        # A write that torch has seen is mostly one of a whole piece: the first block shows whether
        # it has restored the values.
        self._rows = [
            torch.tensor(firsts, device=flat.device)
            for firsts, flat in zip(self._firsts, flats, strict=True)
            if self._num_parts > 1
        ]
        """By buffer: blocks that are kept in every iteration, where a part is not all of them."""
        self._in_rows: list[torch.Tensor] = []
        self._has_found = False
        """True if blocks with a difference are among them."""

    def _spans_of(self, part: int) -> Iterator[tuple[int, slice]]:
        """A stretch of all buffers, counted as one sequence."""
        first = part * self._num_blocks // self._num_parts
        last = (part + 1) * self._num_blocks // self._num_parts
        for buffer, blocks in enumerate(self._blocks):
            if max(first, 0) < min(last, len(blocks)):
                yield buffer, slice(max(first, 0), min(last, len(blocks)))
            first, last = first - len(blocks), last - len(blocks)

    def take(self, chunks: Collection[int] | None = None) -> None:
        """Keep the values of the part; of ``chunks``, where others are not in place yet."""
        if chunks is None or not self._in_spans:
            self._in_spans = [self._blocks[buffer][span].clone() for buffer, span in self._spans]
            self._in_rows = self._now_in_rows()
        for chunk in (self._chunks[index] for index in chunks or ()):
            start, stop = chunk.start // ALIGN, (chunk.start + chunk.length) // ALIGN
            blocks = self._blocks[chunk.buffer]
            for (buffer, span), values in zip(self._spans, self._in_spans, strict=True):
                first, last = max(span.start, start), min(span.stop, stop)
                if buffer == chunk.buffer and first < last:
                    values[first - span.start : last - span.start] = blocks[first:last]
            if self._rows:
                rows = self._rows[chunk.buffer]
                is_inside = (rows >= start) & (rows < stop)
                self._in_rows[chunk.buffer][is_inside] = blocks[rows[is_inside]]

    def changed(self, written: Collection[int] = ()) -> list[int]:
        """Return the pieces with an element that differs from what :meth:`take` kept, ascending.

        Restored values do not differ. Returns no pieces again before the next :meth:`take`, which
        keeps another part. ``written``: pieces that torch has seen written."""
        found: set[int] = set()
        for buffer, numbers in self._found_in(written):
            found.update(self._piece_of(buffer, number) for number in numbers.tolist())
            self._keep(buffer, numbers)
        self._in_spans, self._in_rows = [], []
        self._part = (self._part + 1) % self._num_parts
        self._spans = list(self._spans_of(self._part))
        return sorted(found)

    def _found_in(self, written: Collection[int]) -> list[tuple[int, torch.Tensor]]:
        """By buffer: the numbers of blocks that are other ones than they were."""
        if not self._in_spans:
            return []
        places: list[tuple[int, slice | torch.Tensor]] = list(self._spans)
        before = list(self._in_spans)
        if written or self._has_found:
            places += enumerate(self._rows)
            before += self._in_rows
        now = [self._blocks[buffer][where] for buffer, where in places]
        if _are_same(before, now):
            return []
        found = []
        for (buffer, where), its_before, its_now in zip(places, before, now, strict=True):
            is_other = _is_other(its_before, its_now).any(dim=1)
            numbers = torch.arange(len(self._blocks[buffer]), device=is_other.device)
            found.append((buffer, numbers[where][is_other]))
        return found

    def _piece_of(self, buffer: int, block: int) -> int:
        return self._pieces[buffer][bisect.bisect_right(self._firsts[buffer], block) - 1]

    def _keep(self, buffer: int, blocks: torch.Tensor) -> None:
        """From now on these are compared in every iteration."""
        if self._rows and len(blocks):
            self._has_found = True
            self._rows[buffer] = torch.cat([self._rows[buffer], blocks[:_MOST_FOUND]])

    def _now_in_rows(self) -> list[torch.Tensor]:
        return [blocks[rows] for blocks, rows in zip(self._blocks, self._rows, strict=False)]


def _are_same(before: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> bool:
    """True if all hold the same bits. Waits for a device once."""
    if before[0].device.type == "cpu":
        return all(map(same_bits, before, now))
    are_other = [
        (as_bits(one) != as_bits(other)).any() for one, other in zip(before, now, strict=True)
    ]
    return not torch.stack(are_other).any()


def _is_other(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Return, by element, True if it has changed and is not restored up to rounding."""
    is_other = as_bits(before) != as_bits(now)
    if before.element_size() < 4 or not before.numel():
        # A unit of float16 or bfloat16 is up to 0.1 or 0.8 % of a value: what is rounded to that
        # is not restored, and torch would train with it.
        return is_other
    scale = max(float(before.abs().max()), _LEAST_SCALE)
    tolerance = _TOLERANCE * torch.finfo(before.dtype).eps * scale
    return is_other & ~((before - now).abs() <= tolerance)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers."""
    return tensor.view(_BITS[tensor.element_size()])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors of one shape and dtype are equal bit by bit, including NaN and -0."""
    if one.device.type == "cpu" and one.is_contiguous() and other.is_contiguous():
        return same_bytes(one, other)
    return torch.equal(as_bits(one), as_bits(other))
