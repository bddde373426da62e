"""What a primary says, and when it leaves: a transport that holds outputs for the buddy.

The loops of a server's parameter sets are given it in place of the network. What they send is made
up at once, so that a reply reads the position and the buffer that it is about, and leaves when the
buddy holds every change before it (psdist.servers.protocol.replication.primary).

    outbox = Outbox(transport, Primary(server=1, buddy=server_id(2)))
    outbox.record(0, StepRecord(...), gradient)     # the buddy is told
    outbox.send(worker_id(3), reply)                # held until the buddy has it
    outbox.on_recorded(server_id(2), 1)             # now it leaves
"""

from __future__ import annotations

from functools import partial
from typing import Any

from psdist.protocol.control import Control
from psdist.protocol.events import Frame
from psdist.protocol.header import Header, Kind
from psdist.servers.protocol.replication.primary import Primary
from psdist.servers.protocol.replication.records import Record, pack_record
from psdist.transport.base import Transport


class RecordFrame(Frame):
    """Memory for a record on its way to the buddy; reused for record after record, but where it
    tells of a whole chunk with its optimizer's state."""

    __slots__ = ("is_reused", "outbox")

    def __init__(self, payload: memoryview, *, outbox: Outbox, is_reused: bool) -> None:
        super().__init__(payload)
        self.is_reused = is_reused
        self.outbox = outbox
        """Of which server it is: a process may serve several, and the network tells the process."""


class Outbox:
    """A :class:`psdist.transport.base.Sender` in front of the server's transport."""

    def __init__(self, transport: Transport, primary: Primary) -> None:
        self.primary = primary
        self._transport = transport
        self._free: list[RecordFrame] = []
        self._num_frames = 0
        self._frame_bytes = 0
        self.num_bytes_told = 0
        """Of payload, in records."""

    # -- to the buddy --------------------------------------------------------------------------

    def record(
        self, set_index: int, record: Record, *carried: memoryview, is_of_fill: bool = False
    ) -> int:
        """Tell the buddy, with a copy of the bytes that the change is made of; the record's number,
        0 where there is nobody to tell. ``is_of_fill``: its memory is not kept for others."""
        buddy, number = self.primary.buddy, self.primary.count_record()
        if not number or buddy is None:
            return 0
        told = pack_record(record)
        num_carried = sum(map(len, carried))
        num_bytes = num_carried + len(told)
        frame = self._new_frame(num_bytes) if is_of_fill else self._frame(num_bytes)
        payload, at = frame.payload, 0
        assert payload is not None
        for each in (*carried, memoryview(told)):
            payload[at : at + len(each)] = each
            at += len(each)
        Header(
            kind=Kind.RECORD,
            sender=self._transport.me,
            clock=number,
            length=num_bytes,
            settings=num_carried,
            set_index=set_index,
        ).pack_into(frame.header)
        self.num_bytes_told += num_bytes
        self._transport.send(buddy, frame)
        return number

    def _frame(self, num_bytes: int) -> RecordFrame:
        while self._free:
            frame = self._free.pop()
            if frame.capacity >= num_bytes:
                return frame
            self._num_frames -= 1  # a larger one takes its place
        self._frame_bytes = max(self._frame_bytes, num_bytes)
        return self._new_frame(self._frame_bytes, is_reused=True)

    def _new_frame(self, num_bytes: int, *, is_reused: bool = False) -> RecordFrame:
        from psdist.protocol.memory import allocate  # with torch, which simulations do without

        self._num_frames += 1
        return RecordFrame(allocate(num_bytes), outbox=self, is_reused=is_reused)

    def take_back(self, frame: RecordFrame) -> None:
        """The network needs the frame no more."""
        if frame.is_reused:
            self._free.append(frame)
        else:
            self._num_frames -= 1

    @property
    def is_told(self) -> bool:
        """Whether nothing is held, and nothing is on its way to the buddy."""
        return self.primary.is_told and len(self._free) == self._num_frames

    @property
    def num_bytes_held(self) -> int:
        """Memory for records on their way."""
        return self._num_frames * self._frame_bytes

    def on_recorded(self, peer: int, number: int) -> None:
        for output in self.primary.on_recorded(peer, number):
            output()

    def go_alone(self) -> None:
        """The registrar has declared the buddy dead."""
        for output in self.primary.go_alone():
            output()

    def begin_fill(self, keeper: int) -> None:
        """The registrar has found a server that keeps a second copy: it is told of the shard."""
        self.primary.begin_fill(keeper)

    # -- to all others -------------------------------------------------------------------------

    @property
    def me(self) -> int:
        return self._transport.me

    def send(self, peer: int, frame: Frame) -> None:
        output = partial(self._transport.send, peer, frame)
        if not self.primary.hold(output):
            output()

    def send_control(self, peer: int, message: Control, set_index: int = 0) -> None:
        output = partial(self._transport.send_control, peer, message, set_index)
        if not self.primary.hold(output):
            output()

    def accept(self, ticket: Any, frame: Frame) -> None:
        self._transport.accept(ticket, frame)
