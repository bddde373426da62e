"""The worker's state machine of one parameter set: what it decides, without doing any of it.

Events and commands are the only ways in; both return actions for the loop to execute, in order.
Commands (``begin_...``) are what the worker's script brings about, events what the network brings;
predicates (``is_...``) say what is still waited for. Time, memory and the network never appear.

    core = WorkerCore(Seat(worker=0, group=0, members=(0,), num_servers=2))
    core.take_slice(partition, owners=owners, credits=4, replies=rule)
    actions = core.begin_iteration(clock=0, hyper=packed, absent=(), weight=1.0)
    actions += core.transfers.push_chunk(0, is_empty=False)       # as soon as it may leave, or
    actions += core.finish_push(empty=())               # all that are left
    while not core.is_idle: actions = core.handle(event)

Each subject is decided in a module of its own: transfers, settings, collectives, membership. The
core decides across subjects: which settings precede a push, when a group is suspended, and which
calls must end before others begin.

Sets never wait for one another, so each has a machine of its own. The first one's speaks for the
worker: it enters collectives and takes leave for all sets.

    second = core.next_set()

Longer than other modules: every command and every event of a worker comes in here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import le
from typing import Any

from psdist.errors import InvariantError, PeerLostError, ProtocolError, UsageError
from psdist.protocol.control import (
    Absent,
    BeginCodecs,
    Collected,
    JoinAccepted,
    MembershipChanged,
    Missing,
    Moved,
    PauseAborted,
    Paused,
    PauseRequest,
    Proceed,
    Registered,
    Regrouped,
    Settings,
    Setup,
    StateHeld,
    StateTaken,
    StepsFixed,
    Stop,
    TakePlace,
    WhoIsMissing,
)
from psdist.protocol.events import Arrived, ControlArrived, Offered, PeerLost
from psdist.protocol.header import MOST_SETS, Header
from psdist.protocol.ids import COORDINATOR, describe_peer, is_worker, server_id
from psdist.protocol.partition import Partition
from psdist.protocol.payloads import PayloadRule
from psdist.protocol.rounds import Turns
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import (
    Action,
    InitialSent,
    MovePeer,
    SendControl,
    Warn,
)
from psdist.workers.protocol.codec_levels import CodecLevels
from psdist.workers.protocol.collectives import Collectives, FixedSteps
from psdist.workers.protocol.joining import membership_of
from psdist.workers.protocol.meetings import Meetings
from psdist.workers.protocol.membership import Regrouping
from psdist.workers.protocol.optimizer_state import StateTransfer
from psdist.workers.protocol.resending import NoFailover, failover_of
from psdist.workers.protocol.versions import SettingsVersions

ANY_TIME = frozenset({"mean", "any", "all", "barrier", "loader"})
"""Collectives that leave parameters alone: a worker may enter them while it has pushed half an
iteration."""

WorkerEvent = Offered | Arrived | ControlArrived | InitialSent | PeerLost


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCounts:
    """A snapshot; counts since the start."""

    bytes_pushed: int
    bytes_pulled: int
    duplicates: int
    """Replies and answers that came a second time."""


class WorkerCore:
    def __init__(
        self,
        seat: Seat,
        *,
        describe_group: Callable[[int], str] = lambda group: f"group {group}",
        sets: list[WorkerCore] | None = None,
        survives_workers: bool = False,
    ) -> None:
        """``describe_group(group)`` names a group to people; ``sets``: the machines of the sets
        before this one; ``survives_workers``: the coordinator decides what follows from the
        failure of another worker, which otherwise is an error."""
        self.seat = seat
        self.sets = [] if sets is None else sets
        """The machines of all sets of this worker, by index."""
        self.set_index = len(self.sets)
        self._survives_workers = survives_workers
        self.sets.append(self)
        self._describe_group = describe_group
        self.membership = membership_of(seat, set_index=self.set_index)
        self.collectives: Collectives = (
            self.sets[0].collectives if self.set_index else Collectives(seat)
        )
        self.meetings: Meetings = self.sets[0].meetings if self.set_index else Meetings(seat.worker)
        self.regrouping: Regrouping = (
            self.sets[0].regrouping if self.set_index else Regrouping(seat)
        )
        self.steps: FixedSteps = self.sets[0].steps if self.set_index else FixedSteps(seat)
        """Local steps of each group, where they differ."""
        self.settings = SettingsVersions()
        self.state = StateTransfer(seat, set_index=self.set_index)
        self.failover: NoFailover = failover_of(
            seat, self.sets[0].failover if self.set_index else None
        )
        self.levels = CodecLevels(seat)
        self.transfers = self.failover.transfers.of_nothing(seat)
        """Pushes and pulls of the slice, once it is taken."""
        self._first_clock = 0
        self._is_expecting = False
        self._is_suspended = False
        """True if the collective that was entered last has stopped this set."""
        self.handlers: dict[type, Callable[[Any], list[Action]]] = {
            Offered: self._on_data_too_early,
            Arrived: self._on_data_too_early,
            ControlArrived: self._on_control,
            InitialSent: self._on_initial_sent,
            PeerLost: self._on_peer_lost,
        }
        """Handlers that :meth:`handle` calls, by type of event. The loop itself calls those of the
        most frequent events."""
        self._control: dict[type, Callable[[int, Any], list[Action]]] = {
            Registered: self.membership.on_registered,
            Missing: self._on_missing,
            StateTaken: self.state.on_taken,
            StateHeld: self.state.on_held,
            Moved: self._on_moved,
            BeginCodecs: self.levels.on_begin_codecs,
        }
        if not self.set_index:
            self._control |= {
                Stop: self.membership.on_stop,
                Collected: self.collectives.on_collected,
                Absent: self.collectives.on_absent,
                MembershipChanged: self._on_survive,
                Regrouped: self.regrouping.on_regrouped,
                TakePlace: self.membership.on_replace,
                JoinAccepted: self._on_welcome,
                PauseRequest: self.meetings.on_propose,
                Proceed: self.meetings.on_release,
                Paused: self.meetings.on_commit,
                PauseAborted: self.meetings.on_cancel,
                StepsFixed: self.steps.on_fixed,
            }
        self._checked: tuple[int, ...] = ()

    def next_set(self) -> WorkerCore:
        """The machine of another parameter set of this worker."""
        if len(self.sets) == MOST_SETS:
            raise UsageError(f"a job trains at most {MOST_SETS} parameter sets (optimizers)")
        return WorkerCore(
            self.seat,
            describe_group=self._describe_group,
            sets=self.sets,
            survives_workers=self._survives_workers,
        )

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: WorkerEvent) -> list[Action]:
        """Return the actions after ``event``, in order. Raises :class:`ProtocolError` naming a peer
        that has broken a rule, :class:`PeerLostError` naming a failed peer, :class:`BuriedError`
        if this worker's group is evicted."""
        return self.handlers[type(event)](event)

    def _on_control(self, event: ControlArrived) -> list[Action]:
        handler = self._control.get(type(event.message))
        if handler is None:
            raise ProtocolError(
                f"worker {self.seat.worker}: {describe_peer(event.peer)} sent "
                f"{type(event.message).__name__}, which no worker takes"
            )
        return handler(event.peer, event.message)

    def _on_initial_sent(self, event: InitialSent) -> list[Action]:
        return self.membership.on_initial_sent(event.chunk)

    def _on_peer_lost(self, event: PeerLost) -> list[Action]:
        """Given to every set of a worker, as :class:`Moved` is."""
        if self._survives_workers and is_worker(event.peer):
            return []  # servers wait for it until the coordinator reports the failure
        return self._go_on_with(self.failover.on_lost(event, self._require_set_up))

    def _on_moved(self, peer: int, message: Moved) -> list[Action]:
        return self._go_on_with(self.failover.on_moved(peer, message, self.seat))

    def _require_set_up(self, who: str) -> None:
        if self.membership.is_setting_up or self.state.is_sending:
            raise PeerLostError(f"{who} (while a model was being set up)")

    def _go_on_with(self, moved: Sequence[tuple[int, int]]) -> list[Action]:
        """Repeat messages to the processes that have taken the places of failed servers."""
        return [each for server, host in moved for each in self._tell_again(server, host)]

    def _tell_again(self, server: int, host: int) -> list[Action]:
        """Process ``host`` serves ``server`` now: repeat the messages that the failed process may
        not have received, or has not answered."""
        self._require_set_up(describe_peer(server_id(server)))  # which began after the failure
        actions = list[Action]()
        if not self.set_index:
            actions.append(MovePeer(server_id(server), server_id(host)))
        is_waiting = self.collectives.is_waiting
        waits_in = self.collectives.seq if is_waiting and self._is_suspended else 0
        actions += self.membership.say_again(server, waits_in=waits_in)
        if server in self.transfers.servers:
            newest = self.settings.newest
            actions += [SendControl(server_id(server), each, self.set_index) for each in newest]
        actions += self.transfers.send_again(server)
        return actions + self.state.ask_again(server)

    def _on_survive(self, peer: int, message: MembershipChanged) -> list[Action]:
        actions = self.membership.on_survive(peer, message)
        for each in self.sets:
            each.transfers.generation = self.membership.generation
        if not self.regrouping.lose(self.membership.dead):
            return actions
        is_waiting = self.collectives.is_waiting
        for each in self.sets:
            actions += each.membership.speak_for_group(
                is_done=self.membership.is_done,
                waits_in=self.collectives.seq if is_waiting and each._is_suspended else 0,
                clock=each.clock,
            )
        return actions

    def _on_welcome(self, peer: int, message: JoinAccepted) -> list[Action]:
        if self.membership.on_welcome(peer, message):
            for each in self.sets[1:]:
                each.membership.take_in(message)
            self.collectives.go_on(message.seq)
            self.meetings.go_on(message.meeting)
        return []

    def _on_data_too_early(self, event: Offered | Arrived) -> list[Action]:
        raise ProtocolError(
            f"worker {self.seat.worker}: {describe_peer(event.peer)} sent parameters before this "
            "worker had a model"
        )

    # -- coming --------------------------------------------------------------------------------

    def take_slice(
        self,
        partition: Partition,
        *,
        owners: Sequence[int],
        credits: int,
        replies: PayloadRule,
        order: Sequence[int] = (),
        first_clock: int = 0,
        turns: Turns | None = None,
        num_levels: int = 0,
    ) -> None:
        """The model is cut: this worker pushes its part of the chunks. ``owners``: chunk -> server;
        ``credits``: maximum of messages outstanding at one server; ``replies``: the payloads that
        bring parameters; ``order``: of all chunks, in which all groups send them, () for ascending;
        ``first_clock``: iterations of the checkpoint that the job resumes from; ``turns``: which of
        ``num_levels`` codecs rule which rounds, if servers announce changes."""
        if self.transfers.owners:
            raise InvariantError(f"worker {self.seat.worker} took a second slice")
        self.transfers = self.failover.transfers(
            self.seat,
            owners=owners,
            mine=partition.slices(len(self.seat.members), order)[self.seat.place],
            chunk_bytes=[chunk.num_bytes for chunk in partition.chunks],
            credits=credits,
            replies=replies,
            set_index=self.set_index,
            order=order,
            first_clock=first_clock,
        )
        self.transfers.generation = self.sets[0].membership.generation
        self._first_clock = first_clock
        self.levels.begin(turns, num_levels)
        self.handlers[Offered] = self.transfers.on_offered
        self.handlers[Arrived] = self.transfers.on_arrived

    def begin_setup(self, setup: Setup) -> list[Action]:
        """The chief: describe the model, and the order in which all groups send its chunks, to
        every server, and send it its chunks' values. ``membership.is_joining`` until the network
        has given back all of them."""
        transfers = self.transfers
        if not transfers.owners:
            raise InvariantError(f"worker {self.seat.worker} has no slice yet")
        return self.membership.begin_setup(
            replace(setup, order=transfers.order.told()),
            owners=transfers.owners,
            chunk_bytes=transfers.chunk_bytes,
            dtypes=transfers.dtypes,
        )

    def begin_register(self) -> list[Action]:
        """A group's leader: every server counts the group; ``membership.is_joining`` until all have
        answered."""
        return self.membership.begin_register(clock=self._first_clock)

    # -- push and pull -------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no iteration is half pushed and every push and pull is answered. The gradient
        memory is the worker's again then: a reply proves that its push has arrived, whether or not
        the network has said ``Sent``."""
        return self.transfers.is_idle

    @property
    def is_awaiting(self) -> bool:
        """Whether a push or pull is not answered yet."""
        return bool(self.transfers.awaited)

    @property
    def is_pushing(self) -> bool:
        """True while an iteration has begun and not every chunk was handed over."""
        return self.transfers.is_pushing

    @property
    def clock(self) -> int:
        """Iterations that this worker has begun to push: a collective suspends from there."""
        return self.transfers.clock

    @property
    def mine(self) -> Sequence[int]:
        """The chunks of this worker's slice, ascending."""
        return self.transfers.mine

    @property
    def versions(self) -> Mapping[int, Header]:
        """Chunk -> the reply whose values lie in this worker's memory, once one has come."""
        return self.transfers.versions

    def expect_iteration(self) -> None:
        """Gradients of the next iteration are being made, and some may leave before the others:
        here, or in other groups, whose early chunks wait for this one's. Until :meth:`finish_push`
        none of :data:`ANY_TIME` suspends the group in this set."""
        self._is_expecting = not self.is_pushing

    def expect_nothing(self) -> None:
        """The gradients of the next iteration have been dropped before any of it left."""
        self._is_expecting = False

    @property
    def is_open(self) -> bool:
        """Whether an iteration is expected, or half pushed."""
        return self._is_expecting or self.is_pushing

    def begin_iteration(
        self, *, clock: int, hyper: bytes, absent: Sequence[int], weight: float
    ) -> list[Action]:
        """Iteration ``clock`` of this worker's slice is pushed from now on, made under these
        settings: ``hyper``, the packed hyperparameters, and ``absent``, the pieces without a
        gradient. ``weight``: the group's, in full batches of one worker.

        Until :meth:`finish_push` nothing else may begin in this set, no worker of the group leaves,
        and of collectives it enters those that leave parameters alone (:data:`ANY_TIME`).
        """
        self.sets[0].membership.require_in_job()
        is_stopped = self.collectives.is_waiting and self._is_suspended
        if is_stopped or self.sets[0].membership.is_done:
            raise InvariantError(
                f"worker {self.seat.worker} pushes iteration {clock} inside a collective or after "
                "its end"
            )
        version = self.settings.version
        self.transfers.begin_iteration(clock=clock, settings=version, weight=weight)
        self._is_expecting = False
        return self._tell_servers(self.settings.update(hyper, absent))

    def _tell_servers(self, settings: Settings | None) -> list[Action]:
        """Tell the servers of this worker's slice, before the pushes that name this version."""
        if settings is None:
            return []
        self.transfers.use_settings(settings.version)
        servers = self.transfers.servers
        return [SendControl(server_id(server), settings, self.set_index) for server in servers]

    def settings_of(self, version: int) -> tuple[bytes, tuple[int, ...]]:
        """Packed hyperparameters and absent pieces of a push that leaves now."""
        return self.settings.of(version)

    def finish_push(
        self, *, empty: Collection[int], absent: Sequence[int] | None = None
    ) -> list[Action]:
        """Push every chunk of the iteration that is left; those in ``empty`` without bytes.

        ``absent``: the pieces without a gradient, as far as those chunks hold them, where that was
        not known yet when the iteration began.
        """
        transfers, told = self.transfers, []
        if absent is not None and transfers.has_unpushed:
            told = self._tell_servers(self.settings.update_absent(absent))
        return told + transfers.finish_push(empty=empty)

    def begin_load(self, *, clock: int) -> list[Action]:
        """Send the chief's values of all chunks, which become the servers'. All workers are in a
        collective. Nothing in place changes."""
        self._require_chief("sets values", is_between_collectives=True)
        return self.transfers.begin_load(clock=clock)

    def _require_chief(self, does: str, *, is_between_collectives: bool = False) -> None:
        is_waiting = self.collectives.is_waiting or self.membership.is_joining
        if self.seat.worker != self.chief or (is_between_collectives and is_waiting):
            raise InvariantError(
                f"worker {self.seat.worker} {does}; the chief does, between collectives"
            )

    def begin_sending_state(self, parts: Iterable[tuple[int, int]]) -> list[Action]:
        """Send these parts (chunk, start) of the chief's optimizer state to the servers, before the
        first push; ``state.is_idle`` is false until then."""
        self._require_chief("sends optimizer state")
        return self.state.begin_send(self._by_owner(parts))

    def begin_fetching_state(self, parts: Iterable[tuple[int, int]]) -> list[Action]:
        """Request these parts of the optimizer state for the chief; all workers are in a
        collective."""
        self._require_chief("asks for optimizer state", is_between_collectives=True)
        return self.state.begin_fetch(self._by_owner(parts))

    def _by_owner(self, parts: Iterable[tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = {}
        for chunk, start in parts:
            found.setdefault(self.transfers.owners[chunk], []).append((chunk, start))
        return found

    def _on_missing(self, peer: int, message: Missing) -> list[Action]:
        awaited = dict(self.transfers.missing())
        if len(message.groups) != len(message.clocks) or (
            message.chunk in awaited and peer != server_id(awaited[message.chunk])
        ):
            raise ProtocolError(
                f"worker {self.seat.worker}: {describe_peer(peer)} sent Missing about chunk "
                f"{message.chunk}, {len(message.groups)} groups and {len(message.clocks)} clocks"
            )
        if message.chunk not in awaited:
            return []  # late: the chunk has come since
        groups = "; ".join(
            f"{self._describe_group(group)} at iteration {clock}"
            for group, clock in zip(message.groups, message.clocks, strict=True)
        )
        return [Warn(f"chunk {message.chunk} waits for {groups or 'no group'}")]

    # -- collectives and the end ---------------------------------------------------------------

    def begin_collective(
        self, name: str, payload: bytes = b"", *, values: bytes = b""
    ) -> list[Action]:
        """Enter the next collective of the job; ``collectives.is_answered`` when all have come. A
        group is suspended meanwhile, in all sets but those in the middle of an iteration, where the
        collective is one of :data:`ANY_TIME` (docs/dev/design.md, Single chunks). ``payload`` is
        compared with what others bring, ``values`` (float64) are summed."""
        self.sets[0].membership.require_in_job()
        is_moved = all(each.state.is_idle for each in self.sets)
        stopped = [each for each in self.sets if not (each.is_open and name in ANY_TIME)]
        is_idle = all(each.is_idle for each in stopped)
        if not (is_idle and is_moved) or self.membership.is_done:
            raise InvariantError(
                f"worker {self.seat.worker}: {name} began during a push or pull, or after the end"
            )
        enter = self.collectives.begin(name, payload, values)
        for each in self.sets:
            each._is_suspended = each in stopped
        suspends = (each.membership.suspend(clock=each.clock, seq=enter.seq) for each in stopped)
        return [*chain.from_iterable(suspends), SendControl(COORDINATOR, enter)]

    @property
    def is_half_pushed(self) -> bool:
        """Whether an iteration is half pushed in any set of this worker: nothing that reads or sets
        parameters begins then, nor the end of the job."""
        return any(each.is_pushing for each in self.sets)

    @property
    def _all_idle(self) -> bool:
        return all(each.is_idle for each in self.sets)

    def begin_leave(self) -> list[Action]:
        """The group's script has finished: servers await no iterations from :attr:`clock` on, of
        any set. Only the leader of a registered group has something to send."""
        if self.is_half_pushed:
            raise InvariantError(
                f"worker {self.seat.worker} leaves in the middle of an iteration that it pushes"
            )
        leaves = (each.membership.begin_leave(clock=each.clock) for each in self.sets)
        return list(chain.from_iterable(leaves))

    def begin_done(self, statistics: dict[str, Any]) -> list[Action]:
        """This worker's script has finished; ``membership.is_stopped`` when all have.
        ``statistics`` go into summary.json."""
        self.sets[0].membership.require_in_job()
        if not self._all_idle or self.collectives.is_waiting:
            raise InvariantError(f"worker {self.seat.worker} is done and waits for {self.awaits()}")
        left = [each.membership.left_after for each in self.sets]
        return self.membership.begin_done(statistics, left=self.failover.left_after(left))

    @property
    def chief(self) -> int:
        """The worker that has the chief's duties."""
        return self.sets[0].membership.chief

    def take_over_chunks(self, mine: Collection[int]) -> list[Action]:
        """The slice is ``mine`` from now on: the slice before, and chunks of failed workers of the
        group."""
        transfers = self.transfers
        before = set(transfers.servers)
        transfers.take_over(mine)
        return [
            SendControl(server_id(server), each, self.set_index)
            for server in transfers.servers
            if server not in before
            for each in self.settings.newest
        ]

    def push_for_the_dead(self) -> list[Action]:
        """Push the chunks that were taken over since the last iteration for that iteration, without
        a gradient and with no weight."""
        return self.transfers.push_for_the_dead()

    @property
    def dead(self) -> Collection[int]:
        """Failed workers of this job."""
        return self.sets[0].membership.dead

    # -- for people and tests ------------------------------------------------------------------

    def awaits(self) -> str:
        """Return what is awaited now, in words that follow "still waiting for"."""
        if not self.is_idle:
            return self.transfers.describe()
        if not self.state.is_idle:
            return self.state.describe()
        if self.collectives.is_waiting:
            return f"the other workers in {self.collectives.name}"
        if self.meetings.is_held:
            return "the other workers to come to the end of an iteration"
        return self.membership.describe() or "nothing"

    def ask_who_is_missing(self) -> list[Action]:
        """Return warnings about missing answers after a long wait, and requests for more detail."""
        if self.transfers.awaited:
            chunk, server = self.transfers.missing()[0]
            return [
                Warn(f"waiting for chunk {chunk} from server {server}"),
                SendControl(server_id(server), WhoIsMissing(chunk=chunk), self.set_index),
            ]
        if not self.state.is_idle:
            return self.state.warnings()
        if self.collectives.is_waiting:
            return [self.collectives.ask_who_is_absent()]
        return self.membership.describe_joining()

    def counts(self) -> TransferCounts:
        transfers = self.transfers
        control = self.membership.duplicates + self.state.duplicates
        if not self.set_index:
            control += self.collectives.duplicates
        return TransferCounts(
            bytes_pushed=transfers.bytes_pushed,
            bytes_pulled=transfers.bytes_pulled,
            duplicates=transfers.duplicates + control,
        )

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself, or has gone back since the
        last check. Linear in the chunks."""
        self.membership.check_invariants()
        self.collectives.check_invariants()
        self.transfers.check_invariants()
        now = (self.clock, self.settings.version, self.collectives.seq)
        if not all(map(le, self._checked, now)):
            raise InvariantError(
                f"clock, settings and collective went back from {self._checked} to {now}"
            )
        self._checked = now
        if self.settings.version > 2 * self.clock:
            raise InvariantError(
                f"{self.settings.version} versions of settings in {self.clock} iterations"
            )
        if self.membership.is_done and (not self.is_idle or self.collectives.is_waiting):
            raise InvariantError(f"worker {self.seat.worker} is done and waits for {self.awaits()}")
