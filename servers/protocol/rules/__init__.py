"""Round rules: when a server turns updates into optimizer steps, and when replies may leave.

The package imports ``chunks``, membership and actions, and never the state
machine.

The seam between a server's state machine and the mode: what a round rule decides; pure.

A server core owns one rule and does not know which. The rule decides

    which slots an offered push needs                      slots_needed, on_offered
    whether an update comes too late, and what follows     drop_late
    when updates become a step                             on_arrived, proceed, on_free_buffer
    when a reply may leave                                 required_min_done
    what changes with the membership                       on_stopped, on_counting, on_deaths
    how it treats the messages and completions it takes    TAKES, takes, on_held
    what a checkpoint contains of it                       misses; ``first`` restores it

    rule = Ssp(RuleContext(server=0, membership=membership), staleness=3)
    rule.build(chunks, built, send_order=[0, 1])
    actions = rule.on_arrived(chunk, push)

A push that has arrived waits in its chunk until the rule can apply it. It waits for a parameter
buffer that no open reply reads, and in sync for its turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeAlias

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.checkpoints import FirstClocks, Misses
from psdist.protocol.control import Control, Setup
from psdist.protocol.events import Frame, Offered
from psdist.protocol.header import Header
from psdist.protocol.ids import COORDINATOR, describe_peer
from psdist.servers.protocol.actions import (
    Action,
    Built,
    ChangeMode,
    Contribution,
    Step,
    SumMoved,
)
from psdist.servers.protocol.chunk_clock import ChunkClock
from psdist.servers.protocol.chunks import ChunkState, Push
from psdist.servers.protocol.chunks.receive_pool import ReceivePool
from psdist.servers.protocol.chunks.replies import NoteSent, Replies
from psdist.servers.protocol.membership import Membership


def contribution_of(push: Push) -> Contribution:
    codec = push.codec if push.slot is not None else 0
    return Contribution(push.group, push.clock, push.weight, push.slot is None, codec)


class RuleContext(NamedTuple):
    """The parameter set that a rule is made for, on one server."""

    server: int
    membership: Membership
    pipeline: int = 0
    """Rounds whose replies a worker may leave outstanding."""
    first: FirstClocks | None = None
    """State from the checkpoint that the set continues; None without one."""
    of_tables: Callable[[RuleContext], RoundRule] | None = None
    """Makes the rule of a set of tables; None: they have that of parameters."""


class RoundRule(ABC):
    """The rule of one parameter set on one server. It owns the set's receive pool and replies."""

    TAKES: ClassVar[tuple[type[Control], ...]] = ()
    """Control messages that only this rule takes."""
    scheduled: Sequence[ChangeMode] = ()
    """Changes of the mode that the run's settings contain, in order."""

    def __init__(self, context: RuleContext, *, note_sent: NoteSent | None = None) -> None:
        """``note_sent``: called for each reply."""
        self.context = context
        self._server, self._membership, self.pipeline, first, _ = context
        # A push and its retransmission, for each iteration that may be under way.
        self._most_held = 2 * (2 + self.pipeline)
        self._chunks: dict[int, ChunkState] = {}
        self.replies = Replies(
            server=self._server,
            required_min_done=self.required_min_done,
            pipeline=self.pipeline,
            note_sent=note_sent,
        )
        if first is not None:  # sent before the checkpoint
            self.replies.highest_sent = max(first.clocks)
        self.pool = ReceivePool((), need=self.slots_needed)
        self.takes: dict[type, Callable[[int, Any], list[Action]]] = {}
        """Handlers of the messages in ``TAKES``."""
        self.num_pushes = 0
        """Received updates that were not dropped."""
        self.num_steps = 0
        self.num_copies = 0
        """Steps that wrote to the other parameter buffer."""

    # -- the model -----------------------------------------------------------------------------

    def for_model(self, peer: int, setup: Setup) -> RoundRule:  # noqa: ARG002 - any model
        """Return the rule for the model that ``peer`` describes: this rule, or one that wraps it.
        Raise :class:`ProtocolError` if this rule cannot do what ``setup`` asks. (In ssp and async
        the workers clip gradients.)"""
        return self

    def new_clock(self, done: Sequence[int] = ()) -> ChunkClock:
        """Return a chunk's clock; ``done``: see :class:`ChunkClock`."""
        return ChunkClock(self._membership.limits, done)

    def build(
        self, chunks: Sequence[ChunkState], built: Built, *, send_order: Sequence[int]
    ) -> None:
        """Take the chunks of this server, in the send order, and the slots that receive pushes.
        ``send_order``: all chunks of the set, in the order in which all groups push them."""
        del send_order
        self._chunks = {chunk.index: chunk for chunk in chunks}
        self.pool = ReceivePool(built.slots, need=self.slots_needed)

    def misses(self) -> Misses | None:
        """Return what a checkpoint contains of this rule; None for nothing."""
        return None

    # -- when a reply may leave ----------------------------------------------------------------

    @abstractmethod
    def required_min_done(self, round_number: int) -> int:
        """Return the least ``min_done`` of parameters that are used in this round, see
        psdist.servers.protocol.chunk_clock."""

    def hold_rounds(self, highest: int, chunks: Iterable[ChunkState]) -> None:
        """Send nothing for rounds above ``highest`` until the proposed change is decided."""
        self.replies.hold_above(highest, chunks)

    def change_mode(self, change: ChangeMode) -> None:
        """Apply ``change.mode`` from ``change.round`` on."""
        del change
        self._refuse(COORDINATOR, "changes the mode, which is the same for the whole run")

    def furthest_pull(self, chunk: ChunkState, group: int) -> int:
        """Return the highest iteration for which a worker of the group may pull the chunk: a worker
        runs at most 1 + ``pipeline`` iterations ahead of the rest of its group."""
        return chunk.newest_round_of(group) + 2 + self.pipeline

    # -- from the offer to the step ------------------------------------------------------------

    @abstractmethod
    def slots_needed(self, index: int, group: int | None) -> int:
        """Return how many free slots the group's next push of a chunk needs, see
        psdist.servers.protocol.chunks.receive_pool."""

    def on_offered(self, chunk: ChunkState, group: int | None, offered: Offered) -> list[Action]:
        """Receive an offered message, or leave it with its sender. ``group``: None for values that
        the chief sets."""
        actions = self.pool.offer(chunk.index, group, offered.ticket, offered.peer)
        if not actions:
            index, most = chunk.index, self._most_held
            self.replies.blocked[index] = chunk
            if self.pool.num_held_of(index, group) > most:
                self._refuse(offered.peer, f"offers chunk {index} more than {most} times")
        return actions

    def drop_late(
        self,
        chunk: ChunkState,  # noqa: ARG002 - here and below: no round closes without an update
        peer: int,  # noqa: ARG002
        header: Header,  # noqa: ARG002
        slot: Frame | None,  # noqa: ARG002
    ) -> list[Action] | None:
        """Drop a push if the round closed without it; None if the push counts."""
        return None

    @abstractmethod
    def on_arrived(self, chunk: ChunkState, push: Push) -> list[Action]:
        """Take a received push, the next one of its group."""

    @abstractmethod
    def proceed(self, chunk: ChunkState) -> list[Action]:
        """Apply what can be applied to this chunk now."""

    @abstractmethod
    def on_free_buffer(self, chunk: ChunkState) -> list[Action]:
        """A reply's buffer is free, and a step may have waited for it."""

    def on_held(self, event: SumMoved) -> list[Action]:
        """The executor has moved a chunk's mean into held memory."""
        raise InvariantError(f"chunk {event.chunk} is in held memory, and this rule holds none")

    # -- membership ----------------------------------------------------------------------------

    def has_all(self, contained: int, expected: int) -> bool:
        """Return True if this many contained updates agree with the number that a group pushed."""
        return contained == expected

    def on_stopped(self, clock: int) -> list[Action]:
        """A group has stopped, and every chunk contains ``clock`` updates of it. Chunks that waited
        for the group continue."""
        # Chosen before any of them acts, because an action may make another chunk catch up.
        actions = chain.from_iterable(map(self._continue, self._waiting_at(clock)))
        return [*actions, *self._after_stop()]

    def on_deaths(self) -> list[Action]:
        """Groups have failed, and each chunk has been told. Chunks that waited for them
        continue."""
        for chunk in self._chunks.values():
            chunk.clock.catch_up()
        actions = list(chain.from_iterable(map(self._continue, self._chunks.values())))
        return actions + self._after_stop()

    def _continue(self, chunk: ChunkState) -> list[Action]:
        chunk.clock.catch_up()
        return self.proceed(chunk) + self.replies.release(chunk)

    def _waiting_at(self, clock: int) -> tuple[ChunkState, ...]:
        """Return the chunks at ``clock`` on which something waits, and drop chunks on which nothing
        waits from ``blocked``."""
        replies, holds = self.replies, self.pool.holds
        replies.blocked = {
            index: chunk
            for index, chunk in replies.blocked.items()
            if chunk.has_waiting or holds(index)
        }
        blocked = replies.blocked.values()
        return tuple(chunk for chunk in blocked if self._may_wait_at(chunk, clock))

    def _may_wait_at(self, chunk: ChunkState, clock: int) -> bool:
        """Return True if the chunk may wait for a group that stopped after ``clock`` updates."""
        return chunk.clock.min_done == clock

    @abstractmethod
    def _after_stop(self) -> list[Action]:
        """A group has stopped, and the chunks that waited for it have continued."""

    @abstractmethod
    def on_counting(self, clocks: Iterable[int]) -> list[Action]:
        """Groups count from now on; ``clocks``: iterations that each of them has made."""

    def begin_step(self, step: Step, chunk: ChunkState) -> None:
        """The chunk makes ``step``."""
        chunk.current = step.target
        chunk.version += 1
        if step.source != step.target:
            self.num_copies += 1
        self.num_steps += 1

    # -- errors and tests ----------------------------------------------------------------------

    def _refuse(self, peer: int, why: str) -> NoReturn:
        raise ProtocolError(f"server {self._server}: {describe_peer(peer)} {why}")

    def _chunk(self, index: int) -> tuple[ChunkState, ...]:
        """Return that chunk, if this server holds it."""
        chunk = self._chunks.get(index)
        return () if chunk is None else (chunk,)

    def check_invariants(self, index: int | None = None) -> None:
        """See :meth:`psdist.servers.protocol.state.ServerCore.check_invariants`."""
        chunks = self._chunks.values() if index is None else self._chunk(index)
        for chunk in chunks:
            chunk.check_invariants()
            is_waiting = chunk.parked or self.pool.holds(chunk.index)
            if is_waiting and chunk.index not in self.replies.blocked:
                raise InvariantError(f"chunk {chunk.index} is blocked and not listed in blocked")
        if index is not None:
            return
        self.pool.check_invariants()
        in_use = sum(chunk.num_slots_held for chunk in self._chunks.values())
        if in_use > self.pool.num_slots - self.pool.num_free:
            raise InvariantError(f"{in_use} receive slots in use, more than were taken")


MakeRule: TypeAlias = Callable[[RuleContext], RoundRule]
"""A rule's class, with its own parameters bound by ``functools.partial``."""
