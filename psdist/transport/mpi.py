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
from typing import Any, TypeAlias

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
# Looked up once: these are used in every poll.
_BYTE, _NO_REQUEST = MPI.BYTE, MPI.REQUEST_NULL
_ANY_SOURCE, _ANY_TAG = MPI.ANY_SOURCE, MPI.ANY_TAG
_CONTROL = int(Kind.CONTROL)
_CONTROL_LIMIT_BYTES = HEADER_BYTES + CONTROL_LIMIT_BYTES
_MOST_UNSEEN = 32
"""With more sends than these even a poll that brings a message looks for what has been sent."""
_LAST_WORDS_S = 0.1
"""For so long after the notice of a death messages of the dead may still come."""


_Ticket: TypeAlias = tuple[int, Header, int]
"""A payload that waits at its sender: the peer, its header and its tag."""


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
        self._num_sent = dict.fromkeys(self._peer_of, 0)  # payloads to each rank
        self._num_offered = dict.fromkeys(self._peer_of, 0)  # payloads from each rank
        tag_limit = comm.Get_attr(MPI.TAG_UB)
        self._num_tags = int(tag_limit if tag_limit is not None else 32767) + 1
        self._status = MPI.Status()
        self._scratch = bytearray(HEADER_BYTES)
        self._scratch_memory = (self._scratch, _BYTE)

    @property
    def me(self) -> int:
        return self._me

    def send(self, peer: int, frame: Frame) -> None:
        rank, data = self._rank_of[peer], frame.header
        num_bytes = frame.num_payload_bytes()
        memory = _memory(frame, num_bytes) if num_bytes else None
        payload = _NO_REQUEST
        try:
            header = self._comm.Isend((data, _BYTE), rank, data[KIND_BYTE])
            if memory is not None:
                number = self._num_sent[rank]
                self._num_sent[rank] = number + 1
                payload = self._payloads.Isend(memory, rank, number % self._num_tags)
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
            request = self._comm.Isend((data, _BYTE), self._rank_of[peer], _CONTROL)
        except MPI.Exception as error:
            self._failed(error, f"sending to {describe_peer(peer)}")
            return
        self._sending.append((request, _NO_REQUEST, None, data))

    def accept(self, ticket: Any, frame: Frame) -> None:
        waiting: _Ticket = ticket
        peer, header, tag = waiting
        num_bytes = header.length
        if self.lost and peer in self.lost:
            return
        if num_bytes > frame.capacity:
            raise ProtocolError(
                f"{describe_peer(peer)} sent {num_bytes} bytes where {frame.capacity} "
                "belong; do all ranks run the same version of the script?"
            )
        frame.num_received = num_bytes
        try:
            request = self._payloads.Irecv(_memory(frame, num_bytes), self._rank_of[peer], tag)
            if request.Test(self._status):
                self._ready.append(self._arrived(waiting, frame))
            else:
                self._receiving.append((request, waiting, frame))
        except MPI.Exception as error:
            self._failed(error, f"receiving from {describe_peer(peer)}")

    def poll(self) -> Event | None:
        ready = self._ready
        if not ready:
            try:
                event = self._progress()
            except MPI.Exception as error:
                self._failed(error, "polling")
            else:
                if event is not None:
                    return event
        return ready.popleft() if ready else None

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

    def _progress(self) -> Event | None:
        """The next event that is here; others may lie in ``_ready`` then."""
        if self._receiving and (arrived := self._first_received()) is not None:
            return arrived
        if len(self._sending) > _MOST_UNSEEN:  # who never polls to the end must not fill memory
            self._look_for_sent()
        status = self._status
        message = self._comm.Improbe(_ANY_SOURCE, _ANY_TAG, status)
        if message is not None:
            rank = status.Get_source()
            try:
                return self._probed(message, rank, status.Get_tag(), status.Get_count(_BYTE))
            except MPI.Exception:
                self._cut_off.add(rank)
                raise
        if self._unannounced:
            self._announce_deaths()
        if self._sending:
            self._look_for_sent()
        return None

    def _look_for_sent(self) -> None:
        """Among the first few."""
        sending = self._sending
        for _ in range(min(len(sending), 4)):
            header, payload, sent, _data = sending[0]
            if header.Test() and payload.Test():
                sending.popleft()
                if sent is not None:
                    self._ready.append(Sent(sent))
                    return
            else:
                sending.rotate(-1)

    def _first_received(self) -> Arrived | None:
        status = self._status
        for index, (request, ticket, frame) in enumerate(self._receiving):
            try:
                is_here = request.Test(status)
            except MPI.Exception:
                del self._receiving[index]  # a failed request is at its end
                raise
            if is_here:
                del self._receiving[index]
                return self._arrived(ticket, frame)
        return None

    def _probed(
        self, message: MPI.Message, rank: int, tag: int, num_bytes: int
    ) -> ControlArrived | Offered | Arrived | None:
        """None where it is not of now (psdist.transport.generations)."""
        peer = self._peer_of[rank]
        is_control = tag == _CONTROL
        limit = _CONTROL_LIMIT_BYTES if is_control else HEADER_BYTES
        if not HEADER_BYTES <= num_bytes <= limit:
            message.Recv(bytearray(num_bytes))
            raise ProtocolError(
                f"{describe_peer(peer)} (rank {rank}) sent a message of {num_bytes} bytes with "
                f"tag {tag}, which is none of psdist's; is another program sending on psdist's "
                "communicator?"
            )
        if self._cut_off and rank in self._cut_off:
            message.Recv(bytearray(num_bytes))
            return None
        if is_control:
            data = bytearray(num_bytes)
            message.Recv((data, _BYTE))
            header = self._header(peer, data)
            control = decode_control(memoryview(data)[HEADER_BYTES:])
            said = ControlArrived(peer, control, header.set_index)
            is_of_now = self._generations.admits(said, generation=header.generation)
            return said if is_of_now else None
        message.Recv(self._scratch_memory)
        header = self._header(peer, self._scratch)
        event: Arrived | Offered
        if length := header.length:
            number = self._num_offered[rank]
            self._num_offered[rank] = number + 1
            ticket = peer, header, number % self._num_tags
            event = Offered(
                peer, header.kind, header.chunk, length, ticket,
                header.set_index, header.clock, header.pull_number,
            )  # fmt: skip
        else:
            event = Arrived(peer, header, None)
        return event if self._generations.admits_data(event) else None

    def _arrived(self, ticket: _Ticket, frame: Frame) -> Arrived:
        """``self._status`` is that of the payload."""
        peer, header, _tag = ticket
        num_bytes = self._status.Get_count(_BYTE)
        if num_bytes != header.length:
            raise ProtocolError(
                f"{describe_peer(peer)} announced {header.length} bytes and sent {num_bytes}"
            )
        return Arrived(peer, header, frame)

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
            is_receiving = any(sender == peer for _, (sender, _, _), _ in self._receiving)
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
    return (frame.payload, num_bytes, _BYTE)
