"""How parameters are cut: pieces -> flat buffers -> chunks -> shards, and a group's slices.

Pure arithmetic on names and shapes; torch is not imported. Every rank computes the same
partition from the same description, so only the description travels.

* A **piece** is a trainable parameter (later also a DTensor's shard or the rows of a table).
* Pieces of one dtype and one optimizer group follow one another in a flat **buffer**, each
  from a multiple of ``ALIGN`` elements on (padding is zero and stays zero).
* Buffers are cut into **chunks**, the unit of transfer, of apply and of consistency. Boundaries
  are multiples of ``ALIGN`` elements and do not depend on the number of servers: a fused
  optimizer's last bit depends on where a tensor starts, so results would otherwise change with
  the number of servers. A piece whose optimizer needs its shape stays whole: in a chunk of its
  own, or with its neighbours while these are small.
* A **shard** is the set of chunks of one server, a **slice** the set of chunks that one worker of a
  group pushes and pulls. A **bucket** has one chunk per worker of a group, chunks that follow one
  another in the order in which they are sent: each worker owns one of them.

    partition = Partition.cut(pieces, chunk_bytes=None)
    owners = partition.shard(weights=[1.0, 1.0])   # chunk -> server

Longer than other modules: pieces, buffers, chunks, shards and slices are one cut, each made
from the one before, the slices after a failure among them.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from psdist.errors import ModelError, ProtocolError, UsageError
from psdist.protocol.header import Dtype

ALIGN = 64
AUTO_CHUNKS = 32
"""An automatic chunk size aims at this many chunks, so that a pipeline has something to overlap
and a few servers share evenly ..."""
AUTO_MIN_BYTES = 2**20
"""... but not at chunks so small that a message's fixed cost shows (docs/dev/performance.md) ..."""
AUTO_MAX_BYTES = 4 * 2**20
"""... nor so large that receive buffers take much memory."""
AUTO_FEWEST_CHUNKS = 4
"""A smaller model is cut nevertheless, so that a few servers share it: a message more costs tens of
microseconds, a link that carries all of the model while others are idle milliseconds ..."""
AUTO_LEAST_BYTES = 64 * 2**10
"""... down to this."""
AUTO_LINK_S = 8.4e-3
"""On a slow link a chunk takes at most this long, so that the chunks of a layer are on the links of
several servers at a time ..."""
AUTO_LINK_BYTES = 256 * 2**10
"""... but is no smaller than this."""
AUTO_ROUND_BYTES = 1024
"""Shares are rounded up to this: a chunk for the rest of a division would be a message more."""

MOST_TOGETHER_BYTES = 64 * 2**10
"""Whole pieces share a chunk up to this size: together they cost one message, and of larger ones
the steps, which cost more than a message then, are spread over the servers."""

ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
DTYPE_CODES = {
    "float32": Dtype.FLOAT32,
    "float64": Dtype.FLOAT64,
    "float16": Dtype.FLOAT16,
    "bfloat16": Dtype.BFLOAT16,
}


def master_dtype(dtype: str) -> str:
    """Dtype in which a server computes for parameters that workers store in ``dtype``."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A parameter that the optimizer holds: ``shape`` and ``stride`` in elements, memory dense."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    optimizer_group: int
    is_frozen: bool = False
    """At the start: these and the others have buffers of their own, so that chunks are frozen
    whole, wherever in the model frozen parameters stand."""

    @property
    def num_elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The part of a piece that lies in a chunk; offsets and lengths in elements."""

    piece: int
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """A flat buffer: ``num_elements`` with padding, of workers' dtype ``dtype``."""

    index: int
    dtype: str
    optimizer_group: int
    num_elements: int
    piece_starts: tuple[tuple[int, int], ...]
    """(piece, first element) of every piece in this buffer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """``length`` elements of buffer ``buffer`` from element ``start`` on."""

    index: int
    buffer: int
    start: int
    length: int
    dtype: str
    optimizer_group: int
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        """On the wire, in the workers' dtype."""
        return self.length * ITEM_BYTES[self.dtype]

    @property
    def num_master_bytes(self) -> int:
        """In the dtype that a server computes in."""
        return self.length * ITEM_BYTES[master_dtype(self.dtype)]


class Span(NamedTuple):
    """Elements ``start`` to ``stop`` (exclusive) of flat buffer ``buffer``."""

    buffer: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Partition:
    pieces: tuple[Piece, ...]
    buffers: tuple[Buffer, ...]
    chunks: tuple[Chunk, ...]
    chunk_bytes: int
    whole_tensors: bool

    @classmethod
    def cut(
        cls,
        pieces: Sequence[Piece],
        *,
        chunk_bytes: int | None,
        whole_tensors: bool = False,
        link_bytes_per_s: float = math.inf,
    ) -> Partition:
        """Cut ``pieces`` (in the model's order); ``chunk_bytes=None`` chooses by the model's size
        and the slowest link.

        ``whole_tensors``: no piece is cut (optimizers that need shapes); small neighbours share a
        chunk, of :data:`MOST_TOGETHER_BYTES` or ``chunk_bytes`` if that is less.
        Raises :class:`ModelError` for a dtype that no server can hold, and for no pieces at all.
        """
        if not pieces:
            raise ModelError(
                "the model has no parameters to train: the optimizer holds no parameter that "
                "requires a gradient"
            )
        by_buffer: dict[tuple[bool, str, int], list[int]] = {}
        for index, piece in enumerate(pieces):
            if piece.dtype not in ITEM_BYTES:
                raise ModelError(
                    f"parameter {piece.name} has dtype {piece.dtype}; psdist trains "
                    f"{', '.join(ITEM_BYTES)}"
                )
            key = piece.is_frozen, piece.dtype, piece.optimizer_group
            by_buffer.setdefault(key, []).append(index)
        if chunk_bytes is None:
            chunk_bytes = auto_chunk_bytes(
                sum(_aligned(max(p.num_elements, 1)) * ITEM_BYTES[p.dtype] for p in pieces),
                link_bytes_per_s,
            )
        buffers: list[Buffer] = []
        chunks: list[Chunk] = []
        # Moving parameters come first: they are spread over the servers before fixed ones.
        for (_, dtype, group), members in sorted(by_buffer.items(), key=lambda each: each[0][0]):
            starts: list[tuple[int, int]] = []
            position = 0
            for index in members:
                starts.append((index, position))
                position += _aligned(max(pieces[index].num_elements, 1))
            buffer = Buffer(
                index=len(buffers),
                dtype=dtype,
                optimizer_group=group,
                num_elements=position,
                piece_starts=tuple(starts),
            )
            buffers.append(buffer)
            if whole_tensors:
                most = min(chunk_bytes, MOST_TOGETHER_BYTES) // ITEM_BYTES[dtype]
                bounds = _whole_bounds([start for _, start in starts], position, most=most)
            else:
                step = max(chunk_bytes // ITEM_BYTES[dtype] // ALIGN, 1) * ALIGN
                bounds = [(at, min(at + step, position)) for at in range(0, position, step)]
            chunks.extend(_chunks_of(buffer, bounds, pieces, first_index=len(chunks)))
        return cls(
            pieces=tuple(pieces),
            buffers=tuple(buffers),
            chunks=tuple(chunks),
            chunk_bytes=chunk_bytes,
            whole_tensors=whole_tensors,
        )

    @property
    def num_bytes(self) -> int:
        """All chunks on the wire, once."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    @property
    def max_chunk_bytes(self) -> int:
        return max(chunk.num_bytes for chunk in self.chunks)

    def shard(self, weights: Sequence[float], held: Sequence[int] = ()) -> tuple[int, ...]:
        """Chunk -> server, so that server i holds about ``weights[i]`` of the bytes, those counted
        that servers have ``held`` before, of other parameter sets (() for none).

        Largest chunk first, each to the server that is the least full for its weight with that
        chunk: equal weights are kept to within one chunk (Graham 1969), and a server whose weight
        is too small for a chunk, at the end of a slow link, holds nothing.
        """
        if not weights or min(weights) < 0 or sum(weights) <= 0:
            raise UsageError(f"shard weights {list(weights)}: at least one must be positive")
        loads = list(held) or [0] * len(weights)
        owners = [0] * len(self.chunks)
        ordered = sorted(self.chunks, key=lambda chunk: (-chunk.num_bytes, chunk.index))
        for size, chunks in itertools.groupby(ordered, key=lambda chunk: chunk.num_bytes):
            heap = [
                ((loads[server] + size) / weight, server)
                for server, weight in enumerate(weights)
                if weight > 0
            ]
            heapq.heapify(heap)
            for chunk in chunks:
                server = heap[0][1]
                owners[chunk.index] = server
                loads[server] += size
                heapq.heapreplace(heap, ((loads[server] + size) / weights[server], server))
        return tuple(owners)

    def bytes_by_server(self, owners: Sequence[int], num_servers: int) -> list[int]:
        """Bytes of this partition on each server."""
        held = [0] * num_servers
        for chunk, server in zip(self.chunks, owners, strict=True):
            held[server] += chunk.num_bytes
        return held

    def slices(self, num_workers: int, order: Sequence[int] = ()) -> tuple[Sequence[int], ...]:
        """The chunks of each of ``num_workers`` workers of a group, ascending, even by bytes to
        within one chunk: neighbours, or a share of every bucket where chunks are sent in an
        ``order`` of their own, so that all workers of a group have something to send at a time."""
        if len(order) and list(order) != list(range(len(self.chunks))):
            return self._slices_of_buckets(num_workers, order)
        total = self.num_bytes
        bounds = [0]
        done = 0
        for chunk in self.chunks:
            middle = done + chunk.num_bytes / 2
            while len(bounds) < num_workers and middle >= total * len(bounds) / num_workers:
                bounds.append(chunk.index)
            done += chunk.num_bytes
        bounds += [len(self.chunks)] * (num_workers + 1 - len(bounds))
        return tuple(range(bounds[i], bounds[i + 1]) for i in range(num_workers))

    def _slices_of_buckets(
        self, num_workers: int, order: Sequence[int]
    ) -> tuple[Sequence[int], ...]:
        owned: list[list[int]] = [[] for _ in range(num_workers)]
        held = [0] * num_workers
        for turn, bucket in enumerate(buckets_of(order, num_workers)):
            # The largest chunk to the worker with the least: no worker is ever ahead by more than a
            # chunk. Equals take turns, and these take turns, since servers have every so many-th
            # chunk: else each worker would talk to some of them only, and the links of a group's
            # hosts would carry unequal loads.
            shift = _digit_sum(turn, num_workers)
            largest_first = sorted(bucket, key=lambda index: (-self.chunks[index].num_bytes, index))
            emptiest_first = sorted(
                range(num_workers),
                key=lambda place: (held[place], (place - shift) % num_workers),
            )
            for index, place in zip(largest_first, emptiest_first, strict=False):
                owned[place].append(index)
                held[place] += self.chunks[index].num_bytes
        return tuple(sorted(its) for its in owned)

    def spans(self, chunks: Iterable[int]) -> tuple[Span, ...]:
        """Where chunks, ascending, lie: one span for neighbours in a flat buffer."""
        spans: list[Span] = []
        for index in chunks:
            chunk = self.chunks[index]
            stop = chunk.start + chunk.length
            if spans and spans[-1][::2] == (chunk.buffer, chunk.start):
                spans[-1] = spans[-1]._replace(stop=stop)
            else:
                spans.append(Span(chunk.buffer, chunk.start, stop))
        return tuple(spans)

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb(
            {
                "chunk_bytes": self.chunk_bytes,
                "whole_tensors": self.whole_tensors,
                "pieces": [
                    [
                        *(piece.name, piece.shape, piece.stride),
                        *(piece.dtype, piece.optimizer_group, piece.is_frozen),
                    ]
                    for piece in self.pieces
                ],
            }
        )
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Partition:
        """The partition that :meth:`encode` described; :class:`ProtocolError` if it is not one."""
        try:
            body: dict[str, Any] = msgpack.unpackb(data)
            pieces = [
                Piece(
                    name=str(name),
                    shape=tuple(int(extent) for extent in shape),
                    stride=tuple(int(step) for step in stride),
                    dtype=str(dtype),
                    optimizer_group=int(group),
                    is_frozen=bool(is_frozen),
                )
                for name, shape, stride, dtype, group, is_frozen in body["pieces"]
            ]
            chunk_bytes = int(body["chunk_bytes"])
            whole_tensors = bool(body["whole_tensors"])
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise ProtocolError(f"a partition that cannot be read: {error!r}") from error
        return cls.cut(pieces, chunk_bytes=chunk_bytes, whole_tensors=whole_tensors)


def auto_chunk_bytes(num_bytes: int, link_bytes_per_s: float = math.inf) -> int:
    """Return the size of a chunk for a model of ``num_bytes``. ``link_bytes_per_s``: the slowest
    host's link, one direction."""
    share = -(-num_bytes // AUTO_FEWEST_CHUNKS)
    for_few = max(share + -share % AUTO_ROUND_BYTES, AUTO_LEAST_BYTES)
    on_link = min(link_bytes_per_s * AUTO_LINK_S, AUTO_MAX_BYTES) // AUTO_LEAST_BYTES
    most = max(int(on_link) * AUTO_LEAST_BYTES, AUTO_LINK_BYTES)
    return min(max(num_bytes // AUTO_CHUNKS, min(AUTO_MIN_BYTES, for_few)), most)


def empty_servers(weights: Sequence[float], num_chunks: int) -> tuple[int, ...]:
    """Servers to which :meth:`Partition.shard` gives none of ``num_chunks`` chunks of one size.

    Without a partition, before there is a model: a server gets its first chunk after all that
    fill another one to less than that first chunk fills it.
    """

    def gets_one(server: int) -> bool:
        weight, before = weights[server], 0
        if weight <= 0:
            return False
        for other, its in enumerate(weights):
            # Chunks k = 1, 2 ... of another server with k / its < 1 / weight; among equals the
            # lower number goes first. The server itself adds none.
            most = its / weight
            before += math.floor(most) if other < server else max(0, math.ceil(most) - 1)
        return before < num_chunks

    # A server with a larger weight gets one earlier.
    order = sorted(range(len(weights)), key=lambda server: (weights[server], -server))
    num_empty = bisect.bisect_left(order, True, key=gets_one)
    return tuple(sorted(order[:num_empty]))


def chunk_bytes_for_all(num_bytes: float, weights: Sequence[float]) -> int:
    """A size of chunks, in whole KiB, with which every server gets one; 0 where there is none.

    The share of the smallest weight: if that server got no chunk of such a size, each other one
    would hold at most its own share, and together less than the model.
    """
    return int(min(weights) / sum(weights) * num_bytes) // 1024 * 1024


def _digit_sum(number: int, base: int) -> int:
    total = 0
    while number and base > 1:
        number, digit = divmod(number, base)
        total += digit
    return total


def buckets_of(order: Sequence[int], num_workers: int) -> list[Sequence[int]]:
    """Chunks that a group of ``num_workers`` workers sends at a time: one each, in this order."""
    return [order[at : at + num_workers] for at in range(0, len(order), num_workers)]


def runs_of(chunks: Iterable[int]) -> list[range]:
    """Ascending numbers as ranges, as few as there can be."""
    runs: list[range] = []
    for chunk in chunks:
        if runs and runs[-1].stop == chunk:
            runs[-1] = range(runs[-1].start, chunk + 1)
        else:
            runs.append(range(chunk, chunk + 1))
    return runs


def _aligned(num_elements: int) -> int:
    return -(-num_elements // ALIGN) * ALIGN


def _whole_bounds(starts: Sequence[int], end: int, *, most: int) -> list[tuple[int, int]]:
    """From where to where chunks reach that cut no piece: neighbours share one of up to ``most``
    elements."""
    bounds: list[tuple[int, int]] = []
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        if bounds and stop - bounds[-1][0] <= most:
            bounds[-1] = bounds[-1][0], stop
        else:
            bounds.append((start, stop))
    return bounds


def _chunks_of(
    buffer: Buffer,
    bounds: Sequence[tuple[int, int]],
    pieces: Sequence[Piece],
    *,
    first_index: int,
) -> list[Chunk]:
    chunks: list[Chunk] = []
    first = 0  # pieces are in order: none before this one reaches into later chunks
    for start, end in bounds:
        segments: list[Segment] = []
        for at in range(first, len(buffer.piece_starts)):
            piece, piece_start = buffer.piece_starts[at]
            if piece_start >= end:
                break
            piece_end = piece_start + pieces[piece].num_elements
            if piece_end <= start:
                first = at + 1
                continue
            low, high = max(piece_start, start), min(piece_end, end)
            segments.append(Segment(piece=piece, offset=low - start, length=high - low))
        chunks.append(
            Chunk(
                index=first_index + len(chunks),
                buffer=buffer.index,
                start=start,
                length=end - start,
                dtype=buffer.dtype,
                optimizer_group=buffer.optimizer_group,
                segments=tuple(segments),
            )
        )
    return chunks


def heir(owner: int, *, rank: int, members: Sequence[int], living: Collection[int]) -> int:
    """Return the worker that has chunk number ``rank`` of ``owner``'s slice after failures.

    Each chunk has an order of the other workers of its group, which follows from its rank in the
    slice. The first of them in ``living`` has it. So the rest is divided evenly, in whatever order
    the failures are heard of, and a chunk moves only from a failed worker. ``members``: the whole
    group; ``living``: at least one of them."""
    chosen, others = owner, [each for each in members if each != owner]
    while chosen not in living:
        rank, index = divmod(rank, len(others))
        chosen = others.pop(index)
    return chosen


def slices_of_the_living(
    slices: Mapping[int, Sequence[int]], living: Collection[int]
) -> dict[int, list[int]]:
    """Return the chunks of each worker in ``living``, both ascending. ``slices``: the chunks that
    each worker of the group had at first, ascending."""
    members = list(slices)
    found: dict[int, list[int]] = {each: [] for each in members if each in living}
    for owner, chunks in slices.items():
        for rank, chunk in enumerate(chunks):
            found[heir(owner, rank=rank, members=members, living=living)].append(chunk)
    return {worker: sorted(chunks) for worker, chunks in found.items()}
