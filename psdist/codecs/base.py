"""The seam for codecs: from a vector of float32 to bytes, and back to what the receiver has.

A codec is *pure*: what it gives depends on its arguments alone. It keeps nothing from one encoding
to the next; what is random comes from a seed. So an encoding can be taken back, repeated and
tested, and both ends have the same bits: the sender decodes its own payload.

    payload = codec.encode(values, seed=7)            # uint8, codec.num_bytes(len(values)) of them
    seen = codec.decode(payload, len(values))         # float32: what the receiver will have

**Nothing makes a value finite that is not.** Where a vector holds NaN or infinity, what is decoded
holds NaN: in the values' block, or (topk, randk) in all values that are sent.

:class:`psdist.codecs.schemes.raw.Raw` is no codec in this sense: there the values' own memory is
the payload, and nothing is encoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from psdist.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor


class Codec(Protocol):
    @property
    def code(self) -> int:
        """Names the codec in headers; not 0, which is raw."""
        ...

    @property
    def name(self) -> str:
        """As users write it."""
        ...

    def num_bytes(self, num_values: int) -> int:
        """Of the payload of so many values, 1 at least; of a :class:`Varying` codec at most."""
        ...

    def encode(self, values: Tensor, *, seed: int) -> Tensor:
        """The payload of ``values`` (1-D, float32, contiguous, on the CPU), which stay as they
        are."""
        ...

    def decode(self, payload: Tensor, num_values: int) -> Tensor:
        """New float32 values. ``payload``: uint8, from a multiple of 4 bytes on in its memory.
        Raises :class:`ProtocolError` where it cannot be what ``encode`` made of so many values."""
        ...


class Varying:
    """Base of codecs of which payloads of as many values are not all of one size."""


class OnDevice(ABC):
    """Base of codecs that encode where the values lie, a GPU among others, by operations of torch
    whose results are the same bits everywhere: each element by itself, or in an order that is
    written down."""

    has_device_form = True
    """False where this one is for the host alone."""

    @abstractmethod
    def encode_on_device(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The payload that ``encode`` makes of ``values`` (1-D, float32, contiguous, finite), byte
        for byte, and what ``decode`` makes of it, bit for bit, both where the values lie. The
        device is asked for no answer, so nobody waits for it."""


class Matrix(NamedTuple):
    """A stretch of a piece, as rows that lie behind one another; the first and the last one may be
    cut."""

    width: int
    """Values of a row; 0 of a vector, which has no rows."""
    before: int
    """Values of the first row that lie before the stretch."""
    length: int

    @property
    def rows(self) -> int:
        """That the stretch touches."""
        return -(-(self.before + self.length) // self.width)


class MatrixCodec(ABC):
    """Base of codecs that take values as matrices, and whose next encoding of a matrix may go on
    from the last one. The sender keeps what it goes on from; nothing of it is told."""

    @abstractmethod
    def of(self, matrices: Sequence[Matrix]) -> Codec:
        """The same codec for values that are these, behind one another."""

    @abstractmethod
    def encode_from(
        self, values: Tensor, *, seed: int, starts: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """As ``encode``; ``starts``: for each matrix what its last encoding has given beside the
        payload, which is what is returned second."""


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
