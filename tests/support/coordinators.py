"""Coordinators with the parts of features, assembled as in psdist.ranks.coordinating."""

from __future__ import annotations

from collections.abc import Sequence

from psdist.controller import Controller
from psdist.controller.codec import CodecControl
from psdist.controller.kept import KeptModes, TuningState
from psdist.controller.loss_steps import LossStepControl
from psdist.controller.rollback import RiseGuard
from psdist.controller.steps import StepControl
from psdist.errors import InvariantError
from psdist.ranks.coordinator_parts import (
    choosing_parts,
    fixed_steps,
    joining_parts,
    resume,
)
from psdist.servers.protocol import coordinator_assembly
from psdist.servers.protocol.coordinator import Coordinator, Part
from psdist.servers.protocol.missed_rounds import MissedRounds
from psdist.servers.protocol.regroups import Regroups
from psdist.servers.protocol.round_control import RoundControl


def assemble(
    *,
    num_workers: int,
    num_servers: int,
    mode: str = "sync",
    staleness: int = 0,
    groups: Sequence[Sequence[int]] = (),
    max_deaths: int = 0,
    buddies: Sequence[int] = (),
    hosts: Sequence[str] = (),
    racks: Sequence[str] = (),
    num_spares: int = 0,
    num_substitutes: int = 0,
    takes_set_mode: bool = False,
    control: Controller | None = None,
    steps: StepControl | LossStepControl | None = None,
    rollback: float | None = None,
    tuning_state: TuningState | None = None,
    first_round: int = 0,
    modes: KeptModes | None = None,
    reforms: bool = False,
    backup: int = 0,
) -> Coordinator:
    rounds = RoundControl(control, groups=groups) if control is not None else None
    fixed = fixed_steps(steps, num_workers=num_workers, groups=groups, mode=mode)
    guard = RiseGuard(rollback) if rollback is not None else None
    reads = isinstance(control, CodecControl) and (control.reads_losses or guard is not None)
    if tuning_state is not None or first_round:
        resume(tuning_state or TuningState(), first_round, control, fixed, guard)
    return coordinator_assembly.assemble(
        num_workers=num_workers,
        num_servers=num_servers,
        mode=mode,
        staleness=staleness,
        groups=groups,
        num_substitutes=num_substitutes,
        max_deaths=max_deaths,
        is_out=all if reforms else any,
        parts=[
            *choosing_parts(
                num_servers=num_servers,
                begins=modes,
                takes_set_mode=takes_set_mode,
                rounds=rounds,
                steps=fixed,
                guard=guard,
                reads_losses=reads,
            ),
            *([Regroups(groups, control=rounds)] if reforms else []),
            *joining_parts(
                num_workers=num_workers,
                buddies=buddies,
                hosts=hosts,
                racks=racks,
                num_spares=num_spares,
                num_substitutes=num_substitutes,
            ),
            *([MissedRounds()] if backup > 0 else []),
        ],
    )


def part_of(coordinator: Coordinator, cls: type[Part]) -> Part:
    """Return the part of this class. Raises :class:`InvariantError` if the job has none."""
    found = coordinator.part(cls)
    if found is None:
        raise InvariantError(f"this job has no {cls.__name__}")
    return found
