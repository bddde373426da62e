"""Make the coordinator of a job out of the settings and roles of its ranks.

coordinator = coordinator_of(context)
coordinator_log_of(context, coordinator, is_active=True)     # with a standby
"""

from __future__ import annotations

from psdist.config.codec_rounds import is_auto
from psdist.config.modes import (
    judging_mode,
    least_bound,
    mode_by,
)
from psdist.config.outer import counted_steps
from psdist.config.settings import RunConfig
from psdist.controller.bound import BoundControl
from psdist.controller.decisions import Controller
from psdist.controller.loss_steps import LossStepControl
from psdist.controller.mode import ModeControl
from psdist.controller.steps import StepControl
from psdist.protocol.ids import server_id
from psdist.ranks.checkpointing.fidelity import codec_control, loss_step_control
from psdist.ranks.checkpointing.ruling import begins_with
from psdist.ranks.context import RankContext
from psdist.ranks.pairing import hosts_of, racks_of
from psdist.servers.protocol.coordinator import Coordinator
from psdist.servers.protocol.coordinator_assembly import assemble
from psdist.servers.protocol.failover.coordinator_log import CoordinatorLog


def coordinator_of(context: RankContext) -> Coordinator:
    """Return the coordinator, before anything has happened in the job."""
    roles, first = context.roles, context.first_clocks(0)
    kept_modes = context.fidelity.modes if context.fidelity is not None else None
    return assemble(
        num_workers=roles.num_workers,
        num_servers=roles.num_servers,
        mode=judging_mode(context.config),
        # Replies to iteration c are used in c + 1 + pipeline, so who waits for them waits for as
        # many more of the others' iterations.
        staleness=least_bound(context.config) - context.config.pipeline,
        groups=roles.groups,
        max_deaths=context.config.max_deaths,
        buddies=context.buddies,
        hosts=hosts_of(roles),
        racks=racks_of(roles),
        num_spares=roles.num_spares,
        reforms=context.reforms_groups,
        may_miss=context.config.backup > 0,
        takes_set_mode=context.config.set_mode == "allowed",
        control=_controller(context.config, roles.num_groups_beginning),
        steps=_step_control(context),
        num_substitutes=roles.num_substitutes,
        rollback=context.config.rollback,
        fidelity=context.fidelity,
        first_round=max(first.clocks[: roles.num_groups_beginning]) if first is not None else 0,
        modes=kept_modes if kept_modes is not None else begins_with(context.config),
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


def _step_control(context: RankContext) -> StepControl | LossStepControl | None:
    config, roles = context.config, context.roles
    if config.steps_by == "speed":
        sizes = [len(workers) for workers in roles.groups]
        return StepControl(sizes=sizes, local_steps=counted_steps(config))
    if config.steps_by == "loss":
        return loss_step_control(
            config, num_workers=roles.num_workers, num_groups=len(roles.groups)
        )
    return None


def coordinator_log_of(
    context: RankContext, coordinator: Coordinator, *, is_active: bool
) -> CoordinatorLog:
    """Return the coordinator with what lets the standby go on in its place; ``is_active``: False
    on the standby."""
    roles = context.roles
    return CoordinatorLog(
        coordinator,
        standby=server_id(context.buddies[0]),
        num_workers=roles.num_workers,
        num_servers=roles.num_servers,
        num_spares=roles.num_spares,
        num_substitutes=roles.num_substitutes,
        is_active=is_active,
    )
