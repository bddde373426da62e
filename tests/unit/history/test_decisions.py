"""RUN_DIR/decisions.jsonl: read, refused where it is damaged, and judged by `psdist check`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psdist.controller import Observation
from psdist.controller.codec import CodecControl
from psdist.controller.kept import KeptCodecs, Rollback, TuningState
from psdist.controller.loss_steps import MOST_LOSS
from psdist.controller.observed import (
    GroupCame,
    GroupGone,
    LevelsSized,
    LossHeard,
    ModeObserved,
)
from psdist.controller.rollback import KeptRise
from psdist.errors import HistoryError
from psdist.history import CHECKSUM_DTYPE, EVENT_DTYPE, EventKind, ServerLog
from psdist.history.lines import (
    DECISION_LINES,
    Changed,
    DecisionLine,
    read_choices,
)
from psdist.history.rules.choices.decisions import Members, check_decisions, with_decided_codecs
from psdist.history.rules.findings import Findings
from psdist.history.run_record import CodecsSince, LevelCodecs, RunRecord
from psdist.history.summary import Summary

OBSERVED = (
    '{"observed": {"group": 0, "first_round": 1, "own_us": [5], "waits_us": [2], '
    '"is_judged": true}}'
)
CHANGED = '{"changed": {"rounds": [9], "mode": "ssp", "staleness": 3, "why": "a test"}}'


def write(folder: Path, text: str) -> Path:
    (folder / DECISION_LINES).write_text(text)
    return folder


def test_lines_are_read_in_order_and_one_that_a_crash_has_cut_is_left_out(tmp_path: Path) -> None:
    first, second = read_choices(
        write(tmp_path, f"{OBSERVED}\n{CHANGED}\n{OBSERVED[:20]}"), DecisionLine
    )
    assert first.observed == ModeObserved(
        group=0, first_round=1, own_us=[5], waits_us=[2], is_judged=True
    )
    assert second.changed == Changed(rounds=[9], mode="ssp", staleness=3, why="a test")


def test_a_run_in_which_nothing_was_observed_has_no_lines(tmp_path: Path) -> None:
    assert read_choices(tmp_path, DecisionLine) == []


@pytest.mark.parametrize(
    "line",
    [
        *("", "[]", "5", '{"other": 1}', OBSERVED[:-1], OBSERVED.replace("[5]", "[-5]")),
        *(
            CHANGED.replace("[9]", "[]"),
            CHANGED.replace("ssp", "auto"),
            CHANGED.replace("3", "-3"),
        ),
    ],
)
def test_a_damaged_line_names_the_file(tmp_path: Path, line: str) -> None:
    with pytest.raises(HistoryError, match=r"decisions.jsonl is damaged: "):
        read_choices(write(tmp_path, f"{OBSERVED}\n{line}\n"), DecisionLine)


# -- codecs that psdist has chosen ---------------------------------------------------------------

NONE, INT8 = (
    LevelCodecs(push=each, pull=each, push_code=n) for n, each in enumerate(("none", "x"))
)
RUN = RunRecord(
    psdist="test",
    mode="sync",
    groups=((0,), (1,)),
    slices=((),),
    num_servers=1,
    num_chunks=0,
    owners=(),
    codecs=(CodecsSince(round=0, **NONE.model_dump()),),
    ladder=(NONE, INT8),
)
WHY = (
    "iterations 5 to 24: 10.00 ms each with none, 9.00 ms of them waiting; 3.25 ms expected with "
    "x/x"
)


def observed(group: int, **changed: Any) -> DecisionLine:
    told = {"group": group, "first_round": 5, "is_judged": True, "errors_ppm": [0] * 20}
    times = {"own_us": [1000] * 20, "waits_us": [9000] * 20}
    return DecisionLine(observed=ModeObserved(**{**told, **times, **changed}))


def sized(*sizes: int) -> DecisionLine:
    return DecisionLine(sized=LevelsSized([*sizes] or [1000, 250]))


def changed(level: int = 1, why: str = WHY, start: int = 30) -> DecisionLine:
    told = {"rounds": [start], "mode": "sync", "staleness": 0, "why": why, "level": level}
    return DecisionLine.model_validate({"changed": told})


def findings_of(
    *lines: DecisionLine,
    is_complete: bool = True,
    run: RunRecord = RUN,
    summary: Summary | None = None,
) -> str:
    findings = Findings(max_listed_per_rule=9)
    check_decisions(run, [*lines], (), findings, is_complete=is_complete, summary=summary)
    return "\n".join(findings.lines())


def test_a_change_of_codecs_that_follows_is_right() -> None:
    assert findings_of(sized(), observed(0), observed(1), changed()) == ""


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((sized(), observed(0), observed(1)), "x/x was never set, although: iterations 5"),
        ((observed(0), observed(1), changed()), "line 3: changed to x/x (iterations 5"),
        ((sized(), observed(0), changed()), "what was observed calls for no change"),
        ((sized(), observed(0), observed(1), changed(0)), "changed to none (iterations"),
        ((sized(), observed(0), observed(1), changed(why="so")), "calls for x/x (iterations 5"),
        ((sized(), observed(0), observed(1), changed(2)), "line 4: to codecs that are none of"),
        ((sized(), observed(0), observed(1), changed(-1)), "line 4: to codecs that are none of"),
        ((sized(5, 4, 3),), "line 1: not of the codecs of this run"),
        ((sized(), observed(2)), "line 2: of no group of this run, or of one that is not in"),
        ((sized(), observed(0, own_us=[1])), "line 2: not as much of each round"),
        ((sized(), observed(0, errors_ppm=[1])), "line 2: not as much of each round"),
        (
            (sized(), observed(0, is_judged=False), observed(1, is_judged=False), changed()),
            "calls for no change",
        ),
    ],
)
def test_what_does_not_follow_is_found(lines: tuple[DecisionLine, ...], words: str) -> None:
    assert words in findings_of(*lines)


@pytest.mark.parametrize(("mode", "staleness"), [("ssp", 3), ("async", None)])
def test_where_groups_are_apart_each_one_s_own_rounds_are_looked_at(
    mode: str, staleness: int | None
) -> None:
    """The second group is 70 rounds behind."""
    run = RUN.model_copy(update={"mode": mode, "staleness": staleness})
    lines = [sized(), observed(0, first_round=75), observed(1)]
    why = WHY.replace("5 to 24", "5 to 94")
    told = {"mode": mode, "staleness": staleness or 0, "level": 1, "why": why, "rounds": [97]}
    right = DecisionLine.model_validate({"changed": told})
    assert findings_of(*lines, right, run=run) == ""
    assert "x/x was never set, although: iterations 5 to 94" in findings_of(*lines, run=run)
    wrong = [{"mode": "sync", "staleness": 0}, {"staleness": 9}, {"why": WHY}, {"level": 0}]
    for each in wrong:
        line = DecisionLine.model_validate({"changed": {**told, **each}})
        assert "what was observed calls for x/x" in findings_of(*lines, line, run=run), each


def test_before_the_second_moment_stays_nothing_is_decided() -> None:
    run = RUN.model_copy(update={"freeze_step": 25})
    lines = [sized(), observed(0), observed(1)]
    assert findings_of(*lines, run=run) == ""
    assert "calls for no change" in findings_of(*lines, changed(), run=run)


def test_what_a_run_that_was_cut_has_not_set_is_no_fault() -> None:
    assert findings_of(sized(), observed(0), observed(1), is_complete=False) == ""


def test_every_round_has_the_codecs_that_were_decided_for_it() -> None:
    lines = [sized(), changed(1, start=30), observed(0), changed(0, start=60)]
    run = with_decided_codecs(RUN, lines)
    assert [(each.round, each.push, each.push_code) for each in run.codecs] == [
        *((0, "none", 0), (30, "x", 1), (60, "none", 0)),
    ]
    wrong = [changed(2), changed(-1), changed(1, start=30), changed(0, start=30)]
    assert [each.round for each in with_decided_codecs(RUN, wrong).codecs] == [0, 30]


def test_a_ladder_is_that_with_which_the_run_begins() -> None:
    told = RUN.model_dump()
    assert RunRecord.model_validate(told) == RUN
    for wrong in ({"codecs": ()}, {"ladder": (INT8.model_dump(), NONE.model_dump())}):
        with pytest.raises(ValueError, match="begins with the first one"):
            RunRecord.model_validate(told | wrong)


# -- groups that have failed or joined ------------------------------------------------------------

THREE = RUN.model_copy(
    update={"groups": ((0,), (1,), (2,)), "num_substitutes": 1, "slices": ((0,), (0,), (0,))}
)


def gone(group: int) -> DecisionLine:
    return DecisionLine(gone=GroupGone(group))


def came(group: int, first_round: int) -> DecisionLine:
    return DecisionLine(came=GroupCame(group, first_round))


def findings_with(members: Members, *lines: DecisionLine) -> str:
    findings = Findings(max_listed_per_rule=9)
    check_decisions(THREE, [*lines], (), findings, is_complete=True, members=members)
    return "\n".join(findings.lines())


def test_who_is_in_the_job_is_read_from_a_log() -> None:
    events = np.zeros(4, EVENT_DTYPE)
    events["kind"] = [EventKind.JOIN, EventKind.DEATH, EventKind.JOIN, EventKind.LEAVE]
    events["group"] = [0, 1, 2, 0]
    events["clock"] = [0, 7, 9, 12]
    sums = np.zeros(0, CHECKSUM_DTYPE)
    log = ServerLog(server=0, events=events, checksums=sums, is_complete=True)
    assert Members.of(THREE, log) == Members(frozenset({1}), frozenset({0}), {2: 9})
    events["kind"][3] = EventKind.REFORM
    assert Members.of(THREE, log) == Members(frozenset({1}), joined={2: 9}, num_leaders_lost={0: 1})


def test_who_leads_a_group_is_the_first_of_those_who_are_left() -> None:
    run = RUN.model_copy(update={"groups": ((0, 1, 2), (3, 4)), "slices": ((0, 0, 0), (0, 0))})
    events = np.zeros(4, EVENT_DTYPE)
    events["kind"] = EventKind.REFORM
    events["group"], events["weight"] = [0, 0, 1, 9], [1, 0, 4, 7]
    sums = np.zeros(0, CHECKSUM_DTYPE)
    log = ServerLog(server=0, events=events, checksums=sums, is_complete=True)
    assert Members.of(run, log).num_leaders_lost == {0: 1}


DIED = Members(dead=frozenset({1}))


LOST = Members(num_leaders_lost={1: 1})


def test_what_a_group_has_told_counts_no_more_when_another_worker_leads_it() -> None:
    told = (sized(), observed(0), observed(1))
    assert findings_with(LOST, *told, changed()) == ""
    first = told[2].observed
    assert first is not None
    later, begins = observed(1, first_round=first.first_round + 4), first.first_round + 3
    assert findings_with(LOST, *told[:2], came(1, begins), later) == ""
    assert "calls for no change" in findings_with(
        LOST, *told[:2], came(1, begins), later, changed()
    )
    for wrong in ((came(1, begins), told[2]), (came(1, begins), told[1])):
        words = "line 4: after a line in which group 1 reports the next round"
        assert words in findings_with(LOST, *told[:2], *wrong)


def test_of_a_group_that_has_died_nothing_is_waited_for() -> None:
    assert findings_with(DIED, sized(), gone(1), observed(0), changed()) == ""
    assert "calls for no change" in findings_with(Members(), sized(), observed(0), changed())


def test_a_group_that_had_left_may_be_gone() -> None:
    assert findings_with(Members(left=frozenset({0, 1})), sized(), gone(1)) == ""


@pytest.mark.parametrize(
    ("members", "lines", "words"),
    [
        (DIED, (sized(),), "groups [] are gone; by the log of server 0 groups [1] have failed"),
        (Members(), (sized(), gone(1)), "groups [1] are gone; by the log of server 0 groups []"),
        (DIED, (gone(1), gone(1)), "line 2: group 1 is gone, which is not in the run then"),
        (DIED, (gone(1), gone(0)), "line 2: group 0 is gone, which is not in the run then, or the"),
        (DIED, (gone(1), observed(1)), "line 2: of no group of this run, or of one that is not"),
        (Members(), (observed(2),), "line 1: of no group of this run, or of one that is not in"),
        (Members(), (gone(2),), "line 1: group 2 is gone, which is not in the run then"),
        (
            Members(),
            (came(1, 3),),
            "group 1 has come 1 times, led by another worker; by the log of",
        ),
        (LOST, (came(1, 3), came(1, 5)), "server 0 it has lost the one that led it 1 times"),
        (DIED, (gone(1), came(1, 3)), "line 2: group 1 has come, which is no substitute"),
        (Members(), (came(3, 3),), "line 1: group 3 has come, which is no substitute"),
        (Members(), (came(2, 3), came(2, 3)), "line 2: group 2 has come, which is no substitute"),
        (Members(), (came(2, 3),), "groups {2: 3} have come, by their first rounds; by the log"),
        (Members(joined={2: 4}), (came(2, 3),), "by the log of server 0 {2: 4}"),
        (Members(joined={2: 4}), (), "groups {} have come"),
    ],
)
def test_who_is_looked_at_is_who_is_in_the_job(
    members: Members, lines: tuple[DecisionLine, ...], words: str
) -> None:
    assert words in findings_with(members, *lines)


def test_a_group_that_has_joined_is_waited_for() -> None:
    joined = Members(dead=frozenset({1}), joined={2: 4})
    begins = [sized(), gone(1), came(2, 4), observed(0)]
    assert findings_with(joined, *begins, observed(2), changed()) == ""
    assert "calls for no change" in findings_with(joined, *begins, changed())


def test_of_a_run_that_was_cut_nobody_says_who_is_in_it() -> None:
    findings = Findings(max_listed_per_rule=9)
    check_decisions(THREE, [sized()], (), findings, is_complete=False, members=DIED)
    assert findings.lines() == ()


# -- by what scripts have reported ----------------------------------------------------------------

GUARDED = RUN.model_copy(update={"loss_patience": 1})
BACK = (
    "iterations 32 to 51: 3.00 ms each with x/x, 2.00 ms of them waiting, the loss not below 2 for "
    "1 windows; 10.00 ms seen with none"
)


def reported(worker: int, total: float, count: int = 1) -> DecisionLine:
    return DecisionLine(reported=LossHeard(worker, 3, count, total))


def window(first_round: int, wait_us: int) -> list[DecisionLine]:
    told = {"first_round": first_round, "waits_us": [wait_us] * 20}
    return [observed(group, **told) for group in range(2)]


FIRST = [sized(), reported(1, 2.0), *window(5, 9000), changed()]


def guarded(*lines: DecisionLine) -> str:
    return findings_of(*FIRST, *lines, run=GUARDED)


def test_codecs_that_a_loss_leads_away_from_are_right() -> None:
    back = changed(0, why=BACK, start=60)
    assert guarded(reported(0, 4.0, count=2), *window(32, 2000), back) == ""
    assert guarded(reported(0, 3.0, count=2), *window(32, 2000)) == "", "it has fallen"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([reported(0, 4.0, count=2), *window(32, 2000)], "none was never set, although: iter"),
        ([reported(0, 3.0, count=2), *window(32, 2000), changed(0, why=BACK)], "for no change"),
        ([*window(32, 2000), changed(0, why=BACK, start=60)], "calls for no change"),
        ([reported(2, 4.0)], "line 6: of no worker of this run, or not asked for"),
        ([reported(0, 1e101)], "line 6: of no worker of this run, or not asked for"),
        ([reported(0, -1e101)], "line 6: of no worker of this run, or not asked for"),
    ],
)
def test_what_a_loss_does_not_lead_to_is_found(lines: list[DecisionLine], words: str) -> None:
    assert words in guarded(*lines)


def test_a_loss_that_nobody_asks_for_is_found() -> None:
    assert "line 1: of no worker of this run, or not asked for" in findings_of(reported(0, 1.0))
    by_mode = RUN.model_copy(update={"ladder": (), "codecs": (), "auto_staleness": 2})
    assert "or not asked for" in findings_of(reported(0, 1.0), run=by_mode)


@pytest.mark.parametrize("total", ["NaN", "Infinity", '"1"', "null"])
def test_a_damaged_report_is_named(total: str, tmp_path: Path) -> None:
    line = f'{{"reported": {{"worker": 0, "round": 0, "count": 1, "total": {total}}}}}'
    with pytest.raises(HistoryError, match=r"decisions.jsonl is damaged"):
        read_choices(write(tmp_path, f"{line}\n"), DecisionLine)


# -- from attempt to attempt ---------------------------------------------------------------------

NAME = "step-00000100"
AGAIN = RUN.model_copy(update={"restored": NAME, "restored_attempt": 1, "first_clocks": (100, 90)})


def controlled() -> CodecControl:
    return CodecControl(num_groups=2, names=["none", "x/x"])


def line_of(key: str, codecs: KeptCodecs | None, checkpoint: str = NAME) -> DecisionLine:
    told = {"checkpoint": checkpoint, "fidelity": TuningState(codecs=codecs)}
    return DecisionLine.model_validate({key: told})


def begins(*levels: tuple[int, int]) -> RunRecord:
    ladder = (NONE, INT8)
    codecs = [CodecsSince(round=at, **ladder[level].model_dump()) for at, level in levels]
    return AGAIN.model_copy(update={"codecs": tuple(codecs)})


def test_a_run_goes_on_with_what_its_first_line_says() -> None:
    kept = replace(controlled().kept(0), starts=((0, 1),), came_from=0, here=1)
    first = line_of("resumed", kept)
    told = {"own_us": [1000] * 20, "waits_us": [9000] * 20, "first_round": 95}
    why = (
        "iterations 95 to 114: 10.00 ms each with x/x, 9.00 ms of them waiting; 10.00 ms seen with"
    )
    assert findings_of(first, sized(), observed(0, **told), run=begins((0, 1))) == ""
    lines = (first, sized(), observed(0, **told), observed(1, **told), changed(0, why=why))
    assert "line 5: changed to none" in findings_of(*lines, run=begins((0, 1)))
    assert "begins with other codecs than ((0, 1),)" in findings_of(first, run=begins((0, 0)))
    assert "begins with other codecs than ((0, 0),)" in findings_of(sized(), run=begins((0, 1)))


def test_codecs_that_were_set_for_a_later_round_are_the_runs() -> None:
    kept = replace(controlled().kept(0), starts=((0, 0), (101, 1)))
    assert findings_of(line_of("resumed", kept), run=begins((0, 0), (101, 1))) == ""
    assert findings_of(line_of("resumed", kept), run=begins((0, 0)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (line_of("resumed", None), "of another checkpoint than run.json says, or of other"),
        (
            line_of("resumed", controlled().kept(0), "step-00000101"),
            "line 1: of another checkpoint than run.json says",
        ),
        (
            line_of("resumed", replace(controlled().kept(0), lossiest=2)),
            "line 1: the run continued with choices of the codecs none, x/x, or not whole",
        ),
    ],
)
def test_what_a_run_cannot_have_gone_on_with(line: DecisionLine, words: str) -> None:
    assert words in findings_of(line, sized(5), run=begins((0, 0)))


def test_only_the_first_line_says_with_what_a_run_has_gone_on() -> None:
    first = line_of("resumed", controlled().kept(0))
    found = findings_of(first, first, run=begins((0, 0)))
    assert found.startswith("decisions.jsonl, line 2: names the choices that the run continued")


def test_what_a_checkpoint_keeps_follows_from_what_was_observed() -> None:
    control = controlled()
    lines = [sized(), observed(0), observed(1), changed()]
    control.know_sizes([1000, 250])
    for group in (0, 1):
        control.observe(Observation(group, 5, [1000] * 20, [9000] * 20, [0] * 20))
    decision = control.judge()
    assert decision is not None
    control.committed(decision, 30)
    kept = line_of("kept", control.kept(29), "step-00000029")
    assert findings_of(*lines, kept) == ""
    assert "step-00000029 has other choices than follow" in findings_of(*lines[:3], kept, lines[3])
    other = line_of("kept", control.kept(30), "step-00000029")
    assert "line 5: step-00000029 has other choices than follow" in findings_of(*lines, other)
    assert "has other choices" in findings_of(*lines, line_of("kept", None))


# -- a loss that blows up ------------------------------------------------------------------------

WATCHED = RUN.model_copy(update={"rollback": 2.0})


def reported_at(number: int, loss: float) -> DecisionLine:
    return DecisionLine(reported=LossHeard(0, 4 * number, 2, 2 * loss))


def rolled(**changed: Any) -> DecisionLine:
    names = tuple(each.name for each in RUN.ladder)
    told = {"round": 20, "loss": 9.0, "best": 1.0, "good": 7, "names": names, "lossiest": 0}
    return DecisionLine.model_validate(
        {"rolled_back": Rollback(**{**told, "allowed": -1, **changed})}
    )


RISES = [
    reported_at(number, loss) for number, loss in enumerate((1.0, 1.0, 9.0, 9.0, 9.0), start=1)
]


def test_a_run_ends_with_a_rollback_where_its_loss_has_blown_up() -> None:
    assert findings_of(*RISES, rolled(), run=WATCHED) == ""
    assert findings_of(*RISES, run=WATCHED, is_complete=False) == "", "a crash has cut the line"
    assert "the loss had blown up in round 20 (9, its least 1, good up to 7)" in findings_of(
        *RISES, run=WATCHED
    )
    assert "the loss had blown up in round 20" in findings_of(
        *RISES, reported_at(6, 1.0), run=WATCHED
    )


@pytest.mark.parametrize("changed", [{"good": 8}, {"allowed": 0}, {"loss": 9.5}, {"round": 21}])
def test_another_rollback_is_found(changed: dict[str, Any]) -> None:
    assert "line 6: the loss had blown up" in findings_of(*RISES, rolled(**changed), run=WATCHED)


def test_nothing_stands_behind_a_rollback() -> None:
    for more in (reported_at(6, 1.0), rolled()):
        assert "line 7: follows a rollback, which ended the run" in findings_of(
            *RISES, rolled(), more, run=WATCHED
        )


def test_no_run_is_completed_with_a_rollback() -> None:
    completed, again = (Summary.model_construct(exit=each) for each in ("completed", "requeue"))
    found = findings_of(*RISES, rolled(), run=WATCHED, summary=completed)
    assert "summary.json says that it was completed" in found
    assert findings_of(*RISES, rolled(), run=WATCHED, summary=again) == ""
    assert findings_of(*RISES[:4], run=WATCHED, summary=completed) == ""


def test_a_rollback_that_nothing_calls_for_is_found() -> None:
    words = "the run has ended with a rollback, which what was reported does not call for"
    assert words in findings_of(*RISES[:4], rolled(), run=WATCHED)
    negative = reported_at(1, -1.0)
    assert "line 1: of no worker of this run, or not asked for" in findings_of(
        negative, run=WATCHED
    )
    assert "not asked for" in findings_of(RISES[0])


def test_a_checkpoint_keeps_the_least_loss() -> None:
    kept = {"checkpoint": "step-00000009", "fidelity": None}
    for rise, is_right in ((KeptRise(best=1.0, good=7), True), (KeptRise(best=2.0, good=7), False)):
        kept["fidelity"] = TuningState(codecs=controlled().kept(9), rise=rise)  # type: ignore[assignment]
        line = DecisionLine.model_validate({"kept": kept})
        assert (findings_of(*RISES[:2], line, run=WATCHED) == "") == is_right


def test_a_checkpoint_of_a_run_in_which_nobody_looked_is_taken_as_good() -> None:
    told = {"rollback": 2.0, "codecs": (CodecsSince(round=0, **NONE.model_dump()),)}
    run = AGAIN.model_copy(update=told)
    for resumed in ([], [line_of("resumed", controlled().kept(0))]):
        for good in (100, 0):
            kept = TuningState(codecs=controlled().kept(90), rise=KeptRise(best=None, good=good))
            says = {"kept": {"checkpoint": "step-00000090", "fidelity": kept}}
            line = DecisionLine.model_validate(says)
            assert (findings_of(*resumed, line, run=run) == "") == (good == 100)


def test_losses_that_are_none_do_not_stand_still() -> None:
    control = CodecControl(num_groups=2, names=["none", "x/x"], loss_patience=1)
    run = WATCHED.model_copy(update={"loss_patience": 1})
    rise = KeptRise(best=MOST_LOSS, good=0)
    line = DecisionLine.model_validate(
        {
            "kept": {
                "checkpoint": "step-00000009",
                "fidelity": TuningState(codecs=control.kept(9), rise=rise),
            }
        }
    )
    assert findings_of(reported_at(1, MOST_LOSS), line, run=run) == ""


def test_a_first_attempt_goes_on_with_nothing() -> None:
    forged = line_of("resumed", replace(controlled().kept(0), lossiest=0), "")
    again = RUN.model_copy(update={"attempt": 2})
    words = "line 1: of another checkpoint than run.json says, or of other choices"
    assert words in findings_of(forged)
    assert findings_of(forged, run=again) == ""
