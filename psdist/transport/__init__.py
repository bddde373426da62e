"""The seam for the network and its two implementations: ``mpi`` and ``virtual``.

``waiting`` is the pause between two empty polls; ``job_epochs`` keeps the messages of one job out
of the next. This room uses frames, headers and peers. It must not import servers, workers or modes.
mpi4py's exceptions end here.

The seam for the network: what servers and workers may ask of it.

Two implementations: :mod:`psdist.transport.mpi` and :mod:`psdist.transport.virtual` (one process,
a virtual clock, seeded delays). The loops of servers and workers drive either, and never know
which.

Peers are *stable ids* (:mod:`psdist.protocol.ids`), never MPI ranks. The contract:

* ``send`` does not block. The frame and its payload belong to the network until the matching
  :class:`Sent` event, or until the answer has come, which proves the same: **the bytes of an open
  send never change**.
* A message without payload, and every control message, arrives by itself as :class:`Arrived` or
  :class:`ControlArrived`. A message with payload is first *offered*; its bytes stay with the
  sender until ``accept`` names the frame to receive them into. That is how a server's memory
  stays bounded however many workers push at once.
* **Order.** What one peer sends another is announced in the order in which it was sent: headers
  (:class:`Offered`, or :class:`Arrived` without payload) and control messages together. Payloads
  that were accepted may be complete in any order, and messages of different pairs overtake one
  another. Oneself is sent control messages only.
* **Failure.** Some networks detect a failed peer (MPI with ULFM, the virtual network). Every other
  endpoint then gets :class:`PeerLost`, once and as the last event of that peer: the headers and
  control messages that had left it come first, in order. A payload moves only while its sender
  runs: a payload that was offered or accepted and has not arrived is lost. A message to a failed
  peer is dropped; its frame comes back by :class:`Sent` like any other.
* **Moves.** A failed peer may continue in another rank's process. That process makes an endpoint
  for it (``host``), and every rank calls ``move``, after the PeerLost and before it sends to the
  peer. The id stays, and the new endpoint gets PeerLost events like every other.
* **Two ids.** A spare may become a worker under a second id, known to all ranks from the start.
  Messages to either id arrive at the one endpoint, and PeerLost comes for both. The endpoint sends
  under ``me``, which is the first id until ``become``.
* Only ``drain`` waits: ``poll`` returns the next event or None.

    transport.send(server_id(0), frame)
    while (event := transport.poll()) is not None: ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from psdist.protocol.control import Control
from psdist.protocol.events import Event, Frame


class Sender(Protocol):
    """The part of an endpoint that the loop of a parameter set needs."""

    @property
    def me(self) -> int:
        """This endpoint's stable id."""
        ...

    def send(self, peer: int, frame: Frame) -> None:
        """Send the frame's header, packed already, and as much of its payload as the header's
        ``length`` says. Raises :class:`InvariantError` where the frame holds less than that."""
        ...

    def send_control(self, peer: int, message: Control, set_index: int = 0) -> None:
        """Send a control message about a parameter set; nothing to look after."""
        ...

    def accept(self, ticket: Any, frame: Frame) -> None:
        """Receive an offered message into ``frame``; :class:`Arrived` follows."""
        ...


class Transport(Sender, Protocol):
    """One endpoint of the network."""

    @property
    def lost(self) -> Mapping[int, str]:
        """Failed peers, each with its description for messages."""
        ...

    @property
    def moved(self) -> Mapping[int, str]:
        """Failed peers that continue in another process, as in :attr:`lost`, which omits them."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process has sent in this job: headers, payloads, control messages.
        Bytes of a hosted endpoint count for its host; its own count is 0."""
        ...

    def poll(self) -> Event | None:
        """The next event, if any; makes progress."""
        ...

    def host(self, peer: int) -> Transport:
        """Return an endpoint for the failed ``peer``, which continues in this process. Its events
        come from its own ``poll``; this endpoint has to be polled, too."""
        ...

    def move(self, peer: int, host: int) -> None:
        """Send to the failed ``peer`` in the process of ``host`` from now on."""
        ...

    def become(self, peer: int) -> None:
        """Set ``me`` to ``peer``, the second id of this endpoint."""
        ...

    def drain(self, timeout_s: float) -> None:
        """Wait until the network no longer needs the memory of sent messages, for at most
        ``timeout_s`` seconds. Events that come meanwhile are lost."""
        ...


class ForwardingTransport:
    """A :class:`Transport` in front of another one. Subclasses override what they change."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def me(self) -> int:
        return self._transport.me

    @property
    def lost(self) -> Mapping[int, str]:
        return self._transport.lost

    @property
    def moved(self) -> Mapping[int, str]:
        return self._transport.moved

    @property
    def bytes_sent(self) -> int:
        return self._transport.bytes_sent

    def send(self, peer: int, frame: Frame) -> None:
        self._transport.send(peer, frame)

    def send_control(self, peer: int, message: Control, set_index: int = 0) -> None:
        self._transport.send_control(peer, message, set_index)

    def accept(self, ticket: Any, frame: Frame) -> None:
        self._transport.accept(ticket, frame)

    def poll(self) -> Event | None:
        return self._transport.poll()

    def host(self, peer: int) -> Transport:
        return self._transport.host(peer)

    def move(self, peer: int, host: int) -> None:
        self._transport.move(peer, host)

    def become(self, peer: int) -> None:
        self._transport.become(peer)

    def drain(self, timeout_s: float) -> None:
        self._transport.drain(timeout_s)
