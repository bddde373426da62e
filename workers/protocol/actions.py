"""Actions for the worker's loop to execute, in order, and what the loop reports back.

The machine (psdist.workers.protocol.core) decides, the loop (psdist.workers.loop) executes on real
memory and the network. Headers name chunks; the loop owns their memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psdist.protocol.control import Control, StateHeld
from psdist.protocol.header import Header


@dataclass(slots=True)
class SendPush:
    """Send this header, and then the chunk's gradient of ``header.length`` bytes. A codec changes
    codec and length in the header, and the loop counts the difference
    (:meth:`psdist.workers.protocol.transfers.Transfers.count_coded`)."""

    peer: int
    header: Header


@dataclass(slots=True)
class SendPull:
    """Send this header alone."""

    peer: int
    header: Header


@dataclass(slots=True)
class SendInitial:
    """Send this header and the chunk's initial parameters; :class:`InitialSent` comes back."""

    peer: int
    header: Header


@dataclass(slots=True)
class SendValues:
    """Send this header and the chunk's parameters as they are in memory, which become the server's;
    a receipt comes back."""

    peer: int
    header: Header


@dataclass(slots=True)
class MovePeer:
    """Send messages for ``peer``, whose process has failed, to the process of ``host``."""

    peer: int
    host: int


@dataclass(slots=True)
class SendState:
    """Send the optimizer state of a part of the chunk, the elements from ``start`` on, as
    StateValues."""

    peer: int
    chunk: int
    start: int


@dataclass(slots=True)
class KeepState:
    """The optimizer state of a part of a chunk, as ``peer`` holds it, has come."""

    peer: int
    message: StateHeld


@dataclass(slots=True)
class SendControl:
    peer: int
    message: Control
    set_index: int = 0


@dataclass(slots=True)
class AcceptReply:
    """Receive the offered parameters of ``chunk``: raw ones where they belong, others into memory
    of their own, from where :class:`DecodeReply` brings them."""

    ticket: Any
    chunk: int


@dataclass(slots=True)
class DecodeReply:
    """Decode the awaited reply about ``chunk``, of round ``clock``, to where it belongs."""

    chunk: int
    clock: int


@dataclass(slots=True)
class RestoreHeld:
    """The values of ``chunk`` that were decoded last are the newest, and others have written to
    the memory since: bring them into place once more."""

    chunk: int


@dataclass(slots=True)
class DiscardReply:
    """Receive an offered message that is not awaited, and drop it. Its arrival is not reported: it
    would count as the arrival of another reply about the chunk."""

    ticket: Any
    num_bytes: int


@dataclass(slots=True)
class Warn:
    """Tell people, in one line."""

    text: str


Action = (
    SendPush
    | SendPull
    | SendInitial
    | SendValues
    | MovePeer
    | SendState
    | KeepState
    | SendControl
    | AcceptReply
    | DecodeReply
    | RestoreHeld
    | DiscardReply
    | Warn
)


@dataclass(slots=True)
class InitialSent:
    """From the loop: the network has given back the initial values of ``chunk``."""

    chunk: int
