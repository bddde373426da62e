"""Hands and steps as they are recorded: read, refused where damaged, and judged by the check."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from psdist.controller.kept import KeptPaces, KeptPass, TuningState
from psdist.controller.observed import StepsObserved
from psdist.errors import HistoryError
from psdist.history.lines import (
    STEP_LINES,
    Fixed,
    HandLine,
    KeptLine,
    LineRecords,
    StepLine,
    WorkerLines,
    read_choices,
    read_worker_lines,
)
from psdist.history.rules.choices.hands import Attempt, check_dealt_on, check_hands
from psdist.history.rules.findings import Findings, Rule
from psdist.history.run_record import RunRecord

RUN = RunRecord(
    psdist="1",
    mode="sync",
    local_steps_by_speed=2,
    groups=((0,), (1,)),
    slices=((),),
    num_servers=1,
    num_chunks=0,
    owners=(),
)


@dataclass(frozen=True)
class Dealt:
    loader: int = 1
    number: int = 0
    hand: int = 0
    start: int = 0
    stop: int = 4
    batches: int = 2
    end: int = -1
    left: int = 0
    may_leave: int = 0


def line(**given: int) -> HandLine:
    return HandLine.model_validate({**vars(Dealt()), "round": 0, **given})


def test_records_are_read_as_they_were_made(tmp_path: Path) -> None:
    records = [LineRecords(tmp_path / "history", worker, HandLine) for worker in range(2)]
    records[0].add(round=3, **vars(Dealt()))
    records[0].add(round=-1, **vars(Dealt(hand=1, end=8)))
    records[0].close()
    records[0].flush()
    records[1].add(round=3, **vars(Dealt(hand=5)))
    records[1].flush()
    first, second = read_worker_lines(tmp_path / "history", HandLine, num_workers=2)
    assert first.lines == (line(round=3), line(hand=1, end=8, round=-1))
    assert first.is_complete
    assert second == WorkerLines(lines=(line(hand=5, round=3),), is_complete=False)
    records[1].close()


def test_evidence_is_not_written_over(tmp_path: Path) -> None:
    LineRecords(tmp_path, 0, HandLine).close()
    with pytest.raises(HistoryError, match=r"worker-0.hands is there already"):
        LineRecords(tmp_path, 0, HandLine)


def test_a_line_that_a_crash_has_cut_is_left_out(tmp_path: Path) -> None:
    text = line().model_dump_json()
    (tmp_path / "worker-0.hands").write_text(f"{text}\n{text[:20]}")
    (only,) = read_worker_lines(tmp_path, HandLine, num_workers=1)
    assert only == WorkerLines(lines=(line(),), is_complete=False)


@pytest.mark.parametrize(
    "damaged",
    ["", "[]", '{"loader": 1}', line().model_dump_json().replace("4", "-4"), "closed\nclosed"],
)
def test_damage_names_the_file(damaged: str, tmp_path: Path) -> None:
    (tmp_path / "worker-0.hands").write_text(f"{damaged}\n{line().model_dump_json()}\n")
    with pytest.raises(HistoryError, match=r"worker-0.hands is damaged"):
        read_worker_lines(tmp_path, HandLine, num_workers=1)
    (tmp_path / STEP_LINES).write_text(f"{damaged}\n")
    with pytest.raises(HistoryError, match=r"steps.jsonl is damaged"):
        read_choices(tmp_path, StepLine)


def test_a_missing_file_is_named_where_the_run_did_not_end_early(tmp_path: Path) -> None:
    (told,) = read_worker_lines(tmp_path, HandLine, num_workers=1, may_be_missing=True)
    assert (told.lines, told.is_complete) == ((), False)
    with pytest.raises(HistoryError, match=r"cannot read .*worker-0.hands"):
        read_worker_lines(tmp_path, HandLine, num_workers=1)


OBSERVED = [
    StepLine(observed=StepsObserved(group=group, round=0, step_us=us))
    for group, us in ((0, 3000), (1, 1000))
]


def fixed(block: int, *steps: int, why: str = "") -> StepLine:
    return StepLine(fixed=Fixed(loader=1, number=0, block=block, steps=list(steps), why=why))


WHY = "a step takes 1.50 ms in the mean, not 3.00 ms"
STEPS = [fixed(0, 2, 2), *OBSERVED, fixed(1, 1, 3, why=WHY)]
MINE = [
    [line(stop=4, batches=2), line(hand=1, start=8, stop=10, batches=1, end=16, round=1)],
    [
        line(start=4, stop=8, batches=2),
        line(hand=1, start=10, stop=16, batches=3, end=16, round=1),
    ],
]
"""Hands of two workers, in batches of two."""


def found(
    workers: list[list[HandLine]], steps: list[StepLine], run: RunRecord = RUN
) -> tuple[str, ...]:
    findings = Findings(max_listed_per_rule=9)
    told = [WorkerLines(lines=tuple(lines), is_complete=True) for lines in workers]
    check_hands(run, told, steps, findings)
    assert set(findings.counts) <= {Rule.HANDS}
    return findings.lines()


def test_what_is_right_is_not_found() -> None:
    assert found(MINE, STEPS) == ()
    fewer = [[MINE[0][0]], MINE[1]]  # the first has left before the second hand
    assert found(fewer, STEPS) == ()


def changed(worker: int, place: int, **update: Any) -> list[list[HandLine]]:
    lines = [list(each) for each in MINE]
    lines[worker][place] = lines[worker][place].model_copy(update=update)
    return lines


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (changed(0, 0, batches=1), "is of 1 batches, 2 were fixed"),
        (changed(0, 0, batches=3), "is of 3 batches, 2 were fixed"),
        (changed(0, 1, batches=2), "is of 2 batches, 1 were fixed"),
        (changed(0, 0, start=1), "the samples 1 to 4 were dealt, those before end at 0"),
        (changed(1, 0, start=3), "the samples 3 to 8 were dealt, those before end at 4"),
        (changed(1, 0, start=5), "the samples 5 to 8 were dealt, those before end at 4"),
        (changed(1, 0, stop=9), "the samples 8 to 10 were dealt, those before end at 9"),
        (changed(1, 1, stop=15), "hand 1 ends at 15, workers say [16]"),
        (changed(1, 1, end=17), "workers say [16, 17]"),
        (changed(1, 1, left=1), "leaves out 1 samples"),
        (changed(1, 1, round=0), "ended in round 0, as the hand before it"),
        (changed(1, 1, hand=2), "follows 0"),
        (changed(0, 0, number=1), "hand 0 of pass 1 over loader 1 was never fixed"),
        ([[MINE[0][0]], [MINE[1][0], MINE[0][1], MINE[1][1]]], "follows 1"),
        (
            [[MINE[0][0]], [MINE[1][0], MINE[1][1].model_copy(update={"start": 7})]],
            "the samples 7 to 16 were dealt, those before end at 8",
        ),
        (
            [
                [each.model_copy(update={"end": 8}) for each in lines[:1]] + lines[1:]
                for lines in MINE
            ],
            "hand 0 is the last one, and others follow",
        ),
    ],
)
def test_what_is_dealt_wrongly_is_found(workers: list[list[HandLine]], words: str) -> None:
    assert any(words in each for each in found(workers, STEPS)), found(workers, STEPS)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([STEPS[0], *OBSERVED, fixed(1, 1, 3, why="no reason")], "calls for [1, 3]"),
        ([STEPS[0], *OBSERVED, fixed(1, 2, 2)], "calls for [1, 3]"),
        ([STEPS[0], fixed(1, 1, 3, why=WHY), *OBSERVED], "calls for [2, 2] (as before)"),
        ([STEPS[0], *STEPS], "line 2: Term(loader=1, number=0, block=0) is fixed twice"),
        ([STEPS[0], *OBSERVED], "was never fixed"),
        (
            [StepLine(observed=StepsObserved(group=2, round=0, step_us=1)), *STEPS],
            "line 1: of no group of this run",
        ),
    ],
)
def test_steps_that_do_not_follow_are_found(steps: list[StepLine], words: str) -> None:
    assert any(words in each for each in found(MINE, steps)), found(MINE, steps)


# -- from attempt to attempt -----------------------------------------------------------------------

AGAIN = RUN.model_copy(
    update={
        "attempt": 2,
        "restored": "step-00000001",
        "restored_attempt": 1,
        "first_clocks": (1, 1),
    }
)


def test_hands_of_a_resumed_run_follow_each_other_too() -> None:
    assert found(MINE, STEPS, AGAIN) == ()
    later = [[each for each in lines if each.hand] for lines in MINE]
    assert found(later, STEPS, AGAIN) == ()
    (line,) = found(changed(0, 1, start=9), STEPS, AGAIN)
    assert "in hand 1 the samples 9 to 10 were dealt, those before end at 8" in line


def test_a_resumed_run_has_the_steps_that_its_checkpoint_fixed() -> None:
    its = KeptPass(loader=1, number=0, starts=((0, (2, 2)), (1, (1, 3))), num_fixed=2)
    told: dict[str, Any] = {
        "total": 4,
        "steps": (1, 3),
        "step_us": ((3000,), (1000,)),
        "passes": (its,),
    }
    for sizes, num_found in ((1, 1), 0), ((2, 1), 4):
        paces = KeptPaces(sizes=sizes, **told)
        resumed = KeptLine(checkpoint=AGAIN.restored, fidelity=TuningState(paces=paces))
        assert len(found(MINE, [StepLine(resumed=resumed)], AGAIN)) == num_found


def dealt_on(first: list[list[HandLine]], *second: HandLine) -> Sequence[str]:
    """``second``: of worker 0 in the next attempt, which continues behind round 0."""
    findings = Findings(max_listed_per_rule=20)
    of_first = [WorkerLines(lines=tuple(each), is_complete=True) for each in first]
    of_second = [WorkerLines(lines=each, is_complete=True) for each in (second, ())]
    attempts = {1: Attempt(RUN, of_first), 2: Attempt(AGAIN, of_second)}
    check_dealt_on(attempts, findings)
    return findings.lines()


def test_a_pass_goes_on_behind_the_checkpoint() -> None:
    assert not dealt_on(MINE, line(hand=1, start=8, stop=10, round=1))
    assert not dealt_on(MINE), "it has not come to train"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"hand": 1, "start": 7}, "continues with hand 1 at sample 7"),
        ({"hand": 2, "start": 8}, "continues with hand 2 at sample 8"),
        ({"hand": 0, "start": 0}, "continues with hand 0 at sample 0"),
        ({"number": 3, "hand": 1, "start": 8}, "hands up to 0 were dealt, to 0"),
        ({"number": 3}, "pass 0 over loader 1, which was under way at .* is not dealt to its end"),
    ],
)
def test_what_is_dealt_twice_or_never_is_found(given: dict[str, int], found: str) -> None:
    lines = dealt_on(MINE, line(**{"stop": 10, "round": 1, **given}))
    assert any(re.search(found, each) for each in lines), lines


def test_a_pass_that_was_over_is_not_dealt_on() -> None:
    first = [[line(stop=4, end=8)], [line(start=4, stop=8, end=8)]]
    (found,) = dealt_on(first, line(hand=1, start=8, stop=10, round=1))
    assert "was over at step-00000001, and is dealt again" in found


def judged(*attempts: tuple[RunRecord, list[list[HandLine]]]) -> tuple[str, ...]:
    """By the number that each run has."""
    findings = Findings(max_listed_per_rule=9)
    told = {
        run.attempt: Attempt(run, [WorkerLines(lines=tuple(it), is_complete=True) for it in lines])
        for run, lines in attempts
    }
    check_dealt_on(told, findings)
    assert set(findings.counts) <= {Rule.HANDS}
    return findings.lines()


THIRD = AGAIN.model_copy(update={"attempt": 3, "restored_attempt": 2, "first_clocks": (2, 2)})
"""It resumes the second attempt behind round 1."""


def test_of_a_pass_that_began_in_an_attempt_without_a_record_nothing_is_said() -> None:
    second = [[line(loader=1, hand=1, start=4, stop=8, round=1)], []]
    unknown, wrong = line(loader=0, hand=7, round=2), line(loader=1, hand=9, round=2)
    (only,) = judged((AGAIN, second), (THIRD, [[unknown, wrong], []]))
    assert "attempt 3: pass 0 over loader 1 continues with hand 9" in only


# -- groups in different hands ------------------------------------------------------------------

SSP: dict[str, Any] = {"mode": "ssp", "staleness": 1}
REST = [
    [line(hand=1, start=8, stop=10, batches=1, end=16, round=1)],
    [line(hand=1, start=10, stop=16, batches=3, end=16, round=1)],
]
"""Behind the first hands of ``MINE``."""
BEGUN = [lines[:1] for lines in MINE]


def dealt_apart(
    first: list[list[HandLine]], second: list[list[HandLine]], **changed: Any
) -> tuple[str, ...]:
    return judged(
        (RUN.model_copy(update=SSP), first),
        (AGAIN.model_copy(update={**SSP, **changed}), second),
    )


def test_each_worker_continues_with_its_own_next_hand() -> None:
    assert dealt_apart(MINE, REST) == ()
    ahead = {"first_clocks": (2, 1)}
    assert dealt_apart(MINE, [[], REST[1]], **ahead) == (), "worker 0 had its last hand"
    others = {"groups": ((0, 1),), "first_clocks": (1,)}
    assert dealt_apart(MINE, [[line(hand=5, round=1)], []], **others) == (), "no pass continues"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            MINE,
            [[REST[0][0].model_copy(update={"hand": 2})], REST[1]],
            "continues with hand 2 on worker 0; by step-00000001 hands up to 1 were dealt to it",
        ),
        (
            [[lines[0].model_copy(update={"end": 8})] for lines in BEGUN],
            [REST[0], []],
            "continues with hand 1 on worker 0; by step-00000001 hands up to 1 were dealt to it, "
            "which was the last",
        ),
        (
            MINE,
            [[line(number=1, stop=8, end=8, round=1)], REST[1]],
            "pass 0 over loader 1, which was under way at step-00000001, is not dealt to its end "
            "on worker 0",
        ),
        (
            MINE,
            [[REST[0][0].model_copy(update={"start": 9})], REST[1]],
            "attempts up to 2: pass 0 over loader 1: in hand 1 the samples 9 to 10 were dealt, "
            "those before end at 8",
        ),
    ],
)
def test_what_a_worker_is_dealt_wrongly_behind_a_checkpoint_is_found(
    first: list[list[HandLine]], second: list[list[HandLine]], words: str
) -> None:
    lines = dealt_apart(first, second)
    assert any(words in each for each in lines), lines


def test_a_worker_continues_behind_the_hands_of_all_earlier_attempts() -> None:
    runs = [each.model_copy(update=SSP) for each in (RUN, AGAIN, THIRD)]
    last = [
        [line(hand=2, start=8 + 4 * worker, stop=12 + 4 * worker, end=16, round=2)]
        for worker in range(2)
    ]
    middle = [
        [line(hand=1, start=8, stop=8, batches=0, round=1)],
        [line(hand=1, start=8, stop=8, batches=0, round=1)],
    ]
    first = list(zip(runs, (BEGUN, middle, last), strict=True))
    assert judged(*first) == ()
    (wrong, *_) = judged(*first[:2], (runs[2], [[line(hand=0, stop=8, round=2)], last[1]]))
    assert "continues with hand 0 on worker 0; by step-00000001 hands up to 2 were dealt" in wrong
    assert judged(*first[1:]) == (), "what the first attempt dealt is not known"
    begun_later = [[each.model_copy(update={"number": 3})] for (each,) in last]
    assert judged(first[1], (runs[2], begun_later)) == ()
