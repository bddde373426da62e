"""Frames for what is not raw: encoded bytes for the network on one side, a chunk's values behind.

    frame = EncodingFrame(encoder, chunk, memory.gradient_frame(chunk))
    num_bytes = frame.encode(clock=3, terms=terms)   # then send it with a header that says so
    frame = DecodingFrame(codings, chunk, memory.parameter_frame(chunk), held=Held())
    frame.decode(clock=3)                            # when its payload has arrived

Where the values have no memory (simulations of sizes alone), a payload is as large as it is when
nothing is left out.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from psdist.codecs.chunks import ChunkCoding, ChunkCodings, Form
from psdist.codecs.feedback import PushEncoder, PushTerms
from psdist.errors import ProtocolError
from psdist.protocol.events import Frame
from psdist.protocol.memory import allocate, as_tensor
from psdist.protocol.partition import Chunk

if TYPE_CHECKING:
    from torch import Tensor


class _EncodedFrame(Frame):
    __slots__ = ("chunk", "codings", "values")

    def __init__(self, codings: ChunkCodings, chunk: Chunk, values: Frame) -> None:
        """``values``: a frame over the chunk's values, in the workers' dtype."""
        largest = codings.largest(chunk.index)
        super().__init__(
            allocate(largest) if values.payload is not None else None, capacity=largest
        )
        self.codings = codings
        self.chunk = chunk
        self.values: Tensor | None = None
        if values.payload is not None:
            self.values = as_tensor(values.payload, chunk.dtype, chunk.length)

    def coding(self, clock: int) -> ChunkCoding:
        """Of a payload of this round."""
        return self.codings.at(clock)[self.chunk.index]


class EncodingFrame(_EncodedFrame):
    __slots__ = ("encoded", "encoder")

    def __init__(self, encoder: PushEncoder, chunk: Chunk, values: Frame) -> None:
        super().__init__(encoder.codings, chunk, values)
        self.encoder = encoder
        self.encoded = -1, 0
        """(clock, bytes) of what the payload is."""

    def encode(self, *, clock: int, terms: PushTerms, is_again: bool = False) -> int:
        """Make the payload of what the values are at ``clock``; its bytes. ``is_again``: it may
        have been made, and is what it was, for what the codec has left out of it is kept."""
        if is_again and self.encoded[0] == clock:
            return self.encoded[1]
        num_bytes = self.coding(clock).usual_bytes
        if self.values is not None and self.payload is not None:
            index, values = self.chunk.index, self.values
            num_bytes = self.encoder.encode(index, values, self.payload, clock=clock, terms=terms)
        self.encoded = clock, num_bytes
        return num_bytes

    def again(self) -> EncodingFrame:
        """Another frame with the same payload, for a network that may still have this one."""
        other = copy(self)
        other.header, other.owner = bytearray(self.header), None
        return other


class Held:
    """What a server knows that a reader holds of a chunk: the sum of what it was sent, apart from
    the parameters, to which the script may write."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: Tensor | None = None


class DecodingFrame(_EncodedFrame):
    __slots__ = ("_held",)

    def __init__(
        self, codings: ChunkCodings, chunk: Chunk, values: Frame, *, held: Held | None = None
    ) -> None:
        """``held``: where replies are relative to the ones before; None where each says all."""
        super().__init__(codings, chunk, values)
        self._held = held

    def decode(self, *, clock: int) -> bool:
        """Bring the payload that was received last, of this round, to where the values lie. False
        where the sender has others: all of them must come."""
        if self.values is None or self.payload is None:
            return True
        content = self.coding(clock).read(self.payload[: self.num_received])
        held = self._held
        if content.form is Form.CHANGE and (held is None or held.values is None):
            raise ProtocolError(
                f"chunk {self.chunk.index}: a reply relative to values that this worker "
                "does not hold"
            )
        if held is None:
            content.set(self.values)
            return True
        if held.values is None:
            held.values = self.values.clone()
        is_same = content.change(held.values)
        self.values.copy_(held.values)
        return is_same

    def restore(self) -> None:
        """What was decoded last lies where the values lie, once more."""
        if self.values is not None and self._held is not None and self._held.values is not None:
            self.values.copy_(self._held.values)
