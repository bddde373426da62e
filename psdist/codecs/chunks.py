"""The payload of one chunk: which of its values a codec takes, and what stands beside them.

    coding = ChunkCodings(layouts)[chunk]
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
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from psdist.codecs.base import MatrixCodec
from psdist.codecs.layout import ChunkLayout, Layouts, Stretch, filled, num_values
from psdist.codecs.schemes.plain import Exact
from psdist.errors import ProtocolError
from psdist.protocol.memory import as_bytes, as_tensor, torch_dtype
from psdist.protocol.partition import Chunk
from psdist.protocol.rounds import Turns

if TYPE_CHECKING:
    from torch import Tensor

_HEAD: Final = struct.Struct("<BBHI")
_LENGTH: Final = struct.Struct("<Q")
_MOST_LEFT_OUT: Final = (1 << 16) - 1


class Form(IntEnum):
    RAW = 0
    VALUES = 1
    CHANGE = 2


class Content(NamedTuple):
    """What a payload says; of a RAW one all values are exact."""

    form: Form
    chunk: Chunk
    coded: Sequence[Stretch]
    decoded: Tensor
    """float32, of the coded stretches, behind one another."""
    exact: Sequence[Stretch]
    given: Tensor
    """In the workers' dtype, of the exact ones."""
    checksum: int | None
    """CRC-32 of what the receiver holds afterwards, of a push of ``decoded``, where it is to be
    compared."""

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
        """Of a push: False where its sender has decoded something else."""
        return self.checksum is None or self.checksum == zlib.crc32(as_bytes(self.decoded))

    def change(self, held: Tensor) -> bool:
        """What was sent becomes ``held``, or is added to it, and is rounded to its dtype once; the
        same bits for the same ``held`` on every CPU. False where it differs from the sender's."""
        if self.form is Form.CHANGE:
            sums = taken(held, self.coded).to(torch.float32).add_(self.decoded)
            put(held, self.coded, sums)
            put(held, self.exact, self.given)
        else:
            self.set(held)
        return self.checksum is None or self.checksum == zlib.crc32(as_bytes(held))


class Places(NamedTuple):
    """Where the parts of a payload lie in it, in bytes; of one whose size is known before it is
    encoded."""

    form: Form
    left_out: Sequence[int]
    coded: Sequence[Stretch]
    coded_at: int
    coded_stop: int
    exact: Sequence[Stretch]
    exact_at: int
    exact_stop: int
    num_bytes: int

    def finish(self, into: memoryview) -> None:
        """Write what stands beside the parts, which are there."""
        _write_head(into, self.form, self.left_out)
        _write_zeros(into, self.coded_stop, self.exact_at)
        _write_zeros(into, self.exact_stop, self.num_bytes)


class ChunkCoding(ChunkLayout):
    def _left_out(self, absent: Collection[int]) -> list[int]:
        segments = enumerate(self.chunk.segments)
        return [number for number, segment in segments if segment.piece in absent]

    def places(self, absent: Collection[int]) -> Places:
        """As :meth:`encode` makes a push; of a codec that is not :class:`Varying`."""
        left_out = self._left_out(absent) if absent else []
        if len(left_out) > _MOST_LEFT_OUT or isinstance(self.codec, Exact):
            return self.places_raw()
        coded, exact, codec, _ = self.divided(left_out) if left_out else self.all
        at = _HEAD.size + filled(4 * len(left_out))
        stop = at + (codec.num_bytes(num_values(coded)) if coded else 0)
        exact_at = filled(stop)
        exact_stop = exact_at + num_values(exact) * self.item_bytes
        return Places(
            form=Form.VALUES,
            left_out=left_out,
            coded=coded,
            coded_at=at,
            coded_stop=stop,
            exact=exact,
            exact_at=exact_at,
            exact_stop=exact_stop,
            num_bytes=filled(exact_stop),
        )

    def places_raw(self) -> Places:
        """As :meth:`encode_raw` makes one."""
        at = _HEAD.size
        return Places(
            form=Form.RAW,
            left_out=(),
            coded=(),
            coded_at=at,
            coded_stop=at,
            exact=[Stretch(0, self.chunk.length)],
            exact_at=at,
            exact_stop=at + self.chunk.num_bytes,
            num_bytes=at + self.chunk.num_bytes,
        )

    def encode_raw(self, values: Tensor, into: memoryview) -> int:
        """``values`` as they are, in the workers' dtype; the bytes used."""
        _write_head(into, Form.RAW, ())
        num_bytes = self.chunk.num_bytes
        as_tensor(into[_HEAD.size :], self.chunk.dtype, self.chunk.length).copy_(values)
        return _HEAD.size + num_bytes

    def encode(
        self,
        values: Tensor,
        into: memoryview,
        *,
        whole: Tensor,
        seed: int,
        absent: Collection[int] = (),
        form: Form = Form.VALUES,
        starts: dict[int, Tensor | None] | None = None,
    ) -> int:
        """``values``: float32, what the codec is given of the whole chunk; ``whole``: of which the
        exact pieces are sent (all, where there is no codec); ``absent``: pieces that are left out;
        ``starts``: by segment, from where a codec of matrices goes on, brought up to date. The
        bytes used."""
        left_out = self._left_out(absent) if absent else []
        if len(left_out) > _MOST_LEFT_OUT or isinstance(self.codec, Exact):
            return self.encode_raw(whole, into)
        division = self.divided(left_out) if left_out else self.all
        coded, exact, codec, segments = division
        _write_head(into, form, left_out)
        at = _HEAD.size + filled(4 * len(left_out))
        if coded:
            given = taken(values, coded)
            if isinstance(codec, MatrixCodec) and starts is not None:
                last = [starts.get(number) for number in segments]
                payload, after = codec.encode_from(given, seed=seed, starts=last)
                starts.update(zip(segments, after, strict=True))
            else:
                payload = codec.encode(given, seed=seed)
            if division.length_bytes:
                at += _LENGTH.size
                _LENGTH.pack_into(into, at - _LENGTH.size, len(payload))
            stop = at + len(payload)
            into[at:stop] = as_bytes(payload)
            at = filled(stop)
            _write_zeros(into, stop, at)
        if exact:
            num = num_values(exact)
            as_tensor(into[at:], self.chunk.dtype, num).copy_(taken(whole, exact))
            stop = at + num * self.item_bytes
            at = filled(stop)
            _write_zeros(into, stop, at)
        return at

    @staticmethod
    def add_checksum(payload: memoryview, held: Tensor) -> None:
        """The receiver is to compare what it holds afterwards with ``held``."""
        form, _, num_left_out, _ = _HEAD.unpack_from(payload)
        _HEAD.pack_into(payload, 0, form, 1, num_left_out, zlib.crc32(as_bytes(held)))

    def read(self, payload: memoryview) -> Content:
        """Raises :class:`ProtocolError` where no encoder makes such a payload."""
        chunk, num_bytes = self.chunk, len(payload)
        self._require(num_bytes >= _HEAD.size, f"{num_bytes} bytes are less than a head")
        number, has_checksum, num_left_out, checksum = _HEAD.unpack_from(payload)
        is_known = number <= Form.CHANGE and has_checksum <= 1
        self._require(is_known, f"form {number} and flag {has_checksum} are not known")
        form, compared, at = Form(number), checksum if has_checksum else None, _HEAD.size
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
    """Those of all chunks of a set; of round 0, and :meth:`at` those of others."""

    def __init__(self, layouts: Layouts) -> None:
        self.codec = layouts.codec
        self._layouts = layouts
        self._levels: Sequence[ChunkCodings] = (self,)
        self._turns: Turns | None = None
        """As :class:`Layouts` has both."""
        self._each = [
            ChunkCoding(each.codec, each.chunk, exact=each.exact, matrices=each.matrices)
            for each in layouts
        ]

    def __getitem__(self, chunk: int) -> ChunkCoding:
        return self._each[chunk]

    def at(self, clock: int) -> ChunkCodings:
        """Of messages of this round."""
        return self if self._turns is None else self._levels[self._turns.at(clock)]

    def is_burst(self, clock: int) -> bool:
        """Whether messages of this round are coded otherwise than those of the rounds around it."""
        return self._turns is not None and self._turns.is_burst(clock)

    def largest(self, chunk: int) -> int:
        """Bytes of its largest payload, in any round."""
        return self._layouts.largest(chunk)

    @classmethod
    def of(cls, layouts: Layouts | None) -> ChunkCodings | None:
        """None for raw, of which payloads are the values themselves."""
        if layouts is None:
            return None
        made = {id(each): cls(each) for each in layouts.levels}
        first = made[id(layouts)]
        first._levels, first._turns = [made[id(each)] for each in layouts.levels], layouts.turns
        return first


def _write_head(into: memoryview, form: Form, left_out: Sequence[int]) -> None:
    num = len(left_out)
    _HEAD.pack_into(into, 0, form, 0, num, 0)
    struct.pack_into(f"<{num}I{num % 2 * 4}x", into, _HEAD.size, *left_out)


def _write_zeros(into: memoryview, start: int, stop: int) -> None:
    into[start:stop] = bytes(stop - start)


def taken(values: Tensor, stretches: Sequence[Stretch]) -> Tensor:
    """Behind one another; a single one is not copied."""
    parts = [values[start:stop] for start, stop in stretches]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else values[:0]


def put(values: Tensor, stretches: Sequence[Stretch], source: Tensor) -> None:
    """What lies behind one another in ``source`` goes where it belongs."""
    at = 0
    for start, stop in stretches:
        values[start:stop] = source[at : at + stop - start]
        at += stop - start
