"""Which values of a chunk a codec takes, and how large a payload is; torch-free.

    layout = Layouts(codec, partition, patterns=("vectors", "*embed*"))[chunk]
    layout.sizes, layout.usual_bytes

Padding between pieces is never sent. What a payload consists of is psdist.codecs.chunks'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from psdist.codecs.base import Codec, Matrix, MatrixCodec, Varying
from psdist.codecs.schemes.raw import Raw
from psdist.errors import InvariantError
from psdist.protocol.partition import ITEM_BYTES, Chunk, Partition
from psdist.protocol.rounds import Turns

VECTORS: Final = "vectors"
"""Among patterns of names: pieces of fewer than two dimensions, such as norms and biases."""
HEAD_BYTES: Final = 8


class CodecOf(NamedTuple):
    """Of messages of some rounds."""

    codec: Codec | Raw
    patterns: tuple[str, ...] = ()
    """Which pieces it leaves alone, as of :func:`exact_pieces`."""


class Stretch(NamedTuple):
    """Elements of a chunk, in it."""

    start: int
    stop: int


class Division(NamedTuple):
    """What a codec has of a chunk, and what goes as it is."""

    coded: list[Stretch]
    exact: list[Stretch]
    codec: Codec
    """Of the coded ones."""
    segments: tuple[int, ...]
    """Those of the codec, by number."""

    @property
    def length_bytes(self) -> int:
        """Of the length of what the codec gives, where that varies."""
        return 8 if self.coded and isinstance(self.codec, Varying) else 0


class ChunkLayout:
    def __init__(
        self, codec: Codec, chunk: Chunk, *, exact: Collection[int], matrices: Sequence[Matrix]
    ) -> None:
        """``exact``: pieces that the codec leaves alone; ``matrices``: where each segment lies in
        its piece."""
        self.codec = codec
        self.chunk = chunk
        self.exact = frozenset(exact)
        self.matrices = matrices
        self.item_bytes = ITEM_BYTES[chunk.dtype]
        self.all = self.divided(())
        """Where nothing is left out."""

    def divided(self, left_out: Iterable[int]) -> Division:
        """``left_out``: segments, by number."""
        coded: list[Stretch] = []
        exact: list[Stretch] = []
        numbers: list[int] = []
        without = set(left_out)
        for number, segment in enumerate(self.chunk.segments):
            if number not in without and segment.length:
                is_exact = segment.piece in self.exact
                if not is_exact:
                    numbers.append(number)
                stretches = exact if is_exact else coded
                start, stop = segment.offset, segment.offset + segment.length
                if stretches and stretches[-1].stop == start:
                    start = stretches.pop().start
                stretches.append(Stretch(start, stop))
        codec = self.codec
        if isinstance(codec, MatrixCodec):
            codec = codec.of([self.matrices[number] for number in numbers])
        return Division(coded, exact, codec, tuple(numbers))

    def num_bytes(self, division: Division) -> int:
        """Of both parts; at most, where the codec's varies."""
        num_coded, num_exact = num_values(division.coded), num_values(division.exact)
        part = filled(division.codec.num_bytes(num_coded)) if num_coded else 0
        return division.length_bytes + part + filled(num_exact * self.item_bytes)

    @property
    def sizes(self) -> tuple[int, int]:
        """The smallest and the largest payload, in bytes."""
        left_out = filled(4 * len(self.chunk.segments))
        coded = left_out + self.num_bytes(self.all)
        return HEAD_BYTES, HEAD_BYTES + max(coded, self.chunk.num_bytes)

    @property
    def usual_bytes(self) -> int:
        """Of a payload that leaves nothing out."""
        return HEAD_BYTES + self.num_bytes(self.all)


class Layouts:
    """Those of all chunks of a set; of round 0, and :meth:`at` those of others."""

    def __init__(
        self,
        codec: Codec,
        partition: Partition,
        *,
        patterns: Collection[str],
    ) -> None:
        """``patterns``: as of :func:`exact_pieces`."""
        self.codec = codec
        self.levels: Sequence[Layouts] = (self,)
        """All that rule in some round; this one is of round 0."""
        self.turns: Turns | None = None
        """Which of them in which; None where there is one."""
        exact = exact_pieces(partition, patterns)
        self._each = [
            ChunkLayout(codec, chunk, exact=exact, matrices=matrices_of(partition, chunk))
            for chunk in partition.chunks
        ]

    def __getitem__(self, chunk: int) -> ChunkLayout:
        return self._each[chunk]

    def __iter__(self) -> Iterator[ChunkLayout]:
        return iter(self._each)

    def at(self, clock: int) -> Layouts:
        """Of messages of this round."""
        return self if self.turns is None else self.levels[self.turns.at(clock)]

    def largest(self, chunk: int) -> int:
        """Bytes of its largest payload, in any round."""
        return max(each[chunk].sizes[1] for each in self.levels)

    @classmethod
    def of(
        cls, parts: Sequence[CodecOf], partition: Partition, turns: Turns | None
    ) -> Layouts | None:
        """``turns``: which of ``parts`` in which round, the first in round 0; None where there is
        one. None where all is raw, and payloads are the values themselves. Where single rounds are
        to be, they have :class:`psdist.codecs.schemes.plain.Exact`."""
        made: dict[CodecOf, Layouts] = {}
        levels: list[Layouts] = []
        for each in parts:
            if isinstance(each.codec, Raw):
                continue
            if each not in made:
                made[each] = cls(each.codec, partition, patterns=each.patterns)
            levels.append(made[each])
        if not levels:
            return None
        if len(levels) < len(parts):
            raise InvariantError("some rounds are raw, and have no head that says so")
        first = levels[0]
        first.levels, first.turns = levels, turns
        return first


def exact_pieces(partition: Partition, patterns: Collection[str]) -> frozenset[int]:
    """The pieces whose name is like one of the patterns (``*`` and ``?`` as in a shell), or that
    have fewer than two dimensions (:data:`VECTORS`)."""
    return frozenset(
        index
        for index, piece in enumerate(partition.pieces)
        if (VECTORS in patterns and len(piece.shape) < 2)
        or any(fnmatchcase(piece.name, pattern) for pattern in patterns)
    )


def matrices_of(partition: Partition, chunk: Chunk) -> list[Matrix]:
    """Where each segment of a chunk lies in its piece. A piece's rows are its slices along the
    dimension that is the outermost in memory, which is the first of a contiguous one."""
    starts = dict(partition.buffers[chunk.buffer].piece_starts)
    found: list[Matrix] = []
    for segment in chunk.segments:
        piece = partition.pieces[segment.piece]
        steps = [
            step for extent, step in zip(piece.shape, piece.stride, strict=False) if extent > 1
        ]
        width = max(steps) if len(steps) > 1 else 0
        place = chunk.start + segment.offset - starts[segment.piece]
        found.append(Matrix(width, place % width if width else 0, segment.length))
    return found


def num_values(stretches: Iterable[Stretch]) -> int:
    return sum(stop - start for start, stop in stretches)


def filled(num_bytes: int) -> int:
    """Up to a multiple of 8."""
    return (num_bytes + 7) // 8 * 8
