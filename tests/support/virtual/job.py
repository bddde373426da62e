"""A whole job in one process: the real loops, shards and state machines over the virtual network.

:func:`play` runs a :class:`~tests.support.virtual.schedule.Schedule` and returns the job.
Meanwhile every machine looks at itself whenever it has handled something, and a watch
(``watch``) counts at the network and at the servers' memory. Whether the run was right is judged
afterwards (``proof``).

    job = play(Schedule.from_seed(7))
    prove(job)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy.typing as npt
import torch

from psdist.codecs import Raw
from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.config.modes import ModeFrom
from psdist.controller import Controller, Decision
from psdist.controller.bound import BoundControl
from psdist.controller.codec import CodecControl
from psdist.controller.mode import ModeControl
from psdist.errors import (
    BuriedError,
    CollectiveError,
    HyperparameterError,
    PeerLostError,
    PsdistError,
    ServersLostError,
)
from psdist.history.files import copy_name, joined
from psdist.history.run_record import CodecsSince, LevelCodecs, ModeSince
from psdist.history.writers import History, RunRecord, slice_places
from psdist.protocol.control import (
    Absent,
    Collected,
    Control,
    Failure,
    Missing,
    Progress,
    Registered,
    Settings,
    Stop,
    WhoIsAbsent,
    WhoIsMissing,
)
from psdist.protocol.coordinator_line import num_done
from psdist.protocol.events import ControlArrived
from psdist.protocol.header import CodecCode, Kind
from psdist.protocol.ids import (
    COORDINATOR,
    describe_peer,
    is_worker,
    server_id,
    spare_id,
    worker_id,
    worker_of,
)
from psdist.protocol.memory import as_tensor
from psdist.servers.loop import ServerLoop, ServerPart
from psdist.servers.parts import CoordinatorSeat, ModeSwitches, Reports, codec_sizes, plain_loop
from psdist.servers.protocol.assembly import assemble_core
from psdist.servers.protocol.coordinator import Coordinator
from psdist.servers.protocol.failover.coordinator_log import CoordinatorLog, LogAction
from psdist.servers.protocol.modes import ModeChanged, ModeChanges
from psdist.servers.protocol.replication.shard_state import ShardState
from psdist.servers.protocol.rules import MakeRule
from psdist.servers.protocol.start import Start
from psdist.servers.protocol.state import ServerCore
from psdist.servers.protocol.successor import Successor
from psdist.servers.protocol.takeovers import Takeovers
from psdist.servers.replication import Replication
from psdist.servers.replication.keeping import ReplicationOptions
from psdist.servers.replication.standby import LoggedSeat, Standby, StandbySeat
from psdist.servers.set_loop import SetLoop
from psdist.servers.set_store import ChooseContents, ServerOptions, ShardStore
from psdist.servers.shard.executor import Executor, MakeExecutor
from psdist.servers.shard.tensors import TensorShard
from psdist.servers.spare import SpareSeat
from psdist.servers.tables.service import RowService
from psdist.transport import Transport
from psdist.transport.lines import LineTransport
from psdist.transport.virtual import Actor
from psdist.workers.group.channel import AloneChannel, GroupChannel
from psdist.workers.group.shrinking import ShrinkingChannel
from tests.support.coordinators import assemble, part_of
from tests.support.history.memory import ServerHistory, collect
from tests.support.virtual.checkpoints import MemoryKeeper
from tests.support.virtual.delays import link_of, napping, slowed
from tests.support.virtual.group import VirtualGroup
from tests.support.virtual.network import LinkModel, VirtualNetwork
from tests.support.virtual.schedule import Schedule, small_partition
from tests.support.virtual.self_checks import check_server_after_every_event
from tests.support.virtual.sizes import SizeShard
from tests.support.virtual.virtual_worker import VirtualWorker
from tests.support.virtual.watch import Watch

__all__ = ["Schedule", "VirtualJob", "VirtualWorker", "play", "small_partition"]

REPEATABLE: tuple[type[Control] | Kind, ...] = (
    Kind.PUSH,  # of an update without a gradient
    Kind.PULL,
    Kind.REPLY,  # of what the worker holds already
    Kind.RECEIPT,
    *(Registered, Settings, Collected, Stop, Missing, WhoIsMissing, Absent, WhoIsAbsent),
    *(Progress,),
)
"""Messages without payload whose receivers take a second one: what it changes has happened already,
or it is answered again. A second one of any other message is an error."""
COUNTED = frozenset({Collected, Stop, Progress})
"""Those of them that come once where lines to the coordinator count."""


def codecs_of(wire: Wire) -> tuple[CodecsSince, ...]:
    """For run.json, by their own names."""
    parts = [
        (0, wire.push, wire.reply, wire.burst),
        *((at.round, at.push, at.reply, at.burst) for at in wire.later),
    ]
    if all(isinstance(push, Raw) and isinstance(pull, Raw) for _, push, pull, _ in parts):
        return ()
    return tuple(
        CodecsSince(
            round=start,
            push=push.name,
            pull=pull.name,
            push_code=push.code,
            burst=burst,
            burst_code=CodecCode.PLAIN * bool(burst),
        )
        for start, push, pull, burst in parts
    )


def ladder_of(wire: Wire) -> tuple[LevelCodecs, ...]:
    """Those among which the coordinator chooses; nothing where it does not."""
    levels = [(wire.push, wire.reply), *((at.push, at.reply) for at in wire.later)]
    return tuple(
        LevelCodecs(push=push.name, pull=pull.name, push_code=push.code)
        for push, pull in levels * wire.is_ladder
    )


def since(part: ModeFrom) -> ModeSince:
    """As run.json has it."""
    staleness = part.staleness if part.mode == "ssp" else None
    return ModeSince(round=part.round, mode=part.mode, staleness=staleness)


TOLD = b"what people have heard"


class _Reports(Reports):
    """The coordinator on ``peer`` reports to the list of the job."""

    def __init__(self, job: VirtualJob, peer: int) -> None:
        self._job, self._peer = job, peer

    def on_action(self, action: LogAction) -> None:
        self._job.reported.append(action)

    def succeed(self, undone: Sequence[LogAction]) -> None:
        job = self._job
        job.has_succeeded = True
        job.num_successions += 1
        job.coordinator_log, job.second, job.standby = job.second, None, None
        job.coordinator_at = self._peer
        job.reported += undone[num_done(job.reported, undone) :]

    def to_snapshot(self) -> bytes:
        return TOLD


def replication_of(loop: ServerLoop) -> Replication:
    """The part of a server's loop that is about replicas."""
    return next(each for each in loop.parts if isinstance(each, Replication))


def spare_seat(loop: ServerLoop) -> SpareSeat:
    """Return the duties of a spare."""
    assert isinstance(loop.served, SpareSeat)
    return loop.served


class SetOfJob:
    """One parameter set of a virtual job; of the first, the job itself."""

    schedule: Schedule
    groups: list[tuple[int, ...]]
    servers: list[ServerLoop]
    spares: list[ServerLoop]
    dead: int | None
    network: VirtualNetwork
    reported: list[LogAction]
    num_substitutes: int
    tables: dict[tuple[int, int, int], list[tuple[int, ...]]]
    given_up: set[tuple[int, int, int]]

    def __init__(self, set_index: int, schedule: Schedule) -> None:
        self.set_index = set_index
        self.order = schedule.order(set_index)
        """In which all groups send the chunks."""
        held = [0] * schedule.servers
        for index in range(set_index + 1):
            self.partition = schedule.partition(index)
            self.owners = self.partition.shard([1.0] * schedule.servers, held)
            mine = self.partition.bytes_by_server(self.owners, schedule.servers)
            held = [one + other for one, other in zip(held, mine, strict=True)]
        self.server_histories = [ServerHistory(None, server) for server in range(schedule.servers)]
        self.copied_histories: list[dict[int, ServerHistory]] = [{} for _ in self.server_histories]
        """By server and number of the copy: as who keeps it writes it."""
        self.workers: list[VirtualWorker] = []
        """Each worker's part in the set."""
        self.clocks_at_save: list[dict[int, int]] = []
        """For each save the clocks of the groups."""
        self._last_save = -1
        """Its number among the collectives."""
        self.copies: list[tuple[int, list[npt.NDArray[Any]]]] = []
        """For each save how often values were set before, and what the chief has copied, by
        chunk."""

    # -- what workers note ---------------------------------------------------------------------

    def note_clock_at_save(self, group: int, clock: int, seq: int) -> None:
        saves = self.clocks_at_save
        if seq != self._last_save:
            self._last_save = seq
            saves.append({})
        saves[-1][group] = clock

    def note_copy(self, payloads: Sequence[memoryview | None]) -> None:
        chunks = zip(payloads, self.partition.chunks, strict=True)
        copy = [
            as_tensor(payload, chunk.dtype, chunk.length).numpy()
            for payload, chunk in chunks
            if payload is not None
        ]
        self.copies.append((len(self.workers[0].pushed), copy))

    # -- what has become of it -----------------------------------------------------------------

    def loop_of(self, server: int) -> ServerLoop:
        """That which serves its shard at the end."""
        hosted = {
            loop.transport.me: each
            for loop in (*self.servers, *self.spares)
            for each in loop.hosted
            if each.transport.me == server
        }
        living = [each for host, each in hosted.items() if host not in self.network.dead]
        if living or not hosted:
            return living[0] if living else self.servers[server]
        # Its last process failed when no rank needed it any more.
        return hosted.get(
            part_of(self.coordinator, Takeovers).shards[server].host, self.servers[server]
        )

    def make_copied_history(self, server: int, number: int, position: int) -> ServerHistory:
        history = ServerHistory(None, server, copy=number, position=position)
        assert number not in self.copied_histories[server]
        self.copied_histories[server][number] = history
        return history

    def set_loop(self, server: int) -> SetLoop | None:
        """None if the server has not received the set, because a rank failed."""
        loops = self.loop_of(server).sets
        return loops[self.set_index] if self.set_index < len(loops) else None

    def core(self, server: int) -> ServerCore:
        each = self.set_loop(server)
        assert each is not None
        return each.core

    def executor(self, server: int) -> Executor | None:
        each = self.set_loop(server)
        return each and each.executor

    @property
    def holds_sizes_alone(self) -> bool:
        """Nothing has bytes that a checksum could be taken of."""
        servers = range(len(self.servers))
        return any(isinstance(self.executor(server), SizeShard) for server in servers)

    @property
    def modes(self) -> list[ModeFrom]:
        """Modes of all rounds, each with its first round, from the schedule and the coordinator."""
        schedule = self.schedule
        staleness = schedule.staleness if schedule.mode == "ssp" else 0
        modes = [ModeFrom(0, schedule.mode, staleness), *schedule.later]
        for change in (each for each in self.reported if isinstance(each, ModeChanged)):
            if change.level >= 0:
                continue
            index = self.set_index
            start = change.rounds[index] if index < len(change.rounds) else 0
            modes = [each for each in modes if each.round < start]
            modes.append(ModeFrom(start, change.mode, change.staleness))
        return modes

    @property
    def codecs(self) -> tuple[CodecsSince, ...]:
        """Codecs of all rounds, from the schedule and the coordinator."""
        if not self.wire.is_ladder:
            return codecs_of(self.wire)
        ladder = ladder_of(self.wire)
        changes = [each for each in self.reported if isinstance(each, ModeChanged)]
        parts = {0: 0} | {each.rounds[self.set_index]: each.level for each in changes}
        return tuple(
            CodecsSince(round=n, **ladder[level].model_dump()) for n, level in parts.items()
        )

    def is_gathered(self, round_number: int) -> bool:
        """Whether the updates of this round become one step."""
        return [each for each in self.modes if each.round <= round_number][-1].mode == "sync"

    def history(self) -> History:
        schedule = self.schedule
        record = RunRecord(
            psdist="test",
            mode=schedule.mode,
            staleness=schedule.staleness if schedule.mode == "ssp" else None,
            mode_by=schedule.mode_by,
            auto_staleness=(
                schedule.highest or schedule.staleness if schedule.mode_by == "auto" else None
            ),
            schedule=tuple(map(since, self.modes)) if schedule.later else (),
            groups=tuple(self.groups),
            num_substitutes=self.num_substitutes,
            slices=slice_places(lambda size: self.partition.slices(size, self.order), self.groups),
            num_servers=schedule.servers,
            set_index=self.set_index,
            num_chunks=len(self.partition.chunks),
            owners=self.owners,
            checksum_every=int(not self.holds_sizes_alone),
            codecs=self.codecs[:1] if self.wire.is_ladder else self.codecs,
            ladder=ladder_of(self.wire),
            has_copies=self.wire.has_copies,
            stale_lr=schedule.stale_lr,
            delay_compensation=schedule.compensation,
            backup=schedule.backup,
            backup_every=schedule.backup_every if schedule.backup else 0,
        )
        record = record.model_copy(update={"codecs": self.codecs})
        workers = [worker.history for worker in self.workers]
        history = collect(record, self.server_histories, workers)
        logs = list(history.servers)
        for server, copies in enumerate(self.copied_histories):
            for number, copy in sorted(copies.items()):
                name = copy_name(server, number)
                logs[server] = joined(logs[server], copy.log(), name=name)
        return replace(history, servers=tuple(logs))

    def has_values_of(self, chunk: int) -> bool:
        """True if the server of ``chunk`` lives and holds values of it."""
        loop = self.set_loop(self.owners[chunk])
        known = loop and loop.core.chunk_states.get(chunk)
        holds_values = loop is not None and isinstance(loop.executor, TensorShard)
        return bool(known and known.is_loaded and holds_values)

    def parameters_of(self, chunk: int) -> torch.Tensor:
        """Its server's own, now."""
        server = self.owners[chunk]
        executor = self.executor(server)
        assert isinstance(executor, TensorShard)
        return executor.memory[chunk].buffer(self.core(server).chunk_states[chunk].current).clone()

    def parameters(self) -> torch.Tensor:
        """The servers' parameters, chunk after chunk."""
        return torch.cat([self.parameters_of(chunk) for chunk in range(len(self.owners))])


class OtherSet(SetOfJob):
    """A set after the first; state common to all sets is in the job."""

    def __init__(self, job: VirtualJob, set_index: int) -> None:
        super().__init__(set_index, job.schedule)
        self._job = job

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)


class VirtualJob(SetOfJob):
    def __init__(
        self,
        schedule: Schedule,
        *,
        rule: Callable[[int], MakeRule] | None = None,
        make_set: Callable[..., SetLoop] | None = None,
        make_executor: MakeExecutor = TensorShard,
        make_worker: Callable[[VirtualJob, int, int], VirtualWorker] = VirtualWorker,
        wire: Wire = RAW_WIRE,
        verify_open_sends: bool = True,
        is_watched: bool = True,
        choose: Callable[[VirtualJob, int], ChooseContents] | None = None,
        network: VirtualNetwork | None = None,
        max_deaths: int = 0,
        num_substitutes: int = 0,
        reforms: bool = False,
        apart_s: float = 0.0,
    ) -> None:
        """``rule(server)``, ``make_set`` and ``make_worker(job, worker, group)`` let a test break
        servers and workers on purpose, ``is_watched=False`` before the watch sees it;
        ``make_executor`` is the memory of servers, and ``choose(job, server)`` what sets consist
        of (None: parameters); ``network`` is that of a job before this one,
        whose ranks now do this job; ``max_deaths``: number of workers that may fail while the
        others continue; ``num_substitutes``: number of groups, the last ones, of workers that wait
        to join; where the schedule has spares they are these; ``reforms``: groups continue without
        failed workers; ``apart_s``: maximum delay of a worker in an operation of its group."""
        super().__init__(0, schedule)
        self.schedule = schedule
        self.wire = self.server_wire = wire
        self.max_deaths, self.num_substitutes = max_deaths, num_substitutes
        self.reforms, self._apart_s = reforms, apart_s
        self._choose = choose
        self.formed: dict[tuple[int, ...], VirtualGroup] = {}
        """Groups that continued, by who is left of them."""
        self.tables: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}
        """(set, group, iteration) -> workers whose gradients it has, once for each start."""
        self.given_up: set[tuple[int, int, int]] = set()
        """(set, group, iteration) of iterations that count only for their pushed part."""
        self._first_substitute = sum(schedule.group_sizes) - num_substitutes
        self.proposals: Sequence[int] = ()
        """After so many events the coordinator proposes other codecs."""
        self.random = random.Random(schedule.seed)
        self.network = network or VirtualNetwork(
            seed=schedule.seed,
            link=link_of(schedule),
            verify_open_sends=verify_open_sends,
            repeatable=[
                each for each in REPEATABLE if not schedule.has_buddies or each not in COUNTED
            ],
        )
        orders = [schedule.order(index) for index in range(schedule.num_sets)]
        self.watch = (
            Watch(self.network, credits=schedule.credits, orders=orders) if is_watched else None
        )
        if self.watch is not None:
            self.watch.may_miss = schedule.backup > 0
            self.watch.reforms = reforms
            self.watch.out = lambda: {worker_id(worker) for worker in self.out_of_the_job}
        self.groups: list[tuple[int, ...]] = []
        for size in schedule.group_sizes:
            first = sum(map(len, self.groups))
            self.groups.append(tuple(range(first, first + size)))
        self.channels = [self._channels(members) for members in self.groups]
        """Each group's ends of its channel, by place."""
        self.servers: list[ServerLoop] = []
        self.keepers = [MemoryKeeper(schedule.seed + each) for each in range(schedule.servers)]
        """Checkpoint state of each server."""
        self.others = [OtherSet(self, index) for index in range(1, schedule.num_sets)]
        """The parameter sets after the first."""
        self.reported: list[LogAction] = []
        """The coordinator's output for files and people."""
        self.num_half_pushed = 0
        """Number of sets in which a worker had pushed half an iteration when it entered a
        collective."""
        self.dead: int | None = None
        self.errors: dict[int, PsdistError] = {}
        """Errors of ranks that a failure, or a mistake in the schedule, has ended."""
        self.buried: dict[int, BuriedError] = {}
        """Errors of workers that ended because another worker of their group had failed."""
        num_workers = self._num_workers = sum(schedule.group_sizes)
        rule_of = rule or (lambda _server: schedule.rule())
        self.has_succeeded = False
        """Whether a standby has become the coordinator."""
        self.num_successions = 0
        self.coordinator_at = COORDINATOR
        """In whose process the coordinator is, or was until it failed."""
        self.coordinator_log: CoordinatorLog | None = None
        """The coordinator's, and its standby's:"""
        self.second: CoordinatorLog | None = None
        self.standby: int | None = None
        """The standby's process; None without replicas, and after a failover until there is
        another."""
        if schedule.has_buddies:
            self.coordinator_log = self._coordinator_log(num_workers, is_active=True)
            self.second = self._coordinator_log(num_workers, is_active=False)
            self.standby = self._first_standby
        self.seat: CoordinatorSeat | None = None
        """The coordinator's, on server 0."""
        for server in range(schedule.servers):
            loop = self._server(
                server,
                rule_of,
                self._watched(server, slowed(schedule, server, make_executor)),
                {} if make_set is None else {"make_set": make_set},
            )
            self.servers.append(loop)
            self._spawn(server_id(server), napping(schedule, server, loop.actor()))
        self.spares = [
            self._spare(spare, rule_of, slowed(schedule, 0, make_executor))
            for spare in range(schedule.spares)
        ]
        self.workers = [
            make_worker(self, worker, group)
            for group, members in enumerate(self.groups)
            for worker in members
        ]
        for worker in self.workers:
            if not self._is_spare(worker.worker):
                self._spawn(worker_id(worker.worker), worker.script())

    # -- how it is put together ----------------------------------------------------------------

    @property
    def sets(self) -> list[SetOfJob]:
        return [self, *self.others]

    @property
    def _first_standby(self) -> int | None:
        return server_id(self.schedule.buddies[0]) if self.schedule.has_buddies else None

    def ends_without(self, gone: Collection[int]) -> bool:
        """True if no process has the coordinator's state once these have failed."""
        return self.coordinator_at in gone and (self.standby is None or self.standby in gone)

    @property
    def coordinator(self) -> Coordinator:
        """That which lives, or has lived last."""
        if self.has_succeeded:
            assert self.coordinator_log is not None
            return self.coordinator_log.coordinator
        assert self.seat is not None
        coordinator = self.seat.coordinator
        return coordinator.coordinator if isinstance(coordinator, CoordinatorLog) else coordinator

    def clocks_once_ready(self) -> list[int]:
        """How many iterations the scripts have made, once training may continue without some."""
        return [each.clock for each in self.workers] if self.coordinator.is_ready else []

    def _coordinator(self, num_workers: int) -> Coordinator:
        schedule = self.schedule
        control: Controller | None = None
        if schedule.highest:
            control = BoundControl(
                num_groups=len(self.groups), lowest=schedule.staleness, highest=schedule.highest
            )
        elif schedule.is_auto:
            control = ModeControl(num_groups=len(self.groups), staleness=schedule.staleness)
        elif self.wire.is_ladder:
            names = [each.name for each in ladder_of(self.wire)]
            control = CodecControl(
                num_groups=len(self.groups) - self.num_substitutes,
                names=names,
                mode=schedule.mode,
                staleness=schedule.staleness if schedule.mode == "ssp" else 0,
            )
        return assemble(
            num_workers=num_workers,
            num_servers=schedule.servers,
            mode=schedule.modes[0] if len(schedule.modes) == 1 else "ssp",
            takes_set_mode=True,
            control=control,
            groups=self.groups,
            max_deaths=self.max_deaths,
            buddies=schedule.buddies if schedule.has_buddies else (),
            num_spares=schedule.spares,
            num_substitutes=self.num_substitutes,
            reforms=self.reforms,
            backup=schedule.backup,
        )

    def _server(
        self,
        server: int,
        rule_of: Callable[[int], MakeRule],
        make_executor: MakeExecutor,
        make_set: dict[str, Callable[..., SetLoop]],
    ) -> ServerLoop:
        transport, options = self.transport(server_id(server)), self._options(server)
        make_core = partial(self._make_core, server, rule_of)
        store = ShardStore(
            make_executor,
            choose=None if self._choose is None else self._choose(self, server),
            wire=self.server_wire,
            make_history=lambda index, _position: self.sets[index].server_histories[server],
            keeper=self.keepers[server],
        )
        seat: CoordinatorSeat | StandbySeat
        if self.coordinator_log is None:
            seats: list[ServerPart] = [] if self._choose is None else [RowService()]
            if server == COORDINATOR:
                seat = CoordinatorSeat(self._coordinator(self._num_workers), _Reports(self, server))
                self.seat = seat
                seats += [seat, *codec_sizes(self.wire, seat.know_sizes)]
            return plain_loop(transport, make_core, options, store, seats=seats, **make_set)
        replication = self._replication(
            transport, options, rule_of, make_executor, buddy=self.schedule.buddies[server]
        )
        if server == COORDINATOR:
            seat = LoggedSeat(self.coordinator_log, _Reports(self, server), replication)
            self.seat = seat
        else:
            assert self.second is not None
            is_standby = server_id(server) == self._first_standby
            standby = Standby(self.second, _Reports(self, server)) if is_standby else None
            make_standby = partial(self._make_standby, server_id(server))
            seat = StandbySeat(make_standby, replication, self.wire, standby)
        seats = [seat, *codec_sizes(self.wire, seat.know_sizes)]
        seats += [ModeSwitches()]
        return replication.make_loop(make_core, store, seats=seats, **make_set)

    def _options(self, server: int) -> ServerOptions:
        return ServerOptions(
            server=server,
            shard_weights=(1.0,) * self.schedule.servers,
            modes=self.schedule.modes,
            receive_buffers=self.schedule.receive_buffers,
            reply_window=self.schedule.reply_window,
            checksum_every=1,
            compensation=self.schedule.compensation,
        )

    def _spare(
        self,
        spare: int,
        rule_of: Callable[[int], MakeRule],
        make_executor: MakeExecutor,
    ) -> ServerLoop:
        peer = spare_id(spare)
        if self.num_substitutes:
            self.network.share(peer, worker_id(self._first_substitute + spare))
        transport, options = self.transport(peer), self._options(peer)
        replication = self._replication(transport, options, rule_of, make_executor, buddy=None)
        seat = StandbySeat(partial(self._make_standby, peer), replication, self.wire)
        seats = [seat, *codec_sizes(self.wire, seat.know_sizes)]
        loop = ServerLoop(transport, SpareSeat(options, replication), (replication, *seats))
        self._spawn(peer, self._process_of(spare, loop))
        return loop

    def _is_spare(self, worker: int) -> bool:
        """Whether it is one of the spares, which take the places of servers, too."""
        return bool(self.schedule.spares) and worker >= self._first_substitute

    def _process_of(self, spare: int, loop: ServerLoop) -> Actor:
        """Run a spare, and the worker that it becomes if the coordinator requests it."""
        yield from loop.actor()
        served = spare_seat(loop)
        if served.replace is None:
            return
        worker = self.workers[self._first_substitute + spare]
        loop.transport.become(worker_id(worker.worker))
        for event in (*served.heard, ControlArrived(COORDINATOR, served.replace)):
            worker.loop.hear(event)
        yield from worker.script()

    @property
    def never_asked(self) -> set[int]:
        """Workers that spares could have become that have not."""
        idle = [number for number, each in enumerate(self.spares) if not spare_seat(each).replace]
        return {self._first_substitute + each for each in idle if self.num_substitutes}

    def _coordinator_log(self, num_workers: int, *, is_active: bool) -> CoordinatorLog:
        assert self._first_standby is not None
        return CoordinatorLog(
            self._coordinator(num_workers),
            standby=self._first_standby,
            num_workers=num_workers,
            num_servers=self.schedule.servers,
            num_spares=self.schedule.spares,
            num_substitutes=self.num_substitutes,
            is_active=is_active,
        )

    def _make_standby(self, peer: int, state: bytes, told: bytes) -> Standby:
        assert told == TOLD
        coordinator_log = self._coordinator_log(self._num_workers, is_active=False)
        coordinator_log.from_snapshot(state)
        self.second, self.standby = coordinator_log, peer
        return Standby(coordinator_log, _Reports(self, peer))

    def _replication(
        self,
        transport: Transport,
        server_options: ServerOptions,
        rule_of: Callable[[int], MakeRule],
        make_executor: MakeExecutor,
        *,
        buddy: int | None,
    ) -> Replication:
        def make_core(
            server: int, set_index: int, resumed_up_to: int, picture: ShardState | None
        ) -> ServerCore:
            return self._make_core(server, rule_of, set_index, resumed_up_to, picture)

        def make_store(server: int, number: int) -> ShardStore:
            return ShardStore(
                make_executor,
                wire=self.wire,
                make_history=lambda index, position: self.sets[index].make_copied_history(
                    server, number, position
                ),
                keeper=MemoryKeeper(self.schedule.seed - 1 - server),
            )

        options = ReplicationOptions(
            buddies=self.schedule.buddies,
            num_groups=len(self.groups),
            num_substitutes=self.num_substitutes,
            make_core=make_core,
            make_store=make_store,
        )
        return Replication(transport, options, server_options, buddy=buddy)

    def _make_core(
        self,
        server: int,
        rule_of: Callable[[int], MakeRule],
        _set_index: int,
        resumed_up_to: int,
        picture: ShardState | None = None,
    ) -> ServerCore:
        core = assemble_core(
            server=server,
            make_rule=rule_of(server),
            groups=self.groups,
            resumed_up_to=resumed_up_to,
            survives_workers=self.max_deaths > 0,
            start=Start() if picture is None else Successor(picture),
            num_substitutes=self.num_substitutes,
            is_out=all if self.reforms else any,
        )
        check_server_after_every_event(core, is_large=self.schedule.is_large)
        return core

    def transport(self, peer: int) -> Transport:
        """The endpoint of ``peer``, watched."""
        if is_worker(peer) and self._is_spare(worker_of(peer)):
            return self.spares[worker_of(peer) - self._first_substitute].transport
        endpoint = self.network.endpoint(peer)
        watched = endpoint if self.watch is None else self.watch.transport(endpoint)
        standby = self._first_standby
        return watched if standby is None else LineTransport(watched, standby=standby)

    def _channels(self, members: Sequence[int]) -> list[GroupChannel]:
        channels: list[GroupChannel] = [AloneChannel()]
        if len(members) > 1:
            group = self._virtual_group(members)
            channels = [group.channel(place) for place in range(len(members))]
        return [ShrinkingChannel(each) for each in channels] if self.reforms else channels

    def _virtual_group(self, members: Sequence[int]) -> VirtualGroup:
        schedule = self.schedule
        jitter_s = max(schedule.jitter_s, self._apart_s)
        link = LinkModel(latency_s=schedule.latency_s, jitter_s=jitter_s)
        peers = [worker_id(worker) for worker in members]
        return VirtualGroup(self.network, peers, seed=schedule.seed, link=link)

    def form(self, members: Sequence[int], place: int) -> GroupChannel:
        """The end of those who are left of a group."""
        if len(members) == 1:
            return AloneChannel()
        key = tuple(members)
        if key not in self.formed:
            self.formed[key] = self._virtual_group(members)
        return self.formed[key].channel(place)

    def _watched(self, server: int, make: MakeExecutor) -> MakeExecutor:
        return make if self.watch is None else self.watch.executor(server, make)

    def _spawn(self, peer: int, actor: Actor) -> None:
        self.network.spawn(peer, self._caught(peer, actor))

    def _caught(self, peer: int, actor: Actor) -> Actor:
        """Errors that the schedule is about end an actor, all others the test. As in a job, the
        coordinator is told."""
        try:
            yield from actor
        except BuriedError as error:
            self.buried[peer] = error
            self.network.crash(peer)  # its process ends by itself, and not by the network's end
        except (PeerLostError, ServersLostError, CollectiveError, HyperparameterError) as error:
            is_meant = self.dead is not None or self.schedule.mistake
            if not is_meant:
                raise
            self.errors[peer] = error
            if peer != COORDINATOR:
                failure = Failure(heading=describe_peer(peer), text=str(error), exit_status=1)
                self.network.endpoint(peer).send_control(COORDINATOR, failure)

    # -- the run -------------------------------------------------------------------------------

    def run(self) -> None:
        death = self.schedule.death
        num_events = 0
        while self.network.step():
            num_events += 1
            if death is not None and num_events == death.after_events:
                self._kill()
            if num_events in (self.schedule.proposals or self.proposals):
                self._propose(num_events)
        for server in range(len(self.servers)):
            for each in self.loop_of(server).sets:
                each.core.check_invariants()
        for worker in self.workers:
            for core in worker.core.sets:
                core.check_invariants()
        if not self.errors:
            assert not self.network.unfinished, f"still waiting: {self.network.unfinished}"

    def _propose(self, number: int) -> None:
        """The coordinator changes the mode, unless it cannot now."""
        another = self.schedule.another_mode(number)
        coordinator = self.coordinator
        decided = Decision(another.mode, another.staleness, "a test")
        if self.wire.is_ladder:
            level = random.Random(f"{self.schedule.seed} level {number}").randrange(
                1 + len(self.wire.later)
            )
            decided = replace(decided, mode=self.schedule.mode, level=level)
        modes = coordinator.part(ModeChanges)
        if self.seat is not None and modes is not None and modes.may_change(coordinator):
            self.seat.do(modes.propose(decided))

    @property
    def out_of_the_job(self) -> set[int]:
        """Workers of groups with a failed worker; where groups continue, only failed workers."""
        dead = {worker_of(peer) for peer in self.network.dead if is_worker(peer)}
        if self.reforms:
            return dead
        out = {worker for members in self.groups if dead & set(members) for worker in members}
        return out | {each.worker for each in self.workers if each.core.membership.is_outside}

    def _kill(self) -> None:
        """Somebody of the kind that the schedule says, if one still works."""
        death = self.schedule.death
        assert death is not None
        kinds = {
            "worker": [peer for peer in self.network.unfinished if is_worker(peer)],
            "registrar": [peer for peer in self.network.unfinished if peer == COORDINATOR],
            "server": [peer for peer in self.network.unfinished if not is_worker(peer)],
        }
        if kinds[death.victim]:
            pick = random.Random(f"{self.schedule.seed} death")
            self.dead = pick.choice(kinds[death.victim])
            self.network.crash(self.dead, notice_s=death.notice_s)


def play(schedule: Schedule, **broken: object) -> VirtualJob:
    job = VirtualJob(schedule, **broken)  # type: ignore[arg-type]
    job.run()
    return job
