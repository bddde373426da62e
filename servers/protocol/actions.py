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
    """Codec number of the message that brought it."""


@dataclass(slots=True)
class Build:
    """Make the shard: chunks, optimizers, memory for the parameters; ``Built`` comes back."""

    setup: Setup


@dataclass(slots=True)
class Load:
    """Copy a chunk's parameters from the slot to buffer ``target``: initial ones, or those that the
    chief sets after ``clock`` iterations of its ``group``. The optimizer's state stays."""

    chunk: int
    slot: Frame
    target: int = 0
    group: int = 0
    clock: int = -1
    """-1 for the initial ones."""
    number: int = 0
    """Number of the values that the chief sets; 0 for the initial ones."""


@dataclass(slots=True)
class LoadState:
    """Load the chief's optimizer state for a part of a chunk: the elements from ``start`` on."""

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
    """Content of a slot."""

    GRADIENT = "gradient"
    """As it was received, in the workers' dtype."""
    SUM = "sum"
    """A weighted sum of gradients, in the server's dtype."""
    HELD = "held"
    """Not in a slot: the weighted mean is in the chunk's held memory, in the server's dtype."""


@dataclass(slots=True)
class StartSum:
    """Turn the gradient in the slot, of round ``clock``, times ``weight``, into a sum in the same
    slot."""

    chunk: int
    slot: Frame
    weight: float
    clock: int


@dataclass(slots=True)
class Fold:
    """Add the gradient in the slot, of round ``clock``, times ``weight``, to the sum in
    ``accumulator``."""

    chunk: int
    slot: Frame
    accumulator: Frame
    weight: float
    clock: int


@dataclass(slots=True)
class Hold:
    """Move the sum in the slot, times ``scale``, to the chunk's held memory; :class:`SumMoved`
    comes back.

    Blocks of :data:`BLOCK_ELEMENTS` are counted from the chunk's start, so that the result for each
    does not depend on which server holds the chunk."""

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
    """The worker that pushed it, if there is exactly one."""


@dataclass(slots=True)
class EmptyStep:
    """Log that the chunk contains these updates without a gradient; nothing is computed."""

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
    """Tell a worker that its push of the chunk came after the round had closed, and that its group
    rejoins in round ``joins_at``: a header alone."""

    peer: int
    chunk: int
    clock: int
    joins_at: int


@dataclass(slots=True)
class Receipt:
    """Tell a worker that its push of the chunk has been received, or (``pull_number``) that the
    values that it sent are set: a header alone."""

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
    """True if the log contains it already: a server failed before it wrote the file."""
    misses: Misses | None = None
    """Missed rounds of the set, if this server decides which groups miss a round."""


@dataclass(slots=True)
class WriteSnapshots:
    """The snapshots of all sets were taken: write them while the job continues."""

    checkpoint: str


@dataclass(slots=True)
class MembershipEvent:
    """A membership event for the history: kind is join, suspend, resume, leave, death or reform."""

    kind: str
    group: int
    clock: int
    workers: int
    """Number of workers of the group; for reform, the number of the failed worker."""


class ChangeMode(NamedTuple):
    """Change the mode from ``round`` on. As an action: record that it changes. For a set that is
    added after the run's mode has changed, ``round`` may have ended."""

    round: int
    mode: Mode
    staleness: int
    number: int = 0
    """Number of the change, among those that the coordinator has sent; 0: from a schedule."""


class ChangeCodecs(NamedTuple):
    """Use the codecs of this level from ``round`` on, by the run's ``number``-th change; event and
    action. The mode stays, and replies that were held leave."""

    number: int
    round: int
    level: int


@dataclass(slots=True)
class Missed:
    """For the history: these groups have missed the round of the chunk's next step."""

    chunk: int
    round: int
    groups: tuple[int, ...]


@dataclass(slots=True)
class Inherit:
    """For the history: this update of a failed group, or of a failed worker in a group, has arrived
    whole. The chunk will contain it."""

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
    """End the job with this error."""

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
    | ChangeMode
    | ChangeCodecs
    | Missed
    | Inherit
    | Append
    | Fail
)


# -- events from the loop ----------------------------------------------------------------------


BLOCK_ELEMENTS = 1 << 16
"""Elements of a block of a chunk. A server sums squares by block; a norm combines these sums."""


def num_blocks(num_elements: int) -> int:
    """Return the number of blocks of a chunk with ``num_elements``."""
    return -(-num_elements // BLOCK_ELEMENTS)


class HeldBlocks(NamedTuple):
    """For clipping: which server holds each chunk of the model, and how many blocks it has."""

    owners: Sequence[int]
    numbers: Sequence[int]


NO_BLOCKS: Final = HeldBlocks((), ())


class ReplyFlow(NamedTuple):
    """Order and limit of the replies to pushes that are in flight."""

    sizes: Sequence[int]
    """Bytes of the reply about each chunk of the set."""
    rank: Sequence[int]
    """By chunk: its place in the order in which a forward pass reads the chunks."""
    most_bytes: int
    """Maximum bytes of replies in flight to one worker, except for a single reply."""


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
    """Elements of each chunk of the set."""
    replies: ReplyFlow | None = None
    """None: every reply that is allowed leaves at once."""
    are_replies_apart: bool = False
    """True if each reply is relative to what this server has sent its reader before."""
    state: Sequence[StatePart] = ()
    """The optimizer state that the chief is to send for these chunks, ascending."""


@dataclass(slots=True)
class HoldRounds:
    """A change of the mode or of the codecs is proposed. Send no parameters for rounds above the
    highest round sent so far, :attr:`ServerCore.highest_sent`."""


class AdmitGroup(NamedTuple):
    """The group of ``worker``, a substitute, joins with its clock at ``clock``."""

    worker: int
    clock: int


@dataclass(slots=True)
class SumMoved:
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
    | SumMoved
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
