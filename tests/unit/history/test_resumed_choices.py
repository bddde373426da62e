"""With what of psdist's own choices attempts have continued, as the check judges it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psdist.controller.kept import KeptSteps, TuningState, rolled_back
from psdist.controller.loss_steps import LossStepControl
from psdist.controller.rollback import Rise
from psdist.history.lines import DecisionLine, StepLine
from psdist.history.rules.choices.resumed import Attempt, check_resumed, goes_on
from psdist.history.rules.findings import Findings, Rule
from psdist.history.run_record import RunRecord
from tests.unit.history.test_decisions import INT8, NONE, RUN
from tests.unit.ranks.checkpointing.test_tuning_state import CODECS, STEPS

NAME = "step-00000100"


def run_of(**changed: Any) -> RunRecord:
    told = {"attempt": 2, "restored": NAME, "restored_attempt": 1, "first_clocks": (100, 100)}
    return RUN.model_copy(update={"ladder": (), "codecs": (), **told, **changed})


def line(key: str, tuning_state: TuningState, checkpoint: str = NAME) -> StepLine:
    return StepLine.model_validate({key: {"checkpoint": checkpoint, "fidelity": tuning_state}})


def found(
    kept: list[StepLine], resumed: list[StepLine | DecisionLine], **changed: Any
) -> list[str]:
    findings = Findings(max_listed_per_rule=9)
    attempts = {1: Attempt(RUN, kept), 2: Attempt(run_of(**changed), resumed)}
    check_resumed(attempts, findings)
    assert set(findings.counts) <= {Rule.KEPT}
    return [*findings.lines()]


OTHER = TuningState(
    steps=KeptSteps(starts=((0, 5),), num_fixed=3, first_loss=2.5, totals=(0.1, 0.2), count=4)
)
WORDS = (
    "attempt 2 continued with other choices of psdist's own than attempt 1 has kept in "
    "step-00000100"
)


def test_what_was_kept_last_under_that_name_is_gone_on_with() -> None:
    kept = [line("kept", OTHER), line("kept", STEPS), line("kept", OTHER, "step-00000200")]
    assert found(kept, [line("resumed", STEPS)], local_steps_by_loss=8) == []
    (wrong,) = found(kept, [line("resumed", OTHER)], local_steps_by_loss=8)
    assert WORDS in wrong
    assert found([], [line("resumed", STEPS)], local_steps_by_loss=8)
    assert found([], [], local_steps_by_loss=8) == []


@pytest.mark.parametrize(
    ("tuning_state", "changed", "is_wrong"),
    [
        (STEPS, {}, False),
        (STEPS, {"local_steps_by_loss": 5}, False),
        (STEPS, {"local_steps_by_loss": 6}, True),
        (CODECS, {}, False),
        (CODECS, {"ladder": (NONE, INT8)}, False),
    ],
)
def test_nothing_goes_on_only_where_the_settings_choose_among_other_things(
    tuning_state: TuningState, changed: dict[str, Any], *, is_wrong: bool
) -> None:
    assert bool(found([line("kept", tuning_state)], [], **changed)) == is_wrong


def test_codecs_of_the_same_names_go_on() -> None:
    assert CODECS.codecs is not None
    ladder = tuple(
        NONE.model_copy(update={"push": push, "pull": pull or "none"})
        for push, _, pull in (each.partition("/") for each in CODECS.codecs.names)
    )
    assert tuple(each.name for each in ladder) == CODECS.codecs.names
    assert found([line("kept", CODECS)], [], ladder=ladder)
    assert found([line("kept", CODECS)], [line("resumed", CODECS)], ladder=ladder) == []


def test_of_attempts_that_were_not_recorded_nothing_is_said() -> None:
    findings = Findings(max_listed_per_rule=9)
    check_resumed({2: Attempt(run_of(), [line("resumed", STEPS)])}, findings)
    begins_afresh = run_of(restored="", restored_attempt=0, first_clocks=())
    attempts = {1: Attempt(RUN, [line("kept", STEPS)]), 2: Attempt(begins_afresh, [])}
    check_resumed(attempts, findings)
    assert not findings.total


# -- after a rollback ---------------------------------------------------------------------------


def ended(good: int, lossiest: int = 8) -> StepLine:
    return StepLine(rolled_back=rolled_back(good + 20, Rise(9.0, 1.0, good), lossiest))


BEGUN_OTHERWISE = (
    "attempt 2 has begun with other choices of psdist's own than attempts before it have left to it"
)


def first_steps(most: int) -> TuningState:
    """State of a run that begins with ``most`` local steps."""
    control = LossStepControl(num_workers=1, num_groups=1, local_steps=most)
    return TuningState(steps=control.kept(((0, most),), 0))


FIRST_LESS = first_steps(4)
LESS = TuningState(steps=replace(OTHER.steps, starts=((0, 4),))) if OTHER.steps else OTHER


@pytest.mark.parametrize(
    ("good", "resumed", "words"),
    [
        (100, LESS, ""),
        (99, LESS, "resumes from step-00000100; attempt 1 reported that the loss was good up to"),
        (100, OTHER, "attempt 2 is as lossy as what attempt 1 has ended with: 4 is allowed"),
    ],
)
def test_an_attempt_goes_on_from_before_with_what_is_allowed(
    good: int, resumed: TuningState, words: str
) -> None:
    lines = [line("kept", OTHER), ended(good)]
    wrong = found(lines, [line("resumed", resumed)], local_steps_by_loss=8)
    assert words in "\n".join(wrong)
    assert bool(wrong) == bool(words)


def test_where_nothing_less_lossy_was_left_nothing_is_limited() -> None:
    assert (last := ended(100, 1)).rolled_back is not None
    assert last.rolled_back.allowed == -1
    by_loss = {"local_steps_by_loss": 8}
    assert found([line("kept", OTHER), last], [line("resumed", OTHER)], **by_loss) == []
    assert found([last], [], restored="", restored_attempt=0, first_clocks=(), **by_loss) == []
    assert found([last], []) == [], "another run than one by the loss"
    (wrong,) = found([ended(99, 1)], [])
    assert "the loss was good up to iteration 99" in wrong


def test_an_attempt_that_starts_afresh_is_as_careful() -> None:
    afresh = {"restored": "", "restored_attempt": 0, "first_clocks": (), "local_steps_by_loss": 8}
    assert found([ended(0)], [], **afresh)
    assert found([ended(0)], [line("resumed", FIRST_LESS, "")], **afresh) == []
    (wrong,) = found([ended(0)], [line("resumed", LESS, "")], **afresh)
    assert BEGUN_OTHERWISE in wrong
    assert found([ended(0)], [], **{**afresh, "local_steps_by_loss": 4}) == []
    assert found([ended(0)], [], **{**afresh, "local_steps_by_loss": 0}) == []


def test_without_a_rollback_nothing_is_gone_on_with_but_a_checkpoint() -> None:
    afresh = {"restored": "", "restored_attempt": 0, "first_clocks": (), "local_steps_by_loss": 8}
    for forged in (STEPS, FIRST_LESS, first_steps(8)):
        (wrong,) = found([], [line("resumed", forged, "")], **afresh)
        assert BEGUN_OTHERWISE in wrong


def test_of_attempts_behind_one_that_was_not_recorded_the_beginning_is_not_known() -> None:
    told = {"attempt": 3, "restored": "", "restored_attempt": 0, "first_clocks": ()}
    run = run_of(**told, local_steps_by_loss=8)
    lines = [line("resumed", FIRST_LESS, "")]
    for first, is_wrong in ({}, False), ({1: Attempt(RUN, [])}, True):
        findings = Findings(max_listed_per_rule=9)
        check_resumed({**first, 2: Attempt(RUN, []), 3: Attempt(run, lines)}, findings)
        assert bool(findings.total) == is_wrong


def test_the_first_attempt_goes_on_with_nothing() -> None:
    resumed = line("resumed", FIRST_LESS, "").resumed
    assert resumed is not None
    told = {"restored": "", "first_clocks": ()}
    assert not goes_on(run_of(**told, attempt=1), resumed)
    assert goes_on(run_of(**told), resumed)
    assert not goes_on(run_of(), resumed)


@pytest.mark.parametrize("most", [8, 12, 4, 3])
def test_with_fewer_local_steps_goes_on_what_a_rollback_allows(most: int) -> None:
    """A rollback allows 8 of 16 steps: a run with 8 continues with the first loss, too."""
    assert OTHER.steps is not None
    kept = TuningState(steps=replace(OTHER.steps, starts=((0, 16), (3, 5))))
    left = TuningState(steps=replace(OTHER.steps, starts=((0, 8), (3, 5))))
    lines = [line("kept", kept), ended(100, 16)]
    goes = found(lines, [line("resumed", left)], local_steps_by_loss=most)
    drops = found(lines, [], local_steps_by_loss=most)
    assert (goes == [], drops == []) == (most >= 8, most < 8)


def test_with_more_than_is_allowed_an_attempt_begins_with_what_is() -> None:
    """Codecs were kept; now local steps are set, and an earlier rollback allows four."""
    lines = [ended(100), line("kept", CODECS)]
    assert found(lines, [line("resumed", FIRST_LESS)], local_steps_by_loss=8) == []
    assert found(lines, [line("resumed", LESS)], local_steps_by_loss=8)
