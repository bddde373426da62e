"""Frames for what is not raw: encoded bytes for the network on one side, a chunk's values behind.

    frame = EncodingFrame(encoder, chunk, gradient)
    frame.begin(clock=3, terms=terms, after=[mark])  # optional, on a device
    num_bytes = frame.encode(clock=3, terms=terms)   # then send it with a header that says so
    frame = DecodingFrame(codings, chunk, memory.parameter_frame(chunk), is_relative=True)
    frame.decode(clock=3)                            # when its payload has arrived

Where the values have no memory (simulations of sizes alone), a payload is as large as it is when
nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from psdist.codecs.chunks import ChunkCoding, ChunkCodings, Form
from psdist.codecs.feedback import PushEncoder, PushTerms
from psdist.errors import ProtocolError
from psdist.protocol.events import Frame
from psdist.protocol.memory import allocate, as_tensor
from psdist.protocol.partition import Chunk
from psdist.transfers import DONE, Copy, Mark

if TYPE_CHECKING:
    from torch import Tensor


class _EncodedFrame(Frame):
    __slots__ = ("chunk", "codings", "values")

    def __init__(
        self,
        codings: ChunkCodings,
        chunk: Chunk,
        values: Tensor | None,
        memory: Callable[[int], memoryview] = allocate,
    ) -> None:
        """``values``: of the chunk, in the workers' dtype; ``memory(num_bytes)``: for payloads."""
        largest = codings.largest(chunk.index)
        super().__init__(memory(largest) if values is not None else None, capacity=largest)
        self.codings = codings
        self.chunk = chunk
        self.values = values

    def coding(self, clock: int) -> ChunkCoding:
        """Return the coding of a payload of this round."""
        return self.codings.at(clock)[self.chunk.index]


class EncodingFrame(_EncodedFrame):
    """A push of one chunk; its payload is encoded when it leaves."""

    __slots__ = ("encoded", "encoder")

    def __init__(
        self,
        encoder: PushEncoder,
        chunk: Chunk,
        values: Tensor | None,
        memory: Callable[[int], memoryview] = allocate,
    ) -> None:
        super().__init__(encoder.codings, chunk, values, memory)
        self.encoder = encoder
        self.encoded = -1, 0
        """(clock, bytes) of what the payload is."""

    def begin(self, *, clock: int, terms: PushTerms, after: Iterable[Mark]) -> Copy:
        """See :meth:`PushEncoder.begin`."""
        if self.values is None or self.payload is None:
            return DONE
        return self.encoder.begin(
            self.chunk.index, self.values, self.payload, clock=clock, terms=terms, after=after
        )

    def encode(self, *, clock: int, terms: PushTerms, is_retransmit: bool = False) -> int:
        """Make the payload from the values of ``clock``, and return its bytes. ``is_retransmit``: a
        payload that was made for this clock stays, because its residual is kept."""
        if is_retransmit and self.encoded[0] == clock:
            return self.encoded[1]
        num_bytes = self.coding(clock).usual_bytes
        if self.values is not None and self.payload is not None:
            index, values = self.chunk.index, self.values
            num_bytes = self.encoder.encode(index, values, self.payload, clock=clock, terms=terms)
        self.encoded = clock, num_bytes
        return num_bytes


class DecodingFrame(_EncodedFrame):
    """A reply about one chunk; its payload is decoded when it has arrived."""

    __slots__ = ("held", "is_relative", "kernels")

    def __init__(
        self, codings: ChunkCodings, chunk: Chunk, values: Frame, *, is_relative: bool = False
    ) -> None:
        """``values``: a frame over the chunk's values; ``is_relative``: each reply is relative to
        the reply before."""
        from psdist.codecs.host_kernels import kernels_for  # compiles; only for a codec

        super().__init__(codings, chunk, values_of(chunk, values))
        self.is_relative = is_relative
        self.kernels = kernels_for(codings.codecs) if is_relative else None
        self.held: Tensor | None = None
        """The sum of relative replies: 1-D, the workers' dtype. It lies apart from the parameters,
        because the script may write to them."""

    def decode(self, *, clock: int) -> bool:
        """Decode the payload that was received last, of this round, to where the values lie. Return
        False if the sender holds other values: all of them must come."""
        if self.values is None or self.payload is None:
            return True
        coding, payload = self.coding(clock), self.payload[: self.num_received]
        kernels, held = self.kernels, self.held
        if kernels and held is not None and kernels.add(coding, payload, held, form=Form.CHANGE):
            self.values.copy_(held)
            return True
        content = coding.read(payload)
        if content.form is Form.CHANGE and self.held is None:
            raise ProtocolError(
                f"chunk {self.chunk.index}: a reply relative to values that this worker "
                "does not hold"
            )
        if not self.is_relative:
            content.set(self.values)
            return True
        if self.held is None:
            self.held = self.values.clone()
        is_same = content.change(self.held)
        self.values.copy_(self.held)
        return is_same

    def restore(self) -> None:
        """Bring the values that were decoded last into place once more."""
        if self.values is not None and self.held is not None:
            self.values.copy_(self.held)


def values_of(chunk: Chunk, values: Frame) -> Tensor | None:
    """Return the values in a frame (1-D, the workers' dtype); None if it has no memory."""
    if values.payload is None:
        return None
    return as_tensor(values.payload, chunk.dtype, chunk.length)
