"""Assemble the coordinator of a job from the parts that the job needs; pure.

coordinator = assemble(num_workers=4, num_servers=2, mode="ssp", staleness=3)
coordinator.part(Takeovers)          # None: this job does not replicate shards
"""

from __future__ import annotations

from collections.abc import Sequence

from psdist.controller.bound import BoundControl
from psdist.controller.codec import CodecControl
from psdist.controller.decisions import Controller
from psdist.controller.kept import Fidelity, KeptModes
from psdist.controller.loss_steps import LossStepControl
from psdist.controller.mode import ModeControl
from psdist.controller.rollback import RiseGuard
from psdist.controller.steps import StepControl
from psdist.servers.protocol.checkpoints import Checkpoints
from psdist.servers.protocol.collectives import MissedCalls
from psdist.servers.protocol.coordinator import Coordinator, CoordinatorPart
from psdist.servers.protocol.joins import Joins
from psdist.servers.protocol.losses import Losses
from psdist.servers.protocol.modes import ModeChanges
from psdist.servers.protocol.pauses import Pauses
from psdist.servers.protocol.regroups import Regroups
from psdist.servers.protocol.round_control import RoundControl
from psdist.servers.protocol.steps import FixedSteps
from psdist.servers.protocol.takeovers import Takeovers
from psdist.servers.protocol.views import Views


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
    takes_set_mode: bool = False,
    control: Controller | None = None,
    steps: StepControl | LossStepControl | None = None,
    num_substitutes: int = 0,
    rollback: float | None = None,
    fidelity: Fidelity | None = None,
    first_round: int = 0,
    modes: KeptModes | None = None,
    reforms: bool = False,
    may_miss: bool = False,
) -> Coordinator:
    """Return the coordinator of a job.

    ``mode``: sync only if no other one may come, async if no group ever waits. ``staleness``: in
    ssp, the least number of iterations that a group may be ahead of what it waits for. ``groups``:
    the workers of each; without them each worker is a group of its own. ``max_deaths``: workers
    that may fail. ``reforms``: groups go on without their failed workers. ``may_miss``: rounds may
    close without some groups.

    ``buddies``: by server, the server with the replica of its shard; empty without replication.
    ``hosts``, ``racks``: by server and then by spare. ``num_substitutes``: the last workers, each a
    group of its own, wait to join; with ``num_spares`` they are the spares.

    ``takes_set_mode``: scripts may change the mode. ``control``: changes the mode or the codecs.
    ``steps``: chooses local steps. ``rollback``: a loss so many times the least one has blown up.
    ``modes``: with which the run begins. ``fidelity``, ``first_round``: what a checkpoint keeps of
    these choices, and the most rounds of a group in it; ValueError if it is of other choices."""
    substitutes = range(num_workers - num_substitutes, num_workers)
    membership = Views(
        groups=groups or [(worker,) for worker in range(num_workers)],
        num_servers=num_servers,
        max_deaths=max_deaths,
        substitutes=substitutes,
        reforms=reforms,
    )
    pause = Pauses(
        num_workers=num_workers,
        groups=groups,
        staleness={"sync": 0, "ssp": staleness}.get(mode),
        substitutes=substitutes,
        may_miss=may_miss,
    )
    takeovers = Takeovers(
        num_workers=num_workers,
        buddies=buddies,
        hosts=hosts,
        racks=racks,
        num_spares=num_spares,
        num_substitutes=num_substitutes,
    )
    rounds = RoundControl(control, groups=groups) if control is not None else None
    fixed = _fixed_steps(steps, num_workers, groups, mode)
    guard = RiseGuard(rollback) if rollback is not None else None
    if fidelity is not None or first_round:
        _resume(fidelity or Fidelity(), first_round, control, fixed, guard)
    parts: list[CoordinatorPart] = []
    if takes_set_mode or rounds is not None or modes is not None:
        parts.append(
            ModeChanges(
                num_servers=num_servers,
                begins=modes,
                takes_set_mode=takes_set_mode,
                control=rounds,
            )
        )
    if fixed is not None:
        parts.append(fixed)
    reads_losses = isinstance(control, CodecControl) and (control.reads_losses or guard is not None)
    if rounds is not None and reads_losses:
        parts.append(Losses(rounds, guard=guard, must_read=guard is None))
    elif fixed is not None:
        parts.append(Losses(fixed, guard=guard))
    if reforms:
        parts.append(Regroups(groups, control=rounds))
    if substitutes:
        shared = takeovers if num_spares else None
        parts.append(Joins(substitutes, takeovers=shared))
    if buddies or num_spares:
        parts.append(takeovers)
    checkpoints = Checkpoints(
        num_workers=num_workers,
        num_servers=num_servers,
        substitutes=substitutes,
        may_miss=may_miss,
    )
    return Coordinator(
        num_workers=num_workers,
        num_servers=num_servers,
        membership=membership,
        pause=pause,
        missed_calls=MissedCalls(mode=mode, may_miss=may_miss),
        parts=[*parts, checkpoints],
    )


def _fixed_steps(
    steps: StepControl | LossStepControl | None,
    num_workers: int,
    groups: Sequence[Sequence[int]],
    mode: str,
) -> FixedSteps | None:
    if steps is None:
        return None
    return FixedSteps(
        steps,
        num_workers=num_workers,
        leaders={workers[0]: group for group, workers in enumerate(groups)},
        # In sync groups make rounds together anyway; then steps depend on no order of arrival.
        waits=mode == "sync" and isinstance(steps, LossStepControl),
        keeps_passes=mode != "sync" and isinstance(steps, StepControl),
    )


def _resume(
    fidelity: Fidelity,
    first_round: int,
    control: Controller | None,
    steps: FixedSteps | None,
    guard: RiseGuard | None,
) -> None:
    """Go on with what a checkpoint keeps."""
    if fidelity.codecs is not None and isinstance(control, CodecControl):
        control.go_on(fidelity.codecs, first_round)
    if isinstance(control, ModeControl | BoundControl):
        control.go_on(fidelity.modes, first_round)
    if fidelity.steps is not None and steps is not None:
        steps.go_on(fidelity.steps)
    if fidelity.paces is not None and steps is not None:
        steps.go_on_at_pace(fidelity.paces)
    if guard is not None and (fidelity.rise is not None or first_round):
        guard.go_on(fidelity.rise, first_round)
