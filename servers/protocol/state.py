"""The state machine of one parameter set on one server: it decides, and performs no I/O.

``handle(event) -> actions`` is the only entry. Events come from a transport (real or virtual) and
from the loop, which executes the actions; time, memory and the network never appear here.

A push takes this path:

    Offered   -> a receive slot, or it stays with its sender     chunks/receive_pool
    Arrived   -> is it the next of its group?                    _on_push, here
    applied   -> when, and what becomes one Step                 rules: the set's RoundRule
                 which the loop has the executor run             set_loop, shard/tensors
    contained -> the group's clock advances                      chunks/replies: advance
    min_done  -> replies that the rule now allows                chunks/replies: release

The round rule is the mode (sync, ssp, async, and what extends them); this module does not know
which one it has. :func:`psdist.servers.protocol.assembly.assemble_core` puts a core together.

    core = ServerCore(server=0, membership=membership, rule=rule, settings=settings)
    for action in core.handle(event): ...

Longer than other modules: every event that a server takes is in one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any, NoReturn

from psdist.errors import ProtocolError, PsdistError
from psdist.protocol.checkpoints import number_of
from psdist.protocol.control import (
    Evict,
    Leave,
    Missing,
    Register,
    Registered,
    Resume,
    Settings,
    Setup,
    StateValues,
    StateWanted,
    Suspend,
    WhoIsMissing,
)
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered, PeerLost
from psdist.protocol.header import MOST_CREDITS, Flag, Header, Kind
from psdist.protocol.ids import COORDINATOR, describe_peer, worker_id, worker_of
from psdist.protocol.payloads import PayloadRule
from psdist.protocol.send_order import SendOrder
from psdist.servers.protocol.actions import (
    Action,
    AdmitGroup,
    Build,
    Built,
    ChangeCodecs,
    ChangeMode,
    Fail,
    HoldRounds,
    Inherit,
    LeftOut,
    MembershipEvent,
    Receipt,
    Reply,
    ReplySent,
    SendControl,
    ServerEvent,
    ServerStatistics,
    SumMoved,
    TakeSnapshot,
    Unchanged,
)
from psdist.servers.protocol.chunks import ChunkState, PendingReply, Push
from psdist.servers.protocol.chunks.values import ChiefValues
from psdist.servers.protocol.membership import Membership
from psdist.servers.protocol.optimizer_state import StateOfSet
from psdist.servers.protocol.replication.records import ChunkRecord, SnapshotBegin
from psdist.servers.protocol.rules import RoundRule
from psdist.servers.protocol.rules.changes import RoundChanges, rule_of_set
from psdist.servers.protocol.settings import SettingsOfWorkers
from psdist.servers.protocol.start import Start

CHIEF = worker_id(0)
"""The worker that describes the model and sends its initial values."""

_PUSH = int(Kind.PUSH)


class ServerCore:
    def __init__(
        self,
        *,
        server: int,
        membership: Membership,
        rule: RoundRule,
        settings: SettingsOfWorkers,
        start: Start,
    ) -> None:
        """``rule``: the mode; it owns the receive pool and the replies. ``start``: what the set
        begins with."""
        self._server = server
        self.rule = rule
        self._start = start
        self._chunks: dict[int, ChunkState] = {}  # ascending
        self._membership = membership
        self._limits, self._group_of = self._membership.limits, self._membership.group_of
        self._pushing = self._membership.pushing
        self._replies = rule.replies
        self.changes = RoundChanges(membership=membership, rule=rule)
        self._is_kept = start.is_kept
        """See :attr:`Start.is_kept`."""
        start.begin(membership, self.changes)
        self._settings = settings
        self._pushed = PayloadRule.of_nothing()
        self._is_described = False
        self._told_order: Sequence[int] = ()
        self._rank: Sequence[int] = ()
        """By chunk of the set: its place in the order in which all groups send."""
        self._newest = dict.fromkeys(self._group_of, (-1, -1))
        """By worker: iteration and rank of its last push."""
        self._num_chunks: int | None = None
        """None until the shard is built."""
        self._before_built: list[Offered | Arrived] = []
        self._num_before_built: dict[int, int] = {}
        """By peer."""
        self._events_before_built: list[MembershipEvent] = []
        self._state = StateOfSet(server=server)
        self._values = ChiefValues(
            server=server,
            membership=self._membership,
            replies=self._replies,
            has_all=rule.has_all,
        )
        self._has_waiting = False
        """True while values wait for a buffer."""
        self._duplicates = 0
        self._on: dict[type, Callable[[Any], list[Action]]] = {
            ControlArrived: self._on_control,
            Built: self._on_built,
            SumMoved: lambda event: self.rule.on_held(event),
            Offered: self._hold,
            Arrived: self._hold,
            ReplySent: self._on_reply_sent,
            PeerLost: self._on_peer_lost,
            HoldRounds: self.changes.on_hold_rounds,
            ChangeCodecs: self.changes.on_change_codecs,
            ChangeMode: self.changes.on_change_mode,
            AdmitGroup: self._on_admit,
        }
        self._on_message: dict[type, Callable[[int, Any], list[Action]]] = {
            Setup: self._on_setup,
            Register: self._on_register,
            Settings: self._on_settings,
            Suspend: self._on_suspend,
            Resume: self._on_resume,
            Leave: self._on_leave,
            Evict: self._on_evict,
            WhoIsMissing: self._on_who_is_missing,
            StateValues: self._on_state_values,
            StateWanted: self._on_state_wanted,
        }

    # -- the entry ----------------------------------------------------------------------------

    @property
    def num_groups(self) -> int:
        return self._membership.num_groups

    def handle(self, event: ServerEvent) -> list[Action]:
        """Return the actions for ``event``, in order. A peer's protocol error becomes ``Fail``."""
        try:
            if (dead := self._replies.dead) and getattr(event, "peer", None) in dead:
                return self._on_dead(event)
            return self._on[type(event)](event)
        except PsdistError as error:
            return [Fail(error)]

    def _on_control(self, event: ControlArrived) -> list[Action]:
        kind = type(event.message)
        handler = self._on_message.get(kind) or self.rule.takes.get(kind)
        if handler is None:
            self._refuse(event.peer, f"sent {kind.__name__}, which this set does not take")
        return handler(event.peer, event.message)

    def _refuse(self, peer: int, why: str) -> NoReturn:
        raise ProtocolError(f"server {self._server}: {describe_peer(peer)} {why}")

    # -- set-up and membership ----------------------------------------------------------------

    def _on_setup(self, peer: int, message: Setup) -> list[Action]:
        if peer != CHIEF:
            self._refuse(peer, f"sent Setup; {describe_peer(CHIEF)} describes the model")
        if self._is_described:
            self._refuse(peer, "sent a second Setup")
        self._is_described = True
        if refusal := self._start.refusal(message):
            self._refuse(peer, refusal)
        self._told_order = message.order
        self.rule = rule_of_set(self.rule, peer, message)
        return [Build(message)]

    def _hold(self, event: Offered | Arrived) -> list[Action]:
        """Keep an event that arrives before the shard is built, and handle it then."""
        num_held = self._num_before_built.get(event.peer, 0) + 1
        if num_held > MOST_CREDITS:
            self._refuse(event.peer, f"sent {num_held} messages before there was a model")
        self._num_before_built[event.peer] = num_held
        self._before_built.append(event)
        return []

    def _on_built(self, event: Built) -> list[Action]:
        try:
            order = SendOrder(self._told_order, num_chunks=len(event.pushes.dtypes))
        except ValueError as error:
            self._refuse(CHIEF, f"sent Setup with an order that {error}")
        self._chunks = {
            index: self._start.new_chunk(index, self.rule) for index in sorted(event.chunks)
        }
        self._num_chunks = len(self._chunks)
        self._take_out_failed()
        self._rank = order.rank
        in_order = [self._chunks[index] for index in order.sorted(self._chunks)]
        self._settings.describe_model(
            num_pieces=event.num_pieces, num_optimizer_groups=event.num_optimizer_groups
        )
        self._pushed = event.pushes
        if event.replies is not None:
            self._replies.build(event.replies)
        self.rule.build(in_order, event, send_order=order.chunks)
        self._values.build(event.initials, self.rule.pool)
        self._state.expect(event.state, lengths=event.lengths)
        self._start.resume(self._state, self.rule, event)
        self._on[Offered] = self._start.watch_offers(self._on_offered, self._chunks, self._group_of)
        self._on[Arrived] = (
            self._on_arrived if self._state.is_complete else self._on_arrived_before_state
        )
        held, self._before_built = self._before_built, []
        actions = self.changes.build(self._chunks) + self._events_before_built
        for each in held:
            actions += self.handle(each)
        return actions

    def _take_out_failed(self) -> None:
        """Wait for no group that failed before the shard was built. Not earlier, because the worker
        that describes the model may be among them."""
        self._replies.evict(self._membership.dead)
        for group in filter(self._membership.is_dead, range(self._membership.num_groups)):
            for chunk in self._chunks.values():
                chunk.clock.evict(group, num_arrived=0)

    def _on_state_values(self, peer: int, message: StateValues) -> list[Action]:
        if peer != CHIEF:
            self._refuse(
                peer, f"sent StateValues; {describe_peer(CHIEF)} has the optimizer's state"
            )
        actions = self._state.take(peer, message)
        if self._on[Arrived] == self._on_arrived_before_state and self._state.is_complete:
            self._on[Arrived] = self._on_arrived
        return actions

    def _on_arrived_before_state(self, event: Arrived) -> list[Action]:
        """Nothing may change values before the optimizer's whole state is here."""
        header = event.header
        if header.kind == Kind.PUSH or (header.kind == Kind.INIT and header.pull_number):
            self._refuse(
                event.peer,
                f"sent a message of kind {header.kind} before the optimizer's state was complete",
            )
        return self._on_arrived(event)

    def _on_state_wanted(self, peer: int, message: StateWanted) -> list[Action]:
        """Every worker is in a collective: no message is in flight."""
        if peer != self._membership.chief:
            self._refuse(
                peer, f"sent StateWanted; {describe_peer(self._membership.chief)} asks for state"
            )
        chunk = self._chunks.get(message.chunk)
        if chunk is None:
            self._refuse_chunk(peer, message.chunk)
        if not chunk.is_loaded or chunk.has_updates or chunk.is_held or chunk.loading:
            self._refuse(
                peer,
                f"asks for the optimizer's state of chunk {chunk.index} in the middle of updates "
                "or before there were any values",
            )
        return self._state.tell(peer, message)

    def _on_register(self, peer: int, message: Register) -> list[Action]:
        self._membership.join(peer, message)
        clock = message.clock
        if any(chunk.is_gathering_later_than(clock) for chunk in self._chunks.values()):
            self._refuse(peer, f"registered group {message.group} in the middle of an iteration")
        return [
            *self._membership_event("join", message.group, clock),
            SendControl(peer, Registered(group=message.group, server=self._server)),
            *self._count([message.group]),
        ]

    def _on_admit(self, event: AdmitGroup) -> list[Action]:
        """All workers wait in a collective, after their replies. So no round from the substitute's
        first one on has begun, except with the last updates of failed groups. Suspend messages of
        waiting groups may still be in flight."""
        worker, clock = event
        group = self._membership.admit(worker, clock)
        if group is None:
            return []
        for chunk in self._chunks.values():
            chunk.clock.begin(group)
            if not chunk.is_loaded or chunk.loading or chunk.is_gathering_later_than(clock):
                self._refuse(
                    COORDINATOR,
                    f"admitted worker {worker} at clock {clock}; chunk {chunk.index} is in a later "
                    "iteration, or its values are being set",
                )
        return [*self._membership_event("join", group, clock), *self._count([group])]

    def _on_settings(self, peer: int, message: Settings) -> list[Action]:
        self._membership.require_registered(peer)
        self._settings.learn(peer, message)
        return []

    def _on_suspend(self, peer: int, message: Suspend) -> list[Action]:
        num_chunks, has_all = self._num_chunks, self.rule.has_all
        if not self._membership.suspend(peer, message, num_chunks=num_chunks, has_all=has_all):
            return []  # its collective has ended: Resume overtook it
        return self._stop("suspend", message.group, message.clock)

    def _on_leave(self, peer: int, message: Leave) -> list[Action]:
        num_chunks, has_all = self._num_chunks, self.rule.has_all
        if not self._membership.leave(peer, message, num_chunks=num_chunks, has_all=has_all):
            return []
        return self._stop("leave", message.group, message.clock)

    def _stop(self, kind: str, group: int, clock: int) -> list[Action]:
        """``group`` has stopped, and every chunk contains ``clock`` updates of it."""
        return [*self._membership_event(kind, group, clock), *self.rule.on_stopped(clock)]

    def _on_resume(self, peer: int, message: Resume) -> list[Action]:
        if peer != COORDINATOR:
            self._refuse(peer, f"sent Resume; {describe_peer(COORDINATOR)} decides what ends")
        has_ended = self._membership.has_ended(message.seq)
        is_kept, self._is_kept = self._is_kept or has_ended, False
        actions = list[Action]()
        if message.checkpoint:  # the failed server's copy is the same: no group has continued
            actions = self._snapshot(message.checkpoint, is_again=is_kept)
        if has_ended:
            return actions
        resumed = self._membership.resume(message.seq)
        for each in resumed:
            actions += self._membership_event("resume", each, 0)
        return actions + self._count(resumed)

    def _snapshot(self, checkpoint: str, *, is_again: bool) -> list[Action]:
        """All workers wait in a collective, after their replies: no message is in flight."""
        number = number_of(checkpoint)
        if number is None or self._num_chunks is None:
            self._refuse(
                COORDINATOR,
                f"wants a checkpoint {checkpoint[:80]!r}"
                + ("" if self._num_chunks is not None else " before there was a model"),
            )
        for chunk in self._chunks.values():
            if not chunk.is_loaded or chunk.has_updates or chunk.is_held or chunk.loading:
                self._refuse(
                    COORDINATOR,
                    f"wants {checkpoint} of chunk {chunk.index} in the middle of updates or before "
                    "there were any values",
                )
        return [TakeSnapshot(number, tuple(self._chunks), is_again, self.rule.misses())]

    def _count(self, groups: Sequence[int]) -> list[Action]:
        """These groups count from now on, from the clock at which they stopped."""
        return self.rule.on_counting(list(map(self._limits.count, groups)))

    def _membership_event(self, kind: str, group: int, clock: int) -> list[Action]:
        """Return the event. A restored set's log begins with the restored values, so the event
        waits for them: leaders may register before the chief has described the model."""
        event = MembershipEvent(kind, group, clock, self._membership.num_workers_of(group))
        if not self._start.checkpoint or self._num_chunks is not None:
            return [event]
        self._events_before_built.append(event)
        return []

    def _on_who_is_missing(self, peer: int, message: WhoIsMissing) -> list[Action]:
        self._membership.require_worker(peer)
        chunk = self._chunks.get(message.chunk)
        groups: list[int] = []
        clocks: list[int] = []
        if chunk is not None:
            chunk.clock.catch_up()
            groups = chunk.clock.missing()
            clocks = [chunk.clock.min_done] * len(groups)
        answer = Missing(chunk=message.chunk, groups=groups, clocks=clocks)
        return [SendControl(peer, answer)]

    # -- changes of the mode and of the codecs -------------------------------------------------

    @property
    def held_above(self) -> int | None:
        """While a change is proposed: the highest round for which parameters may be sent."""
        return self._replies.held_above

    @property
    def highest_sent(self) -> int:
        """The highest round for which parameters were sent; -1 for none."""
        return self._replies.highest_sent

    # -- failures -----------------------------------------------------------------------------

    def _on_peer_lost(self, event: PeerLost) -> list[Action]:
        """Nothing more arrives from a failed worker. The coordinator decides what follows."""
        self._membership.lose(event)
        pool = self.rule.pool
        pool.forget_offers({event.peer})
        return pool.give_up({event.peer})

    def _on_evict(self, peer: int, message: Evict) -> list[Action]:
        """Groups have failed. Their updates that arrived whole are contained, chunk by chunk; no
        other update of theirs is."""
        chief = self._membership.chief
        groups = self._membership.evict(peer, message)
        if groups is None:
            return []
        replies, actions = self._replies, list[Action]()
        replies.evict(self._membership.dead)
        if self._membership.chief != chief:
            for chunk in self._chunks.values():
                actions += self._and_look(self._values.give_up(chunk))
        for group, lost in self._membership.take_lost().items():
            actions += self._go_on_without(group, lost)
        for group, had_registered in groups.items():
            peers = self._membership.peers_of(group)
            for chunk in self._chunks.values():
                actions += [Inherit(chunk.index, group, each) for each in chunk.evict(group, peers)]
            if had_registered:
                clocks = (chunk.clock.done[group] for chunk in self._chunks.values())
                fewest = min(clocks, default=self._limits.first[group])
                actions += self._membership_event("death", group, fewest)
        self.rule.pool.forget_offers(replies.dead)
        return actions + self.rule.on_deaths()

    def _go_on_without(self, group: int, lost: Sequence[int]) -> list[Action]:
        """These workers of the group have failed. Their pushes that arrived whole count; other
        workers of the group replace the missing ones (:meth:`_answer_retransmit`)."""
        peers, actions = set(map(worker_id, lost)), list[Action]()
        for chunk in self._chunks.values():
            clocks = chunk.lose(group, peers)
            actions += [Inherit(chunk.index, group, each) for each in clocks]
        done = (chunk.clock.done[group] for chunk in self._chunks.values())
        fewest = min(done, default=self._limits.first[group])
        return [*actions, *(MembershipEvent("reform", group, fewest, each) for each in lost)]

    def reached_by(self, dead: Iterable[int]) -> list[int]:
        """Return for each of these workers the most updates of its group that a chunk contains or
        will contain; 0 if its group has left."""
        clocks = [chunk.clock for chunk in self._chunks.values()]
        found = []
        for worker in dead:
            group = self._membership.group_of[worker_id(worker)]
            is_dead = self._membership.is_dead(group)
            ends = (each.draining.get(group, each.done[group]) for each in clocks if is_dead)
            found.append(max(ends, default=0))
        return found

    def _on_dead(self, event: Any) -> list[Action]:
        """Ignore a peer that is out of the job, and free its slot."""
        if isinstance(event, PeerLost):
            return self._on_peer_lost(event)
        if isinstance(event, Arrived) and event.frame is not None:
            pool = self.rule.pool
            return pool.release(event.frame) if pool.has_come(event.frame) else []
        return []

    # -- a replica that is made during training ------------------------------------------------

    def snapshot_begin(self) -> SnapshotBegin:
        """Return the state of the set without its chunks, between events."""
        members = self._membership
        return SnapshotBegin(
            standings=[each.name for each in members.standings],
            stops=members.stops,
            first=list(self._limits.first),
            generation=members.generation,
            dead=list(members.dead_workers),
            chief=worker_of(members.chief),
            resumed_up_to=members.resumed_up_to,
            is_kept=self._is_kept,
        )

    def may_copy(self, index: int) -> bool:
        """True if the whole chunk can be copied now: it has its values and its optimizer's state,
        and no new values are about to be set."""
        chunk = self._chunks[index]
        return chunk.is_loaded and chunk.loading is None and self._state.is_complete

    def chunk_record(self, index: int, *, states: bytes) -> ChunkRecord:
        """Return the chunk's content, between events. ``states``: description of its optimizer's
        state."""
        chunk = self._chunks[index]
        return ChunkRecord(
            chunk=index,
            clocks=list(chunk.clock.done),
            version=chunk.version,
            newest_load=chunk.newest_load,
            states=states,
        )

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunks of this server, ascending, once the shard is built."""
        return tuple(self._chunks)

    @property
    def chunk_states(self) -> Mapping[int, ChunkState]:
        """By chunk of this server, ascending: its state."""
        return self._chunks

    @property
    def num_contained(self) -> int:
        """Number of updates that the chunks contain, summed over the chunks."""
        return sum(self._limits.contained)

    @property
    def num_steps(self) -> int:
        """Number of steps with a gradient."""
        return self.rule.num_steps

    # -- messages about a chunk ---------------------------------------------------------------

    def _refuse_chunk(self, peer: int, index: int) -> NoReturn:
        self._refuse(
            peer,
            f"sent a message about chunk {index}, which this server does not hold; run the same "
            "script and psdist version on all ranks",
        )

    def _on_offered(self, event: Offered) -> list[Action]:
        peer, index = event.peer, event.chunk
        chunk = self._chunks.get(index)
        if chunk is None:
            self._refuse_chunk(peer, index)
        group: int | None = None
        if event.kind == _PUSH:
            # A group that has stopped may still deliver a push twice.
            group = self._group_of.get(peer)
            if group is None:
                group = self._membership.require_worker(peer)
            place = event.clock, self._rank[index]
            if place > self._newest[peer]:
                self._newest[peer] = place
                chunk.sent[group] = event.clock
            elif event.clock > chunk.sent.get(group, -1):
                self._refuse_order(peer, index, event.clock)
        elif event.kind != Kind.INIT or peer != self._membership.chief:
            self._refuse_kind(peer, event.kind)
        return self.rule.on_offered(chunk, group, event)

    def _refuse_order(self, peer: int, index: int, clock: int) -> NoReturn:
        newest, rank = self._newest[peer]
        last = next(each for each in self._chunks if self._rank[each] == rank)
        self._refuse(
            peer,
            f"pushed iteration {clock} of chunk {index} after iteration {newest} of chunk {last}; "
            "all groups push in the chief's order",
        )

    def _on_arrived(self, event: Arrived) -> list[Action]:
        peer, header, slot = event.peer, event.header, event.frame
        chunk = self._chunks.get(header.chunk)
        if chunk is None:
            self._refuse_chunk(peer, header.chunk)
        if slot is not None:
            self.rule.pool.has_come(slot)
        chunk.clock.catch_up()
        if header.kind == _PUSH:
            actions = self._on_push(chunk, peer, header, slot)
            return actions if self._replies.window is None else actions + self._replies.leave(peer)
        if header.kind == Kind.INIT and slot is not None:
            return self._on_values(chunk, peer, header, slot)
        if header.kind != Kind.PULL or slot is not None:
            self._refuse_kind(peer, header.kind)
        return self._on_pull(chunk, peer, header)

    def _refuse_kind(self, peer: int, kind: int) -> NoReturn:
        self._refuse(peer, f"sent a message of kind {kind}, which no server takes from it")

    def _on_pull(self, chunk: ChunkState, peer: int, header: Header) -> list[Action]:
        group = self._membership.require_worker(peer)
        if header.generation > self._membership.generation:
            self._refuse_generation(peer, header)
        highest = self.rule.furthest_pull(chunk, group)
        if not 0 <= header.clock <= highest or not header.pull_number:
            pushed = chunk.newest_round_of(group) + 1
            self._refuse(
                peer,
                f"sent pull {header.pull_number} of chunk {chunk.index} at iteration "
                f"{header.clock}; its group has pushed {pushed}, and pulls are counted from 1",
            )
        if header.chunk_version > chunk.version:
            self._refuse_version(chunk, peer, header)
        actions = self._replies.answer_pull(chunk, peer, header)
        return actions + self.rule.on_free_buffer(chunk)

    def _refuse_sender(self, peer: int, header: Header) -> NoReturn:
        if header.generation > self._membership.generation:
            self._refuse_generation(peer, header)
        self._refuse(peer, f"pushed for group {header.group}, which is not its own")

    def _refuse_generation(self, peer: int, header: Header) -> NoReturn:
        self._refuse(
            peer,
            f"sent view number {header.generation}; the coordinator's last one is "
            f"{self._membership.generation}",
        )

    def _refuse_version(self, chunk: ChunkState, peer: int, header: Header) -> NoReturn:
        self._refuse(
            peer,
            f"says that it holds version {header.chunk_version} of chunk {chunk.index}; its newest "
            f"version is {chunk.version}",
        )

    def _on_values(self, chunk: ChunkState, peer: int, header: Header, slot: Frame) -> list[Action]:
        return self._and_look(self._values.on_arrived(chunk, peer, header, slot))

    def _and_look(self, actions: list[Action]) -> list[Action]:
        """Return ``actions``. While values wait for a buffer, use handlers that look for a free one
        after each event. Nothing else depends on waiting values."""
        is_waiting = bool(self._values.waiting)
        if is_waiting != self._has_waiting:
            self._has_waiting = is_waiting
            self._on[Arrived] = self._on_arrived_meanwhile if is_waiting else self._on_arrived
            self._on[ReplySent] = (
                self._on_reply_sent_meanwhile if is_waiting else self._on_reply_sent
            )
        return actions

    def _on_arrived_meanwhile(self, event: Arrived) -> list[Action]:
        header = event.header
        if header.kind == Kind.PUSH and header.chunk in self._values.waiting:
            self._refuse(event.peer, f"pushed chunk {header.chunk}, whose values are being set")
        return self._on_arrived(event) + self._and_look(self._values.set_what_waits())

    def _on_reply_sent_meanwhile(self, event: ReplySent) -> list[Action]:
        return self._on_reply_sent(event) + self._and_look(self._values.set_what_waits())

    def _on_push(
        self, chunk: ChunkState, peer: int, header: Header, slot: Frame | None
    ) -> list[Action]:
        group, clock, weight = header.group, header.clock, header.weight
        if header.generation > self._membership.generation or self._group_of.get(peer) != group:
            self._refuse_sender(peer, header)
        self._replies.close_implied(chunk, peer, clock)
        dropped = self.rule.drop_late(chunk, peer, header, slot)
        if dropped is not None:
            return self._with_receipt(dropped, peer, header)
        is_retransmit = header.flags & Flag.RETRANSMIT and chunk.is_first_again(peer, clock)
        newest = chunk.newest_round_of(group)
        if clock <= newest:
            return self._on_duplicate(chunk, peer, header, slot, is_retransmit=bool(is_retransmit))
        if clock != newest + 1:
            self._refuse(peer, f"pushed iteration {clock} of chunk {chunk.index} after {newest}")
        if slot is None:
            self._check_empty_push(chunk, peer, header, is_retransmit=bool(is_retransmit))
        elif peer not in self._pushing or not self._pushed.takes(header) or not 0 < weight < inf:
            self._refuse_gradient(peer, header)
        held = header.chunk_version
        if held > chunk.version:
            self._refuse_version(chunk, peer, header)
        self.rule.num_pushes += 1
        settings = self._settings.of(peer, header.settings)
        push = Push(peer, group, clock, weight, settings, slot, held, header.codec)
        actions = self.rule.on_arrived(chunk, push)
        return self._with_receipt(actions, peer, header) if header.flags else actions

    def _with_receipt(self, actions: list[Action], peer: int, push: Header) -> list[Action]:
        """Add a receipt if the push asked for one and ``actions`` contain no reply to it."""
        if not _answers(actions, peer, push):
            actions.append(Receipt(peer, push.chunk, push.clock))
        return actions

    def _on_duplicate(
        self,
        chunk: ChunkState,
        peer: int,
        header: Header,
        slot: Frame | None,
        *,
        is_retransmit: bool,
    ) -> list[Action]:
        """A push arrives that was received before."""
        group, clock = header.group, header.clock
        if clock < 0:
            self._refuse(peer, f"pushed iteration {clock}")
        self._duplicates += 1
        chunk.duplicate_offers.discard(group)
        actions = self._answer_retransmit(chunk, peer, header) if is_retransmit else []
        if slot is None:
            return actions
        # The duplicate may have blocked the group's next push.
        pool = self.rule.pool
        return [*actions, *pool.release(slot), *pool.reconsider(chunk.index, group)]

    def _refuse_gradient(self, peer: int, header: Header) -> NoReturn:
        self._membership.require_pushing(peer)
        if not self._pushed.takes(header):
            self._refuse(peer, self._pushed.refusal(header))
        self._refuse(peer, f"pushed a gradient of weight {header.weight}")

    def _check_empty_push(
        self, chunk: ChunkState, peer: int, header: Header, *, is_retransmit: bool
    ) -> None:
        """A push without a payload takes no slot, so it was not offered in its turn before. A push
        that replaces a failed worker's comes at any time (``is_retransmit``), and no push waits for
        it."""
        self._membership.require_pushing(peer)
        if not 0 <= header.weight < inf:
            self._refuse(peer, f"pushed no gradient, of weight {header.weight}")
        place = header.clock, self._rank[chunk.index]
        if place > self._newest[peer]:
            self._newest[peer] = place
        elif not is_retransmit:
            self._refuse_order(peer, chunk.index, header.clock)

    def _answer_retransmit(self, chunk: ChunkState, peer: int, header: Header) -> list[Action]:
        """A received push is retransmitted, because its server or its sender has failed. If the
        chunk contains the push, only this sends the reply."""
        clock, version = header.clock, header.chunk_version
        if clock >= chunk.clock.done[header.group]:
            chunk.hand_on(header.group, clock, peer, version=version)
            is_asked = header.flags & Flag.RECEIPT
            return [Receipt(peer, chunk.index, clock)] if is_asked else []
        actions = self._replies.answer_again(
            chunk, PendingReply(peer, clock, Flag.NONE, version=version)
        )
        return self._with_receipt(actions, peer, header)

    def _on_reply_sent(self, event: ReplySent) -> list[Action]:
        if (token := event.token).is_sent:
            return []
        chunk = self._chunks[token.chunk]
        self._replies.close(chunk, token)
        return self.rule.on_free_buffer(chunk) + self._replies.leave(token.peer)

    # -- for tests, reports and users ---------------------------------------------------------

    @property
    def generation(self) -> int:
        """Generation of the membership."""
        return self._membership.generation

    def group_of(self, peer: int) -> int | None:
        """Return the group of a worker of this run."""
        return self._group_of.get(peer)

    @property
    def chief(self) -> int:
        """The peer that has the chief's duties."""
        return self._membership.chief

    @property
    def has_taken_over(self) -> bool:
        """True if this server replaces a failed one."""
        return self._start.has_taken_over

    @property
    def resumed_up_to(self) -> int:
        """Collectives of the job that have ended."""
        return self._membership.resumed_up_to

    @property
    def has_members(self) -> bool:
        """True if a registered group has not left."""
        return self._membership.num_active_workers > 0

    def statistics(self) -> ServerStatistics:
        return ServerStatistics(
            num_chunks=len(self._chunks),
            updates=self._num_updates(),
            pushes=self.rule.num_pushes,
            steps=self.rule.num_steps,
            replies=self._replies.num_made,
            duplicates=self._duplicates + self._values.num_duplicates,
            receive_slots=self.rule.pool.num_slots,
            most_slots_used=self.rule.pool.most_used,
            copies_on_write=self.rule.num_copies,
        )

    def contained(self) -> list[int]:
        """Return, by group, the number of its iterations that all chunks here contain; [] without
        chunks."""
        clocks = (chunk.clock.done for chunk in self._chunks.values())
        return [min(its) for its in zip(*clocks, strict=True)]

    def _num_updates(self) -> int:
        """Updates in the checkpoint that the set continues are not counted."""
        if not self._chunks:
            return 0
        return sum(self.contained()) - sum(self._limits.first)

    def check_invariants(self, chunk: int | None = None) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. The cost is linear in the
        state. With ``chunk`` only this one is checked, at a cost independent of the others."""
        if chunk is None:
            self._membership.check_invariants()
            self._replies.check_invariants()
        self.rule.check_invariants(chunk)


def _answers(actions: Sequence[Action], peer: int, push: Header) -> bool:
    """True if the push needs no receipt: it has not asked for one, or its reply is among
    ``actions``."""
    if not push.flags & Flag.RECEIPT:
        return True
    owed = peer, push.chunk, push.clock
    for each in actions:
        if isinstance(each, LeftOut):
            if (each.peer, each.chunk, each.clock) == owed:
                return True
        elif isinstance(each, Reply | Unchanged) and not each.flags & Flag.FOR_PULL:
            to = each.token if isinstance(each, Reply) else each
            if (to.peer, to.chunk, each.clock) == owed:
                return True
    return False
