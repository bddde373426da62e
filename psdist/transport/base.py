"""The seam for the network: what servers and workers may ask of it.

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
* **Death.** Where the network notices that a peer has died (MPI with ULFM, the virtual network),
  every other endpoint gets :class:`PeerLost`, once and as the last event of that peer: the headers
  and control messages that had left it come first, in order. A payload moves while its sender
  lives: what was offered or accepted but is not here stays with the dead. What is sent to the
  dead is dropped; its frames are given back by :class:`Sent` like any other.
* **Moves.** A peer that has died may go on in another one's process: that one makes an endpoint for
  it (``host``), and everybody says where it is now (``move``), behind its PeerLost and before
  anything is sent to it. Its id stays, and that endpoint gets PeerLost like every other.
* **Two ids.** A spare may go on as a worker, under another id, which all know from the start. What
  is sent to either arrives at the one endpoint, and when it dies PeerLost comes for both. What it
  sends it sends under ``me``, the first of them until ``become``.
* Nothing here waits but ``drain``: ``poll`` returns the next event or None.

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
        """Peers that are known to be dead, and who they were, for people."""
        ...

    @property
    def moved(self) -> Mapping[int, str]:
        """Those of them that go on in another one's process: these are lost no more."""
        ...

    @property
    def bytes_sent(self) -> int:
        """All that this process has sent others in this job: headers, payloads, control messages.
        What a hosted endpoint sends counts as its host's, and its own is 0."""
        ...

    def poll(self) -> Event | None:
        """The next event, if any; makes progress."""
        ...

    def host(self, peer: int) -> Transport:
        """The endpoint of ``peer``, which has died and goes on in this process. What comes for it
        is polled there; this endpoint's process has to be polled, too."""
        ...

    def move(self, peer: int, host: int) -> None:
        """``peer``, which has died, is found in the process of ``host`` from now on."""
        ...

    def become(self, peer: int) -> None:
        """From now on ``me`` is ``peer``, this endpoint's other id."""
        ...

    def drain(self, timeout_s: float) -> None:
        """Before this endpoint ends: return when the network needs nothing of what it has sent any
        more, after ``timeout_s`` seconds at the latest. Events that come meanwhile are lost."""
        ...
