"""Whether attempts of a run have resumed psdist's own choices.

Owns the part of rule 7 of docs/reference/history.md on psdist's own choices: compares those in a
checkpoint with those that the next attempt began with. Pure.

    check_resumed({1: (run, kept_lines), 2: (run, kept_lines)}, findings)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from psdist.controller.codec import CodecControl
from psdist.controller.kept import (
    KeptMode,
    KeptModes,
    Rollback,
    TuningState,
    within,
    within_all,
)
from psdist.controller.loss_steps import LossStepControl
from psdist.controller.steps import StepControl
from psdist.history.lines import ChoiceLine, KeptLine
from psdist.history.rules.findings import Findings, Rule
from psdist.history.run_record import RunRecord


class Attempt(NamedTuple):
    run: RunRecord
    """The promises of the first parameter set."""
    lines: Sequence[ChoiceLine]


def check_resumed(attempts: Mapping[int, Attempt], findings: Findings) -> None:
    """Require that each recorded attempt resumes the choices of its checkpoint, within the limits
    of earlier rollbacks. With other settings, or without a checkpoint, it begins as every run does,
    within these limits."""
    for number, (run, lines) in sorted(attempts.items()):
        before = [
            (other, line.rolled_back)
            for other, attempt in sorted(attempts.items())
            for line in attempt.lines
            if other < number and line.rolled_back is not None
        ]
        _check_rollbacks(number, run, lines, before, findings)
        maker = attempts.get(run.restored_attempt)
        # Attempts without a record may have ended with rollbacks, too.
        are_known = all(each in attempts for each in range(1, number))
        if maker is None if run.restored else not are_known:
            continue
        of_name = [
            line.kept.fidelity
            for line in (maker.lines if maker is not None else ())
            if line.kept is not None and line.kept.checkpoint == run.restored
        ]
        resumed = [line.resumed.fidelity for line in lines if line.resumed is not None]
        now = resumed[0] if resumed else None
        if now != _due(run, of_name[-1] if of_name else None, [each for _, each in before]):
            findings[Rule.KEPT].add(
                f"attempt {number} continued with other choices of psdist's own than attempt "
                f"{run.restored_attempt} has kept in {run.restored}"
                if run.restored
                else f"attempt {number} has begun with other choices of psdist's own than attempts "
                "before it have left to it"
            )


def goes_on(run: RunRecord, resumed: KeptLine) -> bool:
    """Return True if this attempt may have such a line: of its checkpoint, or, after a rollback,
    without one."""
    return resumed.checkpoint == run.restored and (bool(run.restored) or run.attempt > 1)


def _due(
    run: RunRecord, kept: TuningState | None, limits: Sequence[Rollback]
) -> TuningState | None:
    """Return the choices that this attempt must resume; None if it begins as every run does.
    ``kept``: those of its checkpoint."""
    left = within_all(kept, limits) if kept is not None else None
    if left is not None and _may_go_on(run, left):
        return left
    first = _first(run)
    limited = within_all(first, limits)
    return limited if limited != first else None


def _check_rollbacks(
    number: int,
    run: RunRecord,
    lines: Sequence[ChoiceLine],
    before: Sequence[tuple[int, Rollback]],
    findings: Findings,
) -> None:
    """Require that no attempt after an (attempt, rollback) resumes a checkpoint made after the rise
    of the loss, or choices that were too lossy."""
    broken = findings[Rule.KEPT]
    resumed = next((line.resumed.fidelity for line in lines if line.resumed is not None), None)
    for ended, each in before:
        step = int(run.restored.removeprefix("step-") or 0)
        if run.restored_attempt <= ended and step > each.good:
            broken.add(
                f"attempt {number} resumes from {run.restored}; attempt {ended} reported that the "
                f"loss was good up to iteration {each.good}"
            )
        ladder = tuple(level.name for level in run.ladder)
        is_same = each.names == ladder if each.names else run.local_steps_by_loss > each.allowed
        is_limited = is_same and each.allowed >= 0
        if is_limited and (resumed is None or within(resumed, each) != resumed):
            broken.add(
                f"attempt {number} is as lossy as what attempt {ended} has ended with: "
                f"{each.allowed} is allowed"
            )


def _may_go_on(run: RunRecord, tuning_state: TuningState) -> bool:
    """Return True if this attempt has the same alternatives, so that it must resume the choice."""
    try:
        if tuning_state.codecs is not None:
            _codec_control(run).go_on(tuning_state.codecs, 0)
            return True
        if tuning_state.steps is not None:
            _step_control(run).go_on(tuning_state.steps)
            return True
        if tuning_state.paces is not None:
            if run.local_steps_by_speed:
                sizes = [len(workers) for workers in run.groups]
                local_steps = run.local_steps_by_speed
                StepControl(sizes=sizes, local_steps=local_steps).go_on(tuning_state.paces)
            return run.local_steps_by_speed > 0
        if tuning_state.modes is not None:
            return may_go_on_with_modes(run, tuning_state.modes)
    except ValueError:
        return False
    return False


def may_go_on_with_modes(run: RunRecord, modes: KeptModes) -> bool:
    """Return True if this attempt has the settings of these modes."""
    return modes.are_of(
        by=run.mode_by, mode=run.mode, staleness=run.staleness or 0, highest=run.auto_staleness
    )


def begins_with(run: RunRecord) -> KeptModes | None:
    """Return the first mode of such a run; None if the settings decide the mode of every round."""
    if run.mode_by not in ("script", "auto"):
        return None
    start = KeptMode(rounds=(0,), mode=run.mode, staleness=run.staleness or 0)
    return KeptModes(by=run.mode_by, starts=(start,))


def _first(run: RunRecord) -> TuningState:
    """Return the choices with which every run begins; 0 steps, which no limit lowers, where psdist
    chooses nothing."""
    if run.ladder:
        return TuningState(codecs=_codec_control(run).kept(0))
    starts = ((0, run.local_steps_by_loss),)
    return TuningState(steps=_step_control(run).kept(starts, 0))


def _codec_control(run: RunRecord) -> CodecControl:
    names = [each.name for each in run.ladder]
    return CodecControl(num_groups=1, names=names, loss_patience=run.loss_patience)


def _step_control(run: RunRecord) -> LossStepControl:
    return LossStepControl(num_workers=1, num_groups=1, local_steps=run.local_steps_by_loss)
