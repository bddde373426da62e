"""The pipeline of a worker's pushes of one parameter set: from a header and a gradient to a frame.

The pipeline is a list of transforms (psdist.workers.push_transforms). Each one takes the header and
the frame of a push, and returns the header with its own fields and flags. Raw pushes without
checksums have no transform.

    pushes = Pushes(partition.chunks, core.mine, encoding, transforms)
    empty = pushes.encoding.skipped(clock=7, hyper=packed, weight=1.0, empty=())
    transport.send(peer, pushes.frame(header))                    # of a SendPush

The state machine (psdist.workers.protocol.core) decides which push leaves when, and
psdist.workers.loop sends it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from psdist.protocol.events import Frame
from psdist.protocol.header import Flag, Header
from psdist.protocol.partition import Chunk
from psdist.workers.push_transforms import PushTransform, RawPush

_RETRANSMIT = Flag.RETRANSMIT


class Pushes:
    def __init__(
        self,
        chunks: Sequence[Chunk],
        mine: Collection[int],
        encoding: RawPush,
        transforms: Sequence[PushTransform],
    ) -> None:
        """``chunks``: of the model; ``mine``: the slice; ``encoding``: the transform that makes
        payloads, among ``transforms`` unless it does nothing."""
        self._chunks = chunks
        self.encoding = encoding
        self._apply = tuple(each.apply for each in transforms)
        self._apply_to_values = tuple(each.apply for each in transforms if each.is_of_values)
        self._frames: dict[int, Frame] = {}
        for index in mine:
            self.add(index)

    def add(self, index: int) -> None:
        """Push this chunk, too, from now on."""
        self._frames[index] = self.encoding.frame_of(self._chunks[index])

    def frame(self, header: Header) -> Frame:
        """Return the frame to send of the push with this header, which is packed into it."""
        frame = self._frames[header.chunk]
        if header.flags & _RETRANSMIT:  # the network may still have the frame that was sent first
            frame = self._frames[header.chunk] = frame.again()
        for apply in self._apply:
            header = apply(header, frame)
        header.pack_into(frame.header)
        return frame

    def value_frame(self, header: Header, frame: Frame) -> Frame:
        """Return ``frame``, which has parameters, with this header; they are always raw."""
        for apply in self._apply_to_values:
            header = apply(header, frame)
        header.pack_into(frame.header)
        return frame
