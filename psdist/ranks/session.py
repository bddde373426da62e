"""One job as a rank takes part in it: its settings, transport, run directory and checkpoint.

    session = rank.session
    session.config, session.transport, session.run_directory
    session.restored                 # the job's first checkpoint

A rank runs several jobs one after another, each with a session of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from psdist.checkpoint.folder import Folder
from psdist.config.compatibility import reforms_groups
from psdist.config.modes import ModeFrom, judging_mode, mode_of_tables
from psdist.config.settings import RunConfig
from psdist.controller.kept import TuningState
from psdist.protocol.checkpoints import FirstClocks
from psdist.protocol.control import TakePlace
from psdist.protocol.events import ControlArrived, PeerLost
from psdist.protocol.ids import COORDINATOR, server_id
from psdist.protocol.roles import Roles
from psdist.ranks.checkpointing.resuming import Restored
from psdist.ranks.checkpointing.ruling import fitting, modes_of
from psdist.ranks.exit import DRAIN_TIMEOUT_S, Exit
from psdist.report import RankSurvived
from psdist.report.logs import start_logs, stop_logs
from psdist.report.run_directory import RunDirectory
from psdist.transport import Transport
from psdist.transport.lines import LineTransport

if TYPE_CHECKING:
    from psdist.ranks.rank import Rank
    from psdist.tracing.tracer import Tracer

logger = logging.getLogger("psdist")


class JobSession:
    """A rank's part in one job; number 0 before the first job begins."""

    def __init__(self, rank: Rank, number: int, config: RunConfig) -> None:
        self.rank = rank
        self.number = number
        self.config = config
        """Settings of the job, with the settings that its script has passed to psdist.init."""
        self.is_open = number > 0
        """True until the job ends."""
        bootstrap = rank.bootstrap
        self.started_s = bootstrap.started_s if number <= 1 else time.monotonic()
        self.run_directory = RunDirectory(bootstrap.path_of(number))
        self.line: LineTransport | None = None
        """Transport that follows the coordinator to its standby; None without replication."""
        if number and bootstrap.buddies:
            standby = server_id(bootstrap.buddies[0])
            self.line = LineTransport(rank.endpoint, standby=standby, on_follow=self._on_failover)
        self.tracer: Tracer | None = None
        """Recorder of this rank's spans; None without ``--trace``."""
        self.replace: TakePlace | None = None
        """On a spare that takes a failed worker's place: the coordinator's message."""
        self.heard: Sequence[PeerLost | ControlArrived] = ()
        """On such a spare: the events about servers before that message."""
        self.joined: dict[int, int] = {}
        """Substitutes that have joined, in order, and the worker whose place each one has. Complete
        on the coordinator; a substitute stores its own entry."""

    @property
    def transport(self) -> Transport:
        return self.line if self.line is not None and self.is_open else self.rank.endpoint

    @property
    def roles(self) -> Roles:
        return self.rank.roles

    @property
    def exit(self) -> Exit:
        return self.rank.exit

    # -- begin and end -------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the job; collective with ``--trace``."""
        if self.number > 1:
            start_logs(
                self.run_directory.path,
                rank=self.rank.number,
                who=self.rank.who_in_logs,
                setting=self.config.log,
            )
            logger.info("job %d of %d ranks begins", self.number, len(self.roles.places))
        self.rank.advance()
        if self.config.trace:
            from psdist.ranks.spans import begin_trace

            self.tracer = begin_trace(self)

    def end(self) -> None:
        """End the job on this rank: send what is pending, close its files. Messages about the job
        that arrive from now on are late."""
        self.transport.drain(DRAIN_TIMEOUT_S)
        self.is_open = False
        if self.tracer is not None:
            from psdist.ranks.spans import end_trace

            end_trace(self, self.tracer)
            self.tracer = None
        stop_logs()
        self.exit.end_job()
        self.rank.advance()

    # -- the ranks of the job ------------------------------------------------------------------

    def take_place(
        self, replace: TakePlace, heard: Sequence[PeerLost | ControlArrived] = ()
    ) -> None:
        """Take a failed worker's place with this spare."""
        self.replace, self.heard = replace, heard
        logger.info("this rank takes the place of worker %d", replace.worker)

    @property
    def survives_workers(self) -> bool:
        """True if the job may continue without workers that have failed."""
        return self.rank.survives_ranks and self.config.max_deaths > 0

    @property
    def survives_servers(self) -> bool:
        """True if the job may continue after a server has failed."""
        return bool(self.rank.bootstrap.buddies)

    @property
    def reforms_groups(self) -> bool:
        """True if a group continues without its failed workers."""
        return self.survives_workers and reforms_groups(self.config)

    @property
    def coordinator_at(self) -> int:
        """Id of the rank whose process runs the coordinator, or ran it until it failed."""
        return COORDINATOR if self.line is None else self.line.coordinator_at

    @property
    def standby(self) -> int | None:
        """Id of the coordinator's standby; None without one, and on the coordinator itself."""
        return None if self.line is None else self.line.standby

    @property
    def is_coordinator(self) -> bool:
        """True if the coordinator runs in this process."""
        return self.rank.me == self.coordinator_at

    @property
    def has_lost_coordinator(self) -> bool:
        """True if the coordinator has failed in a job that survives this, or after it. No other job
        begins then."""
        failed = COORDINATOR in self.transport.lost or COORDINATOR in self.transport.moved
        return self.survives_servers and self.number > 0 and failed

    def _on_failover(self, failed: int) -> None:
        """The coordinator, in the process of ``failed``, has been replaced by its standby. Report
        it: the parent of the failed rank may run on this host only."""
        if self.exit.parent is not None:
            self.exit.parent.tell(RankSurvived(rank=self.roles.rank_of_peer[failed]))

    # -- the job's first checkpoint ------------------------------------------------------------

    @property
    def attempt(self) -> int:
        """Number of starts of the run, with this one."""
        return self.rank.bootstrap.attempt if self.number <= 1 else 1

    @property
    def folder(self) -> Folder:
        """Folder of the job's checkpoints."""
        return Folder(self.run_directory.path)

    @property
    def tuning_state(self) -> TuningState | None:
        """Tuning state with which the job begins; None: the tuning state of a new run."""
        return fitting(self.config, self.kept_tuning_state)

    @property
    def kept_tuning_state(self) -> TuningState | None:
        """Tuning state of the checkpoint, even if it does not fit the settings of the job."""
        return self.rank.bootstrap.tuning_state if self.number <= 1 else None

    @property
    def restored(self) -> Restored | None:
        """Checkpoint that the job starts from. None for later jobs of the same processes, and for a
        spare that takes a worker's place: it starts from the chief's state."""
        checkpoint = self.rank.bootstrap.checkpoint
        if checkpoint is None or self.number > 1 or self.replace is not None:
            return None
        return Restored.of(
            checkpoint,
            self.roles,
            mode=judging_mode(self.config),
            modes=self.modes_of,
            of_tables=mode_of_tables(self.config),
        )

    def modes_of(self, set_index: int) -> tuple[ModeFrom, ...]:
        """Return the modes of a parameter set at the beginning of the job."""
        return modes_of(self.config, self.tuning_state, set_index=set_index)

    def first_clocks(self, set_index: int) -> FirstClocks | None:
        """Return the groups' first clocks in a parameter set; None if nothing is restored."""
        restored = self.restored
        return None if restored is None else restored.first(set_index)
