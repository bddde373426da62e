"""A sender that holds the messages of a primary until its replica has the records before them.

The loops of a server's parameter sets send through it. A message is made at once, with the log
position and the buffer that it is about. It leaves when the replica has every change before it
(psdist.servers.protocol.replication.primary). Acknowledgements of records bypass it.

    outbox = Outbox(transport, Primary(server=1, replica=server_id(2)))
    outbox.record(0, StepRecord(...), gradient)     # sent to the replica
    outbox.send(worker_id(3), reply)                # held until the replica has the record
    outbox.on_ack(server_id(2), 1)                  # now the reply leaves
"""

from __future__ import annotations

from functools import partial
from typing import Any

from psdist.protocol.control import Control
from psdist.protocol.events import Frame
from psdist.protocol.header import Header, Kind
from psdist.servers.protocol.replication.primary import Primary
from psdist.servers.protocol.replication.records import Record
from psdist.transport import Transport


class RecordFrame(Frame):
    """Memory for a record in flight. Records of whole chunks do not reuse it."""

    __slots__ = ("is_reused", "outbox")

    def __init__(self, payload: memoryview, *, outbox: Outbox, is_reused: bool) -> None:
        super().__init__(payload)
        self.is_reused = is_reused
        self.outbox = outbox
        """Its server: a process may serve several, and the network knows the process only."""


class Outbox:
    """A :class:`psdist.transport.Sender` in front of the server's transport."""

    def __init__(self, transport: Transport, primary: Primary) -> None:
        self.primary = primary
        self._transport = transport
        self._free: list[RecordFrame] = []
        self._num_frames = 0
        self._frame_bytes = 0
        self.num_bytes_recorded = 0
        """Payload bytes of all records."""

    # -- to the replica ------------------------------------------------------------------------

    def record(
        self, set_index: int, record: Record, *carried: memoryview, is_of_fill: bool = False
    ) -> int:
        """Send the replica a record with a copy of the bytes that it carries. Return its number, 0
        without a replica. ``is_of_fill``: its memory is not reused."""
        replica, number = self.primary.replica, self.primary.count_record()
        if not number or replica is None:
            return 0
        packed = record.encode()
        num_carried = sum(map(len, carried))
        num_bytes = num_carried + len(packed)
        frame = self._new_frame(num_bytes) if is_of_fill else self._frame(num_bytes)
        payload, at = frame.payload, 0
        assert payload is not None
        for each in (*carried, memoryview(packed)):
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
        self.num_bytes_recorded += num_bytes
        self._transport.send(replica, frame)
        return number

    def _frame(self, num_bytes: int) -> RecordFrame:
        while self._free:
            frame = self._free.pop()
            if frame.capacity >= num_bytes:
                return frame
            self._num_frames -= 1  # a larger one replaces it
        self._frame_bytes = max(self._frame_bytes, num_bytes)
        return self._new_frame(self._frame_bytes, is_reused=True)

    def _new_frame(self, num_bytes: int, *, is_reused: bool = False) -> RecordFrame:
        from psdist.protocol.memory import allocate  # with torch, which simulations do without

        self._num_frames += 1
        return RecordFrame(allocate(num_bytes), outbox=self, is_reused=is_reused)

    def take_back(self, frame: RecordFrame) -> None:
        """The network has returned the frame."""
        if frame.is_reused:
            self._free.append(frame)
        else:
            self._num_frames -= 1

    @property
    def is_settled(self) -> bool:
        """True if no message is held and no record is in flight."""
        return self.primary.is_settled and len(self._free) == self._num_frames

    def on_ack(self, peer: int, number: int) -> None:
        for output in self.primary.on_ack(peer, number):
            output()

    def go_alone(self) -> None:
        """The coordinator has declared the replica failed."""
        for output in self.primary.go_alone():
            output()

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
