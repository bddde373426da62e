"""The tuning state (psdist's own choices) that a run takes from its checkpoint.

state = tuning_state_of(config, checkpoint, say=print)     # on rank 0; None: a new run's state
unpacked(packed(state))                                    # sent to the other ranks
levels_of(state)                                           # [(0, 3)]: codec levels by round
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Final

from pydantic import TypeAdapter, ValidationError

from psdist.checkpoint.reading import Checkpoint
from psdist.config.codec_rounds import is_auto, ladder_of
from psdist.config.codec_specs import text_of_both
from psdist.config.modes import first_mode
from psdist.config.outer import counted_steps
from psdist.config.settings import RunConfig
from psdist.controller.codec import CodecControl
from psdist.controller.kept import (
    KeptCodecs,
    KeptPaces,
    KeptSteps,
    Rollback,
    TuningState,
    within_all,
)
from psdist.controller.loss_steps import LossStepControl
from psdist.controller.steps import StepControl
from psdist.errors import ProtocolError
from psdist.ranks.checkpointing.rollbacks import Record

_ADAPTER: Final = TypeAdapter(TuningState | None)
_FIRST_LEVELS: Final = ((0, 0),)
_MOST_SHOWN: Final = 16


def codec_control(config: RunConfig, num_groups: int) -> CodecControl:
    """Return the control of ``codec = auto`` at the beginning of a run."""
    first = first_mode(config)
    return CodecControl(
        num_groups=num_groups,
        names=[text_of_both(each) for each in ladder_of(config)],
        mode=first.mode,
        staleness=first.staleness,
        error_budget=config.error_budget,
        loss_patience=config.loss_patience,
        freeze_step=config.freeze_step,
    )


def loss_step_control(config: RunConfig, *, num_workers: int, num_groups: int) -> LossStepControl:
    """Return the control of ``steps_by = loss`` at the beginning of a run."""
    return LossStepControl(
        num_workers=num_workers, num_groups=num_groups, local_steps=counted_steps(config)
    )


def tuning_state_of(
    config: RunConfig,
    checkpoint: Checkpoint | None,
    say: Callable[[str], None],
    rollbacks: Sequence[Record] = (),
) -> TuningState | None:
    """On rank 0: return the tuning state of a run after these ``rollbacks``. ``say`` receives a
    line for each part that does not fit the settings and is dropped. Modes are compared later, when
    the script has passed its settings (:mod:`psdist.ranks.checkpointing.ruling`)."""
    limits = [each.rollback for each in rollbacks]
    limited = _taken(config, checkpoint, limits, say)
    if limited is None:
        first = _first(config)
        limited = within_all(first, limits) if first is not None else None
        if limited is None or limited == first:
            return None
    if limited.codecs is not None:
        name = limited.codecs.names[limited.codecs.starts[-1][1]]
        say(f"resume: psdist continues with codec {name}{_most_of(limited.codecs)}")
    if limited.paces is not None:
        shown = ", ".join(map(str, limited.paces.steps[:_MOST_SHOWN]))
        more = ", ..." * (len(limited.paces.steps) > _MOST_SHOWN)
        say(f"resume: local steps by group had been {shown}{more}")
    if limited.steps is not None:
        say(f"resume: psdist continues with at most {limited.steps.starts[-1][1]} local steps")
    return limited


def _most_of(codecs: KeptCodecs) -> str:
    is_limited = codecs.lossiest < len(codecs.names) - 1
    return f", {codecs.names[codecs.lossiest]} at most" if is_limited else ""


def _first(config: RunConfig) -> TuningState | None:
    """Return the tuning state of a new run; None without one."""
    if is_auto(config):
        return TuningState(codecs=codec_control(config, 1).kept(0))
    if config.steps_by == "loss":
        control = loss_step_control(config, num_workers=1, num_groups=1)
        return TuningState(steps=control.kept(((0, counted_steps(config)),), 0))
    return None


def _taken(
    config: RunConfig,
    checkpoint: Checkpoint | None,
    limits: Sequence[Rollback],
    say: Callable[[str], None],
) -> TuningState | None:
    """Return the checkpoint's tuning state, limited by rollbacks; None if it does not fit."""
    if checkpoint is None or checkpoint.index.fidelity is None:
        return None
    kept = within_all(checkpoint.index.fidelity, limits)
    if kept.codecs is not None and (wrong := _wrong_codecs(config, kept.codecs)):
        say(f"resume: the codecs that psdist had chosen are dropped: {wrong}")
        return None
    if kept.steps is not None and (wrong := _wrong_steps(config, kept.steps)):
        say(f"resume: the local steps that psdist had chosen are dropped: {wrong}")
        return None
    if kept.paces is not None and (wrong := _wrong_paces(config, kept.paces)):
        say(f"resume: the speeds of groups are dropped: {wrong}")
        return None
    return kept


def _wrong_codecs(config: RunConfig, kept: KeptCodecs) -> str:
    """Return why this run cannot continue with these codecs; "" if it can."""
    if not is_auto(config):
        return "codec.push = auto is not set now"
    try:
        codec_control(config, 1).go_on(kept, 0)
    except ValueError as error:
        return f"they are {error}"
    return ""


def _wrong_steps(config: RunConfig, kept: KeptSteps) -> str:
    if config.steps_by != "loss":
        return "local.steps_by = loss is not set now"
    try:
        loss_step_control(config, num_workers=1, num_groups=1).go_on(kept)
    except ValueError as error:
        return f"they are {error}"
    return ""


def _wrong_paces(config: RunConfig, kept: KeptPaces) -> str:
    if config.steps_by != "speed":
        return "local.steps_by = speed is not set now"
    try:
        StepControl(sizes=kept.sizes, local_steps=counted_steps(config)).go_on(kept)
    except ValueError as error:
        return f"they are {error}"
    return ""


def packed(tuning_state: TuningState | None) -> str:
    return json.dumps(None if tuning_state is None else dataclasses.asdict(tuning_state))


def unpacked(text: str) -> TuningState | None:
    """Return the argument of :func:`packed`. Raises :class:`ProtocolError` for other text."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise ProtocolError(f"the tuning state that rank 0 sent is damaged: {error}") from error


def levels_of(tuning_state: TuningState | None) -> Sequence[tuple[int, int]]:
    """Return (round, level) of the codecs that psdist chooses, from round 0 on."""
    if tuning_state is None or tuning_state.codecs is None:
        return _FIRST_LEVELS
    return tuning_state.codecs.starts
