"""Actions of a server's state machine, for the loop to execute in order, and the loop's events.

The machine (psdist.servers.protocol.state) decides. The loop (psdist.servers.loop) sends and
receives, and hands Load, StartSum, Fold, Hold and Step to an executor
(psdist.servers.shard.executor): real tensors, or sizes alone. Slots are receive frames, opaque to
the machine.

Longer than other modules: it is a list, one entry for each action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

from psdist.errors import PsdistError
from psdist.mode_names import Mode
from psdist.protocol.checkpoints import Misses
from psdist.protocol.control import Control, Setup
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered, PeerLost
from psdist.protocol.optimizer_state import StatePart
from psdist.protocol.payloads import PayloadRule


class Contribution(NamedTuple):
    """A group's update of one chunk; ``is_empty``: it brought no gradient."""

    group: int
    clock: int
    weight: float
    is_empty: bool
    codec: int = 0
    """Of the message that brought it, by number."""


@dataclass(slots=True)
class Build:
    """Make the shard: chunks, optimizers, memory for the parameters; ``Built`` comes back."""

    setup: Setup


@dataclass(slots=True)
class Load:
    """The slot holds a chunk's parameters, which go to buffer ``target``: the initial ones, or such
    as the chief sets after ``clock`` iterations of its ``group``; the optimizer's state stays."""

    chunk: int
    slot: Frame
    target: int = 0
    group: int = 0
    clock: int = -1
    """-1 for the initial ones."""
    number: int = 0
    """Of the values that the chief sets; 0 for the initial ones."""


@dataclass(slots=True)
class LoadState:
    """The chief's optimizer state of a part of a chunk: the elements from ``start`` on."""

    chunk: int
    start: int
    values: bytes


@dataclass(slots=True)
class SendState:
    """Answer ``peer`` with the optimizer state of a part of a chunk, as it is now."""

    peer: int
    number: int
    chunk: int
    start: int


@dataclass(slots=True)
class Accept:
    """Receive an offered message into a slot."""

    ticket: Any
    slot: Frame


class SlotContent(Enum):
    """What the bytes of a slot are."""

    GRADIENT = "gradient"
    """As it was received, in the workers' dtype."""
    SUM = "sum"
    """A weighted sum of gradients, in the server's dtype."""
    HELD = "held"
    """No slot's: the weighted mean lies in the chunk's held memory, in the server's dtype."""


@dataclass(slots=True)
class StartSum:
    """The gradient in the slot, of round ``clock``, times ``weight``, becomes a sum in the same
    slot."""

    chunk: int
    slot: Frame
    weight: float
    clock: int


@dataclass(slots=True)
class Fold:
    """The gradient in the slot, of round ``clock``, times ``weight``, is added to the sum in
    ``accumulator``."""

    chunk: int
    slot: Frame
    accumulator: Frame
    weight: float
    clock: int


@dataclass(slots=True)
class Hold:
    """The sum in the slot, times ``scale``, moves to the chunk's held memory; ``Held`` comes back.

    Blocks of :data:`BLOCK_ELEMENTS` are counted from the chunk's start, so that what is computed of
    each does not depend on who holds the chunk."""

    chunk: int
    slot: Frame
    scale: float


@dataclass(slots=True)
class Step:
    """One optimizer step on a chunk.

    The slot ``gradient`` holds a gradient or a sum, or the chunk's held memory a mean, as
    ``content`` says; the optimizer is given that times ``gradient_scale``. The learning rate is the
    hyperparameters' * ``lr_scale``; pieces in ``absent`` stay as they are. Parameters are read from
    buffer ``source`` and end in buffer ``target`` (other than ``source`` while a reply from it is
    open).
    """

    chunk: int
    gradient: Frame | None
    content: SlotContent
    gradient_scale: float
    lr_scale: float
    hyper: bytes
    absent: frozenset[int]
    source: int
    target: int
    contributions: tuple[Contribution, ...]
    peer: int | None = None
    """Who has pushed it, where that is one worker."""


@dataclass(slots=True)
class EmptyStep:
    """Updates without a gradient: nothing is computed, the log says that the chunk has them."""

    chunk: int
    contributions: tuple[Contribution, ...]


@dataclass(slots=True, eq=False)
class ReplyToken:
    """An open reply: the parameter buffer it reads must not change until it is sent."""

    peer: int
    chunk: int
    buffer: int
    implied_by: int
    """A push of this clock or later from the same peer proves that the reply has arrived, and so
    does any other pull."""
    is_sent: bool = False


class Reply(NamedTuple):
    """Send the chunk's parameters from the token's buffer, stamped with the log's position;
    ``ReplySent(token)`` comes back. ``held``: the version that the peer holds, 0 for none."""

    token: ReplyToken
    clock: int
    min_done: int
    flags: int
    pull_number: int
    version: int
    held: int = 0


class Unchanged(NamedTuple):
    """As :class:`Reply`, to a peer that holds this version already: a header alone. No buffer stays
    open; ``buffer`` is where the parameters lie now."""

    peer: int
    chunk: int
    buffer: int
    clock: int
    min_done: int
    flags: int
    pull_number: int
    version: int


class LeftOut(NamedTuple):
    """Tell a worker that its push of the chunk came after the round had closed, and in which round
    its group goes on: a header alone."""

    peer: int
    chunk: int
    clock: int
    joins_at: int


@dataclass(slots=True)
class Receipt:
    """Tell a worker that its push of the chunk has been received, or (``pull_number``) that the
    values are set which it has sent: a header alone."""

    peer: int
    chunk: int
    clock: int
    pull_number: int = 0


@dataclass(slots=True)
class SendControl:
    peer: int
    message: Control


@dataclass(slots=True)
class TakeSnapshot:
    """Copy the values and the optimizer's state of these chunks, as they are now, for the
    checkpoint ``number``."""

    number: int
    chunks: tuple[int, ...]
    is_again: bool = False
    """The log has it already: the server had died before it wrote."""
    misses: Misses | None = None
    """Of the set, where this server decides who has missed a round."""


@dataclass(slots=True)
class WriteSnapshots:
    """The snapshots of all sets were taken: write them, while the job goes on."""

    checkpoint: str


@dataclass(slots=True)
class MembershipEvent:
    """A membership event for the history: kind is join, suspend, resume, leave, death or reform."""

    kind: str
    group: int
    clock: int
    workers: int
    """How many the group has; of reform the number of the one that has died."""


@dataclass(slots=True)
class ModeEvent:
    """For the history: from ``round`` on the mode is another one."""

    round: int
    mode: Mode
    staleness: int
    number: int = 0
    """See :class:`ChangeMode`."""


@dataclass(slots=True)
class BeginLevel:
    """From ``round`` on messages have the codecs of this level: the ``number``-th change."""

    number: int
    round: int
    level: int


@dataclass(slots=True)
class Missed:
    """For the history: these groups have missed the round that the chunk is stepped in next."""

    chunk: int
    round: int
    groups: tuple[int, ...]


@dataclass(slots=True)
class Inherit:
    """For the history: this update of a group that has died has arrived whole, and the chunk will
    contain it."""

    chunk: int
    group: int
    clock: int


class LogEntry:
    """Base of the records that a server sends its replica."""

    __slots__ = ()


@dataclass(slots=True)
class Append:
    """Send the server's replica this record. Only a server with a replica has this action."""

    record: LogEntry


@dataclass(slots=True)
class Fail:
    """The job cannot go on."""

    error: PsdistError


Action = (
    Build
    | Load
    | LoadState
    | SendState
    | Accept
    | StartSum
    | Fold
    | Hold
    | Step
    | EmptyStep
    | Reply
    | Unchanged
    | LeftOut
    | Receipt
    | SendControl
    | TakeSnapshot
    | WriteSnapshots
    | MembershipEvent
    | ModeEvent
    | BeginLevel
    | Missed
    | Inherit
    | Append
    | Fail
)


# -- events from the loop ----------------------------------------------------------------------


BLOCK_ELEMENTS = 1 << 16
"""Of a chunk, whose squares are summed by its server: the unit in which a norm is put together."""


def num_blocks(num_elements: int) -> int:
    """Of a chunk of so many elements."""
    return -(-num_elements // BLOCK_ELEMENTS)


class HeldBlocks(NamedTuple):
    """For clipping: which server holds each chunk of the model, and how many blocks it has."""

    owners: Sequence[int]
    numbers: Sequence[int]


NO_BLOCKS: Final = HeldBlocks((), ())


class ReplyFlow(NamedTuple):
    """In what portions replies to pushes leave."""

    sizes: Sequence[int]
    """Bytes of the reply about each chunk of the set."""
    rank: Sequence[int]
    """Of each chunk its place in the order in which a forward pass reads them."""
    most_bytes: int
    """Of replies under way to one worker, unless it is one alone."""


@dataclass(slots=True)
class Built:
    """The shard is made: it holds ``chunks``, and payloads are received into ``slots``."""

    chunks: Sequence[int]
    slots: Sequence[Frame]
    initials: PayloadRule
    """For initial values."""
    pushes: PayloadRule
    num_pieces: int
    num_optimizer_groups: int
    blocks: HeldBlocks = NO_BLOCKS
    lengths: Sequence[int] = ()
    """Of all chunks of the set, in elements."""
    replies: ReplyFlow | None = None
    """None: every reply that is allowed leaves at once."""
    are_replies_apart: bool = False
    """Whether a reply is relative to what its reader was sent from here."""
    state: Sequence[StatePart] = ()
    """The optimizer state that the chief is to send for these chunks, ascending."""


@dataclass(slots=True)
class HoldRounds:
    """Another mode is proposed, or other codecs: nothing more is sent for rounds above the highest
    one for which parameters were sent; :attr:`ServerCore.highest_sent` says which that is."""


class ChangeMode(NamedTuple):
    """From ``round`` on the mode is another one. A first one may be of a round that is over: that
    of a set which there was not when the run's mode changed."""

    round: int
    mode: Mode
    staleness: int
    number: int = 0
    """It is the run's so manieth change that the registrar has told of; 0: of a schedule."""


class ChangeCodecs(NamedTuple):
    """From ``round`` on messages have the codecs of this level, by the run's ``number``-th change;
    the mode stays, and what was held back goes out."""

    number: int
    round: int
    level: int


class AdmitGroup(NamedTuple):
    """The group of ``worker``, a substitute, joins, and its clock stands at ``clock``."""

    worker: int
    clock: int


@dataclass(slots=True)
class Held:
    """The weighted mean of the chunk lies in held memory; ``squares``: the sum of the squares of
    each block, in float64."""

    chunk: int
    squares: tuple[float, ...]


@dataclass(slots=True)
class ReplySent:
    """The memory of this reply is free again."""

    token: ReplyToken


ServerEvent = (
    Offered
    | Arrived
    | ControlArrived
    | PeerLost
    | Built
    | Held
    | ReplySent
    | HoldRounds
    | ChangeCodecs
    | ChangeMode
    | AdmitGroup
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerStatistics:
    """A snapshot; counts since the start."""

    num_chunks: int
    updates: int
    """Iterations of groups that every chunk of this server contains, summed over the groups."""
    pushes: int
    steps: int
    replies: int
    duplicates: int
    receive_slots: int
    most_slots_used: int
    copies_on_write: int
