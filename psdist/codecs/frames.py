"""Frames for what is not raw: encoded bytes for the network on one side, a chunk's values behind.

    frame = EncodingFrame(encoder, chunk, memory.gradient_frame(chunk))
    num_bytes = frame.encode(clock=3)              # then send it with a header that says so
    frame = DecodingFrame(codec, chunk, memory.parameter_frame(chunk))
    frame.decode()                                 # when its payload has arrived

Where the values have no memory (simulations of sizes alone), a payload is as large as it can be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from psdist.codecs.base import Codec
from psdist.codecs.wire import Encoder
from psdist.protocol.events import Frame
from psdist.protocol.memory import allocate, as_tensor
from psdist.protocol.partition import Chunk

if TYPE_CHECKING:
    from torch import Tensor


class _EncodedFrame(Frame):
    __slots__ = ("chunk", "codec", "values")

    def __init__(self, codec: Codec, chunk: Chunk, values: Frame) -> None:
        """``values``: a frame over the chunk's values, in the workers' dtype."""
        _, largest = codec.sizes(chunk)
        super().__init__(
            allocate(largest) if values.payload is not None else None, capacity=largest
        )
        self.codec = codec
        self.chunk = chunk
        self.values: Tensor | None = None
        if values.payload is not None:
            self.values = as_tensor(values.payload, chunk.dtype, chunk.length)


class EncodingFrame(_EncodedFrame):
    __slots__ = ("encoder",)

    def __init__(self, encoder: Encoder, chunk: Chunk, values: Frame) -> None:
        super().__init__(encoder.codec, chunk, values)
        self.encoder = encoder

    def encode(self, *, clock: int) -> int:
        """Make the payload of what the values are at ``clock``; its bytes."""
        if self.values is None or self.payload is None:
            return self.capacity
        return self.encoder.encode(self.chunk.index, clock, self.values, self.payload)


class DecodingFrame(_EncodedFrame):
    __slots__ = ()

    def decode(self) -> None:
        """Bring the payload that was received last to where the values lie."""
        if self.values is not None and self.payload is not None:
            self.codec.decode(self.payload[: self.num_received], self.values)
