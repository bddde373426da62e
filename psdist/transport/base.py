"""The seam for the network: what servers and workers may ask of it.

Two implementations: :mod:`psdist.transport.mpi` and :mod:`psdist.transport.virtual` (one process,
a virtual clock, seeded delays). The loops of servers and workers drive either, and never know
which.

Peers are *stable ids* (:mod:`psdist.protocol.roles`), never MPI ranks. The rules:

* ``send`` does not block. The frame and its payload belong to the network until the matching
  :class:`Sent` event, or until the answer has come, which proves the same: **the bytes of an open
  send never change**.
* A message without payload, and every control message, arrives by itself as :class:`Arrived` or
  :class:`ControlArrived`. A message with payload is first *offered*; its bytes stay with the
  sender until ``accept`` names the frame to receive them into. That is how a server's memory
  stays bounded however many workers push at once.
* Messages of one pair of peers are offered in the order they were sent.
* Nothing here waits: ``poll`` returns the next event or None.

    transport.send(server_id(0), frame)
    while (event := transport.poll()) is not None: ...
"""

from __future__ import annotations

from typing import Any, Protocol

from psdist.protocol.control import Control
from psdist.protocol.events import Event, Frame


class Transport(Protocol):
    """One endpoint of the network."""

    @property
    def me(self) -> int:
        """This endpoint's stable id."""
        ...

    def send(self, peer: int, frame: Frame, *, num_bytes: int = 0) -> None:
        """Send the frame's header and the first ``num_bytes`` of its payload.

        The header must be packed already, and its ``length`` is ``num_bytes``.
        """
        ...

    def send_control(self, peer: int, message: Control) -> None:
        """Send a control message; nothing to look after."""
        ...

    def accept(self, ticket: Any, frame: Frame) -> None:
        """Receive an offered message into ``frame``; :class:`Arrived` follows."""
        ...

    def poll(self) -> Event | None:
        """The next event, if any; makes progress."""
        ...

    def now(self) -> float:
        """Seconds on this network's clock."""
        ...
