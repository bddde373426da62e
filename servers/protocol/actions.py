"""What a server's state machine tells its loop to do, in this order, on the spot.

The machine (psdist.servers.protocol.state) decides, the loop (psdist.servers.loop) executes on real
memory and the network, the simulator on sizes alone. Slots are receive frames, opaque to the
machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from psdist.errors import PsdistError
from psdist.protocol.control import Control, Setup
from psdist.protocol.events import Frame


class Contribution(NamedTuple):
    """A group's update as part of one optimizer step; ``is_empty``: it brought no gradient."""

    group: int
    clock: int
    weight: float
    is_empty: bool


@dataclass(slots=True)
class Build:
    """Make the shard: chunks, optimizers, memory for the parameters."""

    setup: Setup


@dataclass(slots=True)
class Load:
    """The slot holds a chunk's initial parameters."""

    chunk: int
    slot: Frame


@dataclass(slots=True)
class Accept:
    """Receive an offered message into a slot."""

    ticket: Any
    slot: Frame


@dataclass(slots=True)
class Fold:
    """accumulator += weight * slot; with ``accumulator is slot``: it becomes the accumulator
    (slot *= weight)."""

    chunk: int
    slot: Frame
    accumulator: Frame
    weight: float


@dataclass(slots=True)
class Step:
    """One optimizer step on a chunk, or (``gradient`` None) only its record.

    The gradient is ``gradient`` * ``gradient_scale``, the learning rate the hyperparameters' *
    ``lr_scale``; pieces in ``absent`` stay as they are. Parameters are read from buffer
    ``source`` and end in buffer ``target`` (other than ``source`` while a reply from it is open).
    """

    chunk: int
    gradient: Frame | None
    gradient_scale: float
    lr_scale: float
    hyper: bytes
    absent: frozenset[int]
    source: int
    target: int
    contributions: tuple[Contribution, ...]


@dataclass(slots=True, eq=False)
class ReplyToken:
    """An open reply: the parameter buffer it reads must not change until it is through."""

    peer: int
    chunk: int
    buffer: int
    implied_by: int
    """A push of this clock or later from the same peer proves that the reply has arrived."""
    is_sent: bool = False


@dataclass(slots=True)
class Reply:
    """Send the chunk's parameters from ``buffer``; ``ReplySent(token)`` comes back."""

    token: ReplyToken
    clock: int
    position: int
    min_done: int
    flags: int
    request: int


@dataclass(slots=True)
class SendControl:
    peer: int
    message: Control


@dataclass(slots=True)
class MembershipEvent:
    """A membership event for the history: kind is join, suspend, resume or leave."""

    kind: str
    group: int
    clock: int
    workers: int


@dataclass(slots=True)
class Fail:
    """The job cannot go on."""

    error: PsdistError


Action = Build | Load | Accept | Fold | Step | Reply | SendControl | MembershipEvent | Fail


@dataclass(slots=True)
class ReplySent:
    """From the loop: the memory of this reply is free again."""

    token: ReplyToken
