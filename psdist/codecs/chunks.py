"""The payload of one chunk: its head, the values that a codec takes, and the exact values.

    coding = ChunkCodings(codec, partition)[chunk]
    num_bytes = coding.encode(values, frame_memory, whole=values, seed=7)
    coding.read(frame_memory[:num_bytes]).values()      # float32, as the receiver has them
    coding.read(...).change(held)                       # or: added to what is held, in place

A payload begins with 8 bytes (little-endian): its form, whether it is one for comparison, how many
segments are left out, and the CRC-32 of what the receiver holds afterwards; of a push, of what the
codec decodes. Then come the numbers of those segments, the codec's bytes (behind their number, 8
bytes, where that varies), and the values of *exact* pieces in the workers' dtype, each filled up to
8 bytes. Padding between pieces is never sent, and stays zero.

RAW      all values of the chunk, in the workers' dtype
VALUES   what the codec made of the values
CHANGE   what it made of the difference to the version before; exact pieces have their values
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from psdist.codecs import Codec, Matrix, MatrixCodec, Raw
from psdist.codecs.layout import (
    CodecOf,
    Division,
    Stretch,
    exact_pieces,
    filled,
    matrices_of,
    num_values,
)
from psdist.codecs.schemes.plain import Exact
from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.memory import as_bytes, as_tensor, torch_dtype
from psdist.protocol.partition import ITEM_BYTES, Chunk, Partition
from psdist.protocol.rounds import Turns

if TYPE_CHECKING:
    from torch import Tensor

HEAD: Final = struct.Struct("<BBHI")
_LENGTH: Final = struct.Struct("<Q")
_MOST_LEFT_OUT: Final = (1 << 16) - 1


class Form(IntEnum):
    RAW = 0
    VALUES = 1
    CHANGE = 2


class Content(NamedTuple):
    """The content of a payload; all values of a RAW one are exact."""

    form: Form
    chunk: Chunk
    coded: Sequence[Stretch]
    decoded: Tensor
    """float32, of the coded stretches, one after another."""
    exact: Sequence[Stretch]
    given: Tensor
    """In the workers' dtype, of the exact stretches."""
    checksum: int | None
    """CRC-32 of what the receiver holds afterwards, or of a push's ``decoded``, to compare."""

    def values(self) -> Tensor:
        """New float32 values of the chunk; zero where nothing was sent."""
        values = torch.zeros(self.chunk.length, dtype=torch.float32)
        self.set(values)
        return values

    def set(self, values: Tensor) -> None:
        """Write what was sent, rounded to their dtype."""
        put(values, self.coded, self.decoded)
        put(values, self.exact, self.given)

    @property
    def is_as_sent(self) -> bool:
        """False if the sender of this push has decoded other values."""
        return self.checksum is None or self.checksum == zlib.crc32(as_bytes(self.decoded))

    def change(self, held: Tensor) -> bool:
        """Write the content to ``held``, or add it, rounding to its dtype once: the same bits for
        the same ``held`` on every CPU. Return False if the sender has another result."""
        if self.form is Form.CHANGE:
            sums = taken(held, self.coded).to(torch.float32).add_(self.decoded)
            put(held, self.coded, sums)
            put(held, self.exact, self.given)
        else:
            self.set(held)
        return self.checksum is None or self.checksum == zlib.crc32(as_bytes(held))


class Places(NamedTuple):
    """Where the parts of a payload lie in it, in bytes from its beginning."""

    form: Form
    left_out: Sequence[int]
    """Segments that are not sent, by number."""
    division: Division
    """Which values are coded, and which are sent in the workers' dtype."""
    coded_at: int
    coded_bytes: int
    """The maximum for a :class:`Varying` codec, until :meth:`sized`."""
    exact_bytes: int

    @property
    def exact_at(self) -> int:
        return filled(self.coded_at + self.coded_bytes)

    @property
    def num_bytes(self) -> int:
        stop = self.exact_at + self.exact_bytes
        return stop if self.form is Form.RAW else filled(stop)

    def sized(self, coded_bytes: int) -> Places:
        """Return the places of a payload whose codec gives this many bytes."""
        return self._replace(coded_bytes=coded_bytes)

    def finish(self, into: memoryview) -> None:
        """Write the head, the length and the padding; coded and exact values are written."""
        num = len(self.left_out)
        HEAD.pack_into(into, 0, self.form, 0, num, 0)
        struct.pack_into(f"<{num}I{num % 2 * 4}x", into, HEAD.size, *self.left_out)
        if self.division.length_bytes:
            _LENGTH.pack_into(into, self.coded_at - _LENGTH.size, self.coded_bytes)
        coded_stop, exact_stop = self.coded_at + self.coded_bytes, self.exact_at + self.exact_bytes
        into[coded_stop : self.exact_at] = bytes(self.exact_at - coded_stop)
        into[exact_stop : self.num_bytes] = bytes(self.num_bytes - exact_stop)


class ChunkCoding:
    def __init__(
        self, codec: Codec, chunk: Chunk, *, exact: Collection[int], matrices: Sequence[Matrix]
    ) -> None:
        """``exact``: pieces without the codec; ``matrices``: by segment, its place in its piece."""
        self.codec = codec
        self.chunk = chunk
        self.exact = frozenset(exact)
        self.matrices = matrices
        self.item_bytes = ITEM_BYTES[chunk.dtype]
        self.all = self.divided(())
        """The division of a payload that leaves nothing out."""

    def divided(self, left_out: Iterable[int]) -> Division:
        """Return how the chunk is divided without the segments ``left_out``."""
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
        """Return the bytes of both parts; the maximum where the codec's vary."""
        num_coded, num_exact = num_values(division.coded), num_values(division.exact)
        part = filled(division.codec.num_bytes(num_coded)) if num_coded else 0
        return division.length_bytes + part + filled(num_exact * self.item_bytes)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the smallest and of the largest payload."""
        left_out = filled(4 * len(self.chunk.segments))
        coded = left_out + self.num_bytes(self.all)
        return HEAD.size, HEAD.size + max(coded, self.chunk.num_bytes)

    @property
    def usual_bytes(self) -> int:
        """Bytes of a payload that leaves nothing out."""
        return HEAD.size + self.num_bytes(self.all)

    def places(self, absent: Collection[int] = (), form: Form = Form.VALUES) -> Places:
        """Return the places of a payload without the pieces in ``absent``."""
        left_out: list[int] = []
        if absent:
            segments = enumerate(self.chunk.segments)
            left_out = [number for number, segment in segments if segment.piece in absent]
        if len(left_out) > _MOST_LEFT_OUT or isinstance(self.codec, Exact):
            return self.places_raw()
        division = self.divided(left_out) if left_out else self.all
        num = num_values(division.coded)
        return Places(
            form=form,
            left_out=left_out,
            division=division,
            coded_at=HEAD.size + filled(4 * len(left_out)) + division.length_bytes,
            coded_bytes=division.codec.num_bytes(num) if num else 0,
            exact_bytes=num_values(division.exact) * self.item_bytes,
        )

    def places_raw(self) -> Places:
        """Return the places of a payload that has all values in the workers' dtype."""
        every = [Stretch(0, self.chunk.length)]
        return Places(
            form=Form.RAW,
            left_out=(),
            division=Division([], every, self.codec, ()),
            coded_at=HEAD.size,
            coded_bytes=0,
            exact_bytes=self.chunk.num_bytes,
        )

    def encode_raw(self, values: Tensor, into: memoryview) -> int:
        """Write ``values`` as they are, in the workers' dtype. Return the bytes used."""
        return self._write_exact(self.places_raw(), values, into)

    def encode(
        self,
        values: Tensor,
        into: memoryview,
        *,
        whole: Tensor,
        seed: int,
        absent: Collection[int] = (),
        form: Form = Form.VALUES,
    ) -> int:
        """Write a payload, and return the bytes used.

        ``values``: float32, the chunk's input to the codec; ``whole``: the chunk's values, for the
        exact pieces (all pieces without a codec); ``absent``: pieces that are left out.
        """
        places = self.places(absent, form)
        coded, _, codec, _ = places.division
        if coded:
            payload = codec.encode(taken(values, coded), seed=seed)
            places = places.sized(len(payload))
            into[places.coded_at : places.coded_at + len(payload)] = as_bytes(payload)
        return self._write_exact(places, whole, into)

    def _write_exact(self, places: Places, whole: Tensor, into: memoryview) -> int:
        if exact := places.division.exact:
            num, at = num_values(exact), places.exact_at
            as_tensor(into[at:], self.chunk.dtype, num).copy_(taken(whole, exact))
        places.finish(into)
        return places.num_bytes

    @staticmethod
    def add_checksum(payload: memoryview, held: Tensor) -> None:
        """The receiver is to compare what it holds afterwards with ``held``."""
        form, _, num_left_out, _ = HEAD.unpack_from(payload)
        HEAD.pack_into(payload, 0, form, 1, num_left_out, zlib.crc32(as_bytes(held)))

    def read(self, payload: memoryview) -> Content:
        """Raises :class:`ProtocolError` where no encoder makes such a payload."""
        chunk, num_bytes = self.chunk, len(payload)
        self._require(num_bytes >= HEAD.size, f"{num_bytes} bytes are less than a head")
        number, has_checksum, num_left_out, checksum = HEAD.unpack_from(payload)
        is_known = number <= Form.CHANGE and has_checksum <= 1
        self._require(is_known, f"form {number} and flag {has_checksum} are not known")
        form, compared, at = Form(number), checksum if has_checksum else None, HEAD.size
        if form is Form.RAW:
            self._require_bytes(num_bytes, at + chunk.num_bytes)
            given = as_tensor(payload[at:], chunk.dtype, chunk.length)
            nothing = torch.empty(0, dtype=torch.float32)
            every = [Stretch(0, chunk.length)]
            return Content(form, chunk, (), nothing, every, given, compared)
        division = self.all
        if num_left_out:
            is_held = num_bytes >= at + filled(4 * num_left_out)
            self._require(is_held, f"{num_left_out} segments are left out in {num_bytes} bytes")
            left_out = struct.unpack_from(f"<{num_left_out}I", payload, at)
            is_known = left_out[-1] < len(chunk.segments) and list(left_out) == sorted(
                set(left_out)
            )
            self._require(is_known, f"segments {left_out[:3]} ... are not to be left out")
            division = self.divided(left_out)
            at += filled(4 * num_left_out)
        coded, exact, codec, _ = division
        num_coded, num_exact = num_values(coded), num_values(exact)
        length = codec.num_bytes(num_coded) if num_coded else 0
        if division.length_bytes:
            is_held = num_bytes >= at + _LENGTH.size
            self._require(is_held, f"{num_bytes} bytes have no room for a length")
            (told,) = _LENGTH.unpack_from(payload, at)
            at += _LENGTH.size
            self._require(0 < told <= length, f"a length of {told} bytes where {length} are most")
            length = told
        expected = at + filled(length) + filled(num_exact * self.item_bytes)
        self._require_bytes(num_bytes, expected)
        decoded = torch.empty(0, dtype=torch.float32)
        if num_coded:
            part = torch.frombuffer(payload, dtype=torch.uint8, offset=at, count=length)
            decoded = codec.decode(part, num_coded)
            at += filled(length)
        given = torch.empty(0, dtype=torch_dtype(chunk.dtype))
        if num_exact:
            given = as_tensor(payload[at:], chunk.dtype, num_exact)
        return Content(form, chunk, coded, decoded, exact, given, compared)

    def _require_bytes(self, num_bytes: int, expected: int) -> None:
        self._require(num_bytes == expected, f"{num_bytes} bytes where {expected} belong")

    def _require(self, is_so: bool, problem: str) -> None:
        if not is_so:
            raise ProtocolError(
                f"chunk {self.chunk.index}, codec {self.codec.name}: a payload that no sender of "
                f"this version makes: {problem}"
            )


class ChunkCodings:
    """The codings of all chunks of a set: of round 0, and :meth:`at` those of others."""

    def __init__(
        self, codec: Codec, partition: Partition, *, patterns: Collection[str] = ()
    ) -> None:
        """``patterns``: as of :func:`psdist.codecs.layout.exact_pieces`."""
        self.codec = codec
        self.levels: Sequence[ChunkCodings] = (self,)
        """The codings of all rounds; this one is of round 0."""
        self.turns: Turns | None = None
        """Which of them rule which rounds; None if there is one."""
        exact = exact_pieces(partition, patterns)
        self._each = [
            ChunkCoding(codec, chunk, exact=exact, matrices=matrices_of(partition, chunk))
            for chunk in partition.chunks
        ]

    def __getitem__(self, chunk: int) -> ChunkCoding:
        return self._each[chunk]

    def __iter__(self) -> Iterator[ChunkCoding]:
        return iter(self._each)

    def at(self, clock: int) -> ChunkCodings:
        """Return the codings of messages of this round."""
        return self if self.turns is None else self.levels[self.turns.at(clock)]

    def is_burst(self, clock: int) -> bool:
        """Return True if messages of this round are coded otherwise than in the rounds around."""
        return self.turns is not None and self.turns.is_burst(clock)

    @property
    def codecs(self) -> list[Codec]:
        """The codecs of all rounds, each once."""
        return list({id(each.codec): each.codec for each in self.levels}.values())

    def largest(self, chunk: int) -> int:
        """Return the bytes of the largest payload of a chunk, in any round."""
        return max(each[chunk].sizes[1] for each in self.levels)

    @classmethod
    def of(
        cls, parts: Sequence[CodecOf], partition: Partition, turns: Turns | None
    ) -> ChunkCodings | None:
        """Return the codings of round 0; None if all is raw, and payloads are the values.

        ``turns``: which of ``parts`` rule which rounds, the first one round 0; None if there is one
        part. Single rounds without a codec have :class:`psdist.codecs.schemes.plain.Exact`.
        """
        made: dict[CodecOf, ChunkCodings] = {}
        levels: list[ChunkCodings] = []
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


def taken(values: Tensor, stretches: Sequence[Stretch]) -> Tensor:
    """Return the values of the stretches, one after another; a single one is not copied."""
    parts = [values[start:stop] for start, stop in stretches]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else values[:0]


def put(values: Tensor, stretches: Sequence[Stretch], source: Tensor) -> None:
    """Write the consecutive values of ``source`` to the stretches of ``values``."""
    at = 0
    for start, stop in stretches:
        values[start:stop] = source[at : at + stop - start]
        at += stop - start
