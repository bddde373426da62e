"""The server's loop: it passes each event from the transport to the parameter set concerned.

    Offered, Arrived, ControlArrived -> the state machine of its set   psdist.servers.protocol.state
                                     -> its actions are executed       psdist.servers.set_loop
    a message to the coordinator       -> psdist.servers.protocol.coordinator

It makes no decision about consistency or about collectives.

    loop = ServerLoop(transport, make_core, options, make_executor=TensorShard)
    loop.run(waiting)                                     # on a real network
    network.spawn(server_id(0), loop.actor())             # in a virtual one

Longer than other modules: the routing of every event is in one place, also after a failover.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

from psdist.codecs.wire import Wire
from psdist.errors import InvariantError, ProtocolError, PsdistError
from psdist.history.writers import EventCount, ServerHistory
from psdist.protocol.control import (
    AdmitWorker,
    Append,
    AppendAck,
    CommitMode,
    Control,
    CopyLost,
    Departed,
    Entrust,
    Evict,
    EvictAck,
    FillCopy,
    Finish,
    Finished,
    KeepCopy,
    Leave,
    ModeProposed,
    Moved,
    ProposeMode,
    Resume,
    Resumed,
    Setup,
    Stop,
    TakenOver,
    TakeOver,
)
from psdist.protocol.coordinator_line import FOR_COORDINATOR
from psdist.protocol.events import Arrived, ControlArrived, Event, Offered, PeerLost, Sent
from psdist.protocol.ids import (
    COORDINATOR,
    describe_peer,
    is_spare,
    is_worker,
    server_id,
    worker_id,
)
from psdist.protocol.partition import Partition
from psdist.servers.protocol.actions import (
    Action,
    AdmitGroup,
    ChangeCodecs,
    ChangeMode,
    Fail,
    SendControl,
    WriteSnapshots,
)
from psdist.servers.protocol.coordinator import Coordinator
from psdist.servers.protocol.failover.coordinator_log import (
    CoordinatorLog,
    EntrustAll,
    LogAction,
    Over,
)
from psdist.servers.protocol.sets import SetNumbers
from psdist.servers.protocol.state import CHIEF, ServerCore
from psdist.servers.protocol.takeovers import Move
from psdist.servers.replication.recording import RecordingSetLoop
from psdist.servers.replication.replication import Replication, ReplicationOptions
from psdist.servers.set_loop import OnBuilt, ReplyFrame, ServerOptions, SetLoop
from psdist.servers.shard.executor import MakeExecutor
from psdist.transport.base import Sender, Transport
from psdist.transport.waiting import Waiting

_DATA = (Offered, Arrived)
_PART_BYTES = 16 * 2**20
"""Bytes of the coordinator's snapshot in one message."""


@dataclass(frozen=True, kw_only=True)
class Standby:
    """Hooks of the coordinator's standby."""

    coordinator_log: CoordinatorLog
    on_done: Callable[[LogAction], None] = lambda _action: None
    """Receives the actions for files and users that the coordinator has done."""
    on_succeed: Callable[[Sequence[LogAction]], None] = lambda _actions: None
    """Receives the actions for files and users that a failed coordinator may not have done."""
    on_action: Callable[[LogAction], None] = lambda _action: None
    """Used as ``on_coordinator`` after a failover."""
    what_was_told: Callable[[], bytes] = bytes
    """Used as ``what_was_told`` after a failover."""


def _no_standby(_state: bytes, _told: bytes) -> Standby:
    raise InvariantError("this server was entrusted with what the coordinator knows")


class ServerLoop:
    def __init__(
        self,
        transport: Transport,
        make_core: Callable[[int, int], ServerCore],
        options: ServerOptions,
        *,
        make_executor: MakeExecutor,
        make_history: Callable[[int], ServerHistory | EventCount | None] = lambda _set_index: None,
        coordinator: Coordinator | CoordinatorLog | None = None,
        on_coordinator: Callable[[LogAction], None] = lambda _action: None,
        standby: Standby | None = None,
        what_was_told: Callable[[], bytes] = bytes,
        make_standby: Callable[[bytes, bytes], Standby] = _no_standby,
        on_built: OnBuilt = lambda _set_index, _partition, _owners, _setup: None,
        make_set: Callable[..., SetLoop] | None = None,
        replication: ReplicationOptions | None = None,
        is_hosted: bool = False,
        has_shard: bool = True,
        made_wires: Mapping[int, Wire] = MappingProxyType({}),
    ) -> None:
        """``make_core(set_index, resumed_up_to)`` and ``make_history(set_index)`` are called for
        every set; ``make_executor`` when the chief has described one, and then ``on_built``.
        ``coordinator`` on server 0 only, inside its log where shards are replicated;
        ``on_coordinator`` gets its actions that are for files and users (all except SendControl);
        ``standby`` on the standby only; ``make_standby(snapshot, told)`` creates one later from the
        coordinator's snapshot and its ``what_was_told()``; ``make_set`` is for spans, and for tests
        that break a server on purpose; ``replication``: None if shards are not replicated;
        ``is_hosted``: True if this loop replaces a failed server; ``has_shard``: False for a spare;
        ``made_wires``: by set, the wires of executors that a replica has built."""
        self._made_wires = made_wires
        self.transport = transport
        self.sets: list[SetLoop] = []
        """By index; the first is there from the start."""
        self.coordinator = coordinator
        self.hosted: list[ServerLoop] = []
        """Loops of failed servers that this process has replaced."""
        self._has_finished = False
        self._is_asked_to_finish = False
        self._options = options
        self._make_core = make_core
        self._make_executor = make_executor
        self._make_history = make_history
        self._on_coordinator = on_coordinator
        self._standby = standby
        self._what_was_told = what_was_told
        self._make_standby = make_standby
        self._entrusted: list[bytes] = []
        """Parts of the coordinator's snapshot, until all have arrived."""
        self._is_hosted = is_hosted
        self._on_built = on_built
        self._replication: Replication | None = None
        if replication is not None:
            buddy = None
            if has_shard and not is_hosted:
                buddy = replication.buddies[options.server]
            self._replication = Replication(
                transport, replication, options, make_executor, buddy=buddy
            )
        self._make_set = make_set or (RecordingSetLoop if replication else SetLoop)
        self._changed: ChangeMode | None = None
        """The coordinator's last change of the mode, for sets that are added later."""
        self._held = [0] * len(options.shard_weights)
        self._numbers = SetNumbers(server=options.server)
        if has_shard:
            self._add_set(resumed_up_to=0)

    def _add_set(self, *, resumed_up_to: int) -> None:
        index = len(self.sets)
        self.sets.append(
            self._make_set(
                self._outputs,
                self._make_core(index, resumed_up_to),
                self._options,
                set_index=index,
                held=self._held,
                make_executor=self._make_executor,
                history=self._make_history(index),
                on_built=self._when_built,
                wire=self._made_wires.get(index),
            )
        )
        if self._changed is not None:
            self.sets[-1].do(self.sets[-1].core.handle(self._changed))

    @property
    def _outputs(self) -> Sender:
        """Sender of messages about the shard. With a replica, they wait until it is up to date."""
        return self.transport if self._replication is None else self._replication.outbox

    def _when_built(
        self, set_index: int, partition: Partition, owners: tuple[int, ...], setup: Setup
    ) -> None:
        self._on_built(set_index, partition, owners, setup)
        if self._options.wire.is_ladder:
            self._tell_sizes(set_index, self._options.wire.sizes(partition))
        if self._replication is not None:
            self._replication.on_built(set_index, partition, owners, setup)

    def _tell_sizes(self, set_index: int, sizes: list[int]) -> None:
        """Pass the sizes to the coordinator, if it is here. Its standby computes them on its own,
        before any decision depends on them."""
        if isinstance(self.coordinator, Coordinator):
            self._do_as_coordinator(self.coordinator.know_sizes(sizes))
        elif self.coordinator is not None and not self.sets[set_index].core.has_taken_over:
            self._do_as_coordinator(self.coordinator.coordinator.know_sizes(sizes))
        elif self._standby is not None:
            self._standby.coordinator_log.coordinator.know_sizes(sizes)

    @property
    def is_finished(self) -> bool:
        """True if this server has finished, and so has every failed server that it replaces."""
        return self._has_finished and all(each.is_finished for each in self.hosted)

    def run(self, waiting: Waiting, *, on_idle: Callable[[], None] = lambda: None) -> None:
        """Serve until the job is complete. All messages of this loop have left by then.
        ``on_idle`` is called between events. Waiting never times out, because workers may take any
        time."""
        if self.coordinator is not None:
            for peer, who in self.transport.lost.items():
                if is_spare(peer):  # before the job began
                    self._do_as_coordinator(self.coordinator.on_server_lost(peer, who))
                elif is_worker(peer):  # a worker that was to wait for a place
                    self._do_as_coordinator(self.coordinator.on_lost(peer, who))
        while not self.is_finished:
            if self.turn():
                waiting.reset()
                if all(each.holds_nothing for each in self.sets):
                    waiting.relax()
            else:
                waiting.idle("messages")
                on_idle()

    def actor(
        self, *, on_idle: Callable[[], None] = lambda: None
    ) -> Generator[float | None, None, None]:
        """As ``run``, for a virtual network: wakes for every message, and sleeps for what an
        action costs before it executes the next, so that replies leave when the work is done."""
        while True:
            found = None if self._has_finished else self._next_event()
            if found is not None:
                loop, event = found
                for each, actions in loop._decide(event):
                    for action in chain(actions, each.follow_up()):
                        each.execute(action)
                        if cost_s := each.take_cost_s():
                            yield cost_s
                continue
            has_copied = False
            for loop in (self, *self.hosted):
                loop._tell_of_file()
                loop._go_on_filling()
                has_copied |= loop._go_on_copying()
                if loop._is_asked_to_finish:
                    loop._finish_if_all_is_over()
            if self.is_finished:  # nothing more will arrive and wake it
                return
            if has_copied:
                yield self._take_cost_s()
                continue
            on_idle()
            yield None

    def _take_cost_s(self) -> float:
        """Return the cost of the work for all sets since the last call."""
        loops = (self, *self.hosted)
        return sum(each.take_cost_s() for loop in loops for each in loop.sets)

    def _next_event(self) -> tuple[ServerLoop, Event] | None:
        """Return the next event and the loop that it is for: this loop or a hosted one."""
        for loop in (self, *self.hosted):
            if (event := loop.transport.poll()) is not None:
                return loop, event
        return None

    def turn(self) -> bool:
        """Handle all events that have arrived; if there are none, continue a checkpoint's copies.
        Return False if there was nothing to do."""
        poll = self.transport.poll
        event = first = poll()
        while event is not None:
            for each, actions in self._decide(event):
                each.do(actions)
            event = None if self._has_finished else poll()
        has_handled = first is not None
        if not has_handled:
            self._tell_of_file()
            self._go_on_filling()
            self._reserve_snapshot()
            has_handled = self._go_on_copying()
        if self._is_asked_to_finish:
            self._finish_if_all_is_over()
        for hosted in self.hosted:  # each gets a turn, whatever the others return
            has_handled |= hosted.turn()
        return has_handled or self.is_finished

    # -- routing of events ---------------------------------------------------------------------

    def _decide(self, event: Event) -> Iterable[tuple[SetLoop, Iterable[Action]]]:
        """Return the actions for ``event``, by set. Pass it to the other components, too."""
        if self._replication is not None and self._replication.handle(event):
            return ()
        if isinstance(event, _DATA):  # the most frequent events; they begin no set
            each = self.sets[self._numbers.of(event)]
            return ((each, each.decide(event)),)
        if isinstance(event, Sent):
            frame = event.frame
            if not isinstance(frame, ReplyFrame) or frame.token is None:
                return ()
            each = frame.set_loop
            if each not in self.sets and not any(each in loop.sets for loop in self.hosted):
                raise InvariantError("the network gave back a reply of a server before this one")
            return ((each, each.take_back(frame)),)
        if isinstance(event, PeerLost):
            if self._replication is not None and self._on_server_lost(event):
                return ()
            return self._lose(event)
        index = self._numbers.of(event)
        if isinstance(event.message, Resume):
            return self._resume(event, event.message)
        if isinstance(event.message, Evict):
            return self._bury(event, event.message)
        if isinstance(event.message, ProposeMode | CommitMode):
            return self._change_mode(event.peer, event.message)
        if isinstance(event.message, AdmitWorker):
            return self._admit(event.peer, event.message)
        if isinstance(event.message, Departed):
            return self._depart(event.peer, event.message)
        if self._handle_outside_sets(event.peer, event.message):
            return ()
        if index == len(self.sets):
            self._add_set(resumed_up_to=self.sets[0].core.resumed_up_to)
        each = self.sets[index]
        return ((each, each.decide(event)),)

    def _resume(
        self, event: ControlArrived, message: Resume
    ) -> Iterable[tuple[SetLoop, Iterable[Action]]]:
        """End a collective in every set. Answer the coordinator once."""
        decided = [(each, each.decide(event)) for each in self.sets]
        if message.checkpoint:
            decided.append((self.sets[0], [WriteSnapshots(message.checkpoint)]))
        resumed = Resumed(seq=message.seq, server=self._options.server)
        return [*decided, (self.sets[0], [SendControl(event.peer, resumed)])]

    def _lose(self, event: PeerLost) -> Iterable[tuple[SetLoop, Iterable[Action]]]:
        """A rank has failed: every set gives up what it was to receive from it. The coordinator
        decides what follows. A hosted loop leaves the replicas of other shards to its host."""
        if self._is_hosted and not is_worker(event.peer):
            if self._replication is not None:
                self._replication.on_server_lost(event.peer)
            if self.coordinator is not None:
                self._do_as_coordinator(self.coordinator.on_server_lost(event.peer, event.who))
            return ()
        decided = [(each, each.decide(event)) for each in self.sets]
        failed = [each for _, actions in decided for each in actions if isinstance(each, Fail)]
        if self.coordinator is not None and not failed:
            self._do_as_coordinator(self.coordinator.on_lost(event.peer, event.who))
        return decided

    def _bury(
        self, event: ControlArrived, message: Evict
    ) -> Iterable[tuple[SetLoop, Iterable[Action]]]:
        """Evict failed workers in every set. Answer the coordinator once."""
        decided = [(each, list(each.decide(event))) for each in self.sets]
        answer = EvictAck(
            generation=message.generation,
            server=self._options.server,
            reached=[clock for each in self.sets for clock in each.core.reached_by(message.dead)],
        )
        return [*decided, (self.sets[0], [SendControl(event.peer, answer)])]

    def _admit(self, peer: int, message: AdmitWorker) -> Iterable[tuple[SetLoop, Iterable[Action]]]:
        """Admit a substitute in every set. :class:`Resumed` confirms it to the coordinator."""
        if peer != COORDINATOR or len(message.clocks) != len(self.sets):
            raise ProtocolError(
                f"server {self._options.server}: {describe_peer(peer)} sent AdmitWorker of "
                f"{len(message.clocks)} parameter sets; {describe_peer(COORDINATOR)} admits who "
                f"joins, and there are {len(self.sets)}"
            )
        return [
            (each, each.core.handle(AdmitGroup(message.worker, clock)))
            for each, clock in zip(self.sets, message.clocks, strict=True)
        ]

    def _change_mode(
        self, peer: int, message: ProposeMode | CommitMode
    ) -> Iterable[tuple[SetLoop, Iterable[Action]]]:
        """Prepare or apply a change in every set, at a round of its own. Answer a proposal once."""
        if peer != COORDINATOR:
            raise ProtocolError(
                f"server {self._options.server}: {describe_peer(peer)} sent "
                f"{type(message).__name__}; {describe_peer(COORDINATOR)} changes the mode"
            )
        if isinstance(message, ProposeMode):
            decided = [(each, each.hold_rounds()) for each in self.sets]
            answer = ModeProposed(
                number=message.number,
                server=self._options.server,
                rounds=[each.core.highest_sent for each in self.sets],
            )
            return [*decided, (self.sets[0], [SendControl(peer, answer)])]
        if len(message.rounds) < len(self.sets):
            raise ProtocolError(
                f"server {self._options.server}: {describe_peer(peer)} sent CommitMode of "
                f"{len(message.rounds)} parameter sets; there are {len(self.sets)}"
            )
        if message.level >= 0:
            return [
                (each, each.core.handle(ChangeCodecs(message.number, start, message.level)))
                for each, start in zip(self.sets, message.rounds, strict=False)
            ]
        change = ChangeMode(0, message.mode, message.staleness, message.number)
        self._changed = change
        return [
            (each, each.core.handle(change._replace(round=start)))
            for each, start in zip(self.sets, message.rounds, strict=False)
        ]

    def _depart(self, peer: int, message: Departed) -> Iterable[tuple[SetLoop, Iterable[Action]]]:
        """Apply the leave that a worker had sent only to the failed server."""
        worker, left = worker_id(message.worker), message.left
        group = self.sets[0].core.group_of(worker)
        if (
            peer != COORDINATOR
            or not self._is_hosted
            or group is None
            or len(left) != len(self.sets)
        ):
            raise ProtocolError(
                f"server {self._options.server}: {describe_peer(peer)} sent Departed of worker "
                f"{message.worker} with clocks of {len(left)} sets; {describe_peer(COORDINATOR)} "
                f"does, to who has taken a dead server's place, and this one has {len(self.sets)}"
            )
        return [
            (each, each.decide(ControlArrived(worker, Leave(group=group, clock=clock), index)))
            for index, (each, clock) in enumerate(zip(self.sets, left, strict=True))
        ]

    def _tell_of_file(self) -> None:
        """Send the coordinator the outcome of this server's checkpoint file, once it is known."""
        keeper = self._options.keeper
        if keeper is not None and keeper.is_busy and (told := keeper.outcome()) is not None:
            self._outputs.send_control(COORDINATOR, told)

    def _go_on_copying(self) -> bool:
        """Between messages: copy one chunk for a checkpoint, or begin to write the file. Return
        False if there was neither."""
        keeper = self._options.keeper
        return keeper is not None and keeper.go_on()

    def _reserve_snapshot(self) -> None:
        """Between messages: reserve memory for the first checkpoint, a chunk at a time."""
        keeper = self._options.keeper
        if keeper is not None and keeper.is_reserving:
            any(each.reserve_snapshot(keeper.memory) for each in self.sets)

    def _handle_outside_sets(self, peer: int, message: Control) -> bool:
        """Handle a message for the loop or the coordinator. Return False for a set's message."""
        if isinstance(message, Moved | Stop):
            self._require_coordinator(peer, message, is_meant=self._replication is not None)
            if isinstance(message, Stop):
                self._finish()
            else:
                self._on_moved(message.server, message.host)
            return True
        if isinstance(message, TakeOver | KeepCopy | FillCopy | CopyLost):
            replication = self._replication
            self._require_coordinator(peer, message, is_meant=replication is not None)
            assert replication is not None
            if isinstance(message, TakeOver):
                self._take_over(message.server)
            elif isinstance(message, KeepCopy):
                replication.keep(message)
            elif isinstance(message, FillCopy):
                loop, filling = self._served(message.server, message)
                filling.fill(loop.sets, keeper=message.keeper, number=message.number)
            else:
                self._served(message.server, message)[1].on_copy_lost()
            return True
        if isinstance(message, Finish):
            if peer != COORDINATOR:
                raise ProtocolError(
                    f"server {self._options.server}: {describe_peer(peer)} sent Finish; "
                    f"{describe_peer(COORDINATOR)} says when the job is complete"
                )
            self._is_asked_to_finish = True
            return True
        if isinstance(message, Append):
            self._note(peer, message)
            return True
        if isinstance(message, Entrust):
            self._take_entrusted(peer, message)
            return True
        if self.coordinator is not None and isinstance(message, FOR_COORDINATOR):
            self._do_as_coordinator(self.coordinator.handle(peer, message))
            return True
        return False

    def _do_as_coordinator(self, actions: Iterable[LogAction]) -> None:
        assert self.coordinator is not None
        for action in actions:
            if isinstance(action, SendControl):
                self.transport.send_control(action.peer, action.message)
            elif isinstance(action, Move):
                self.transport.move(server_id(action.server), server_id(action.host))
            elif isinstance(action, EntrustAll):
                self._entrust(action)
            elif not isinstance(action, Over):
                self._on_coordinator(action)
            if isinstance(action, self.coordinator.LAST):
                self._finish()

    # -- the coordinator's standby ----------------------------------------------------------------

    def _entrust(self, action: EntrustAll) -> None:
        """Send the coordinator's snapshot in parts. The last one adds what users have been told."""
        state, told = action.state, self._what_was_told()
        num_parts = -(-len(state) // _PART_BYTES)
        for part in range(num_parts):
            message = Entrust(
                number=action.number,
                part=part,
                num_parts=num_parts,
                state=state[part * _PART_BYTES : (part + 1) * _PART_BYTES],
                told=told if part == num_parts - 1 else b"",
            )
            self.transport.send_control(action.standby, message)

    def _take_entrusted(self, peer: int, message: Entrust) -> None:
        """Store a part of the snapshot. With the last part this server becomes the standby."""
        parts = self._entrusted
        if peer != COORDINATOR or self._standby is not None or message.part != len(parts):
            raise ProtocolError(
                f"{describe_peer(self._options.server)}: {describe_peer(peer)} sent part "
                f"{message.part} of what the coordinator knows; {describe_peer(COORDINATOR)} does, "
                f"once and in order, and {len(parts)} are here"
            )
        parts.append(message.state)
        if len(parts) < message.num_parts:
            return
        state = b"".join(parts)
        parts.clear()
        self._standby = self._make_standby(state, message.told)
        self.transport.send_control(COORDINATOR, AppendAck(number=message.number))

    def _note(self, peer: int, note: Append) -> None:
        """Store an entry of the coordinator's log, and acknowledge it."""
        if peer != COORDINATOR or self._standby is None:
            raise ProtocolError(
                f"server {self._options.server}: {describe_peer(peer)} sent Append; "
                f"{describe_peer(COORDINATOR)} does, to its standby"
            )
        for action in self._standby.coordinator_log.note(note):
            self._standby.on_done(action)
        self.transport.send_control(COORDINATOR, AppendAck(number=note.number))

    def _succeed(self, who: str) -> None:
        """Take over from the coordinator, described by ``who``. Serve its shard at once, so that
        ranks have an endpoint to send to."""
        assert self._standby is not None
        assert self._replication is not None
        standby, self._standby = self._standby, None
        coordinator_log, transport = standby.coordinator_log, self.transport
        died = coordinator_log.coordinator_at
        lost = {peer: name for peer, name in transport.lost.items() if peer != died}
        for action in coordinator_log.moves:  # Moved may not have arrived yet
            self._on_moved(action.server, action.host)
        said = coordinator_log.announcements()
        hosted: ServerLoop | None = None
        if not coordinator_log.is_complete:
            hosted = self._host(COORDINATOR, standby)
            for action in (*coordinator_log.moves, Move(COORDINATOR, self._options.server)):
                hosted.transport.move(server_id(action.server), server_id(action.host))
        try:
            undone, actions = coordinator_log.succeed(who, lost=lost)
        except (
            PsdistError
        ):  # the job ends; this rank writes the reports, because it is the coordinator now
            standby.on_succeed([])
            raise
        standby.on_succeed(undone)
        for each in said:
            if hosted is not None or each.peer != transport.me:
                transport.send_control(each.peer, each.message)
        if hosted is None:
            self._finish()
        else:
            hosted._do_as_coordinator(actions)

    # -- servers that fail and are replaced ----------------------------------------------------

    def _require_coordinator(self, peer: int, message: Control, *, is_meant: bool) -> None:
        if peer != COORDINATOR or not is_meant:
            raise ProtocolError(
                f"server {self._options.server}: {describe_peer(peer)} sent "
                f"{type(message).__name__}; {describe_peer(COORDINATOR)} declares deaths, where "
                "servers have buddies"
            )

    def _on_server_lost(self, event: PeerLost) -> bool:
        """Handle the failure of a server. Return False for a worker, and in a hosted loop."""
        if is_worker(event.peer) or self._is_hosted:
            return False
        for each in self._replications:
            each.on_server_lost(event.peer)
        if self.coordinator is not None:
            self._do_as_coordinator(self.coordinator.on_server_lost(event.peer, event.who))
        elif (
            self._standby is not None and event.peer == self._standby.coordinator_log.coordinator_at
        ):
            self._succeed(event.who)
        return True

    @property
    def _replications(self) -> Iterable[Replication]:
        """Replications of all shards that are served here."""
        each = (loop._replication for loop in (self, *self.hosted))
        return (one for one in each if one is not None)

    def _take_over(self, server: int) -> None:
        """Serve the shard of a failed server. The coordinator's shard is already served by the
        standby that replaced it."""
        if server != COORDINATOR:
            self._host(server)
        self.transport.send_control(COORDINATOR, TakenOver(server=server))

    def _host(self, server: int, standby: Standby | None = None) -> ServerLoop:
        """Return a loop that continues a failed server from its replica here; with ``standby`` it
        continues the coordinator, too."""
        assert self._replication is not None
        options = self._replication.options
        kept = self._replication.kept_for(server_id(server))
        replicas = kept.take_over()
        for replica in replicas:
            replica.log.taken_over(self._options.server)
        states = {index: replica.state for index, replica in enumerate(replicas)}

        def make_core(set_index: int, resumed_up_to: int) -> ServerCore:
            return options.make_core(server, set_index, resumed_up_to, states.get(set_index))

        hosted = ServerLoop(
            self.transport.host(server_id(server)),
            make_core,
            kept.server_options,
            make_executor=kept.make_executor,
            make_history=kept.log_of,
            coordinator=standby.coordinator_log if standby is not None else None,
            on_coordinator=standby.on_action if standby is not None else lambda _action: None,
            what_was_told=standby.what_was_told if standby is not None else bytes,
            replication=options,
            is_hosted=True,
            made_wires={index: replica.wire for index, replica in enumerate(replicas)},
        )
        for index, replica in enumerate(replicas):
            for each, actions in hosted._decide(ControlArrived(CHIEF, replica.setup, index)):
                each.do(actions)
        self.hosted.append(hosted)
        modes = replicas[0].state.modes if replicas else []
        told = [each for each in modes if each.number]
        if told:  # for later sets: the sets above have it
            hosted._changed = told[-1]._replace(round=0)
        return hosted

    def _on_moved(self, server: int, host: int) -> None:
        if self.coordinator is None:  # the coordinator moved it before it sent Moved
            self.transport.move(server_id(server), server_id(host))
        for each in self._replications:
            each.on_moved(server)

    def _served(self, server: int, message: Control) -> tuple[ServerLoop, Replication]:
        """Return the loop that serves the shard of ``server`` here, and its replication."""
        served = {loop._options.server: loop for loop in (self, *self.hosted)}
        loop = served.get(server)
        if loop is None or loop._replication is None:
            raise ProtocolError(
                f"{describe_peer(self._options.server)}: {describe_peer(COORDINATOR)} sent "
                f"{type(message).__name__} of the shard of server {server}; served here are those "
                f"of {sorted(served)}"
            )
        return loop, loop._replication

    def _go_on_filling(self) -> None:
        """Between messages: send more chunks of a new replica."""
        if self._replication is not None:
            self._replication.go_on_filling()

    # -- the end -------------------------------------------------------------------------------

    def _finish_if_all_is_over(self) -> None:
        # The coordinator's Finish may overtake a worker's Leave. Without this check the Leave would
        # stay unreceived and be missing in the history. The transport may also return a reply's
        # frame long after its worker has continued: the next user of the transport would get a
        # foreign frame.
        # A checkpoint's file must be complete, too.
        keeper = self._options.keeper
        if (keeper is not None and keeper.is_busy) or any(
            each.core.has_members or each.has_open_replies for each in self.sets
        ):
            return
        if self._replication is not None and not self._replication.is_over:
            return
        self._is_asked_to_finish = False
        answer = Finished(server=self._options.server, statistics=self.statistics())
        self.transport.send_control(COORDINATOR, answer)
        if self.coordinator is None and self._replication is None:
            self._finish()

    def _finish(self) -> None:
        if self._has_finished:
            return
        for hosted in self.hosted:
            hosted._finish()
        if self._replication is not None:
            self._replication.close_histories()
        for each in self.sets:
            each.close_history()
        self._has_finished = True

    def statistics(self) -> dict[str, Any]:
        """Return counts of this process and of each set, for summary.json."""
        return {
            "bytes_sent": self.transport.bytes_sent,
            "sets": [each.statistics() for each in self.sets],
        }
