"""One rank of a job, with what was decided before any script ran.

rank = connect(resolved)             # psdist.ranks.connecting
rank.bootstrap.plan, rank.roles      # the decisions before any script ran
rank.session.config                  # the job that runs, or the last one
rank.exit.fail(text, status)         # the end, on every rank
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from psdist.checkpoint.reading import Checkpoint
from psdist.config.settings import RunConfig
from psdist.config.sources import Resolved
from psdist.controller.kept import TuningState
from psdist.protocol.control import TakePlace
from psdist.protocol.events import ControlArrived, PeerLost
from psdist.protocol.ids import COORDINATOR, is_spare, is_worker, spare_of, worker_id
from psdist.protocol.roles import Roles
from psdist.ranks.agreement import allgather, broadcast
from psdist.ranks.exit import Exit
from psdist.ranks.parent_link import ParentLink
from psdist.ranks.session import JobSession
from psdist.report import Phase
from psdist.report.progress import say_phase
from psdist.topology.plan import Plan
from psdist.transport import Transport
from psdist.transport.waiting import Waiting

if TYPE_CHECKING:
    from mpi4py import MPI

    from psdist.transport.virtual import VirtualNetwork

logger = logging.getLogger("psdist")


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """The decisions on which all ranks have agreed before any script runs."""

    resolved: Resolved
    """Settings and their sources, without the settings that the script passes to psdist.init."""
    roles: Roles
    path: Path
    """Run directory of the first job."""
    started_s: float
    """Start of this rank on time.monotonic()."""
    plan: Plan | None = None
    """Result of the mapper; None if the roles were given, and for a job in one process."""
    buddies: tuple[int, ...] = ()
    """[servers]: the server that stores the replica of each shard; () without replication."""
    attempt: int = 1
    """Number of starts of the run, with this one."""
    checkpoint: Checkpoint | None = None
    """Checkpoint that the first job starts from."""
    tuning_state: TuningState | None = None
    """Tuning state with which the first job begins; None: the tuning state of a new run."""

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    def path_of(self, job: int) -> Path:
        """Return the run directory of job number ``job``: RUN_DIR, RUN_DIR-2, RUN_DIR-3 ..."""
        return self.path if job <= 1 else self.path.with_name(f"{self.path.name}-{job}")


class Comms:
    """The MPI communicators of a rank, and collectives over them, which are for set-up and not for
    the hot path. Each communicator is None in a job of one process, and on ranks outside it."""

    def __init__(
        self,
        world: MPI.Intracomm | None = None,
        workers: MPI.Comm | None = None,
        group: MPI.Comm | None = None,
    ) -> None:
        self.world = world
        self.workers = workers
        """The workers that begin the job."""
        self.group = group
        """The workers of this worker's group."""
        self._clocks: MPI.Comm | None = None
        self._num_failed = 0
        """Failed workers that ``workers`` no longer contains."""

    @property
    def may_use_threads(self) -> bool:
        """True if any thread may call MPI while another thread is inside MPI."""
        if self.world is None:
            return False
        from mpi4py import MPI  # only now: it needs MPI to be initialised

        return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)

    def clocks(self) -> MPI.Comm | None:
        """Return the communicator for comparing the ranks' clocks. Collective when first called."""
        if self._clocks is None and self.world is not None:
            self._clocks = self.world.Dup()  # its messages never match psdist's
        return self._clocks

    def broadcast_among_workers(
        self, memory: memoryview, *, dead: Collection[int] = frozenset()
    ) -> None:
        """Copy the chief's ``memory`` to every worker. ``dead``: the failed workers, the same on
        all workers."""
        if self.workers is None or not len(memory):
            return
        if len(dead) != self._num_failed:
            self._num_failed = len(dead)
            self.workers = self.workers.Shrink()
        self.workers.Bcast(memory, root=0)

    def broadcast_in_group(self, data: bytes | None) -> bytes:
        """Return the group leader's ``data`` (others pass None) on all workers of the group."""
        if self.group is None or self.group.Get_size() == 1:
            return data or b""
        return broadcast(self.group, data or b"")

    def gather_in_group(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of every worker of this worker's group, by place."""
        if self.group is None or self.group.Get_size() == 1:
            return [data]
        return allgather(self.group, data)


class Rank:
    """One rank of the job: its id, role, communicators, and the job that it is part of."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        *,
        number: int,
        transport: Transport,
        core_share: float,
        comms: Comms | None = None,
        network: VirtualNetwork | None = None,
        parent: ParentLink | None = None,
        advance: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``core_share``: number of cores that this rank may use, a core of n ranks counted as 1/n;
        ``network``: the network of a job in one process; ``advance()``: the network's job epoch
        begins with this rank's next job, or wait; ``now_s()``: the clock of rounds."""
        self.bootstrap = bootstrap
        self.number = number
        """Rank in MPI's world."""
        self.endpoint = transport
        """Transport of this process; a job may put a coordinator line in front of it."""
        self.core_share = core_share
        self.comms = comms or Comms()
        self.network = network
        self.advance = advance
        self.now_s = now_s
        self.exit = Exit(self, parent)
        self.session = JobSession(self, 0, bootstrap.config)
        """The job that runs, or the last one. Number 0: no job has begun."""

    @property
    def roles(self) -> Roles:
        return self.bootstrap.roles

    @property
    def me(self) -> int:
        """This rank's stable id."""
        return self.endpoint.me

    @property
    def role(self) -> Literal["server", "worker", "spare"]:
        if is_spare(self.me):
            return "spare"
        return "worker" if is_worker(self.me) else "server"

    @property
    def num_threads(self) -> int:
        """Threads that torch may use in this rank."""
        threads = self.session.config.threads
        return max(1, int(self.core_share)) if threads == "auto" else threads

    @property
    def is_substitute(self) -> bool:
        """True if this rank waits for a failed worker's place, or has taken one."""
        return self.roles.is_substitute(self.me)

    @property
    def is_alone(self) -> bool:
        """True if this process is the whole job, without MPI."""
        return self.comms.world is None

    @property
    def survives_ranks(self) -> bool:
        """True if this process may outlive other ranks that fail."""
        return not self.is_alone

    @property
    def who(self) -> str:
        if self.is_alone:
            return f"the only rank (on {self.roles.places[0].host})"
        return self.roles.describe(self.me)

    @property
    def who_in_logs(self) -> str:
        return "worker 0 and server 0" if self.is_alone else self.who

    def reach(self, phase: Phase) -> None:
        """Report that this rank has reached another phase of its life. A spare reports only
        training: the phases of its script before it joins are not the job's."""
        if self.is_substitute:
            phase = "training"
        if self.exit.parent is not None:
            self.exit.parent.reach(phase)
        elif not self.is_alone and self.me == COORDINATOR and self.session.config.progress != "off":
            elapsed_s = time.monotonic() - self.session.started_s
            say_phase(phase, num_ranks=len(self.roles.places), elapsed_s=elapsed_s)

    def waiting(self, *, has_deadline: bool = True) -> Waiting:
        """Return how this rank waits. It spins only if it has a core of its own, or as ``spin``
        says; a spare that waits never spins."""
        config = self.session.config
        is_spinning = self.core_share >= 1.0 if config.spin == "auto" else config.spin == "on"
        if self.role == "spare" or (self.is_substitute and self.session.replace is None):
            is_spinning = False  # its cores belong to ranks that work
        endless = float("inf")
        return Waiting(
            is_spinning=is_spinning,
            warn_s=config.warn_s if has_deadline else endless,
            timeout_s=config.wait_timeout_s if has_deadline else endless,
        )

    def free_s(self) -> float:
        """Return the time in seconds, without the time in which this process has used its part of
        cores that it shares with other ranks."""
        if self.core_share >= 1.0:
            return self.now_s()
        return self.now_s() - time.process_time() / self.core_share

    def begin_job(self, number: int, config: RunConfig) -> None:
        """Take part in job ``number``, which all ranks have begun."""
        if number > 1 and self.network is not None:
            self.network, self.endpoint = network_alone()
        self.session = JobSession(self, number, config)
        self.session.begin()

    def use_settings(self, resolved: Resolved) -> None:
        """Begin later jobs with other settings, the same on all ranks; for benchmarks."""
        self.bootstrap = replace(self.bootstrap, resolved=resolved)

    def become_worker(self, message: TakePlace, heard: Sequence[PeerLost | ControlArrived]) -> None:
        """Take a failed worker's place with this spare, which can take servers' places, too.
        ``heard``: the events about servers that the spare has received."""
        self.session.take_place(message, heard)
        worker = worker_id(self.roles.worker_of_spare(spare_of(self.me)))
        self.session.transport.become(worker)


def network_alone() -> tuple[VirtualNetwork, Transport]:
    """Return the network of a job in one process, and its worker's endpoint."""
    from psdist.transport.virtual import LinkModel, VirtualNetwork

    network = VirtualNetwork(link=LinkModel(latency_s=0.0, jitter_s=0.0, bytes_per_s=float("inf")))
    transport = network.endpoint(worker_id(0))
    transport.drives = True
    return network, transport
