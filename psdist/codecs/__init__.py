"""Codecs: how the values of a chunk lie in a frame, between flat memory and the network.

Here is the interface, with no codec (``RAW``). ``schemes`` has the codecs, and the codec of a
setting; some use ``blocks``. ``layout`` and ``chunks`` make a chunk's payload from a codec's bytes.
``feedback`` encodes a worker's pushes and keeps their residuals, ``coders`` does so on the host or
on a GPU. ``frames`` holds encoded bytes and values, ``wire`` lists the codecs of a run's two
directions, and ``checks`` has checksums. Imports psdist/protocol,
psdist/config and psdist/transfers only. A codec is pure: it owns no memory, keeps nothing between
calls and does not depend on the sender or the receiver.

The seam for codecs: from a vector of float32 to bytes, and back to what the receiver has.

A codec is *pure*: what it gives depends on its arguments alone. It keeps nothing from one encoding
to the next; what is random comes from a seed. So an encoding can be taken back, repeated and
tested, and both ends have the same bits: the sender decodes its own payload.

    payload = codec.encode(values, seed=7)            # uint8, codec.num_bytes(len(values)) of them
    seen = codec.decode(payload, len(values))         # float32: what the receiver will have

**Nothing makes a value finite that is not.** Where a vector holds NaN or infinity, what is decoded
holds NaN: in the values' block, or (topk, randk) in all values that are sent.

:class:`psdist.codecs.Raw` is no codec in this sense: there the values' own memory is
the payload, and nothing is encoded.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from psdist.errors import ProtocolError
from psdist.protocol.header import CodecCode
from psdist.protocol.partition import Chunk

if TYPE_CHECKING:
    from torch import Tensor

ANY_SERVER = -1
"""The sender of a reply: equal parameters get equal bytes from every server."""


def sender_to(worker: int) -> int:
    """Return the sender of a reply that is encoded for one worker: seeds of others differ."""
    return ANY_SERVER - 1 - worker


def seed_of(run_seed: int, sender: int, chunk: int, clock: int) -> int:
    """Return 63 bits that look independent for different arguments, and are the same on all
    machines. ``sender``: the group of a push, :data:`ANY_SERVER`, or that of :func:`sender_to`."""
    text = struct.pack("<4q", run_seed, sender, chunk, clock)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Codec(Protocol):
    @property
    def code(self) -> int:
        """Number of the codec in headers; not 0, which is raw."""
        ...

    @property
    def name(self) -> str:
        """Name in settings."""
        ...

    def num_bytes(self, num_values: int) -> int:
        """Return the bytes of a payload of 1 or more values; the maximum of a :class:`Varying`
        codec."""
        ...

    def encode(self, values: Tensor, *, seed: int) -> Tensor:
        """Return the payload of ``values`` (1-D, float32, contiguous, on the CPU), unchanged
        here."""
        ...

    def decode(self, payload: Tensor, num_values: int) -> Tensor:
        """Return new float32 values. ``payload``: uint8, aligned to 4 bytes. Raises
        :class:`ProtocolError` if ``encode`` makes no such payload of ``num_values``."""
        ...


class Varying:
    """Base of codecs whose payloads of equally many values differ in size."""


class OnDevice(ABC):
    """Base of codecs that encode where the values lie, a GPU among others, by operations of torch
    whose results are the same bits everywhere: each element by itself, or in an order that is
    written down."""

    name: str
    has_device_form = True
    """False if this codec is for the host alone."""

    @abstractmethod
    def encode_on_device(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the payload that ``encode`` makes of ``values`` (1-D, float32, contiguous,
        finite), byte for byte, and the values that ``decode`` makes of it, bit for bit. Both lie on
        the device of ``values``, which is asked for no answer, so no thread waits for it."""


class Matrix(NamedTuple):
    """A stretch of a piece, as consecutive rows; the first and the last row may be cut."""

    width: int
    """Values of a row; 0 of a vector, which has no rows."""
    before: int
    """Values of the first row that lie before the stretch."""
    length: int

    @property
    def rows(self) -> int:
        """Number of rows that the stretch touches."""
        return -(-(self.before + self.length) // self.width)


class MatrixCodec(ABC):
    """Base of codecs that take values as matrices. The next encoding of a matrix may start from the
    result of the last one, which the sender keeps and does not send."""

    @abstractmethod
    def of(self, matrices: Sequence[Matrix]) -> Codec:
        """Return the same codec for values that are these matrices, one after another."""

    @abstractmethod
    def encode_from(
        self, values: Tensor, *, seed: int, starts: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """As ``encode``. ``starts``: for each matrix the second result of its last encoding. Return
        the payload, and the new starts."""


def require_size(codec: Codec, payload: Tensor, num_values: int) -> None:
    expected = codec.num_bytes(num_values)
    if len(payload) != expected:
        raise ProtocolError(
            f"codec {codec.name}: {len(payload)} bytes where {num_values} values have {expected}"
        )


def has_only_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    if bool(values.sum().isfinite()):  # the sum of finite ones may still overflow
        return True
    return bool(values.isfinite().all())


class Raw:
    code = int(CodecCode.RAW)
    name = "raw"

    def sizes(self, chunk: Chunk) -> tuple[int, int]:
        """The smallest and the largest payload, in bytes: both the chunk's own."""
        return chunk.num_bytes, chunk.num_bytes


RAW = Raw()
