"""The coordinator of a job on its rank: made from settings and roles, and reported on.

coordinator = coordinator_of(context)
coordinator_log_of(context, is_active=True)                # with a standby
duty = Duty(context)
seat = CoordinatorSeat(coordinator, duty.report_on(coordinator))        # on server 0
loop = plain_loop(..., seats=[duty, seat])
loop.run(waiting, on_idle=duty.on_idle)
"""

from __future__ import annotations

from psdist.config.codec_rounds import is_auto
from psdist.config.modes import judging_mode, least_bound, mode_by
from psdist.config.outer import counted_steps
from psdist.config.settings import RunConfig
from psdist.controller import Controller
from psdist.controller.bound import BoundControl
from psdist.controller.codec import CodecControl
from psdist.controller.kept import TuningState
from psdist.controller.loss_steps import LossStepControl
from psdist.controller.mode import ModeControl
from psdist.controller.rollback import RiseGuard
from psdist.controller.steps import StepControl
from psdist.protocol.ids import server_id
from psdist.ranks.checkpointing.ruling import begins_with
from psdist.ranks.checkpointing.tuning_state import codec_control, loss_step_control
from psdist.ranks.coordinator_parts import (
    choosing_parts,
    fixed_steps,
    joining_parts,
    resume,
)
from psdist.ranks.reporter import Reporter
from psdist.ranks.seats.placing import hosts_of, racks_of
from psdist.ranks.session import JobSession
from psdist.servers.loop import ServerPart
from psdist.servers.protocol.coordinator import Coordinator
from psdist.servers.protocol.coordinator_assembly import assemble
from psdist.servers.protocol.failover.coordinator_log import CoordinatorLog
from psdist.servers.protocol.missed_rounds import MissedRounds
from psdist.servers.protocol.regroups import Regroups
from psdist.servers.protocol.round_control import RoundControl
from psdist.servers.protocol.rules.backup import misses_groups
from psdist.servers.replication.standby import Standby
from psdist.servers.set_loop import SetLoop
from psdist.servers.set_store import BuiltSet


def coordinator_of(context: JobSession) -> Coordinator:
    """Return the coordinator, before anything has happened in the job."""
    config, roles, first = context.config, context.roles, context.first_clocks(0)
    groups, mode, kept = roles.groups, judging_mode(config), context.tuning_state
    control = _controller(config, roles.num_groups_beginning)
    rounds = RoundControl(control, groups=groups) if control is not None else None
    steps = fixed_steps(
        _step_control(context), num_workers=roles.num_workers, groups=groups, mode=mode
    )
    guard = RiseGuard(config.rollback) if config.rollback is not None else None
    reads = isinstance(control, CodecControl) and (control.reads_losses or guard is not None)
    if kept is not None or first is not None:
        clocks = first.clocks[: roles.num_groups_beginning] if first is not None else (0,)
        resume(kept or TuningState(), max(clocks), control, steps, guard)
    begins = kept.modes if kept is not None and kept.modes is not None else begins_with(config)
    return assemble(
        num_workers=roles.num_workers,
        num_servers=roles.num_servers,
        mode=mode,
        # Replies to iteration c are used in c + 1 + pipeline, so who waits for them waits for as
        # many more of the others' iterations.
        staleness=least_bound(config) - config.pipeline,
        groups=groups,
        num_substitutes=roles.num_substitutes,
        max_deaths=config.max_deaths,
        is_out=all if context.reforms_groups else any,
        parts=[
            *choosing_parts(
                num_servers=roles.num_servers,
                begins=begins,
                takes_set_mode=config.set_mode == "allowed",
                rounds=rounds,
                steps=steps,
                guard=guard,
                reads_losses=reads,
            ),
            *([Regroups(groups, control=rounds)] if context.reforms_groups else []),
            *joining_parts(
                num_workers=roles.num_workers,
                buddies=context.rank.bootstrap.buddies,
                hosts=hosts_of(roles),
                racks=racks_of(roles),
                num_spares=roles.num_spares,
                num_substitutes=roles.num_substitutes,
            ),
            *([MissedRounds()] if misses_groups(config) else []),
        ],
    )


def _controller(config: RunConfig, num_groups: int) -> Controller | None:
    if config.staleness_to is not None:
        lowest, highest = config.staleness, config.staleness_to
        return BoundControl(num_groups=num_groups, lowest=lowest, highest=highest)
    if mode_by(config) == "auto":
        return ModeControl(num_groups=num_groups, staleness=config.staleness)
    if is_auto(config):
        return codec_control(config, num_groups)
    return None


def _step_control(context: JobSession) -> StepControl | LossStepControl | None:
    config, roles = context.config, context.roles
    if config.steps_by == "speed":
        sizes = [len(workers) for workers in roles.groups]
        return StepControl(sizes=sizes, local_steps=counted_steps(config))
    if config.steps_by == "loss":
        return loss_step_control(
            config, num_workers=roles.num_workers, num_groups=len(roles.groups)
        )
    return None


def coordinator_log_of(context: JobSession, *, is_active: bool) -> CoordinatorLog:
    """Return the coordinator with a log for its standby; ``is_active``: False on the standby."""
    roles = context.roles
    return CoordinatorLog(
        coordinator_of(context),
        standby=server_id(context.rank.bootstrap.buddies[0]),
        num_workers=roles.num_workers,
        num_servers=roles.num_servers,
        num_spares=roles.num_spares,
        num_substitutes=roles.num_substitutes,
        is_active=is_active,
    )


class Duty(ServerPart):
    """Tells the reporter of this rank, if it has one, about the sets of its server."""

    def __init__(self, context: JobSession) -> None:
        self._context = context
        self._reporter: Reporter | None = None
        self._sets: list[SetLoop] = []
        self._built: list[BuiltSet] = []

    def report_on(
        self,
        coordinator: Coordinator,
        coordinator_log: CoordinatorLog | None = None,
        *,
        is_active: bool = True,
    ) -> Reporter:
        """Return the reporter of this rank. ``coordinator_log``: None without a standby;
        ``is_active``: False on the standby."""
        reporter = Reporter(
            self._context,
            coordinator,
            coordinator_log=coordinator_log,
            is_active=is_active,
            contained=self._contained,
        )
        for built in self._built:
            reporter.on_built(*built)
        self._reporter = reporter
        return reporter

    def _contained(self) -> list[list[int]]:
        """Return, by set and by group, the iterations that the chunks of this server contain."""
        return [each.core.contained() for each in self._sets]

    def standby(self, state: bytes = b"", told: bytes = b"") -> Standby:
        """Make this rank the standby. A later standby has ``state``, the snapshot of the
        coordinator's log, and ``told``, that of its reporter."""
        log = coordinator_log_of(self._context, is_active=False)
        if state:
            log.from_snapshot(state)
        reporter = self.report_on(log.coordinator, log, is_active=False)
        if told:
            reporter.from_snapshot(told)
        return Standby(log, reporter)

    def on_set(self, each: SetLoop) -> None:
        self._sets.append(each)

    def on_built(self, built: BuiltSet) -> None:
        self._built.append(built)
        if self._reporter is not None:
            self._reporter.on_built(*built)

    def on_idle(self) -> None:
        if self._reporter is not None:
            self._reporter.on_idle()
