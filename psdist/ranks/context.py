"""What a rank is and owns, from its start to its end: its role, settings, network and files.

    context = connect(resolved)          # psdist.ranks.connecting
    context.role, context.transport, context.config
    context.fail(text, status)           # how it ends: with one error, on every rank

What a server or worker does in between is in psdist.ranks.server and psdist.job.

Longer than other modules: one object has what a rank owns, from its start to its end.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

from psdist.checkpoint.folder import Folder
from psdist.checkpoint.reading import Checkpoint
from psdist.config.derived import reforms_groups
from psdist.config.modes import ModeFrom, judging_mode
from psdist.config.settings import RunConfig
from psdist.config.sources import Resolved
from psdist.controller.kept import Fidelity
from psdist.errors import BuriedError, HostLostError, JobEndedError, PeerLostError, PsdistError
from psdist.install.launcher import survives_deaths
from psdist.protocol.checkpoints import FirstClocks
from psdist.protocol.control import Ended, Failure, MembershipChanged, TakePlace
from psdist.protocol.events import ControlArrived, PeerLost
from psdist.protocol.ids import (
    COORDINATOR,
    is_spare,
    is_worker,
    server_id,
    spare_of,
    worker_id,
    worker_of,
)
from psdist.protocol.roles import Roles
from psdist.ranks.agreement import allgather
from psdist.ranks.checkpointing.resuming import Restored
from psdist.ranks.checkpointing.ruling import fitting, modes_of
from psdist.ranks.failure import (
    end_all,
    flush_output,
    ignore_interrupts,
    interruption,
    is_interruption,
    printable,
    wait_until_read,
)
from psdist.ranks.hosts import HostWatch
from psdist.ranks.mpi_end import leave_out
from psdist.ranks.parent_link import ParentLink
from psdist.report.facts import Phase, RankSurvived
from psdist.report.logs import start_logs, stop_logs
from psdist.report.progress import say_phase
from psdist.report.run_directory import RunDirectory
from psdist.topology.plan import Plan
from psdist.transport.base import Transport
from psdist.transport.lines import LineTransport
from psdist.transport.waiting import Waiting

if TYPE_CHECKING:
    from mpi4py import MPI

    from psdist.tracing.tracer import Tracer
    from psdist.transport.virtual import VirtualNetwork

logger = logging.getLogger("psdist")

_T = TypeVar("_T")

_CLOSE_TIMEOUT_S = 10.0
# A server that loads torch from a slow disk answers late.
_REPORT_TIMEOUT_S = 30.0
# How much later than torch.distributed MPI may notice that a rank has died.
_NOTICE_S = 1.0
# How long the word that the job has ended may take to leave.
_LAST_WORDS_S = 1.0


@dataclass(kw_only=True)
class RankContext:
    """One rank's view of the job."""

    config: RunConfig
    roles: Roles
    rank: int
    run_directory: RunDirectory
    transport: Transport
    core_share: float
    """Cores that this rank may use, those shared with other ranks counted in part."""
    started_s: float
    resolved: Resolved | None = None
    """What was decided before any script ran, and where each value came from; ``config`` also has
    what the script passes to psdist.init, once it has."""
    job: int = 0
    """Number of the job that goes on, or was last; 0 before the first."""
    is_in_job: bool = False
    now_s: Callable[[], float] = time.monotonic
    """By which this rank measures its own rounds."""
    failure: BaseException | None = None
    """What has ended this rank's work on the job before its end; it ends the script, too."""
    plan: Plan | None = None
    """What the mapper decided; None where roles were given, and for a job in one process."""
    comm: MPI.Intracomm | None = None
    buddies: tuple[int, ...] = ()
    """By server: who keeps the second copy of its shard; nothing without replication."""
    workers_comm: MPI.Comm | None = None
    """Of those that begin the job."""
    group_comm: MPI.Comm | None = None
    network: VirtualNetwork | None = None
    """The network of a job in one process; None over MPI."""
    hosts: HostWatch | None = None
    """Whether the job's hosts still reach each other; None where there is one, or nobody asks."""
    parent: ParentLink | None = None
    """The line to ``psdist run -n N``; None where that did not start this rank, or not here."""
    advance: Callable[[], None] = lambda: None
    """Tells the network that this rank goes on into a job, or back to waiting."""
    on_abort: Callable[[str, int], None] | None = None
    """Called with text and status before this rank ends a failed job; the coordinator's files."""
    take_over: Callable[[], None] = lambda: None
    """Called before this rank uses the network for the end of a failed job: whoever used it beside
    the script leaves it alone."""
    flushes: list[Callable[[], None]] = field(default_factory=list)
    """Called before this rank ends a job that failed: records that still lie in its memory."""

    tracer: Tracer | None = None
    """Where this rank's spans of the job go; None without ``--trace``."""
    clock_comm: MPI.Comm | None = None
    """Between all ranks, over which their clocks are compared, once they were."""
    replace: TakePlace | None = None
    """On a spare that was asked to take a dead worker's place: the message."""
    heard: Sequence[PeerLost | ControlArrived] = ()
    """What it had heard of servers before that."""
    joined: dict[int, int] = field(default_factory=dict)
    """On the coordinator: substitutes that have joined a job, in order, and whose places they have;
    on one of them it itself."""
    has_trained: bool = False
    """On a substitute that has joined: whether it has made an iteration."""

    def __post_init__(self) -> None:
        self._endpoint = self.transport
        self._first_path = self.run_directory.path
        self._checkpoint: Checkpoint | None = None
        self._fidelity: Fidelity | None = None
        self._attempt = 1
        self._has_survived = False
        self._ends_without_mpi = False
        self._line: LineTransport | None = None
        """That of the job, where servers have buddies."""
        self._num_left_out = 0
        """Workers that have died and are not in ``workers_comm`` any more."""

    @property
    def me(self) -> int:
        """This rank's stable id."""
        return self.transport.me

    @property
    def role(self) -> Literal["server", "worker", "spare"]:
        if is_spare(self.me):
            return "spare"
        return "worker" if is_worker(self.me) else "server"

    @property
    def is_substitute(self) -> bool:
        """Whether this rank waits to take a dead worker's place, or has taken one."""
        return self.roles.is_substitute(self.me)

    def go_on_as_worker(
        self, replace: TakePlace, heard: Sequence[PeerLost | ControlArrived]
    ) -> None:
        """This spare, which may take servers' places, too, is to take a worker's."""
        self.replace, self.heard = replace, heard
        worker = worker_id(self.roles.worker_of_spare(spare_of(self.me)))
        self.transport.become(worker)
        logger.info("this rank takes the place of worker %d", replace.worker)

    @property
    def who(self) -> str:
        if self.comm is None:
            return f"the only rank (on {self.roles.places[0].host})"
        return self.roles.describe(self.me)

    def reach(self, phase: Phase) -> None:
        """This rank has come to another part of its life: a display says so. What a spare's script
        does before it joins is none of the job's."""
        if self.is_substitute:
            phase = "training"
        if self.parent is not None:
            self.parent.reach(phase)
        elif self.comm is not None and self.me == COORDINATOR and self.config.progress != "off":
            elapsed_s = time.monotonic() - self.started_s
            say_phase(phase, num_ranks=len(self.roles.places), elapsed_s=elapsed_s)

    def waiting(self, *, has_deadline: bool = True) -> Waiting:
        """How this rank waits: it spins only where a core is to spare (``spin`` decides)."""
        spin = self.config.spin
        is_spinning = self.core_share >= 1.0 if spin == "auto" else spin == "on"
        waits = self.role == "spare" or (self.is_substitute and self.replace is None)
        is_spinning &= not waits  # its cores are others', which work
        if not has_deadline:
            return Waiting(is_spinning=is_spinning, warn_s=float("inf"), timeout_s=float("inf"))
        return Waiting(
            is_spinning=is_spinning, warn_s=self.config.warn_s, timeout_s=self.config.wait_timeout_s
        )

    def broadcast_among_workers(
        self, memory: memoryview, *, dead: Collection[int] = frozenset()
    ) -> None:
        """Copy the chief's ``memory`` to every worker; for set-up, not for the hot path. ``dead``:
        workers that are known to have died, the same on all."""
        if self.workers_comm is None or not len(memory):
            return
        if len(dead) != self._num_left_out:
            self._num_left_out = len(dead)
            self.workers_comm = self.workers_comm.Shrink()
        self.workers_comm.Bcast(memory, root=0)

    def broadcast_in_group(self, data: bytes | None) -> bytes:
        """Hand the group leader's ``data`` (others pass None) to all workers of the group."""
        if self.group_comm is None or self.group_comm.Get_size() == 1:
            return data or b""
        length = bytearray(4)
        if data is not None:
            length[:] = len(data).to_bytes(4, "little")
        self.group_comm.Bcast(length, root=0)
        body = bytearray(data or bytes(int.from_bytes(length, "little")))
        self.group_comm.Bcast(body, root=0)
        return bytes(body)

    def gather_in_group(self, data: bytes) -> list[bytes]:
        """What every worker of this worker's group brings, by place; collective over them."""
        if self.group_comm is None or self.group_comm.Get_size() == 1:
            return [data]
        return allgather(self.group_comm, data)

    def all_of_group(self, mine: bool) -> bool:
        """Whether ``mine`` is true on every worker of this worker's group; collective over them."""
        if self.group_comm is None or self.group_comm.Get_size() == 1:
            return mine
        return all(each == b"1" for each in allgather(self.group_comm, b"1" if mine else b"0"))

    @property
    def may_use_threads(self) -> bool:
        """Whether any thread may call MPI, while another one is inside."""
        if self.comm is None:
            return False
        from mpi4py import MPI  # only now: it needs MPI to be initialised

        return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)

    @property
    def writes_behind(self) -> bool:
        """Whether a checkpoint's files are written beside what this rank does: not in one process,
        where what comes next must not depend on how long that takes."""
        return self.comm is not None

    @property
    def is_waited_for(self) -> bool:
        """Whether this rank's script has others to end, or a job."""
        return self.comm is not None or self.is_in_job

    def go_on(
        self, checkpoint: Checkpoint | None, attempt: int, fidelity: Fidelity | None = None
    ) -> None:
        """The first job is attempt number ``attempt`` of a run, and goes on from ``checkpoint``,
        with this of psdist's own choices."""
        self._attempt, self._checkpoint, self._fidelity = attempt, checkpoint, fidelity

    @property
    def fidelity(self) -> Fidelity | None:
        """What the job begins with of psdist's own choices; None: as every run begins."""
        return fitting(self.config, self.kept_fidelity)

    @property
    def kept_fidelity(self) -> Fidelity | None:
        """What its checkpoint has of them, also where the settings are others now."""
        return self._fidelity if self.job <= 1 else None

    @property
    def restored(self) -> Restored | None:
        """What the job goes on from; jobs behind the first of these processes start afresh, and a
        spare that takes a worker's place goes on from what the chief has."""
        if self._checkpoint is None or self.job > 1 or self.replace is not None:
            return None
        return Restored.of(
            self._checkpoint, self.roles, mode=judging_mode(self.config), modes=self.modes_of
        )

    def modes_of(self, set_index: int) -> tuple[ModeFrom, ...]:
        """The modes with which the job begins in a parameter set
        (:func:`psdist.ranks.checkpointing.ruling.modes_of`)."""
        return modes_of(self.config, self.fidelity, set_index=set_index)

    def first_clocks(self, set_index: int) -> FirstClocks | None:
        """Where the groups begin in a parameter set; None where nothing is restored."""
        restored = self.restored
        if restored is None:
            return None
        return restored.first(set_index, may_miss=self.config.backup > 0)

    @property
    def attempt(self) -> int:
        """How often the run has been started, with this time."""
        return self._attempt if self.job <= 1 else 1

    @property
    def folder(self) -> Folder:
        """Of the job's checkpoints."""
        return Folder(self.run_directory.path)

    def path_of(self, job: int) -> Path:
        """The run directory of job number ``job``: RUN_DIR, RUN_DIR-2, RUN_DIR-3 ..."""
        first = self._first_path
        return first if job == 1 else first.with_name(f"{first.name}-{job}")

    def begin_job(self, job: int, config: RunConfig) -> None:
        """From now on this rank takes part in job number ``job``, which all have begun."""
        self.job, self.config, self.is_in_job, self.failure = job, config, True, None
        if job > 1:
            self.started_s = time.monotonic()
            self.run_directory = RunDirectory(self.path_of(job))
            if self.network is not None:
                self.network, self.transport = network_alone()
            start_logs(self.run_directory.path, rank=self.rank, who=self.who_in_logs)
            logger.info("job %d of %d ranks begins", job, len(self.roles.places))
        if self.buddies:
            standby = server_id(self.buddies[0])
            self._line = LineTransport(self._endpoint, standby=standby, on_follow=self._on_follow)
            self.transport = self._line
        self.advance()
        if config.trace:
            from psdist.ranks.spans import begin_trace

            begin_trace(self)

    def _on_follow(self, died: int) -> None:
        """The coordinator has died, in the process of ``died``, and its standby has its place:
        whoever has started that rank is to know that it is not missed, and may be on this rank's
        host only."""
        if self.parent is not None:
            self.parent.tell(RankSurvived(rank=self.roles.rank_of_peer[died]))

    @property
    def has_lost_coordinator(self) -> bool:
        """Whether it has died in a job, or behind one, that survives that; no other one begins."""
        is_dead = COORDINATOR in self.transport.lost or COORDINATOR in self.transport.moved
        return bool(self.buddies) and self.job > 0 and is_dead

    @property
    def is_coordinator(self) -> bool:
        """Whether the coordinator is in this process."""
        return self.me == self._coordinator_at

    @property
    def _coordinator_at(self) -> int:
        """In whose process the coordinator is, or was until it died."""
        return COORDINATOR if self._line is None else self._line.coordinator_at

    @property
    def who_in_logs(self) -> str:
        return "worker 0 and server 0" if self.comm is None else self.who

    def end_job(self) -> None:
        """The job is over for this rank: what it sent is on its way, its files are closed, and what
        others have sent about it is late."""
        self.transport.drain(_CLOSE_TIMEOUT_S)
        if self.buddies:
            self.transport = self._endpoint
        if self.tracer is not None:
            from psdist.ranks.spans import end_trace

            end_trace(self)
        stop_logs()
        self.is_in_job = False
        self.on_abort = None
        self.take_over = lambda: None
        self.flushes.clear()
        self.advance()

    def close(self) -> None:
        """This rank ends: what it sent is on its way, its files are closed."""
        self.transport.drain(_CLOSE_TIMEOUT_S)
        if self.hosts is not None:
            self.hosts.close()
        stop_logs()
        if self.parent is not None:
            self._tell_parent_of_survived()
            self.parent.finished()
        # A job may be over before a death is told: nobody waits for a worker that is done, or for a
        # spare that has no shard.
        self._ends_without_mpi = self.survives_workers or self.survives_servers

    def _tell_parent_of_survived(self) -> None:
        """The job is complete without these: the coordinator that knew them may have had no parent,
        on another host than this rank's."""
        assert self.parent is not None
        if self.survives_workers or self.survives_servers:
            for peer in self.transport.lost.keys() | self.transport.moved.keys():
                self.parent.tell(RankSurvived(rank=self.roles.rank_of_peer[peer]))

    def end_process(self) -> None:
        """The last that this process does: where ranks may have died MPI's own end is left out."""
        if self._ends_without_mpi:
            leave_out()

    def fail(self, text: str, status: int) -> NoReturn:
        """End the job: ``text`` is printed once, by the coordinator if that still answers. A spare
        that has not joined ends alone: the job goes on as before; and so does one that has, before
        its first iteration: that is the death of a worker."""
        if self._may_end_alone and not is_interruption(text, status):
            has_joined = worker_of(self.me) in self.joined
            how = ", as without a worker that has died" if has_joined else ""
            self.end_buried(f"{text}\npsdist: this spare ends, and the job goes on without it{how}")
        self._ignore_interrupts()
        self.take_over()
        flush_output()
        self._flush_records()
        heading = f"psdist: {self.who}"
        if self.comm is not None and not self.is_coordinator:
            failure = Failure(heading=heading, text=printable(text), exit_status=status)
            with suppress(PsdistError):  # the network may be what failed: we speak for ourselves
                self.transport.send_control(COORDINATOR, failure)
                told_at = self._coordinator_at
                deadline = time.monotonic() + _REPORT_TIMEOUT_S
                # The speaker's Abort ends this process, or its word.
                while self._speaker() != self.me and time.monotonic() < deadline:
                    try:
                        self.transport.poll()
                    except JobEndedError as ended:
                        self.end_told(ended.exit_status)
                    except PsdistError:  # one failure is enough
                        pass
                    if told_at != self._coordinator_at:  # it has died, and another has its place
                        self.transport.send_control(COORDINATOR, failure)
                        told_at = self._coordinator_at
                    time.sleep(1e-3)
        self.abort(heading, text, status)

    @property
    def _may_end_alone(self) -> bool:
        """Whether the job has nothing of this rank's, and has all that it needs."""
        has_servers = self.survives_servers or all(map(is_worker, self.transport.lost))
        return self.is_substitute and not self.has_trained and has_servers

    def end_buried(self, text: str) -> NoReturn:
        """End this rank alone, with status 0: its group is out of the job, which goes on. Not by
        MPI's end, which would wait for all the others'."""
        self._ignore_interrupts()
        print(f"psdist: {self.who}: {text}", file=sys.stderr, flush=True)
        flush_output()
        self._flush_records()
        if self.hosts is not None:
            self.hosts.close()
        stop_logs()
        if self.parent is not None:
            self.parent.finished()
        wait_until_read()
        os._exit(0)

    def cause_of(self, error: Exception) -> Exception:
        """The death of another rank where there is one, of which ``error`` is taken to be a
        consequence: torch.distributed says only that a connection was closed. Where the job
        survives workers, only one of this worker's own group can be, and the coordinator says what
        follows: :class:`BuriedError`, if that is not the end of the job."""
        if self.comm is None or not survives_deaths(os.environ):
            return error
        self.take_over()
        deadline = time.monotonic() + _NOTICE_S
        while not self._fatal_losses() and time.monotonic() < deadline:
            self._poll_for_survival()
            time.sleep(1e-3)
        lost = self._fatal_losses()
        deadline = time.monotonic() + _REPORT_TIMEOUT_S
        while lost and self.survives_workers and time.monotonic() < deadline:
            if self._poll_for_survival():
                return BuriedError(
                    f"{lost[0]}, of the same group, has died: this worker ends, and the job goes "
                    "on without them"
                )
            time.sleep(1e-3)
        return PeerLostError(lost[0]).with_traceback(error.__traceback__) if lost else error

    def _poll_for_survival(self) -> bool:
        """Whether the coordinator has said that the job goes on without somebody of this group."""
        with suppress(PsdistError):
            event = self.transport.poll()
            if isinstance(event, ControlArrived) and isinstance(event.message, MembershipChanged):
                self._has_survived |= not set(event.message.dead).isdisjoint(self._group)
        return self._has_survived

    def _fatal_losses(self) -> list[str]:
        """Who has died without whom this rank cannot go on."""
        lost = self.transport.lost
        if not self.survives_workers:
            return [who for peer, who in lost.items() if not is_spare(peer)]
        if self.reforms_groups:
            return []
        group = self._group
        return [who for peer, who in lost.items() if is_worker(peer) and worker_of(peer) in group]

    @property
    def _group(self) -> Sequence[int]:
        """The workers of this worker's group."""
        if not is_worker(self.me):
            return ()
        return self.roles.groups[self.roles.group_of_worker[worker_of(self.me)]]

    @property
    def survives_workers(self) -> bool:
        """Whether the job may go on without workers that have died."""
        return self.comm is not None and self.config.max_deaths > 0

    @property
    def reforms_groups(self) -> bool:
        """Whether a group goes on without those of its workers that have died."""
        return self.survives_workers and reforms_groups(self.config)

    @property
    def survives_servers(self) -> bool:
        """Whether the job may go on when a server has died."""
        return bool(self.buddies)

    def _speaker(self) -> int:
        """Who prints why the job ends: the coordinator, or its standby, or the first server that
        lives, or the first worker."""
        dead = self.transport.lost.keys() | self.transport.moved.keys()
        if self._line is not None:
            for known in (self._line.coordinator_at, self._line.standby):
                if known is not None and known not in dead:
                    return known
        unknown = self.roles.is_substitute if self.roles.has_shared_spares else lambda _: False
        living = (peer for peer in self.roles.rank_of_peer if peer not in dead)
        return next(peer for peer in living if peer == self.me or not unknown(peer))

    def abort(self, heading: str, text: str, status: int) -> NoReturn:
        """Print and end every rank, now."""
        self._ignore_interrupts()
        self.write_last_files(text, status)
        if self.parent is not None:
            self.parent.failed(status)
        end_all(self.comm, heading, text, status, tell=lambda: self._tell_all(status))

    def _tell_all(self, status: int) -> None:
        """Under ULFM, where Abort ends this process alone, and nobody may notice for long."""
        if not survives_deaths(os.environ):
            return
        with suppress(Exception):  # what has failed may be the network, or this rank's part of it
            for rank, peer in self.roles.peer_of_rank.items():
                if rank != self.rank and peer not in self._endpoint.lost:
                    self._endpoint.send_control(peer, Ended(exit_status=status))
            self._endpoint.drain(_LAST_WORDS_S)

    def end_told(self, status: int) -> NoReturn:
        """End this rank alone: another one has ended the job, and said why."""
        self._ignore_interrupts()
        flush_output()
        self.write_last_files("another rank has ended the job", status)
        if self.hosts is not None:
            self.hosts.close()
        stop_logs()
        if self.parent is not None:
            self.parent.failed(status)
        wait_until_read()
        os._exit(status)

    def heed_parent(self) -> None:
        """On the coordinator, now and then: end the job where its parent wants that, or has
        gone."""
        if self.parent is None:
            return
        if self.parent.end_signal is not None:
            self.abort(f"psdist: {self.who}", *interruption(self.parent.end_signal))
        if self.parent.is_lost:
            self._ignore_interrupts()
            self.write_last_files("psdist run or its mpirun was killed", 1)
            # No Abort: mpirun may be what was killed, and every rank ends by its own line.
            os._exit(1)

    def heed_hosts(self) -> None:
        """On the coordinator, now and then: :class:`HostLostError` where a host is cut off."""
        if self.hosts is not None and (verdict := self.hosts.verdict) is not None:
            raise HostLostError(verdict)

    def end_cut_off(self, text: str, *, is_told: bool) -> NoReturn:
        """From a thread: end this rank, which the job's other hosts do not reach. ``is_told``:
        people are told here, not by another rank of this host."""
        logger.error("this rank ends: %s", text)
        if is_told:
            with suppress(OSError, ValueError):
                print(f"psdist: {self.who}: error: {text}", file=sys.stderr, flush=True)
        if self.parent is not None:
            self.parent.failed(HostLostError.exit_status)
        flush_output()
        wait_until_read()
        os._exit(HostLostError.exit_status)

    def write_last_files(self, text: str, status: int) -> None:
        """Records that still lie in memory and, on the coordinator, summary.json."""
        self._flush_records()
        # Whatever it meets, a full disk or half of a statistic: it must neither hide what happened
        # first nor keep the other ranks waiting.
        with suppress(Exception):
            if self.on_abort is not None:
                self.on_abort(text, status)

    def _ignore_interrupts(self) -> None:
        ignore_interrupts()
        if self.parent is not None:
            self.parent.ignore_signals()

    def _flush_records(self) -> None:
        for flush in self.flushes:
            with suppress(PsdistError):  # the disk may be what failed
                flush()


def network_alone() -> tuple[VirtualNetwork, Transport]:
    """Of one process, and its worker's end."""
    from psdist.transport.virtual import LinkModel, VirtualNetwork

    network = VirtualNetwork(link=LinkModel(latency_s=0.0, jitter_s=0.0, bytes_per_s=float("inf")))
    transport = network.endpoint(worker_id(0))
    transport.drives = True
    return network, transport
