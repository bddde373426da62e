"""Network events, as servers and workers receive them, and the frames that hold messages.

    while (event := transport.poll()) is not None:
        actions = core.handle(event)

State machines see payload handles and sizes, never their memory, so that the same code
runs on MPI, on the virtual network and in a simulation of sizes alone.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any, Self

from psdist.errors import InvariantError
from psdist.protocol.control import Control
from psdist.protocol.header import HEADER_BYTES, LENGTH, Header


class Frame:
    """A header and the payload that goes with it; ``accept`` fills the payload only.

    ``payload`` is writable memory of at most ``capacity`` bytes, or None for a message that has
    no bytes (a simulation with sizes alone, an empty push). ``owner`` is for the maker of the
    frame.
    """

    __slots__ = ("capacity", "header", "num_received", "owner", "payload")

    def __init__(self, payload: memoryview | None = None, *, capacity: int | None = None) -> None:
        self.header = bytearray(HEADER_BYTES)
        self.payload = payload
        self.capacity = capacity if capacity is not None else (len(payload) if payload else 0)
        self.num_received = 0
        """Bytes of payload that ``accept`` has brought last."""
        self.owner: Any = None

    def num_payload_bytes(self) -> int:
        """Length of the payload according to the packed header."""
        num_bytes: int = LENGTH.unpack_from(self.header)[0]
        if num_bytes > self.capacity:
            raise InvariantError(f"a frame of {self.capacity} bytes after a header for {num_bytes}")
        return num_bytes

    def again(self) -> Self:
        """Return another frame with the same payload, for a network that may still have this
        one."""
        other = copy(self)
        other.header, other.owner = bytearray(self.header), None
        return other


@dataclass(slots=True)
class Offered:
    """A message with payload waits at its sender; ``accept(ticket, frame)`` brings it."""

    peer: int
    kind: int
    chunk: int
    num_bytes: int
    ticket: Any
    set_index: int = 0
    clock: int = 0
    pull_number: int = 0
    """These three as in its header."""


@dataclass(slots=True)
class Arrived:
    """A data message is here. ``frame`` is the one given to ``accept`` (None without payload)."""

    peer: int
    header: Header
    frame: Frame | None


@dataclass(slots=True)
class ControlArrived:
    peer: int
    message: Control
    set_index: int = 0
    """The parameter set that it is about; 0 for what concerns the whole job."""


@dataclass(slots=True)
class Sent:
    """The memory of ``frame`` is the caller's again: it has arrived, or its receiver has failed."""

    frame: Frame


@dataclass(slots=True)
class PeerLost:
    """``peer`` has failed, and this is its last event.

    Headers and control messages that had left it were given before. A payload that was not here
    by then never comes: frames named to ``accept`` for it are the caller's again.
    """

    peer: int
    who: str
    """As people know it: "worker 1 (rank 3 on n2)" where the network knows that much."""


Event = Offered | Arrived | ControlArrived | Sent | PeerLost
