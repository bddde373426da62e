"""Which values of a chunk a codec takes, and how large a payload is; torch-free.

    layout = ChunkLayout(codec, chunk, exact=exact_pieces(partition, ("vectors", "*embed*")))
    layout.sizes, layout.usual_bytes

Padding between pieces is never sent. What a payload consists of is psdist.codecs.chunks'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from psdist.codecs.base import Codec
from psdist.codecs.raw import Raw
from psdist.protocol.partition import ITEM_BYTES, Chunk, Partition

VECTORS: Final = "vectors"
"""Among patterns of names: pieces of fewer than two dimensions, such as norms and biases."""
HEAD_BYTES: Final = 8


class Stretch(NamedTuple):
    """Elements of a chunk, in it."""

    start: int
    stop: int


class ChunkLayout:
    def __init__(self, codec: Codec, chunk: Chunk, *, exact: Collection[int]) -> None:
        """``exact``: pieces that the codec leaves alone."""
        self.codec = codec
        self.chunk = chunk
        self.exact = frozenset(exact)
        self.item_bytes = ITEM_BYTES[chunk.dtype]
        self.all = self.stretches(())
        """Where nothing is left out."""

    def stretches(self, left_out: Iterable[int]) -> tuple[list[Stretch], list[Stretch]]:
        """Those of the codec and the exact ones; ``left_out``: segments, by number."""
        coded: list[Stretch] = []
        exact: list[Stretch] = []
        without = set(left_out)
        for number, segment in enumerate(self.chunk.segments):
            if number not in without and segment.length:
                stretches = exact if segment.piece in self.exact else coded
                start, stop = segment.offset, segment.offset + segment.length
                if stretches and stretches[-1].stop == start:
                    start = stretches.pop().start
                stretches.append(Stretch(start, stop))
        return coded, exact

    def num_bytes(self, coded: Sequence[Stretch], exact: Sequence[Stretch]) -> int:
        """Of both parts."""
        num_coded, num_exact = num_values(coded), num_values(exact)
        part = filled(self.codec.num_bytes(num_coded)) if num_coded else 0
        return part + filled(num_exact * self.item_bytes)

    @property
    def sizes(self) -> tuple[int, int]:
        """The smallest and the largest payload, in bytes."""
        left_out = filled(4 * len(self.chunk.segments))
        coded = left_out + self.num_bytes(*self.all)
        return HEAD_BYTES, HEAD_BYTES + max(coded, self.chunk.num_bytes)

    @property
    def usual_bytes(self) -> int:
        """Of a payload that leaves nothing out."""
        return HEAD_BYTES + self.num_bytes(*self.all)


class Layouts:
    """Those of all chunks of a set."""

    def __init__(self, codec: Codec, partition: Partition, *, patterns: Collection[str]) -> None:
        """``patterns``: as of :func:`exact_pieces`."""
        self.codec = codec
        exact = exact_pieces(partition, patterns)
        self._each = [ChunkLayout(codec, chunk, exact=exact) for chunk in partition.chunks]

    def __getitem__(self, chunk: int) -> ChunkLayout:
        return self._each[chunk]

    def __iter__(self) -> Iterator[ChunkLayout]:
        return iter(self._each)

    @classmethod
    def of(
        cls, codec: Codec | Raw, partition: Partition, *, patterns: Collection[str]
    ) -> Layouts | None:
        """None for raw, of which payloads are the values themselves."""
        return None if isinstance(codec, Raw) else cls(codec, partition, patterns=patterns)


def exact_pieces(partition: Partition, patterns: Collection[str]) -> frozenset[int]:
    """The pieces whose name is like one of the patterns (``*`` and ``?`` as in a shell), or that
    have fewer than two dimensions (:data:`VECTORS`)."""
    return frozenset(
        index
        for index, piece in enumerate(partition.pieces)
        if (VECTORS in patterns and len(piece.shape) < 2)
        or any(fnmatchcase(piece.name, pattern) for pattern in patterns)
    )


def num_values(stretches: Iterable[Stretch]) -> int:
    return sum(stop - start for start, stop in stretches)


def filled(num_bytes: int) -> int:
    """Up to a multiple of 8."""
    return (num_bytes + 7) // 8 * 8
