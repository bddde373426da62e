"""The coordinator's parts for the features of a job, in the order in which their hooks are called.

    parts = [*choosing_parts(...), *joining_parts(...)]
    coordinator = assemble(num_workers=4, num_servers=2, parts=parts)

A function returns no part if the job lacks the feature.
"""

from __future__ import annotations

from collections.abc import Sequence

from psdist.controller import Controller
from psdist.controller.bound import BoundControl
from psdist.controller.codec import CodecControl
from psdist.controller.kept import KeptModes, TuningState
from psdist.controller.loss_steps import LossStepControl
from psdist.controller.mode import ModeControl
from psdist.controller.rollback import RiseGuard
from psdist.controller.steps import StepControl
from psdist.servers.protocol.coordinator import CoordinatorPart
from psdist.servers.protocol.joins import Joins
from psdist.servers.protocol.losses import Losses
from psdist.servers.protocol.modes import ModeChanges
from psdist.servers.protocol.round_control import RoundControl
from psdist.servers.protocol.steps import FixedSteps
from psdist.servers.protocol.takeovers import Takeovers


def choosing_parts(
    *,
    num_servers: int,
    begins: KeptModes | None,
    takes_set_mode: bool,
    rounds: RoundControl | None,
    steps: FixedSteps | None,
    guard: RiseGuard | None,
    reads_losses: bool = False,
) -> list[CoordinatorPart]:
    """Return the parts that choose the mode, the codecs and the local steps.

    ``begins``: the modes with which the run begins; ``takes_set_mode``: scripts may change the
    mode; ``rounds``: changes the mode or the codecs; ``guard``: decides when the loss has blown up;
    ``reads_losses``: the codecs depend on the loss."""
    parts: list[CoordinatorPart] = []
    if takes_set_mode or rounds is not None or begins is not None:
        parts.append(
            ModeChanges(
                num_servers=num_servers,
                begins=begins,
                takes_set_mode=takes_set_mode,
                control=rounds,
            )
        )
    if steps is not None:
        parts.append(steps)
    if rounds is not None and reads_losses:
        parts.append(Losses(rounds, guard=guard, must_read=guard is None))
    elif steps is not None:
        parts.append(Losses(steps, guard=guard))
    return parts


def fixed_steps(
    steps: StepControl | LossStepControl | None,
    *,
    num_workers: int,
    groups: Sequence[Sequence[int]],
    mode: str,
) -> FixedSteps | None:
    """Return the part that answers requests for local steps. ``steps``: chooses them."""
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


def resume(
    tuning_state: TuningState,
    first_round: int,
    control: Controller | None,
    steps: FixedSteps | None,
    guard: RiseGuard | None,
) -> None:
    """Continue the choices that a checkpoint keeps. ``first_round``: the most rounds of a group in
    the checkpoint. Raises ValueError for choices of another kind of run."""
    if tuning_state.codecs is not None and isinstance(control, CodecControl):
        control.go_on(tuning_state.codecs, first_round)
    if isinstance(control, ModeControl | BoundControl):
        control.go_on(tuning_state.modes, first_round)
    if tuning_state.steps is not None and steps is not None:
        steps.go_on(tuning_state.steps)
    if tuning_state.paces is not None and steps is not None:
        steps.go_on_at_pace(tuning_state.paces)
    if guard is not None and (tuning_state.rise is not None or first_round):
        guard.go_on(tuning_state.rise, first_round)


def joining_parts(
    *,
    num_workers: int,
    buddies: Sequence[int] = (),
    hosts: Sequence[str] = (),
    racks: Sequence[str] = (),
    num_spares: int = 0,
    num_substitutes: int = 0,
) -> list[CoordinatorPart]:
    """Return the parts that replace failed workers and servers. ``num_substitutes``: the last
    workers, which join later; with ``num_spares`` they are the spares. For the others see
    :class:`Takeovers`."""
    takeovers = Takeovers(
        num_workers=num_workers,
        buddies=buddies,
        hosts=hosts,
        racks=racks,
        num_spares=num_spares,
        num_substitutes=num_substitutes,
    )
    parts: list[CoordinatorPart] = []
    if num_substitutes:
        substitutes = range(num_workers - num_substitutes, num_workers)
        parts.append(Joins(substitutes, takeovers=takeovers if num_spares else None))
    if buddies or num_spares:
        parts.append(takeovers)
    return parts
