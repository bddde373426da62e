"""Rounds whose length the loss decides, as they are recorded: read, refused where damaged, and
judged by the check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from psdist.controller.kept import KeptSteps, TuningState, rolled_back
from psdist.controller.loss_steps import MOST_LOSS
from psdist.controller.observed import LossHeard, StepsObserved
from psdist.controller.rollback import KeptRise, Rise
from psdist.errors import HistoryError
from psdist.history.lines import (
    STEP_LINES,
    DecisionLine,
    Fixed,
    LengthLine,
    LineRecords,
    StepLine,
    WorkerLines,
    read_choices,
    read_worker_lines,
)
from psdist.history.rules.choices.lengths import check_lengths
from psdist.history.rules.findings import Findings, Rule
from psdist.history.run_record import RunRecord
from psdist.history.summary import StepsTold, Summary

RUN = RunRecord(
    psdist="1",
    mode="sync",
    local_steps_by_loss=4,
    groups=((0,), (1, 2)),
    slices=((), ()),
    num_servers=1,
    num_chunks=0,
    owners=(),
)


def summary(**told: Any) -> Summary:
    """Return a summary with the compared members; no other is read."""
    steps = (StepsTold(round=0, steps=4), StepsTold(round=5, steps=2))
    given = {"local_steps": 63, "rounds_cut": 1, "steps_by_loss": steps, **told}
    return Summary.model_construct(**given)


def test_records_are_read_as_they_were_made(tmp_path: Path) -> None:
    records = [LineRecords(tmp_path / "history", worker, LengthLine) for worker in range(2)]
    records[0].add(round=0, steps=4)
    records[0].add(round=1, steps=2)
    records[0].close()
    records[1].add(round=0, steps=4)
    records[1].flush()
    first, second = read_worker_lines(tmp_path / "history", LengthLine, num_workers=2)
    lines = (LengthLine(round=0, steps=4), LengthLine(round=1, steps=2))
    assert first == WorkerLines(lines=lines, is_complete=True)
    assert second == WorkerLines(lines=lines[:1], is_complete=False)
    records[1].close()
    with pytest.raises(HistoryError, match=r"worker-0.lengths is there already"):
        LineRecords(tmp_path / "history", 0, LengthLine)


@pytest.mark.parametrize(
    "damaged", ["", "{}", '{"round": -1, "steps": 1}', '{"round": 0}', "closed"]
)
def test_damage_names_the_file(damaged: str, tmp_path: Path) -> None:
    (tmp_path / "worker-0.lengths").write_text(f"{damaged}\nclosed\n")
    with pytest.raises(HistoryError, match=r"worker-0.lengths is damaged"):
        read_worker_lines(tmp_path, LengthLine, num_workers=1)
    (tmp_path / "worker-0.lengths").write_text("closed\n")
    with pytest.raises(HistoryError, match=r"cannot read .*worker-1.lengths"):
        read_worker_lines(tmp_path, LengthLine, num_workers=2)
    of_a_run_that_ended_early = read_worker_lines(
        tmp_path, LengthLine, num_workers=2, may_be_missing=True
    )
    assert [each.is_complete for each in of_a_run_that_ended_early] == [True, False]
    assert read_choices(tmp_path, StepLine) == []


@pytest.mark.parametrize(
    "damaged",
    [
        '{"worker": 0, "round": 0, "count": 0, "total": 1.0}',
        '{"worker": -1, "round": 0, "count": 1, "total": 1.0}',
        '{"worker": 0, "round": 0, "count": 1, "total": NaN}',
        '{"worker": 0, "round": 0, "count": 1, "total": Infinity}',
    ],
)
def test_a_report_that_cannot_be_is_damage(damaged: str, tmp_path: Path) -> None:
    (tmp_path / STEP_LINES).write_text(f'{{"reported": {damaged}}}\n')
    with pytest.raises(HistoryError, match=r"steps.jsonl is damaged"):
        read_choices(tmp_path, StepLine)


def reported(worker: int, total: float, *, count: int = 1, round: int = 1) -> StepLine:
    return StepLine(reported=LossHeard(worker=worker, round=round, count=count, total=total))


def fixed(block: int, *steps: int, why: str = "") -> StepLine:
    return StepLine(fixed=Fixed(loader=0, number=0, block=block, steps=list(steps), why=why))


WHY = "the loss is 1, 4 at first"
STEPS = [
    *[fixed(0, 4, 4), reported(0, 4.0), reported(2, 8.0, count=2), fixed(1, 4, 4)],
    *[reported(1, 1.0, round=5), fixed(2, 2, 2, why=WHY)],
]
MINE = [[4, 4, 1, 4, 4, 2], [4, 4, 4, 4, 4, 2], [4, 4, 4, 4, 4, 2]]
"""By worker, the steps of its rounds; the first one has had a round cut. 63 together."""


def found(
    workers: list[list[int]],
    steps: list[StepLine],
    told: Summary | None = None,
    *,
    is_complete: bool = True,
) -> tuple[str, ...]:
    lines = [
        WorkerLines(
            lines=tuple(LengthLine(round=number, steps=n) for number, n in enumerate(each)),
            is_complete=is_complete,
        )
        for each in workers
    ]
    return judged(lines, steps, told)


def judged(
    workers: list[WorkerLines[LengthLine]], steps: list[StepLine], told: Summary | None = None
) -> tuple[str, ...]:
    findings = Findings(max_listed_per_rule=9)
    check_lengths(RUN, workers, steps, told, findings)
    assert set(findings.counts) <= {Rule.HANDS}
    return findings.lines()


def test_what_is_right_is_not_found() -> None:
    assert found(MINE, STEPS) == ()
    assert found(MINE, STEPS, summary(local_steps=63, rounds_cut=1)) == ()
    assert found(MINE, [*STEPS, fixed(3, 2, 2)], summary()) == (), "as before is no change"
    early = summary(local_steps=999, rounds_cut=9)
    assert found(MINE, STEPS, early, is_complete=False) == (), "others were not recorded"
    part = [WorkerLines(lines=(), is_complete=each) for each in (True, False, True)]
    assert judged(part, STEPS, early) == ()


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"rounds_cut": 0}, "summary.json says rounds_cut 0; by what workers recorded it is 1"),
        ({"rounds_cut": None}, "rounds_cut None"),
        (
            {"steps_by_loss": ()},
            "steps_by_loss [], by round; what was fixed is [(0, 4), (5, 2)]",
        ),
        (
            {"steps_by_loss": (StepsTold(round=0, steps=4),)},
            "says steps_by_loss [(0, 4)], by round",
        ),
        (
            {"local_steps": 64},
            "summary.json says local_steps 64; by what workers recorded it is 63",
        ),
    ],
)
def test_a_summary_that_says_something_else_is_found(told: dict[str, Any], words: str) -> None:
    (line,) = found(MINE, STEPS, summary(**{"local_steps": 63, **told}))
    assert words in line


def test_rounds_that_are_too_long_or_out_of_order_are_found() -> None:
    longer = [MINE[0], [4, 4, 4, 4, 4, 3], MINE[2]]
    assert found(longer, STEPS) == ("worker 1: round 5 is of 3 steps, 2 were fixed",)
    never = [MINE[0], MINE[1], [*MINE[2], 2, 2, 2, 2]]
    assert found(never, STEPS) == ("worker 2: round 9: its steps were never fixed",)
    lines = tuple(LengthLine(round=number, steps=4) for number in (0, 2))
    (line,) = judged([WorkerLines(lines=lines, is_complete=True)], STEPS)
    assert line == "worker 0: round 2 is recorded where round 1 belongs"
    (line,) = found(MINE, [*STEPS[:-1], fixed(2, 2, why=WHY)])[1:2]
    assert "its steps were never fixed" in line, "of this group"


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([*STEPS[:-1], fixed(2, 3, 3, why=WHY)], f"fixed [3, 3] ({WHY}); what was observed calls"),
        ([*STEPS[:-1], fixed(2, 2, 2, why="low")], "calls for [2, 2] (the loss is 1, 4 at first)"),
        ([*STEPS[:-1], fixed(2, 2, 1, why=WHY)], "fixed [2, 1]"),
        ([*STEPS[:4], *STEPS[5:]], "line 5: fixed [2, 2]"),
        ([*STEPS[:4], STEPS[5], STEPS[4]], "calls for [4, 4] (as before)"),
        ([*STEPS, STEPS[0]], "line 7: Term(loader=0, number=0, block=0) is fixed twice"),
        ([reported(3, 1.0), *STEPS], "line 1: of no worker of this run"),
        ([reported(0, 2 * MOST_LOSS), *STEPS], "line 1: of no worker of this run, or of losses"),
        ([reported(0, -1.0), *STEPS], "line 1: of no worker of this run, or of losses"),
        (
            [StepLine(observed=StepsObserved(group=0, round=0, step_us=1)), *STEPS],
            "line 1: is no report",
        ),
        ([fixed(1, 4, 4)], "block=1) was fixed where Term(loader=0, number=0, block=0) was to be"),
    ],
)
def test_steps_that_do_not_follow_are_found(steps: list[StepLine], words: str) -> None:
    assert any(words in each for each in found(MINE, steps)), found(MINE, steps)


@pytest.mark.parametrize("kind", [StepLine, DecisionLine])
def test_a_line_says_one_thing(kind: type[StepLine | DecisionLine]) -> None:
    """Else one of two would be read, and the other not be judged."""
    reported = '"reported": {"worker": 0, "round": 3, "count": 1, "total": 1.0}'
    other = {
        StepLine: '"observed": {"group": 0, "round": 0, "step_us": 1}',
        DecisionLine: '"sized": {"sizes": [3]}',
    }[kind]
    for one in (reported, other):
        kind.model_validate_json(f"{{{one}}}")
    for text in ("{}", f"{{{reported}, {other}}}"):
        with pytest.raises(ValidationError, match="members, where one belongs"):
            kind.model_validate_json(text)


def test_the_largest_losses_are_taken() -> None:
    assert found(MINE, [STEPS[0], reported(0, MOST_LOSS), fixed(1, 4, 4), fixed(2, 4, 4)])[1:] == ()


def test_nothing_stands_behind_a_rollback_and_no_run_is_completed_with_one() -> None:
    ended = StepLine(rolled_back=rolled_back(9, Rise(9.0, 1.0, 4), 4))
    lines = found(MINE, [*STEPS[:-1], ended, STEPS[-1]], summary(exit="completed"))
    words = "follows a rollback, which ended the run"
    assert [f"line {len(STEPS) + 1}: {words}" in each for each in lines].count(True) == 1
    assert any("summary.json says that it was completed" in each for each in lines)


# -- from attempt to attempt ---------------------------------------------------------------------

NAME = "step-00000006"
AGAIN = RUN.model_copy(
    update={"restored": NAME, "restored_attempt": 1, "first_clocks": (6, 6), "groups": ((0,), (1,))}
)
KEPT = KeptSteps(starts=((0, 3),), num_fixed=3, first_loss=4.0, totals=(2.0, 0.0), count=1)


def kept_line(key: str, kept: KeptSteps | None, checkpoint: str = NAME) -> StepLine:
    told = {"checkpoint": checkpoint, "fidelity": TuningState(steps=kept)}
    return StepLine.model_validate({key: told})


def fixed_line(block: int, steps: int, why: str = "") -> StepLine:
    return StepLine(fixed=Fixed(loader=0, number=0, block=block, steps=[steps] * 2, why=why))


def judged_again(*lines: StepLine, rounds: range = range(6, 10), steps: int = 3) -> list[str]:
    findings = Findings(max_listed_per_rule=9)
    made = tuple(LengthLine(round=each, steps=steps - (each > 8)) for each in rounds)
    workers = [WorkerLines(lines=made, is_complete=True)] * 2
    told = summary(
        local_steps=2 * sum(each.steps for each in made),
        rounds_cut=0,
        steps_by_loss=(StepsTold(round=0, steps=3), StepsTold(round=9, steps=2)),
    )
    check_lengths(AGAIN, workers, lines, told, findings)
    return [*findings.lines()]


FALLS = StepLine(reported=LossHeard(worker=0, round=9, count=1, total=0.0))
WHY = "the loss is 1, 4 at first"
BEGINS = kept_line("resumed", KEPT)


def test_a_run_goes_on_with_the_steps_of_rounds_that_had_begun() -> None:
    assert judged_again(BEGINS, FALLS, fixed_line(3, 2, WHY)) == []
    later = kept_line(
        "kept",
        KeptSteps(starts=((0, 2),), num_fixed=4, first_loss=4.0, totals=(0.0, 0.0), count=0),
        "step-00000009",
    )
    assert judged_again(BEGINS, FALLS, fixed_line(3, 2, WHY), later) == []
    early = kept_line("kept", KEPT, "step-00000007")
    assert judged_again(BEGINS, early, FALLS, fixed_line(3, 2, WHY)) == []


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((BEGINS, fixed_line(2, 3), FALLS, fixed_line(3, 2, WHY)), "is fixed twice"),
        ((BEGINS, FALLS, fixed_line(4, 2, WHY)), "was fixed where"),
        ((BEGINS, FALLS, BEGINS, fixed_line(3, 2, WHY)), "line 3: names steps that the run"),
        ((FALLS, fixed_line(3, 2, WHY)), "its steps were never fixed"),
        (
            (kept_line("resumed", KEPT, "step-00000007"), FALLS, fixed_line(3, 2, WHY)),
            "line 1: names steps that the run continued with, but it did not",
        ),
        (
            (kept_line("resumed", replace(KEPT, starts=((0, 5),))), FALLS, fixed_line(3, 2, WHY)),
            "line 1: the run continued with steps of more than 4 local steps, or not whole",
        ),
        (
            (BEGINS, kept_line("kept", replace(KEPT, count=2)), FALLS, fixed_line(3, 2, WHY)),
            "line 2: other choices than follow from what was reported",
        ),
    ],
)
def test_what_no_run_goes_on_with(lines: tuple[StepLine, ...], words: str) -> None:
    assert any(words in line for line in judged_again(*lines)), judged_again(*lines)


def test_rounds_begin_where_the_checkpoint_was_made() -> None:
    lines = (BEGINS, FALLS, fixed_line(3, 2, WHY))
    assert any(
        "round 5 is recorded where round 6" in each
        for each in judged_again(*lines, rounds=range(5, 10))
    )


# -- a loss that blows up ------------------------------------------------------------------------


def found_of(run: RunRecord, *lines: StepLine) -> list[str]:
    """Return the findings of an attempt that has ended early."""
    findings = Findings(max_listed_per_rule=9)
    check_lengths(run, [], lines, None, findings)
    return [*findings.lines()]


def test_losses_that_are_none_are_no_first_loss() -> None:
    lines = (
        *(reported(0, MOST_LOSS), fixed(0, 4, 4), reported(0, 4.0), fixed(1, 4, 4)),
        *(reported(0, 1.0), fixed(2, 2, 2, why="the loss is 1, 4 at first")),
    )
    assert found_of(RUN.model_copy(update={"rollback": 2.0}), *lines) == []
    assert found_of(RUN, *lines), "without rollback it is a loss as others are"


def test_a_checkpoint_of_a_run_in_which_nobody_looked_is_taken_as_good() -> None:
    run = AGAIN.model_copy(update={"rollback": 2.0})
    begun = TuningState(steps=KEPT, rise=KeptRise(best=None, good=6))
    said = {"checkpoint": NAME, "fidelity": begun}
    assert found_of(run, BEGINS, StepLine.model_validate({"kept": said})) == []
    at_first = KeptSteps(starts=((0, 4),), num_fixed=0, first_loss=None, totals=(0.0, 0.0), count=0)
    said = {"checkpoint": NAME, "fidelity": replace(begun, steps=at_first)}
    assert found_of(run, StepLine.model_validate({"kept": said})) == []


def test_a_first_attempt_goes_on_with_nothing() -> None:
    """A forged line would let it begin with any steps."""
    forged = kept_line("resumed", KEPT, "")
    words = "line 1: names steps that the run continued with, but it did not"
    assert any(words in each for each in found_of(RUN, forged))
    again = RUN.model_copy(update={"attempt": 2})
    assert not any(words in each for each in found_of(again, forged))
