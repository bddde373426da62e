"""The server's state machine: what a server decides, without doing any of it.

``handle(event) -> actions`` is the only way in. Events come from a transport (real or virtual) and
from the loop, which executes the actions; time, memory and the network never appear here.

A push goes this way, and this is the place to read how:

    Offered   -> a receive slot, or it stays with its sender     receive_pool
    Arrived   -> is it the next of its group?                    _on_push, here
    applied   -> sync: folded in group order, then one Step      gathering
                 ssp, async: a Step at once                      on_arrival
    contained -> the group's clock advances                      replies: advance, chunk_clock
    min_done  -> replies that the mode now allows                replies: release

    core = ServerCore(server=0, policy=Ssp(3))
    for action in core.handle(event): ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from psdist.errors import PeerLostError, ProtocolError, PsdistError
from psdist.protocol.control import (
    Leave,
    Missing,
    Register,
    Registered,
    Resume,
    Resumed,
    Settings,
    Setup,
    Suspend,
    WhoIsMissing,
)
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered, PeerLost
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import describe_peer
from psdist.protocol.payloads import PayloadRule
from psdist.servers.protocol.actions import (
    Action,
    Build,
    Built,
    Fail,
    Load,
    MembershipEvent,
    ReplySent,
    SendControl,
    ServerEvent,
)
from psdist.servers.protocol.chunk_clock import ChunkClock
from psdist.servers.protocol.chunk_state import ChunkState, Push
from psdist.servers.protocol.gathering import Gathered
from psdist.servers.protocol.membership import Membership
from psdist.servers.protocol.on_arrival import OnArrival
from psdist.servers.protocol.policy import Applying, Policy, check_applying
from psdist.servers.protocol.receive_pool import NO_GROUP
from psdist.servers.protocol.replies import Replies
from psdist.servers.protocol.settings import SettingsOfWorkers
from psdist.servers.protocol.updates import Updates

_APPLIES: dict[Applying, type[Updates]] = {
    Applying.GATHERED: Gathered,
    Applying.ON_ARRIVAL: OnArrival,
}


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
    most_slots_used: int
    copies_on_write: int


class ServerCore:
    def __init__(self, *, server: int, policy: Policy, pipeline: int = 0) -> None:
        self._server = server
        self._policy = policy
        self._newest_round = 0
        self._chunks: dict[int, ChunkState] = {}  # ascending
        self._membership = Membership()
        self._settings = SettingsOfWorkers(pipeline=pipeline)
        self._replies = Replies(policy=policy, pipeline=pipeline)
        self._updates = _APPLIES[policy.applying(0)](
            membership=self._membership, settings=self._settings, replies=self._replies
        )
        self._initials = self._pushed = PayloadRule.of_nothing()
        self._is_described = False
        self._before_built: list[Offered | Arrived] = []
        self._pushes = self._duplicates = 0
        self._on: dict[type, Callable[[Any], list[Action]]] = {
            ControlArrived: self._on_control,
            Built: self._on_built,
            Offered: self._hold,
            Arrived: self._hold,
            ReplySent: self._on_reply_sent,
            PeerLost: self._on_peer_lost,
        }
        self._on_message: dict[type, Callable[[int, Any], list[Action]]] = {
            Setup: self._on_setup,
            Register: self._on_register,
            Settings: self._on_settings,
            Suspend: self._on_suspend,
            Resume: self._on_resume,
            Leave: self._on_leave,
            WhoIsMissing: self._on_who_is_missing,
        }

    # -- the way in ---------------------------------------------------------------------------

    def handle(self, event: ServerEvent) -> list[Action]:
        """What to do about ``event``, in order. A broken rule of a peer becomes ``Fail``."""
        try:
            return self._on[type(event)](event)
        except PsdistError as error:
            return [Fail(error)]

    def _on_control(self, event: ControlArrived) -> list[Action]:
        handler = self._on_message.get(type(event.message))
        if handler is None:
            raise ProtocolError(
                f"server {self._server}: {describe_peer(event.peer)} sent "
                f"{type(event.message).__name__}, which no server takes"
            )
        return handler(event.peer, event.message)

    # -- set-up and membership ----------------------------------------------------------------

    def _on_setup(self, peer: int, message: Setup) -> list[Action]:
        if self._is_described:
            raise ProtocolError(f"server {self._server}: {describe_peer(peer)} sent a second Setup")
        self._is_described = True
        return [Build(message)]

    def _hold(self, event: Offered | Arrived) -> list[Action]:
        """Data that comes before the shard is built: handled when it is."""
        self._before_built.append(event)
        return []

    def _on_built(self, event: Built) -> list[Action]:
        for index in sorted(event.chunks):
            clock = ChunkClock()
            for member in self._membership.members():
                clock.join(member.group, done=member.clock)
            self._chunks[index] = ChunkState(index, clock)
        self._initials, self._pushed = event.initials, event.pushes
        self._updates.build(tuple(self._chunks.values()), event.slots)
        self._on[Offered] = self._on_offered
        self._on[Arrived] = self._on_arrived
        held, self._before_built = self._before_built, []
        actions: list[Action] = []
        for each in held:
            actions += self.handle(each)
        return actions

    def _on_register(self, peer: int, message: Register) -> list[Action]:
        self._membership.join(message.group, message.workers, clock=message.clock)
        for chunk in self._chunks.values():
            chunk.join(message.group, done=message.clock)
        return [
            self._membership_event("join", message.group, message.clock),
            SendControl(peer, Registered(group=message.group, server=self._server)),
            *self._updates.on_groups_changed(),
        ]

    def _on_settings(self, peer: int, message: Settings) -> list[Action]:
        actions: list[Action] = []
        for chunk in self._settings.learn(peer, message):
            actions += self._updates.proceed(chunk)
        return actions

    def _on_suspend(self, _peer: int, message: Suspend) -> list[Action]:
        if not self._membership.suspend(message.group, seq=message.seq):
            return []  # its collective is over already: Resume overtook it
        return self._stop_waiting_for("suspend", message.group, message.clock)

    def _on_leave(self, _peer: int, message: Leave) -> list[Action]:
        self._membership.leave(message.group)
        return self._stop_waiting_for("leave", message.group, message.clock)

    def _stop_waiting_for(self, kind: str, group: int, clock: int) -> list[Action]:
        """Stop waiting for ``group``'s iterations from ``clock`` on."""
        actions: list[Action] = [self._membership_event(kind, group, clock)]
        for chunk in self._chunks.values():
            chunk.clock.release_from(group, clock)
            actions += self._updates.proceed(chunk)
            actions += self._replies.release(chunk)
        return actions + self._updates.on_groups_changed()

    def _on_resume(self, peer: int, message: Resume) -> list[Action]:
        actions: list[Action] = []
        for group in self._membership.resume(message.seq):
            for chunk in self._chunks.values():
                chunk.resume(group)
            actions.append(self._membership_event("resume", group, 0))
        actions.append(SendControl(peer, Resumed(seq=message.seq, server=self._server)))
        return actions + self._updates.on_groups_changed()

    def _membership_event(self, kind: str, group: int, clock: int) -> MembershipEvent:
        return MembershipEvent(kind, group, clock, self._membership.num_workers_of(group))

    def _on_who_is_missing(self, peer: int, message: WhoIsMissing) -> list[Action]:
        chunk = self._chunks.get(message.chunk)
        groups = chunk.clock.missing() if chunk else []
        clocks = [chunk.clock.done[group] for group in groups] if chunk else []
        answer = Missing(chunk=message.chunk, groups=groups, clocks=clocks)
        return [SendControl(peer, answer)]

    def _on_peer_lost(self, event: PeerLost) -> list[Action]:
        """No failure is survived in this version."""
        raise PeerLostError(event.who)

    # -- messages about a chunk ---------------------------------------------------------------

    def _chunk_of(self, peer: int, index: int) -> ChunkState:
        chunk = self._chunks.get(index)
        if chunk is None:
            raise ProtocolError(
                f"server {self._server}: {describe_peer(peer)} sent a message about chunk "
                f"{index}, which this server does not hold; run the same script and psdist version "
                "on all ranks"
            )
        return chunk

    def _on_offered(self, event: Offered) -> list[Action]:
        chunk = self._chunk_of(event.peer, event.chunk)
        group = NO_GROUP if event.kind == Kind.INIT else self._membership.group_of(event.peer)
        return self._updates.pool.offer(chunk.index, group, event.ticket)

    def _on_arrived(self, event: Arrived) -> list[Action]:
        peer, header, slot = event.peer, event.header, event.frame
        chunk = self._chunk_of(peer, header.chunk)
        if header.kind == Kind.PUSH:
            return self._on_push(chunk, peer, header, slot)
        if header.kind == Kind.PULL:
            return self._replies.answer_pull(chunk, peer, header)
        if header.kind == Kind.INIT and slot is not None:
            return self._on_initial_values(chunk, peer, header, slot)
        raise ProtocolError(
            f"server {self._server}: {describe_peer(peer)} sent a message of kind {header.kind}, "
            "which no server takes"
        )

    def _refuse_payload(self, rule: PayloadRule, peer: int, header: Header) -> NoReturn:
        raise ProtocolError(f"server {self._server}: {describe_peer(peer)} {rule.refusal(header)}")

    def _on_initial_values(
        self, chunk: ChunkState, peer: int, header: Header, slot: Frame
    ) -> list[Action]:
        if not self._initials.takes(header):
            self._refuse_payload(self._initials, peer, header)
        if chunk.is_loaded:  # a second delivery must not undo what was applied since the first
            self._duplicates += 1
            return self._updates.pool.release(slot)
        chunk.is_loaded = True
        actions: list[Action] = [Load(chunk.index, slot), *self._updates.pool.release(slot)]
        return actions + self._replies.answer_unloaded_pulls(chunk)

    def _on_push(
        self, chunk: ChunkState, peer: int, header: Header, slot: Frame | None
    ) -> list[Action]:
        group = self._membership.group_of(peer)
        if header.group != group:
            raise ProtocolError(
                f"server {self._server}: {describe_peer(peer)} of group {group} pushed for group "
                f"{header.group}"
            )
        chunk.close_implied_replies(peer, header.clock)
        newest = chunk.newest_round_of(group)
        if header.clock <= newest:
            self._duplicates += 1
            if slot is None:
                return []
            # The group's next push may have been held behind its duplicate.
            pool = self._updates.pool
            return [*pool.release(slot), *pool.reconsider(chunk.index, group)]
        if header.clock != newest + 1:
            raise ProtocolError(
                f"server {self._server}: {describe_peer(peer)} pushed iteration {header.clock} of "
                f"chunk {chunk.index} after iteration {newest}"
            )
        if header.clock > self._newest_round:
            check_applying(self._policy, [header.clock])
            self._newest_round = header.clock
        if slot is not None:
            if not self._pushed.takes(header):
                self._refuse_payload(self._pushed, peer, header)
            if not header.weight > 0:
                raise ProtocolError(
                    f"server {self._server}: {describe_peer(peer)} pushed a gradient of weight "
                    f"{header.weight}"
                )
        self._pushes += 1
        push = Push(peer, group, header.clock, header.weight, header.settings, slot)
        return self._updates.on_arrived(chunk, push)

    def _on_reply_sent(self, event: ReplySent) -> list[Action]:
        token = event.token
        if token.is_sent:
            return []
        chunk = self._chunks[token.chunk]
        chunk.close_reply(token)
        return self._updates.on_free_buffer(chunk)

    # -- for tests, reports and people --------------------------------------------------------

    @property
    def has_members(self) -> bool:
        """Whether a group has registered that has not left."""
        return self._membership.num_active_workers > 0

    def statistics(self) -> ServerStatistics:
        return ServerStatistics(
            num_chunks=len(self._chunks),
            updates=self._num_updates(),
            pushes=self._pushes,
            steps=self._updates.num_steps,
            replies=self._replies.num_made,
            duplicates=self._duplicates,
            most_slots_used=self._updates.pool.most_used,
            copies_on_write=self._updates.num_copies,
        )

    def _num_updates(self) -> int:
        clocks = [chunk.clock.done for chunk in self._chunks.values()]
        return sum(min(done) for done in zip(*clocks, strict=True))

    def check_invariants(self, chunk: int | None = None) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. Linear in everything, or
        with ``chunk`` only that one looked at, at a cost that does not grow with the others."""
        self._updates.check_invariants(chunk)
        self._settings.check_invariants()
