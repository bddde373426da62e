"""The seam over MPI: matched probes, one message from header and payload memory, no copies.

Every receive starts with a matched probe; the MPI tag carries kind and chunk, so that the receiver
can choose where the payload goes before it moves. A frame whose payload lies elsewhere than its
header is sent and received by one committed hindexed datatype, made once per frame: the hot path
allocates nothing and copies nothing that the wire does not force.

    transport = MpiTransport(comm, roles)      # comm: a duplicate that only psdist uses

mpi4py's exceptions do not rise above this module.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from mpi4py import MPI

from psdist.errors import ProtocolError, TransportError
from psdist.messages import (
    CONTROL_LIMIT_BYTES,
    HEADER_BYTES,
    Control,
    Header,
    Kind,
    decode_control,
    encode_control,
)
from psdist.roles import Roles, describe_peer
from psdist.transport.base import Arrived, ControlArrived, Event, Frame, Offered, Sent

_KIND_BITS = 3


class MpiTransport:
    """One rank's endpoint."""

    def __init__(self, comm: MPI.Comm, roles: Roles) -> None:
        self._comm = comm
        self._rank_of = roles.rank_of_peer
        self._peer_of = roles.peer_of_rank
        self._me = roles.peer_of_rank[comm.Get_rank()]
        self._ready: deque[Event] = deque()
        self._receiving: list[tuple[MPI.Request, int, Frame]] = []
        self._sending: deque[tuple[MPI.Request, Frame | None, Any]] = deque()
        self._status = MPI.Status()
        self._scratch = bytearray(HEADER_BYTES)
        tag_limit = comm.Get_attr(MPI.TAG_UB)
        self._max_chunks = (int(tag_limit if tag_limit is not None else 32767) + 1) >> _KIND_BITS

    @property
    def me(self) -> int:
        return self._me

    @property
    def max_chunks(self) -> int:
        return self._max_chunks  # the tag carries the chunk

    def now(self) -> float:
        return time.monotonic()

    def send(self, peer: int, frame: Frame, *, num_bytes: int = 0) -> None:
        kind, chunk = frame.header[6], int.from_bytes(frame.header[24:28], "little")
        what = [frame.header, HEADER_BYTES, MPI.BYTE] if not num_bytes else self._spec(frame)
        try:
            request = self._comm.Isend(
                what, dest=self._rank_of[peer], tag=kind | chunk << _KIND_BITS
            )
        except MPI.Exception as error:
            raise self._mapped(error, f"sending to {describe_peer(peer)}") from error
        self._sending.append((request, frame, None))

    def send_control(self, peer: int, message: Control) -> None:
        if peer == self._me:
            self._ready.append(ControlArrived(peer, message))
            return
        body = encode_control(message)
        data = bytearray(HEADER_BYTES + len(body))
        Header(kind=Kind.CONTROL, sender=self._me, length=len(body)).pack_into(data)
        data[HEADER_BYTES:] = body
        try:
            request = self._comm.Isend(
                [data, MPI.BYTE], dest=self._rank_of[peer], tag=int(Kind.CONTROL)
            )
        except MPI.Exception as error:
            raise self._mapped(error, f"sending to {describe_peer(peer)}") from error
        self._sending.append((request, None, data))

    def accept(self, ticket: Any, frame: Frame) -> None:
        message, peer, num_bytes = ticket
        if num_bytes > frame.capacity:
            raise ProtocolError(
                f"{describe_peer(peer)} sent {num_bytes} bytes where {frame.capacity} belong; "
                "do all ranks run the same version of the script?"
            )
        try:
            request = message.Irecv(self._spec(frame))
            if request.Test():
                self._arrived(peer, frame)
            else:
                self._receiving.append((request, peer, frame))
        except MPI.Exception as error:
            raise self._mapped(error, f"receiving from {describe_peer(peer)}") from error

    def poll(self) -> Event | None:
        try:
            if not self._ready:
                self._progress()
        except MPI.Exception as error:
            raise self._mapped(error, "polling") from error
        return self._ready.popleft() if self._ready else None

    def drain(self, timeout_s: float) -> None:
        """Wait until everything sent is on its way; before MPI ends."""
        deadline = time.monotonic() + timeout_s
        while self._sending and time.monotonic() < deadline:
            if self.poll() is None:
                time.sleep(1e-4)

    def _progress(self) -> None:
        for index, (request, peer, frame) in enumerate(self._receiving):
            if request.Test():
                del self._receiving[index]
                self._arrived(peer, frame)
                return
        status = self._status
        message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if message is not None:
            self._probed(message, status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE))
            return
        for _ in range(min(len(self._sending), 4)):
            request, sent, _data = self._sending[0]
            if request.Test():
                self._sending.popleft()
                if sent is not None:
                    self._ready.append(Sent(sent))
                    return
            else:
                self._sending.rotate(-1)

    def _probed(self, message: MPI.Message, rank: int, tag: int, num_bytes: int) -> None:
        peer = self._peer_of[rank]
        kind = tag & ((1 << _KIND_BITS) - 1)
        too_long = kind == Kind.CONTROL and num_bytes > HEADER_BYTES + CONTROL_LIMIT_BYTES
        if num_bytes < HEADER_BYTES or too_long:
            message.Recv(bytearray(num_bytes))
            raise ProtocolError(
                f"{describe_peer(peer)} (rank {rank}) sent a message of {num_bytes} bytes with "
                f"tag {tag}, which is none of psdist's; is another program sending on psdist's "
                "communicator?"
            )
        if num_bytes == HEADER_BYTES:
            message.Recv([self._scratch, MPI.BYTE])
            self._ready.append(Arrived(peer, self._header(peer, self._scratch), None))
        elif kind == Kind.CONTROL:
            data = bytearray(num_bytes)
            message.Recv([data, MPI.BYTE])
            self._header(peer, data)
            control = decode_control(memoryview(data)[HEADER_BYTES:])
            self._ready.append(ControlArrived(peer, control))
        else:
            payload_bytes = num_bytes - HEADER_BYTES
            ticket = (message, peer, payload_bytes)
            chunk = tag >> _KIND_BITS
            self._ready.append(Offered(peer, kind, chunk, payload_bytes, ticket))

    def _arrived(self, peer: int, frame: Frame) -> None:
        self._ready.append(Arrived(peer, self._header(peer, frame.header), frame))

    def _header(self, peer: int, data: bytearray) -> Header:
        header = Header.unpack(data)
        if header.sender != peer:
            raise ProtocolError(
                f"a message from {describe_peer(peer)} says that {describe_peer(header.sender)} "
                "sent it; were ranks renumbered?"
            )
        return header

    def _spec(self, frame: Frame) -> Any:
        """What mpi4py takes as buffer for header and payload: one committed datatype."""
        if frame.handle is None:
            if frame.payload is None:
                raise ProtocolError("a frame without memory cannot go over MPI")
            addresses = [MPI.Get_address(frame.header), MPI.Get_address(frame.payload)]
            datatype = MPI.BYTE.Create_hindexed([HEADER_BYTES, frame.capacity], addresses)
            datatype.Commit()
            frame.handle = [MPI.BOTTOM, 1, datatype]
        return frame.handle

    @staticmethod
    def _mapped(error: MPI.Exception, doing: str) -> TransportError:
        return TransportError(f"MPI failed while {doing}: {error.Get_error_string()}")
