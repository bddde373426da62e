"""The server's state machine: what a server decides, without doing any of it.

``handle(event) -> actions`` is the only way in. Events come from a transport (real or virtual),
actions are executed by the loop or a simulator; time, memory and the network never appear here.

A push goes this way, and this is the place to read how:

    Offered  -> a receive slot, or it stays with its sender     (_on_offered, receive_pool)
    Arrived  -> waits until its settings are known              (_on_push)
    sync     -> folded in group order; complete: one Step       (_gather, chunk_state)
    ssp/async-> one Step at once                                (_apply_arrivals)
    Step     -> the group's clock advances                      (_advance)
    min_done -> replies that the mode now allows                (_release_replies)

    core = ServerCore(server=0, policy=Ssp(3))
    for action in core.handle(event): ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psdist.errors import (
    HyperparameterError,
    InvariantError,
    PeerLostError,
    ProtocolError,
    PsdistError,
)
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
from psdist.protocol.header import Flag, Header, Kind
from psdist.protocol.ids import describe_peer
from psdist.protocol.optimizers import difference, unpack_hyperparameters
from psdist.servers.protocol.actions import (
    Action,
    Build,
    Built,
    Contribution,
    EmptyStep,
    Fail,
    Fold,
    Load,
    MembershipEvent,
    Reply,
    ReplySent,
    SendControl,
    ServerEvent,
    SlotContent,
    StartSum,
    Step,
)
from psdist.servers.protocol.chunk_clock import ChunkClock
from psdist.servers.protocol.chunk_state import ChunkState, Gathering, PendingReply, Push
from psdist.servers.protocol.frontier import Frontier
from psdist.servers.protocol.membership import Membership
from psdist.servers.protocol.policy import Applying, Policy, check_applying
from psdist.servers.protocol.receive_pool import ADDS, EARLY, FRONTIER, STARTS, ReceivePool

_LIVE_SETTINGS = 4
"""Versions kept of each worker: it cannot push under a newer one before all its pushes of the
last but (pipeline + 1) iteration are answered."""


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
        self._gathers = policy.applying(0) is Applying.GATHERED
        self._newest_round = 0
        self._pipeline = pipeline
        self._membership = Membership()
        self._pool = ReceivePool((), need=self._slots_needed)
        self._chunks: dict[int, ChunkState] = {}
        self._order: list[int] = []
        self._frontier = Frontier(())
        self._is_described = False
        self._before_built: list[Offered | Arrived] = []
        self._settings: dict[int, dict[int, tuple[bytes, frozenset[int]]]] = {}
        self._stalled: dict[tuple[int, int], list[ChunkState]] = {}  # (peer, settings) -> chunks
        self._pushes = self._steps = self._replies = self._duplicates = self._copies = 0
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
        self._pool = ReceivePool(event.slots, need=self._slots_needed)
        self._order = sorted(event.chunks)
        for index in self._order:
            clock = ChunkClock()
            for member in self._membership.members():
                clock.join(member.group, done=member.clock)
            self._chunks[index] = ChunkState(index, clock)
        self._frontier = Frontier([self._chunks[index] for index in self._order])
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
            chunk.clock.join(message.group, done=message.clock)
        self._frontier.find()
        return [
            self._membership_event("join", message.group, message.clock),
            SendControl(peer, Registered(group=message.group, server=self._server)),
        ]

    def _on_settings(self, peer: int, message: Settings) -> list[Action]:
        versions = self._settings.setdefault(peer, {})
        versions[message.version] = (message.hyper, frozenset(message.absent))
        versions.pop(message.version - _LIVE_SETTINGS - self._pipeline, None)
        actions: list[Action] = []
        for chunk in self._stalled.pop((peer, message.version), ()):
            actions += self._proceed(chunk)
        return actions

    def _on_suspend(self, _peer: int, message: Suspend) -> list[Action]:
        if not self._membership.suspend(message.group, seq=message.seq):
            return []  # its collective is over already: Resume overtook it
        return self._stop_waiting_for("suspend", message.group, message.clock)

    def _on_leave(self, _peer: int, message: Leave) -> list[Action]:
        self._membership.leave(message.group)
        return self._stop_waiting_for("leave", message.group, message.clock)

    def _stop_waiting_for(self, kind: str, group: int, clock: int) -> list[Action]:
        """Nobody waits for ``group``'s iterations from ``clock`` on."""
        actions: list[Action] = [self._membership_event(kind, group, clock)]
        for index in self._order:
            chunk = self._chunks[index]
            chunk.clock.release_from(group, clock)
            actions += self._proceed(chunk)
            actions += self._release_replies(chunk)
        self._frontier.find()
        return actions + self._reconsider_frontier()

    def _on_resume(self, peer: int, message: Resume) -> list[Action]:
        actions: list[Action] = []
        for group in self._membership.resume(message.seq):
            for chunk in self._chunks.values():
                chunk.resume(group)
            actions.append(self._membership_event("resume", group, 0))
        self._frontier.find()
        actions.append(SendControl(peer, Resumed(seq=message.seq, server=self._server)))
        return actions

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
                f"server {self._server}: {describe_peer(peer)} asked for chunk {index}, which "
                "another server holds; do all ranks run the same version of the script?"
            )
        return chunk

    def _on_offered(self, event: Offered) -> list[Action]:
        chunk = self._chunk_of(event.peer, event.chunk)
        group = -1 if event.kind == Kind.INIT else self._membership.group_of(event.peer)
        return self._pool.offer(chunk.index, group, event.ticket)

    def _slots_needed(self, index: int, group: int) -> int:
        """See psdist.servers.protocol.receive_pool."""
        if not self._gathers or group < 0:
            return ADDS
        chunk = self._chunks[index]
        if chunk.pushes.get(group) or chunk.next_in_turn() != group:
            return EARLY
        if chunk.gathering.accumulator is not None:
            return ADDS
        return FRONTIER if self._frontier.chunk is chunk else STARTS

    def _on_arrived(self, event: Arrived) -> list[Action]:
        peer, header, slot = event.peer, event.header, event.frame
        chunk = self._chunk_of(peer, header.chunk)
        if header.kind == Kind.PUSH:
            return self._on_push(chunk, peer, header, slot)
        if header.kind == Kind.PULL:
            return self._on_pull(chunk, peer, header)
        if header.kind == Kind.INIT and slot is not None:
            chunk.is_loaded = True
            actions: list[Action] = [Load(chunk.index, slot), *self._pool.release(slot)]
            for pending in chunk.unloaded_pulls:
                actions.append(self._reply(chunk, pending))
            chunk.unloaded_pulls.clear()
            return actions
        raise ProtocolError(
            f"server {self._server}: {describe_peer(peer)} sent a message of kind {header.kind}, "
            "which no server takes"
        )

    def _on_pull(self, chunk: ChunkState, peer: int, header: Header) -> list[Action]:
        pending = PendingReply(peer, header.clock, Flag.FOR_PULL, header.pull_number)
        if not chunk.is_loaded:
            chunk.unloaded_pulls.append(pending)
            return []
        if not header.flags & Flag.FRESH:
            needed = self._policy.required_min_done(header.clock)
            if chunk.clock.min_done < needed:
                chunk.parked.setdefault(needed, []).append(pending)
                return []
        return [self._reply(chunk, pending)]

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
        newest = chunk.newest_of(group)
        if header.clock <= newest:
            self._duplicates += 1
            if slot is None:
                return []
            # The group's next push may have been held behind its duplicate.
            return [*self._pool.release(slot), *self._pool.reconsider(chunk.index, group)]
        if header.clock != newest + 1:
            raise ProtocolError(
                f"server {self._server}: {describe_peer(peer)} pushed iteration {header.clock} of "
                f"chunk {chunk.index} after iteration {newest}"
            )
        if header.clock > self._newest_round:
            check_applying(self._policy, [header.clock])
            self._newest_round = header.clock
        if slot is not None and not header.weight > 0:
            raise ProtocolError(
                f"server {self._server}: {describe_peer(peer)} pushed a gradient of weight "
                f"{header.weight}"
            )
        self._pushes += 1
        chunk.put(Push(peer, group, header.clock, header.weight, header.settings, slot))
        if not self._gathers:
            chunk.waiting.append(group)
        return self._proceed(chunk)

    def _proceed(self, chunk: ChunkState) -> list[Action]:
        """Whatever can be applied to this chunk now."""
        return self._gather(chunk) if self._gathers else self._apply_arrivals(chunk)

    def _settings_of(self, chunk: ChunkState, push: Push) -> tuple[bytes, frozenset[int]] | None:
        """None if the push overtook them: ``chunk`` is looked at again when they come."""
        settings = self._settings.get(push.peer, {}).get(push.settings)
        if settings is None:
            stalled = self._stalled.setdefault((push.peer, push.settings), [])
            if chunk not in stalled:
                stalled.append(chunk)
        return settings

    # -- ssp and async: every push is a step --------------------------------------------------

    def _apply_arrivals(self, chunk: ChunkState) -> list[Action]:
        actions: list[Action] = []
        for _ in range(len(chunk.waiting)):
            group = chunk.waiting.popleft()
            push = chunk.pushes[group][0]
            settings = self._settings_of(chunk, push)
            target = chunk.current if push.slot is None else chunk.target_buffer()
            if settings is None or target is None:
                chunk.waiting.append(group)
                continue
            chunk.take(group)
            hyper, absent = settings
            contribution = Contribution(group, push.clock, push.weight, push.slot is None)
            if push.slot is None:
                actions.append(EmptyStep(chunk.index, (contribution,)))
            else:
                step = Step(
                    chunk=chunk.index,
                    gradient=push.slot,
                    content=SlotContent.GRADIENT,
                    gradient_scale=1.0,
                    lr_scale=push.weight / self._membership.num_active_workers,
                    hyper=hyper,
                    absent=absent,
                    source=chunk.current,
                    target=target,
                    contributions=(contribution,),
                )
                actions.append(self._begin_step(chunk, step))
                actions += self._pool.release(push.slot)
            actions += self._advance(chunk, (push,))
        return actions

    # -- sync: gather in group order, then one step -------------------------------------------

    def _gather(self, chunk: ChunkState) -> list[Action]:
        actions: list[Action] = []
        while True:
            group = chunk.next_in_turn()
            if group is None:
                if not chunk.gathering.pushes:
                    return actions
                target = chunk.target_buffer()
                if target is None:
                    return actions  # _on_reply_sent comes back here
                actions += self._finish_gathering(chunk, target)
                continue
            push = chunk.first_of(group)
            settings = self._settings_of(chunk, push) if push else None
            if push is None or settings is None:
                if push is None:
                    actions += self._pool.reconsider(chunk.index, group)
                return actions
            chunk.take(group)
            actions += self._fold(chunk, push, *settings)

    def _fold(
        self, chunk: ChunkState, push: Push, hyper: bytes, absent: frozenset[int]
    ) -> list[Action]:
        gathering = chunk.gathering
        if gathering.hyper is None:
            gathering.hyper, gathering.hyper_group = hyper, push.group
        elif hyper != gathering.hyper:
            told = difference(
                unpack_hyperparameters(gathering.hyper), unpack_hyperparameters(hyper)
            )
            raise HyperparameterError(
                f"sync iteration {push.clock}: groups {gathering.hyper_group} and {push.group} "
                f"disagree on hyperparameters: {told}; in sync mode every worker must use the "
                "same schedule"
            )
        gathering.pushes[push.group] = push
        if push.slot is None:
            return []
        gathering.absent = absent if gathering.absent is None else gathering.absent & absent
        if gathering.accumulator is None:
            gathering.accumulator = push.slot
            return [StartSum(chunk.index, push.slot, push.weight)]
        fold = Fold(chunk.index, push.slot, gathering.accumulator, push.weight)
        return [fold, *self._pool.release(push.slot)]

    def _finish_gathering(self, chunk: ChunkState, target: int) -> list[Action]:
        gathering, chunk.gathering = chunk.gathering, Gathering()
        pushes = tuple(gathering.pushes.values())
        contributions = tuple(
            Contribution(push.group, push.clock, push.weight, push.slot is None) for push in pushes
        )
        slot = gathering.accumulator
        actions: list[Action] = []
        if slot is None:
            actions.append(EmptyStep(chunk.index, contributions))
        else:
            step = Step(
                chunk=chunk.index,
                gradient=slot,
                content=SlotContent.SUM,
                gradient_scale=1.0 / sum(push.weight for push in pushes),
                lr_scale=1.0,
                hyper=gathering.hyper or b"",
                absent=gathering.absent or frozenset(),
                source=chunk.current,
                target=target,
                contributions=contributions,
            )
            actions.append(self._begin_step(chunk, step))
        actions += self._advance(chunk, pushes)
        # Only now: who may have the slot depends on whose turn it is.
        if slot is not None:
            actions += self._pool.release(slot)
        if self._frontier.move():
            actions += self._reconsider_frontier()
        return actions

    def _reconsider_frontier(self) -> list[Action]:
        """The frontier has moved: its next push needs fewer free slots than before."""
        chunk = self._frontier.chunk
        group = chunk.next_in_turn() if chunk is not None and self._gathers else None
        if chunk is None or group is None:
            return []
        return self._pool.reconsider(chunk.index, group)

    # -- a step is made: clocks advance, replies go out ---------------------------------------

    def _begin_step(self, chunk: ChunkState, step: Step) -> Step:
        chunk.current = step.target
        self._copies += step.source != step.target
        self._steps += 1
        return step

    def _advance(self, chunk: ChunkState, pushes: tuple[Push, ...]) -> list[Action]:
        actions: list[Action] = []
        min_done_before = chunk.clock.min_done
        for push in pushes:
            chunk.clock.advance(push.group)
        for push in pushes:
            pending = PendingReply(push.peer, push.clock, Flag.NONE)
            # The reply is used for the iteration after those whose replies may be outstanding.
            needed = self._policy.required_min_done(push.clock + 1 + self._pipeline)
            if chunk.clock.min_done >= needed:
                actions.append(self._reply(chunk, pending))
            else:
                chunk.parked.setdefault(needed, []).append(pending)
        if chunk.clock.min_done != min_done_before:
            actions += self._release_replies(chunk)
        return actions

    def _release_replies(self, chunk: ChunkState) -> list[Action]:
        if not chunk.parked:
            return []
        allowed = [needed for needed in chunk.parked if needed <= chunk.clock.min_done]
        return [
            self._reply(chunk, pending)
            for needed in sorted(allowed)
            for pending in chunk.parked.pop(needed)
        ]

    def _reply(self, chunk: ChunkState, pending: PendingReply) -> Reply:
        implied_by = pending.clock
        if not pending.flags & Flag.FOR_PULL:
            implied_by += 1 + self._pipeline
        token = chunk.open_reply(pending.peer, implied_by=implied_by)
        self._replies += 1
        min_done = chunk.clock.min_done
        return Reply(token, pending.clock, min_done, pending.flags, pending.pull_number)

    def _on_reply_sent(self, event: ReplySent) -> list[Action]:
        """The reply's memory is free; a step may have waited for it."""
        token = event.token
        if token.is_sent:
            return []
        chunk = self._chunks[token.chunk]
        chunk.close_reply(token)
        if chunk.waiting or chunk.gathering.pushes:
            return self._proceed(chunk)
        return []

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
            steps=self._steps,
            replies=self._replies,
            duplicates=self._duplicates,
            most_slots_used=self._pool.most_used,
            copies_on_write=self._copies,
        )

    def _num_updates(self) -> int:
        clocks = [chunk.clock.done for chunk in self._chunks.values()]
        return sum(min(done) for done in zip(*clocks, strict=True))

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. Linear in everything."""
        for chunk in self._chunks.values():
            chunk.check_invariants()
        in_use = sum(chunk.num_slots_held for chunk in self._chunks.values())
        if in_use > self._pool.num_slots - self._pool.num_free:
            raise InvariantError(f"{in_use} receive slots in use, more than were taken")
