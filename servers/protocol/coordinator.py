"""The coordinator: collectives, membership, the end of the job; pure.

Server 0 is the coordinator as well. It answers at all times, unlike the chief, which is busy
computing. It does not coordinate updates: each server is responsible for its own consistency.

A collective (save, mean, barrier, prepare) runs in four steps. Every worker sends ``Enter``. When
all have entered, every server gets ``Resume`` and counts the groups that waited. When all servers
have answered, every worker gets ``Collected``. So every server counts every group again before a
worker leaves the collective.

Everything else is a :class:`CoordinatorPart`. The coordinator routes messages by type, calls the
hooks of all parts in the order of the list, and does not know which parts a job has
(psdist.servers.protocol.coordinator_assembly makes them).

    coordinator = assemble(num_workers=4, num_servers=2)
    coordinator.handle(worker_id(0), Enter(worker=0, seq=1, name="barrier", payload=b""))

Longer than other modules: the steps of a collective share state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar, Final, NoReturn, TypeAlias, TypeVar

import msgpack

from psdist.controller.kept import TuningState
from psdist.controller.snapshots import Change, Fields, HasSnapshot, Nested
from psdist.errors import InvariantError, PeerLostError, ProtocolError
from psdist.protocol.checkpoints import CHECKPOINT, WRITTEN
from psdist.protocol.collected import JOIN, MOST_TOLD, PREPARED, SET_MODE, collected
from psdist.protocol.control import (
    Absent,
    Blocked,
    Collected,
    Control,
    Done,
    Enter,
    EvictAck,
    Failure,
    Finish,
    Finished,
    Held,
    Metrics,
    Progress,
    Resume,
    Resumed,
    Stop,
    WhoIsAbsent,
)
from psdist.protocol.ids import (
    COORDINATOR,
    describe_peer,
    describe_workers,
    is_worker,
    server_id,
    worker_id,
    worker_of,
)
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.collectives import Collective, MissedCalls, Warn
from psdist.servers.protocol.pauses import Pauses
from psdist.servers.protocol.snapshots import OnWire
from psdist.servers.protocol.views import Death, Views

OF_PARTS: Final = (CHECKPOINT, WRITTEN, SET_MODE, JOIN)
"""Names of the collectives that a part completes; refused where no part of the job does."""


@dataclass(slots=True)
class WriteMetrics:
    """One line for metrics.jsonl."""

    line: dict[str, Any]


@dataclass(slots=True)
class EndJob:
    """A rank has failed: print this once and end every rank with this status."""

    failure: Failure


@dataclass(slots=True)
class Complete:
    """All workers are done and all servers have sent their statistics."""


CoordinatorAction: TypeAlias = object
"""SendControl is for a rank; every other action is for files and users."""
Actions: TypeAlias = list[CoordinatorAction]
Part = TypeVar("Part", bound="CoordinatorPart")


class CoordinatorPart(HasSnapshot):
    """One feature's share of the coordinator. It decides and performs no I/O. The default of each
    hook changes nothing."""

    NAME: ClassVar[str]
    """Key of its snapshot."""
    TAKES: ClassVar[tuple[type[Control], ...]] = ()
    """Types of the messages that ``handle`` gets. A type may have several parts."""
    COMPLETES: ClassVar[tuple[str, ...]] = ()
    """Names of the collectives that it completes."""
    APART: ClassVar[tuple[str, ...]] = ()
    """Names of collectives that workers may enter after different iterations because of it."""

    def handle(self, peer: int, message: Control, job: Coordinator) -> Actions:
        """Decide what follows from a message. Raises :class:`ProtocolError` if it is wrong."""
        raise InvariantError(f"{self.NAME} was given {type(message).__name__}")

    def accepts(self, name: str, payload: bytes) -> bool:
        """True if ``payload`` is well formed for collective ``name``, one of ``COMPLETES``."""
        return True

    def complete(self, seq: int, collective: Collective, job: Coordinator) -> Actions:
        """All workers have entered ``collective``, one of ``COMPLETES``."""
        return job.resume(seq)

    def waits(self, blocked: int, held: int) -> bool:
        """See :data:`psdist.servers.protocol.pauses.Waits`. True if this part is the reason."""
        return False

    @property
    def is_settling(self) -> bool:
        """True while servers take in a change that must precede every collective's end."""
        return False

    # -- what workers do -----------------------------------------------------------------------

    def on_progress(self, message: Progress, job: Coordinator) -> Actions:
        return []

    def on_away(self, job: Coordinator) -> Actions:
        """A worker has entered a collective, or is done."""
        return []

    def on_collected(self, name: str, seq: int, job: Coordinator) -> Actions:
        """Collective ``seq`` has ended."""
        return []

    def require_finished(self, peer: int) -> None:
        """Raise :class:`ProtocolError` if ``peer``, which says that it is done, owes something."""

    def to_stop(self, job: Coordinator) -> list[int]:
        """Return the ids of further peers to stop when the job is complete."""
        return []

    @property
    def reads_round_times(self) -> bool:
        """True if workers report the times of their rounds."""
        return False

    @property
    def num_idle_spares(self) -> int:
        """Number of processes that wait for a place."""
        return 0

    # -- membership ----------------------------------------------------------------------------

    def on_evicted(self, worker: int, job: Coordinator) -> Actions:
        """``worker`` has failed and servers are evicting it."""
        return []

    def on_evict_ack(self, reached: Sequence[int]) -> None:
        """A server has evicted workers. ``reached``: by parameter set, the most updates of a failed
        group that its chunks contain."""

    def on_membership_changed(self, job: Coordinator) -> Actions:
        """All servers have evicted the workers that are out of the job."""
        return []

    def on_joined(self, worker: int, clocks: Sequence[int]) -> Actions:
        """``worker`` joins at these clocks, by parameter set."""
        return []

    def on_waiting_lost(self, worker: int, who: str, job: Coordinator) -> Actions:
        """``worker`` has failed before it joined."""
        return []

    def on_done_lost(self, worker: int, job: Coordinator) -> Actions:
        """``worker`` has failed after it was done."""
        return []

    def on_server_lost(self, peer: int, who: str) -> Actions:
        """A server or a spare has failed. Raises :class:`ServersLostError` if the job cannot
        continue."""
        return []

    def on_finishing(self) -> None:
        """``Finish`` is being sent to the servers: all workers are done."""

    def ask_again(self, server: int, job: Coordinator) -> Actions:
        """Another process serves the shard of ``server`` now: repeat what it may have missed."""
        return []

    def keep(self, tuning_state: TuningState, clock: int) -> TuningState:
        """Return ``tuning_state`` with what a checkpoint of ``clock`` rounds keeps of this part."""
        return tuning_state

    def resume_at(self, clocks: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """Return, by worker and set, where workers resume from a checkpoint that is made at
        ``clocks``."""
        return clocks

    def know_sizes(self, sizes: list[int]) -> Actions:
        """The model is known. ``sizes``: by codec level, the bytes of one exchange."""
        return []


class Coordinator(HasSnapshot):
    LAST: Final[type] = Complete
    """The action after which the coordinator ends."""
    STATE = Fields(
        {
            bool: "is_ready is_finishing",
            dict[int, Collective]: "collectives",
            dict[int, int]: "entered",
            dict[int, Annotated[Progress, OnWire]]: "progress",
            dict[int, list[int]]: "left",
            dict[int, dict[str, Any]]: "done servers",
            dict[str, Any]: "last",
            Nested: "membership pause _missed_calls",
        }
    )

    def __init__(
        self,
        *,
        num_workers: int,
        num_servers: int,
        membership: Views,
        pause: Pauses,
        missed_calls: MissedCalls,
        parts: Sequence[CoordinatorPart] = (),
    ) -> None:
        """``num_workers`` includes those that wait to join. The hooks of ``parts`` are called in
        this order."""
        self.num_workers = num_workers
        self.num_servers = num_servers
        self.membership = membership
        self.pause = pause
        self._missed_calls = missed_calls
        self.parts = tuple(parts)
        self._routes: dict[type[Control], list[CoordinatorPart]] = {}
        for part in self.parts:
            for each in part.TAKES:
                self._routes.setdefault(each, []).append(part)
        self._completes = {name: part for part in self.parts for name in part.COMPLETES}
        self._on: dict[type[Control], Callable[[int, Any], Actions]] = {
            Progress: self._on_progress,
            Metrics: self._on_metrics,
            Enter: self._on_enter,
            Resumed: self._on_resumed,
            Done: self._on_done,
            Finished: self._on_finished,
            WhoIsAbsent: self._on_who_is_absent,
            Failure: self._on_failure,
            Held: self._on_pause,
            Blocked: self._on_pause,
            EvictAck: self._on_evict_ack,
        }
        self.is_ready = False
        """True while all workers have prepared and none prepares more."""
        self.is_finishing = False
        """True once ``Finish`` was sent to the servers: all workers are done."""
        self.collectives: dict[int, Collective] = {}
        """By number."""
        self.entered: dict[int, int] = {}
        """Worker -> number of its last collective."""
        self.progress: dict[int, Progress] = {}
        self.done: dict[int, dict[str, Any]] = {}
        """Statistics of the workers that are done."""
        self.left: dict[int, list[int]] = {}
        """By leader that is done: iterations of its group in each parameter set."""
        self.servers: dict[int, dict[str, Any]] = {}
        """Statistics of the servers, at the end."""
        self.last: dict[str, Any] = {}
        """The chief's last value of every logged name."""

    def part(self, cls: type[Part]) -> Part | None:
        """Return the part of this class, None if the job has none."""
        return next((each for each in self.parts if isinstance(each, cls)), None)

    def handle(self, peer: int, message: Control) -> Actions:
        """Decide what follows from a message. Raises :class:`ProtocolError` if ``peer`` may not
        send it, or not now."""
        if is_worker(peer) and worker_of(peer) in self.membership.out:
            return []  # it is out of the job, and may not have received that yet
        handler = self._on.get(type(message))
        if handler is not None:
            return handler(peer, message)
        parts = self._routes.get(type(message))
        if parts is None:
            refuse(peer, f"sent {type(message).__name__}, unasked: no part of this job takes it")
        return [action for part in parts for action in part.handle(peer, message, self)]

    def know_sizes(self, sizes: list[int]) -> Actions:
        """The model is known. ``sizes``: by codec level, the bytes of one exchange."""
        return self._ask(lambda part: part.know_sizes(sizes))

    def _ask(self, hook: Callable[[CoordinatorPart], Iterable[CoordinatorAction]]) -> Actions:
        return [action for part in self.parts for action in hook(part)]

    # -- for parts -----------------------------------------------------------------------------

    def require_worker(self, peer: int, worker: int, message: Control) -> None:
        """Raise :class:`ProtocolError` unless ``peer`` is ``worker`` and has joined the job."""
        if not 0 <= worker < self.num_workers or peer != worker_id(worker):
            refuse(peer, f"sent {type(message).__name__} of worker {worker}")
        if worker in self.membership.waiting:
            refuse(peer, f"sent {type(message).__name__} before it had joined the job")

    def require_server(self, peer: int, server: int, message: Control) -> None:
        """Raise :class:`ProtocolError` unless ``peer`` is ``server``."""
        if not 0 <= server < self.num_servers or peer != server_id(server):
            refuse(peer, f"sent {type(message).__name__} of server {server}")

    @property
    def away(self) -> set[int]:
        """Workers that are done, wait in a collective, or are out of the job."""
        waiting = (each.entered for each in self.collectives.values() if not each.error)
        return {*self.done, *self.membership.out, *chain.from_iterable(waiting)}

    def admit(self, worker: int, seq: int, clocks: Sequence[int]) -> Actions:
        """``worker``, which has waited, joins in collective ``seq`` at these clocks."""
        self.membership.admit(worker)
        self.entered[worker] = seq
        return self._ask(lambda part: part.on_joined(worker, clocks))

    def kept(self, clock: int) -> TuningState:
        """Return what a checkpoint of ``clock`` rounds of the slowest group keeps of the parts."""
        tuning_state = TuningState()
        for part in self.parts:
            tuning_state = part.keep(tuning_state, clock)
        return tuning_state

    def resume(self, seq: int, checkpoint: str = "") -> Actions:
        """Tell every server that all workers have come to collective ``seq``."""
        collective = self.collectives[seq]
        collective.is_complete = True
        collective.told = Resume(seq=seq, checkpoint=checkpoint)
        return self.to_servers(collective.told)

    def to_servers(self, message: Control) -> Actions:
        return [SendControl(server_id(server), message) for server in range(self.num_servers)]

    def fail(self, seq: int, error: str) -> Actions:
        """End collective ``seq`` with an error, for workers that have entered it or will."""
        collective = self.collectives[seq]
        collective.error = error
        return self._tell(seq, error, sorted(collective.entered))

    def retry(self, seq: int) -> Actions:
        """Complete collective ``seq`` if all live workers have entered it and nothing settles."""
        collective = self.collectives[seq]
        if collective.error or collective.is_complete or self.is_settling:
            return []
        if not all(worker in collective.entered for worker in self.membership.live):
            return []
        part = self._completes.get(collective.name)
        return self.resume(seq) if part is None else part.complete(seq, collective, self)

    def retry_all(self) -> Actions:
        """A change has settled: do what has waited for it."""
        retried = [action for seq in tuple(self.collectives) for action in self.retry(seq)]
        return [*retried, *self._finish_if_all_are_done()]

    def ask_again(self, server: int) -> Actions:
        """Another process serves the shard of ``server`` now: repeat the messages that it may have
        missed."""
        peer, actions = server_id(server), Actions()
        for each in self.collectives.values():
            if each.told is not None and server not in each.answered:
                actions.append(SendControl(peer, each.told))
        actions += self.membership.ask_again(server)
        if self.is_finishing:
            self.servers.pop(server, None)  # its statistics were not the last
            actions.append(SendControl(peer, Finish()))
        # First the parts: a server must know the mode before a worker leaves a collective.
        return [*self._ask(lambda part: part.ask_again(server, self)), *actions]

    # -- collectives ---------------------------------------------------------------------------

    def _on_metrics(self, peer: int, message: Metrics) -> Actions:
        if is_worker(peer) and worker_of(peer) in self.membership.waiting:
            return []  # its script has not caught up with the others yet
        line = message.line
        worker, values = line.get("worker"), line.get("values", {})
        is_of_peer = isinstance(worker, int) and peer == worker_id(worker)
        if not is_of_peer or not isinstance(values, dict) or not is_plain(line):
            refuse(peer, "sent a line of metrics that is not its own, or no plain data")
        if worker == self.membership.chief:
            self.last.update(values)
        return [WriteMetrics({**{k: v for k, v in line.items() if k != "values"}, **values})]

    def _on_enter(self, peer: int, message: Enter) -> Actions:
        self.require_worker(peer, message.worker, message)
        return [*self._enter(peer, message), *self._ask(lambda each: each.on_away(self))]

    def _enter(self, peer: int, message: Enter) -> Actions:
        entered = self.entered.get(message.worker, 0)
        is_waiting = self._is_waiting(message.worker)
        if message.seq != entered + 1 or is_waiting or message.worker in self.done:
            refuse(
                peer,
                f"entered collective {message.seq} after collective {entered}"
                + (", which is not over" if is_waiting else "")
                + (", and its script has finished" if message.worker in self.done else ""),
            )
        part = self._completes.get(message.name)
        if part is None and message.name in OF_PARTS:
            refuse(peer, f"entered {message.name}, which no part of this job completes")
        if part is not None and not part.accepts(message.name, message.payload):
            refuse(peer, f"entered {message.name} with an invalid payload")
        self.entered[message.worker] = message.seq
        if message.name == "prepare" and message.payload != PREPARED:
            self.is_ready = False
        collective = self.collectives.get(message.seq)
        if collective is None:
            is_of_meeting = self.pause.on_called(message.name)
            collective = Collective(message.name, is_of_meeting=is_of_meeting)
            self.collectives[message.seq] = collective
        collective.entered[message.worker] = message
        if collective.error:
            return self._tell(message.seq, collective.error, [message.worker])
        actions = self._check_missed_calls(message.seq, collective, message.worker)
        actions += self.pause.on_entered()
        return actions if collective.error else actions + self._go_on(message, collective)

    def _is_waiting(self, worker: int) -> bool:
        """True if it is in a collective that has neither ended nor failed."""
        return any(worker in each.entered and not each.error for each in self.collectives.values())

    def _go_on(self, message: Enter, collective: Collective) -> Actions:
        """``message.worker`` has entered, and no worker has missed a call."""
        if message.name != collective.name:
            return self.fail(
                message.seq,
                f"workers made different calls: {collective.who_called()}; every worker must make "
                "the same calls in the same order",
            )
        failed = self._fail_if_a_script_has_finished(message.seq, collective)
        return failed or self.retry(message.seq)

    def _on_progress(self, peer: int, message: Progress) -> Actions:
        if is_worker(peer) and worker_of(peer) in self.membership.waiting:
            return []  # its script has not caught up with the others yet
        self.require_worker(peer, message.worker, message)
        before = self.progress.get(message.worker)
        if message.clock < (before.clock if before else 0) or message.samples < 0:
            refuse(
                worker_id(message.worker),
                f"sent Progress at clock {message.clock} after "
                f"{before.clock if before else 'none'}, {message.samples} samples",
            )
        told_times = message.own_us or message.waits_us or message.errors_ppm
        if told_times and not any(part.reads_round_times for part in self.parts):
            refuse(peer, "told what rounds took, unasked: nothing in this job depends on it")
        self.progress[message.worker] = message
        actions = Actions()
        for seq, each in self.collectives.items():
            actions += self._judged(seq, self._missed_calls.judge(each, message))
        return actions + self._ask(lambda part: part.on_progress(message, self))

    def _check_missed_calls(self, seq: int, collective: Collective, worker: int) -> Actions:
        """``worker`` has entered."""
        mine = self.progress.get(worker)
        if mine is None:
            return []
        out = self.membership.out
        others = (each for each in self.progress.values() if each.worker not in out)
        return self._judged(seq, self._missed_calls.on_entered(collective, mine, others))

    def _judged(self, seq: int, found: Iterable[str | Warn]) -> Actions:
        """Calls were missed: an error fails the collective."""
        actions = Actions()
        for each in found:
            actions += [each] if isinstance(each, Warn) else self.fail(seq, each)
        return actions

    def _fail_if_a_script_has_finished(self, seq: int, collective: Collective) -> Actions:
        gone = self.done.keys() - collective.entered.keys()
        if not gone or collective.error:
            return []
        whose = "whose script has" if len(gone) == 1 else "whose scripts have"
        return self.fail(
            seq,
            f"{collective.name} was called by {describe_workers(collective.entered)} only; absent: "
            f"{describe_workers(gone)}, {whose} finished; {collective.name} must be called by "
            "every worker",
        )

    @property
    def is_settling(self) -> bool:
        """True while servers take in what must precede everything else."""
        return self.membership.is_settling or any(part.is_settling for part in self.parts)

    @staticmethod
    def _tell(seq: int, error: str, workers: Iterable[int]) -> Actions:
        answer = Collected(seq=seq, payloads=[], runs=[], values=b"", error=error)
        return [SendControl(worker_id(worker), answer) for worker in workers]

    def _on_resumed(self, peer: int, message: Resumed) -> Actions:
        self.require_server(peer, message.server, message)
        collective = self.collectives.get(message.seq)
        if collective is None or collective.told is None:
            refuse(peer, f"resumed collective {message.seq}, which is not complete")
        if message.server in collective.answered:
            refuse(peer, f"resumed collective {message.seq} twice")
        collective.answered.add(message.server)
        if len(collective.answered) < self.num_servers:
            return []
        del self.collectives[message.seq]
        entered = [collective.entered.get(worker) for worker in range(self.num_workers)]
        if collective.name == "prepare":
            brought = {enter.payload for enter in collective.entered.values()}
            self.is_ready = brought == {PREPARED}
        answer = collected(message.seq, entered)
        has_come = [worker for worker in self.membership.live if worker in collective.entered]
        told = [SendControl(worker_id(worker), answer) for worker in has_come]
        name, seq = collective.name, message.seq
        return [*told, *self._ask(lambda part: part.on_collected(name, seq, self))]

    def _on_who_is_absent(self, peer: int, message: WhoIsAbsent) -> Actions:
        self.require_worker(peer, message.worker, message)
        collective = self.collectives.get(message.seq)
        if collective is None:
            return []  # it has ended: the question has crossed the answer
        absent = [worker for worker in self.membership.live if worker not in collective.entered]
        return [
            SendControl(
                worker_id(message.worker),
                Absent(seq=message.seq, workers=absent[:MOST_TOLD], num_absent=len(absent)),
            ),
        ]

    # -- the end -------------------------------------------------------------------------------

    def _on_done(self, peer: int, message: Done) -> Actions:
        self.require_worker(peer, message.worker, message)
        return [*self._end_script(peer, message), *self._ask(lambda each: each.on_away(self))]

    def _end_script(self, peer: int, message: Done) -> Actions:
        is_waiting = self._is_waiting(message.worker)
        if message.worker in self.done or is_waiting or not is_plain(message.statistics):
            refuse(peer, "sent Done twice, inside a collective, or with what is no plain data")
        self._require_finished(peer)
        self.done[message.worker] = message.statistics
        if message.left:
            self.left[message.worker] = message.left
        cancelled = self.pause.on_done(message.worker)
        failed = (
            self._fail_if_a_script_has_finished(seq, each) for seq, each in self.collectives.items()
        )
        return [*cancelled, *chain.from_iterable(failed), *self._finish_if_all_are_done()]

    def _require_finished(self, peer: int) -> None:
        for part in self.parts:
            part.require_finished(peer)

    def _finish_if_all_are_done(self) -> Actions:
        if self.is_finishing or self.is_settling:
            return []
        if not all(worker in self.done for worker in self.membership.live):
            return []
        self.is_finishing = True
        for part in self.parts:
            part.on_finishing()
        return self.to_servers(Finish())

    def _on_finished(self, peer: int, message: Finished) -> Actions:
        self.require_server(peer, message.server, message)
        is_asked = self.is_finishing
        if message.server in self.servers or not is_asked or not is_plain(message.statistics):
            refuse(peer, "sent Finished twice, unasked, or with what is no plain data")
        self._require_finished(peer)
        self.servers[message.server] = message.statistics
        if len(self.servers) < self.num_servers:
            return []
        live = map(worker_id, self.membership.live)
        others = [peer for part in self.parts for peer in part.to_stop(self)]
        workers = sorted({*live, *filter(is_worker, others)})
        # Servers last: until now one may have had to replace another.
        servers = [each for each in others if not is_worker(each) and each != COORDINATOR]
        return [*(SendControl(each, Stop()) for each in (*workers, *servers)), Complete()]

    # -- for files and users -------------------------------------------------------------------

    def open_collectives(self) -> list[tuple[int, str, list[int], list[int]]]:
        """Return number and name of each collective that has not ended, the workers that have
        entered it, and those that have still to come."""
        live = self.membership.live
        return [
            (
                seq,
                each.name,
                sorted(each.entered),
                [worker for worker in live if self.entered.get(worker, 0) < seq],
            )
            for seq, each in sorted(self.collectives.items())
            if not each.error
        ]

    @property
    def out(self) -> frozenset[int]:
        """Workers that are not in the job: evicted, or not joined."""
        return frozenset(self.membership.out | self.membership.waiting)

    @property
    def num_idle_spares(self) -> int:
        """Number of processes that wait for a place."""
        return sum(part.num_idle_spares for part in self.parts)

    # -- failures ------------------------------------------------------------------------------

    def on_lost(self, peer: int, who: str) -> Actions:
        """Handle the failure of ``peer``, which the network has noticed. Raises
        :class:`PeerLostError` if the job cannot continue without it."""
        if not is_worker(peer):
            raise PeerLostError(who)
        worker = worker_of(peer)
        if worker in self.membership.waiting:
            return self._ask(lambda part: part.on_waiting_lost(worker, who, self))
        if worker in self.done:
            return self._ask(lambda part: part.on_done_lost(worker, self))
        actions = self.membership.on_lost(worker, who, is_ready=self.is_ready)
        if not any(isinstance(each, Death) for each in actions):
            return [*actions]
        return [*actions, *self._ask(lambda part: part.on_evicted(worker, self))]

    def on_server_lost(self, peer: int, who: str) -> Actions:
        """Handle the failure of a server or a spare where shards are replicated. Raises
        :class:`ServersLostError` if the job cannot continue."""
        return self._ask(lambda part: part.on_server_lost(peer, who))

    def _on_failure(self, peer: int, message: Failure) -> Actions:
        return [EndJob(message)]

    def _on_pause(self, peer: int, message: Held | Blocked) -> Actions:
        self.require_worker(peer, message.worker, message)
        is_collecting = any(not each.error for each in self.collectives.values())
        return [*self.pause.on_told(message.worker, message, is_collecting=is_collecting)]

    def _on_evict_ack(self, peer: int, message: EvictAck) -> Actions:
        self.require_server(peer, message.server, message)
        reached = self.membership.reached(message)
        actions: Actions = [*self.membership.on_ack(message.server, message)]
        for part in self.parts:
            part.on_evict_ack(reached)
        if self.membership.is_settling:
            return actions
        out = self.membership.out
        for seq, collective in tuple(self.collectives.items()):
            if collective.is_complete:
                continue
            for worker in out:
                collective.entered.pop(worker, None)
            collective.earliest = {
                length: each
                for length, each in collective.earliest.items()
                if each.worker not in out
            }
            if not collective.entered:
                del self.collectives[seq]
        # After MembershipChanged: ranks get the new membership before what follows.
        actions += self._ask(lambda part: part.on_membership_changed(self))
        actions += self.pause.on_lost(out)
        for seq, collective in tuple(self.collectives.items()):
            if not collective.is_complete:
                actions += self._fail_if_a_script_has_finished(seq, collective)
                actions += self.retry(seq)
        return actions + self._finish_if_all_are_done()

    def to_snapshot(self) -> bytes:
        parts = {part.NAME: part.to_snapshot() for part in self.parts}
        data: bytes = msgpack.packb([super().to_snapshot(), parts])
        return data

    def read_snapshot(self, data: bytes) -> list[Change]:
        try:
            own, parts = msgpack.unpackb(data)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ValueError(f"not msgpack: {error}") from error
        names = [part.NAME for part in self.parts]
        if not isinstance(parts, dict) or [*parts] != names:
            raise ValueError(f"not of the parts {', '.join(names)}")
        of_parts = (part.read_snapshot(parts[part.NAME]) for part in self.parts)
        return [*super().read_snapshot(own), *chain.from_iterable(of_parts)]


def is_plain(value: Any, *, depth: int = 8) -> bool:
    """True if this can go into a JSON file: numbers, texts, None, and lists and maps of them."""
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if not depth:
        return False
    if isinstance(value, dict):
        keys = all(isinstance(key, str) for key in value)
        return keys and all(is_plain(each, depth=depth - 1) for each in value.values())
    return isinstance(value, list) and all(is_plain(each, depth=depth - 1) for each in value)


def refuse(peer: int, why: str) -> NoReturn:
    """Raise :class:`ProtocolError`: ``peer`` did what it may not do."""
    raise ProtocolError(f"the coordinator: {describe_peer(peer)} {why}")
