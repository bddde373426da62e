"""The seam over MPI: headers, found by probes, and payloads beside them, without copies.

Two messages, because MPI moves contiguous memory in one copy or none, while a datatype over header
and payload makes it pack (docs/decisions.md). A payload travels on a communicator of its own, so
that no probe finds it: it stays with its sender until the receiver, who has read the header by
then, says where it goes. Its tag is its number among the payloads from that sender, modulo what a
tag can hold, which is far more than are ever under way (Open MPI 2^31, MPICH 2^29); both sides
count, because MPI keeps headers in order.

    transport = MpiTransport(comm, roles)      # collective; comm: a duplicate of psdist's own

Where MPI survives the death of a rank (Open MPI under ``mpirun --with-ft ulfm``; ``comm`` must
return its errors), calls that concern the dead fail. What had left the dead may still be on its way
then, for the notice comes by another: PeerLost follows when nothing has come for a while. Elsewhere
the launcher ends the job.

mpi4py's exceptions do not rise above this module.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from psdist.errors import ProtocolError, TransportError
from psdist.protocol.control import (
    CONTROL_LIMIT_BYTES,
    Control,
    Failure,
    decode_control,
    encode_control,
)
from psdist.protocol.events import Arrived, ControlArrived, Event, Frame, Offered, PeerLost, Sent
from psdist.protocol.header import HEADER_BYTES, KIND_BYTE, Header, Kind
from psdist.protocol.ids import describe_peer
from psdist.protocol.roles import Roles
from psdist.transport.generations import Generations

# MPI without ULFM knows them, too, as names of an error that it may return for anything.
_DEATHS = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING} - {MPI.ERR_UNKNOWN}
_LAST_WORDS_S = 0.1
"""For so long after the notice of a death messages of the dead may still come."""


@dataclass(slots=True)
class _Ticket:
    """A payload that waits at its sender."""

    peer: int
    header: Header
    tag: int


class MpiTransport:
    """One rank's endpoint."""

    def __init__(self, comm: MPI.Comm, roles: Roles) -> None:
        self._comm = comm
        self._payloads = comm.Dup()
        self._roles = roles
        self._rank_of = roles.rank_of_peer
        self._peer_of = roles.peer_of_rank
        self._me = roles.peer_of_rank[comm.Get_rank()]
        self._ready: deque[Event] = deque()
        self._generations = Generations()
        self._receiving: list[tuple[MPI.Request, _Ticket, Frame]] = []
        self._sending: deque[tuple[MPI.Request, MPI.Request, Frame | None, Any]] = deque()
        self._dead: dict[int, float] = {}
        """Ranks, and when their death was noticed."""
        self._unannounced: list[int] = []
        """Those of them whose PeerLost is still to come."""
        self._cut_off: set[int] = set()
        """Those of them of whom only a part of a message is here: what is behind it is dropped."""
        self.lost: dict[int, str] = {}
        self._num_sent: dict[int, int] = {}  # payloads to each rank
        self._num_offered: dict[int, int] = {}  # payloads from each rank
        tag_limit = comm.Get_attr(MPI.TAG_UB)
        self._num_tags = int(tag_limit if tag_limit is not None else 32767) + 1
        self._status = MPI.Status()
        self._scratch = bytearray(HEADER_BYTES)

    @property
    def me(self) -> int:
        return self._me

    def send(self, peer: int, frame: Frame) -> None:
        rank = self._rank_of[peer]
        num_bytes = frame.num_payload_bytes()
        memory = _memory(frame, num_bytes) if num_bytes else None
        payload = MPI.REQUEST_NULL
        try:
            header = self._comm.Isend(
                [frame.header, MPI.BYTE], dest=rank, tag=frame.header[KIND_BYTE]
            )
            if memory is not None:
                number = self._num_sent.get(rank, 0)
                self._num_sent[rank] = number + 1
                payload = self._payloads.Isend(memory, dest=rank, tag=number % self._num_tags)
        except MPI.Exception as error:
            self._failed(error, f"sending to {describe_peer(peer)}")
            self._ready.append(Sent(frame))
            return
        self._sending.append((header, payload, frame, None))

    def send_control(self, peer: int, message: Control, set_index: int = 0) -> None:
        if peer == self._me:
            self._ready.append(ControlArrived(peer, message, set_index))
            return
        body = encode_control(message)
        data = bytearray(HEADER_BYTES + len(body))
        header = Header(
            kind=Kind.CONTROL,
            sender=self._me,
            length=len(body),
            generation=self._generations.now,
            set_index=set_index,
        )
        header.pack_into(data)
        data[HEADER_BYTES:] = body
        try:
            request = self._comm.Isend(
                [data, MPI.BYTE], dest=self._rank_of[peer], tag=int(Kind.CONTROL)
            )
        except MPI.Exception as error:
            self._failed(error, f"sending to {describe_peer(peer)}")
            return
        self._sending.append((request, MPI.REQUEST_NULL, None, data))

    def accept(self, ticket: Any, frame: Frame) -> None:
        waiting: _Ticket = ticket
        num_bytes = waiting.header.length
        if waiting.peer in self.lost:
            return
        if num_bytes > frame.capacity:
            raise ProtocolError(
                f"{describe_peer(waiting.peer)} sent {num_bytes} bytes where {frame.capacity} "
                "belong; do all ranks run the same version of the script?"
            )
        frame.num_received = num_bytes
        try:
            request = self._payloads.Irecv(
                _memory(frame, num_bytes), source=self._rank_of[waiting.peer], tag=waiting.tag
            )
            if request.Test(self._status):
                self._arrived(waiting, frame)
            else:
                self._receiving.append((request, waiting, frame))
        except MPI.Exception as error:
            self._failed(error, f"receiving from {describe_peer(waiting.peer)}")

    def poll(self) -> Event | None:
        try:
            if not self._ready:
                self._progress()
        except MPI.Exception as error:
            self._failed(error, "polling")
        return self._ready.popleft() if self._ready else None

    def advance(self) -> None:
        """This rank goes on into the next job, or back to waiting: what others sent before that is
        late from now on (psdist.transport.generations)."""
        kept = [event for event in self._ready if _is_of_any_generation(event)]
        self._ready = deque([*kept, *self._generations.advance()])

    def drain(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._sending and time.monotonic() < deadline:
            if self.poll() is None:
                time.sleep(1e-4)

    def _progress(self) -> None:
        status = self._status
        for index, (request, ticket, frame) in enumerate(self._receiving):
            try:
                is_here = request.Test(status)
            except MPI.Exception:
                del self._receiving[index]  # a failed request is at its end
                raise
            if is_here:
                del self._receiving[index]
                self._arrived(ticket, frame)
                return
        message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if message is not None:
            rank = status.Get_source()
            try:
                self._probed(message, rank, status.Get_tag(), status.Get_count(MPI.BYTE))
            except MPI.Exception:
                self._cut_off.add(rank)
                raise
            return
        if self._unannounced:
            self._announce_deaths()
        for _ in range(min(len(self._sending), 4)):
            header, payload, sent, _data = self._sending[0]
            if header.Test() and payload.Test():
                self._sending.popleft()
                if sent is not None:
                    self._ready.append(Sent(sent))
                    return
            else:
                self._sending.rotate(-1)

    def _probed(self, message: MPI.Message, rank: int, tag: int, num_bytes: int) -> None:
        peer = self._peer_of[rank]
        is_control = tag == Kind.CONTROL
        limit = HEADER_BYTES + (CONTROL_LIMIT_BYTES if is_control else 0)
        if not HEADER_BYTES <= num_bytes <= limit:
            message.Recv(bytearray(num_bytes))
            raise ProtocolError(
                f"{describe_peer(peer)} (rank {rank}) sent a message of {num_bytes} bytes with "
                f"tag {tag}, which is none of psdist's; is another program sending on psdist's "
                "communicator?"
            )
        if rank in self._cut_off:
            message.Recv(bytearray(num_bytes))
            return
        if is_control:
            data = bytearray(num_bytes)
            message.Recv([data, MPI.BYTE])
            header = self._header(peer, data)
            control = decode_control(memoryview(data)[HEADER_BYTES:])
            arrived = ControlArrived(peer, control, header.set_index)
            if self._generations.admits(arrived, generation=header.generation):
                self._ready.append(arrived)
            return
        message.Recv([self._scratch, MPI.BYTE])
        header = self._header(peer, self._scratch)
        event: Arrived | Offered
        if header.length:
            number = self._num_offered.get(rank, 0)
            self._num_offered[rank] = number + 1
            ticket = _Ticket(peer, header, number % self._num_tags)
            event = Offered(
                *(peer, header.kind, header.chunk, header.length, ticket, header.set_index),
                clock=header.clock,
                pull_number=header.pull_number,
            )
        else:
            event = Arrived(peer, header, None)
        if self._generations.admits_data(event):
            self._ready.append(event)

    def _arrived(self, ticket: _Ticket, frame: Frame) -> None:
        """``self._status`` is that of the payload."""
        num_bytes = self._status.Get_count(MPI.BYTE)
        if num_bytes != ticket.header.length:
            raise ProtocolError(
                f"{describe_peer(ticket.peer)} announced {ticket.header.length} bytes and sent "
                f"{num_bytes}"
            )
        self._ready.append(Arrived(ticket.peer, ticket.header, frame))

    def _header(self, peer: int, data: bytearray) -> Header:
        header = Header.unpack(data)
        if header.sender != peer:
            raise ProtocolError(
                f"a message from {describe_peer(peer)} says that {describe_peer(header.sender)} "
                "sent it; were ranks renumbered?"
            )
        return header

    # -- failures ------------------------------------------------------------------------------

    def _failed(self, error: MPI.Exception, doing: str) -> None:
        """Note who has died; raises :class:`TransportError` if that is not what ``error`` says."""
        if error.Get_error_class() not in _DEATHS:
            raise TransportError(f"MPI failed while {doing}: {error.Get_error_string()}") from error
        failed = self._comm.Get_failed()
        # From here on probes find messages again, those of the dead, too.
        self._comm.Ack_failed(failed.Get_size())
        now = time.monotonic()
        for rank in failed.Translate_ranks(None, self._comm.Get_group()):
            if rank not in self._dead:
                self._dead[rank] = now
                self._unannounced.append(rank)

    def _announce_deaths(self) -> None:
        """No message is here: whoever died long enough ago has nothing more to say."""
        now = time.monotonic()
        for rank in list(self._unannounced):
            peer = self._peer_of[rank]
            is_receiving = any(ticket.peer == peer for _, ticket, _ in self._receiving)
            if now - self._dead[rank] >= _LAST_WORDS_S and not is_receiving:
                self._unannounced.remove(rank)
                self.lost[peer] = self._roles.describe_rank(rank)
                self._ready.append(PeerLost(peer, self.lost[peer]))


def _is_of_any_generation(event: Event) -> bool:
    if isinstance(event, ControlArrived):
        return isinstance(event.message, Failure)
    return isinstance(event, PeerLost)


def _memory(frame: Frame, num_bytes: int) -> Any:
    """The start of a frame's payload, as mpi4py takes it."""
    if frame.payload is None:
        raise ProtocolError("a frame without memory cannot go over MPI")
    return [frame.payload, num_bytes, MPI.BYTE]
