"""Which values of a chunk a codec takes; without torch.

    exact_pieces(partition, ("vectors", "*embed*"))      # pieces that the codec leaves alone
    matrices_of(partition, chunk)                        # where its segments lie in their pieces

Padding between pieces is never sent. psdist.codecs.chunks makes payloads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from psdist.codecs import Codec, Matrix, Raw, Varying
from psdist.protocol.partition import Chunk, Partition

VECTORS: Final = "vectors"
"""Among patterns of names: pieces of fewer than two dimensions, such as norms and biases."""
HEAD_BYTES: Final = 8


class CodecOf(NamedTuple):
    """The codec of messages in some rounds."""

    codec: Codec | Raw
    patterns: tuple[str, ...] = ()
    """Which pieces it leaves alone, as of :func:`exact_pieces`."""


class Stretch(NamedTuple):
    """Elements of a chunk, in it."""

    start: int
    stop: int


class Division(NamedTuple):
    """The stretches of a chunk that a codec takes, and those that are sent as they are."""

    coded: list[Stretch]
    exact: list[Stretch]
    codec: Codec
    """The codec of the coded stretches."""
    segments: tuple[int, ...]
    """The coded segments, by number."""

    @property
    def length_bytes(self) -> int:
        """Bytes of the length field, which a codec of varying size needs."""
        return 8 if self.coded and isinstance(self.codec, Varying) else 0


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
