"""Where replies about a worker's chunks land: raw in parameter memory, or decoded into it.

    replies = Replies(wire, partition)             # the wire of the set
    replies.receive_into(chunk, parameter_frame)
    transport.accept(ticket, replies.landing[3])
    replies.decode(3, clock=7)                     # after a coded one has arrived
    replies.take_copy(partition.chunks, frames)    # the next replies land in these

The state machine decides which replies land; psdist.workers.loop receives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from psdist.codecs.frames import DecodingFrame
from psdist.codecs.wire import Wire, payload_rule
from psdist.protocol.events import Frame
from psdist.protocol.partition import Chunk, Partition

if TYPE_CHECKING:
    from torch import Tensor


class Replies:
    def __init__(self, wire: Wire, partition: Partition) -> None:
        self._codings = wire.replies(partition)
        self._is_relative = wire.is_relative
        self.rule = payload_rule(self._codings, partition, is_relative=wire.is_relative)
        """The payloads that bring parameters, for the state machine."""
        self._in_place: dict[int, Frame] = {}
        self.landing: Mapping[int, Frame] = self._in_place
        """Chunk -> the frame of its next reply: in place, or of a copy."""
        self.bytes_before_coding = 0
        """Bytes of all replies that were decoded, without a codec."""
        self.num_differing = 0
        """Replies whose checksum did not match the server's."""
        self.differing: set[int] = set()
        """Chunks of these replies: all of their values must come."""

    @property
    def is_coded(self) -> bool:
        """True if parameters in memory are what a codec has made of the servers'."""
        return self._codings is not None

    def __contains__(self, chunk: int) -> bool:
        """True if this worker receives replies about ``chunk``."""
        return chunk in self._in_place

    def receive_into(self, chunk: Chunk, values: Frame) -> None:
        """Replies about ``chunk`` land in the memory of this frame from now on."""
        frame, before = self._frame(chunk, values), self._in_place.get(chunk.index)
        if isinstance(frame, DecodingFrame) and isinstance(before, DecodingFrame):
            frame.held = before.held
        self._in_place[chunk.index] = frame

    def take_copy(self, chunks: Iterable[Chunk], frames: Iterable[Frame]) -> None:
        """The next replies land in these frames, until :meth:`take_in_place`."""
        pairs = zip(chunks, frames, strict=True)
        self.landing = {each.index: self._frame(each, frame, is_copy=True) for each, frame in pairs}

    def take_in_place(self) -> None:
        """The next replies land in parameter memory."""
        self.landing = self._in_place

    def _frame(self, chunk: Chunk, values: Frame, *, is_copy: bool = False) -> Frame:
        if self._codings is None:
            return values
        is_relative = self._is_relative and not is_copy
        return DecodingFrame(self._codings, chunk, values, is_relative=is_relative)

    def decode(self, chunk: int, *, clock: int) -> bool:
        """Decode the reply that has arrived, of this round. Return False if the result is not what
        the server holds."""
        frame = self.landing[chunk]
        assert isinstance(frame, DecodingFrame)
        self.bytes_before_coding += frame.chunk.num_bytes
        if frame.decode(clock=clock):
            return True
        self.differing.add(chunk)
        self.num_differing += 1
        return False

    def held(self, chunk: int) -> Tensor | None:
        """Return the sum of the relative replies about ``chunk``: 1-D, the workers' dtype."""
        frame = self._in_place[chunk]
        assert isinstance(frame, DecodingFrame)
        return frame.held

    def restore(self, chunk: int) -> None:
        """Bring the values that were decoded last into place once more."""
        frame = self._in_place[chunk]
        assert isinstance(frame, DecodingFrame)
        frame.restore()
