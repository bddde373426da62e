"""The seam over MPI: headers, found by probes, and separate payloads, without copies.

Two messages, because MPI moves contiguous memory in one copy or none, while a datatype over header
and payload makes it pack (docs/dev/decisions.md). A payload has its own communicator, so that no
probe finds it: it stays with its sender until the receiver, who has read the header by
then, says where it goes. Its tag is its number among the payloads from that sender, modulo what a
tag can hold, which is far more than are ever under way (Open MPI 2^31, MPICH 2^29); both sides
count, because MPI keeps headers in order.

    transport = MpiTransport(comm, roles)      # collective; comm: a duplicate of psdist's own

Where MPI survives the failure of a rank (Open MPI under ``mpirun --with-ft ulfm``; ``comm`` must
return its errors), calls that concern the failed rank raise. Its last messages may arrive after the
notice, which comes another way: PeerLost follows after a while without messages. Elsewhere the
launcher ends the job.

mpi4py's exceptions do not rise above this module. ``poll`` raises :class:`JobEndedError` when a
rank has ended the job (psdist.transport.job_epochs).

Longer than other modules: a hosted endpoint shares the requests in flight with its host.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import Any, TypeAlias

from mpi4py import MPI

from psdist.errors import InvariantError, ProtocolError, TransportError
from psdist.protocol.control import (
    CONTROL_LIMIT_BYTES,
    NOTE_BYTES,
    Control,
    Failure,
    decode_control,
    encode_control,
)
from psdist.protocol.events import Arrived, ControlArrived, Event, Frame, Offered, PeerLost, Sent
from psdist.protocol.header import HEADER_BYTES, KIND_BYTE, Header, Kind
from psdist.protocol.ids import describe_peer
from psdist.protocol.roles import Roles
from psdist.transport import ForwardingTransport
from psdist.transport.job_epochs import JobEpochs

# MPI without ULFM knows them, too, as names of an error that it may return for anything.
_DEATHS = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING} - {MPI.ERR_UNKNOWN}
# Looked up once: these are used in every poll.
_BYTE = MPI.BYTE
_ANY_SOURCE, _ANY_TAG = MPI.ANY_SOURCE, MPI.ANY_TAG
_CONTROL = int(Kind.CONTROL)
_CONTROL_LIMIT_BYTES = HEADER_BYTES + CONTROL_LIMIT_BYTES + NOTE_BYTES
_MOST_UNSEEN = 32
"""With more sends than these even a poll that brings a message looks for what has been sent."""
_LAST_WORDS_S = 0.1
"""Messages of a failed rank may arrive for this long after the notice."""

_MOVED = 64
"""Above all kinds. Messages to a server that continues in another process have the tag
``kind + _MOVED * (1 + number of the server)``."""

_Ticket: TypeAlias = tuple[int, Header, int, deque[Event]]
"""A payload that waits in the process of this rank: its header, its tag, and where its event
goes."""


class MpiTransport:
    """One rank's endpoint."""

    def __init__(self, comm: MPI.Comm, roles: Roles) -> None:
        self._comm = comm
        self._payloads = comm.Dup()
        self._roles = roles
        self._home = roles.rank_of_peer
        self._rank_of = dict(self._home)
        self._peer_of = roles.peer_of_rank
        self._peers_of = roles.peers_of_rank
        self.moved: dict[int, str] = {}
        self._moved: dict[int, int] = {}
        """Failed peer that continues elsewhere -> addition to the tags of its messages."""
        self._has_hosted: set[tuple[int, int]] = {
            (rank, peer) for rank, (_, *others) in self._peers_of.items() for peer in others
        }
        """(rank, peer that continued there, or that its spare may become): messages of that time
        may come late."""
        self._hosted: dict[int, HostedEndpoint] = {}
        """Endpoints of peers that continue here, by that addition."""
        self._me = roles.peer_of_rank[comm.Get_rank()]
        self._ready: deque[Event] = deque()
        self._epochs = JobEpochs()
        self._receiving: list[tuple[MPI.Request, _Ticket, Frame]] = []
        self._sending: deque[tuple[MPI.Request, MPI.Request | None, Frame | None, Any]] = deque()
        """(header, payload or None, frame to return, other memory to keep)."""
        self._dead: dict[int, float] = {}
        """Failed rank -> time of the notice, in seconds."""
        self._unannounced: list[int] = []
        """Failed ranks without a PeerLost event so far."""
        self._cut_off: set[int] = set()
        """Failed ranks whose later messages are dropped: one has arrived in part only."""
        self.lost: dict[int, str] = {}
        self.bytes_sent = 0
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
        tag = data[KIND_BYTE]
        if self._moved:
            tag += self._moved.get(peer, 0)
        num_bytes = frame.num_payload_bytes()
        memory = _memory(frame, num_bytes) if num_bytes else None
        payload = None
        try:
            header = self._comm.Isend((data, _BYTE), rank, tag)
            if memory is not None:
                number = self._num_sent[rank]
                self._num_sent[rank] = number + 1
                payload = self._payloads.Isend(memory, rank, number % self._num_tags)
        except MPI.Exception as error:
            self._failed(error, f"sending to {describe_peer(peer)}")
            self._ready.append(Sent(frame))
            return
        self.bytes_sent += HEADER_BYTES + num_bytes
        self._sending.append((header, payload, frame, None))

    def send_control(self, peer: int, message: Control, set_index: int = 0) -> None:
        self._send_control(self._me, peer, message, set_index)

    def _send_control(self, me: int, peer: int, message: Control, set_index: int) -> None:
        if self._rank_of[peer] == self._comm.Get_rank():
            to = self._hosted.get(self._moved.get(peer, 0))
            ready = self._ready if to is None else to.ready
            ready.append(ControlArrived(me, message, set_index))
            return
        body = encode_control(message)
        data = bytearray(HEADER_BYTES + len(body))
        header = Header(
            kind=Kind.CONTROL,
            sender=me,
            length=len(body),
            generation=self._epochs.now,
            set_index=set_index,
        )
        header.pack_into(data)
        data[HEADER_BYTES:] = body
        try:
            tag = _CONTROL + self._moved.get(peer, 0)
            request = self._comm.Isend((data, _BYTE), self._rank_of[peer], tag)
        except MPI.Exception as error:
            self._failed(error, f"sending to {describe_peer(peer)}")
            return
        self.bytes_sent += len(data)
        self._sending.append((request, None, None, data))

    def accept(self, ticket: Any, frame: Frame) -> None:
        waiting: _Ticket = ticket
        rank, header, tag, ready = waiting
        peer, num_bytes = header.sender, header.length
        if self._cut_off and rank in self._cut_off:
            return
        if num_bytes > frame.capacity:
            raise ProtocolError(
                f"{describe_peer(peer)} sent {num_bytes} bytes where {frame.capacity} "
                "belong; do all ranks run the same version of the script?"
            )
        frame.num_received = num_bytes
        try:
            request = self._payloads.Irecv(_memory(frame, num_bytes), rank, tag)
            if request.Test(self._status):
                ready.append(self._arrived(waiting, frame))
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
        """Enter the next job epoch: the next job, or the wait for one. Messages of earlier epochs
        are dropped from now on (psdist.transport.job_epochs)."""
        self.bytes_sent = 0
        kept = [event for event in self._ready if _is_of_any_epoch(event)]
        self._ready = deque([*kept, *self._epochs.advance()])

    def host(self, peer: int) -> HostedEndpoint:
        added = _MOVED * (1 + peer)
        endpoint = self._hosted[added] = HostedEndpoint(self, peer)
        self._go_on(peer, self._comm.Get_rank())
        return endpoint

    def move(self, peer: int, host: int) -> None:
        self._go_on(peer, self._home[host])

    def _go_on(self, peer: int, rank: int) -> None:
        """``peer`` is found at ``rank`` from now on."""
        self._rank_of[peer], self._moved[peer] = rank, _MOVED * (1 + peer)
        self._has_hosted.add((rank, peer))
        self.moved[peer] = self.lost.pop(peer, self._roles.describe(peer))

    def become(self, peer: int) -> None:
        self._me = peer

    def drain(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._sending and time.monotonic() < deadline:
            if self.poll() is None:
                time.sleep(1e-4)

    def _progress(self) -> Event | None:
        """Return the next event that has arrived; more may be in ``_ready``. Raises
        :class:`JobEndedError`, each time, after a rank has ended the job."""
        self._epochs.require_not_ended()
        if self._receiving and (arrived := self._first_received()) is not None:
            return arrived
        if len(self._sending) > _MOST_UNSEEN:  # bounds the memory of a rank that polls rarely
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
        """Check a few sends; queue an event for the first complete one."""
        sending = self._sending
        for _ in range(min(len(sending), 4)):
            header, payload, sent, _data = sending[0]
            if header.Test() and (payload is None or payload.Test()):
                sending.popleft()
                if sent is not None:
                    self._ready.append(Sent(sent))
                    return
            else:
                sending.rotate(-1)

    def _first_received(self) -> Event | None:
        status = self._status
        for index, (request, ticket, frame) in enumerate(self._receiving):
            try:
                is_here = request.Test(status)
            except MPI.Exception:
                del self._receiving[index]  # a failed request is at its end
                raise
            if is_here:
                del self._receiving[index]
                return self._for_me(self._arrived(ticket, frame), ticket[3])
        return None

    def _for_me(self, event: Event, ready: deque[Event]) -> Event | None:
        """Return the event, or None after giving it to a hosted peer."""
        if ready is self._ready:
            return event
        ready.append(event)
        return None

    def _probed(self, message: MPI.Message, rank: int, tag: int, num_bytes: int) -> Event | None:
        """Return the event, or None if it is of another job epoch (psdist.transport.job_epochs)."""
        ready, kind = self._ready, tag
        if tag >= _MOVED:
            hosted = self._hosted.get(tag - tag % _MOVED)
            if hosted is not None:
                ready, kind = hosted.ready, tag % _MOVED
        if self._cut_off and rank in self._cut_off:
            message.Recv(bytearray(num_bytes))
            return None
        if kind == _CONTROL or num_bytes != HEADER_BYTES:
            return self._probed_control(message, rank, tag, num_bytes, kind, ready)
        message.Recv(self._scratch_memory)
        header = self._header(rank, self._scratch)
        event: Arrived | Offered
        if length := header.length:
            number = self._num_offered[rank]
            self._num_offered[rank] = number + 1
            sender = header.sender
            event = Offered(
                sender, header.kind, header.chunk, length,
                (rank, header, number % self._num_tags, ready),
                header.set_index, header.clock, header.pull_number,
            )  # fmt: skip
        else:
            event = Arrived(header.sender, header, None)
        if self._epochs.waiting and not self._epochs.admits_data(event):
            return None
        return event if ready is self._ready else self._for_me(event, ready)

    def _probed_control(
        self,
        message: MPI.Message,
        rank: int,
        tag: int,
        num_bytes: int,
        kind: int,
        ready: deque[Event],
    ) -> Event | None:
        """As :meth:`_probed`, for a control message. Raises :class:`ProtocolError` for others."""
        data = bytearray(num_bytes)
        message.Recv((data, _BYTE))
        if kind != _CONTROL or not HEADER_BYTES <= num_bytes <= _CONTROL_LIMIT_BYTES:
            raise ProtocolError(
                f"{describe_peer(self._peer_of[rank])} (rank {rank}) sent a message of {num_bytes} "
                f"bytes with tag {tag}, which is none of psdist's; is another program sending on "
                "psdist's communicator?"
            )
        header = self._header(rank, data)
        control = decode_control(memoryview(data)[HEADER_BYTES:])
        said = ControlArrived(header.sender, control, header.set_index)
        is_of_now = self._epochs.admits(said, epoch=header.generation)
        return self._for_me(said, ready) if is_of_now else None

    def _arrived(self, ticket: _Ticket, frame: Frame) -> Arrived:
        """``self._status`` is that of the payload."""
        _rank, header, _tag, _ready = ticket
        peer, num_bytes = header.sender, self._status.Get_count(_BYTE)
        if num_bytes != header.length:
            raise ProtocolError(
                f"{describe_peer(peer)} announced {header.length} bytes and sent {num_bytes}"
            )
        return Arrived(peer, header, frame)

    def _header(self, rank: int, data: bytearray) -> Header:
        header = Header.unpack(data)
        peer = self._peer_of[rank]
        if header.sender != peer and (rank, header.sender) not in self._has_hosted:
            raise ProtocolError(
                f"a message from {describe_peer(peer)} says that {describe_peer(header.sender)} "
                "sent it; were ranks renumbered?"
            )
        return header

    # -- failures ------------------------------------------------------------------------------

    def _failed(self, error: MPI.Exception, doing: str) -> None:
        """Record the failed ranks. Raises :class:`TransportError` for any other error."""
        if error.Get_error_class() not in _DEATHS:
            raise TransportError(f"MPI failed while {doing}: {error.Get_error_string()}") from error
        failed = self._comm.Get_failed()
        # Probes find messages again from here on, including those of failed ranks.
        self._comm.Ack_failed(failed.Get_size())
        now = time.monotonic()
        for rank in failed.Translate_ranks(None, self._comm.Get_group()):
            if rank not in self._dead:
                self._dead[rank] = now
                self._unannounced.append(rank)

    def _announce_deaths(self) -> None:
        """Queue PeerLost for ranks that failed long enough ago. Called when no message is here."""
        now = time.monotonic()
        for rank in list(self._unannounced):
            is_receiving = any(ticket[0] == rank for _, ticket, _ in self._receiving)
            if now - self._dead[rank] >= _LAST_WORDS_S and not is_receiving:
                self._unannounced.remove(rank)
                self._cut_off.add(rank)  # a declared failure is final
                for peer in self._peers_of[rank]:
                    self._announce(peer)

    def _announce(self, peer: int) -> None:
        who = self._roles.describe(peer)
        if peer not in self.moved:  # the coordinator may be faster than the network
            self.lost[peer] = who
        for ready in (self._ready, *(each.ready for each in self._hosted.values())):
            ready.append(PeerLost(peer, who))


class HostedEndpoint(ForwardingTransport):
    """The endpoint of a failed peer that continues in this process. It uses this rank's transport,
    which finds the messages and therefore has to be polled, too."""

    bytes_sent = 0

    def __init__(self, transport: MpiTransport, me: int) -> None:
        super().__init__(transport)
        self._send_control = partial(transport._send_control, me)
        self._me = me
        self.ready: deque[Event] = deque()

    @property
    def me(self) -> int:
        return self._me

    def send_control(self, peer: int, message: Control, set_index: int = 0) -> None:
        self._send_control(peer, message, set_index)

    def poll(self) -> Event | None:
        return self.ready.popleft() if self.ready else None

    def become(self, peer: int) -> None:
        raise InvariantError(f"{describe_peer(self._me)}, in another's process, became {peer}")


def _is_of_any_epoch(event: Event) -> bool:
    if isinstance(event, ControlArrived):
        return isinstance(event.message, Failure)
    return isinstance(event, PeerLost)


def _memory(frame: Frame, num_bytes: int) -> Any:
    """The start of a frame's payload, as mpi4py takes it."""
    if frame.payload is None:
        raise ProtocolError("a frame without memory cannot go over MPI")
    return (frame.payload, num_bytes, _BYTE)
