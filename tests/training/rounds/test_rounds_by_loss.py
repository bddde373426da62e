"""``steps_by = loss``: all groups make the same numbers of local steps, fewer as the loss falls."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psdist.commands.check import check_run
from psdist.errors import UsageError
from psdist.history.rules.findings import Rule
from psdist.history.writers import read_histories
from psdist.job import Job
from psdist.protocol.control import AskSteps
from psdist.servers.protocol.steps import FixedSteps
from psdist.workers.rounds.lengths import StepsByLoss
from tests.support.programs.training.by_loss_cases import STEPS, passes, training
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import LinkModel

OVER_MPI = "by_loss_cases"
WILD = LinkModel(latency_s=1e-5, jitter_s=2e-3, duplicate_rate=0.05)
GROUPS = ((0, 1), (2,))
LENGTHS = [*[8] * 5, *[4] * 4, 2, 2]
"""For a loss that is a quarter from round 1 on, and a sixteenth from round 5 on: 60 steps. The last
one of 61 is a round that a collective cuts."""


def run(script: Script, path: Path, *, seed: int = 0, **settings: Any) -> Outcome:
    groups = settings.pop("groups", GROUPS)
    given = {"local_steps": 8, "steps_by": "loss", "record": True, **settings}
    case = Case(name="loss", script=script, groups=groups, servers=2, settings=given)
    outcome = run_virtually(case, path, seed=seed, link=WILD)
    if given["record"]:
        outcome.checked()
    return outcome


def test_rounds_become_shorter_as_the_loss_falls_on_all_workers_alike(tmp_path: Path) -> None:
    outcomes = [run(training(), tmp_path / str(seed), seed=seed) for seed in range(3)]
    for outcome in outcomes:
        for each in outcome.results:
            assert each["lengths"] == [*LENGTHS, 1]
        assert outcome.summary["local_steps"] == 3 * STEPS
        told = [(each["round"], each["steps"]) for each in outcome.summary["steps_by_loss"]]
        assert told == [(0, 8), (5, 4), (9, 2)]
    bits = [each["parameters"] for outcome in outcomes for each in outcome.results]
    assert all(torch.equal(each, bits[0]) for each in bits), "whatever the order of messages"


def test_the_values_are_those_of_rounds_cut_at_the_same_steps(tmp_path: Path) -> None:
    ends = {sum(LENGTHS[:number]) for number in range(1, len(LENGTHS) + 1)}

    def after_step(job: Job, step: int) -> None:
        if step + 1 in ends:
            job.barrier()

    cut = run(training(after_step=after_step), tmp_path / "0", steps_by="count", local_steps=100)
    by_loss = run(training(), tmp_path / "1")
    assert torch.equal(cut.results[0]["parameters"], by_loss.results[0]["parameters"])


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_groups_that_do_not_wait_for_each_other_make_the_same_steps(
    mode: str, tmp_path: Path
) -> None:
    for seed in range(3):
        script = training(loss_of=lambda clock: 4.0 / (1 + clock))
        results = run(script, tmp_path / str(seed), seed=seed, mode=mode).results
        lengths = {tuple(each["lengths"][:-1]) for each in results}
        shortest = min(lengths, key=len)
        assert all(each[: len(shortest)] == shortest for each in lengths)
        assert shortest[0] == 8
        assert shortest[-1] < 8


@pytest.mark.parametrize("count", [24, 25, 27, 37])
def test_workers_without_a_last_batch_take_part_in_whatever_round_begins(
    count: int, tmp_path: Path
) -> None:
    """With 25 samples some have none for the 16th step, with which shorter rounds begin."""
    outcome = run(
        passes(count, epochs=5), tmp_path, seed=count, local_steps=3, groups=((0, 1), (2, 3))
    )
    seen = Counter(chain.from_iterable(each["seen"] for each in outcome.results))
    assert seen == dict.fromkeys(range(count), 5)
    clocks = [each["clock"] for each in outcome.results]
    assert clocks[::2] == clocks[1::2], "of a group"


@pytest.mark.parametrize("seed", range(3))
def test_a_group_that_waits_in_a_collective_or_is_done_is_not_waited_for(
    seed: int, tmp_path: Path
) -> None:
    def num_steps(job: Job) -> int:
        return 70 if job.group else 20

    def after_step(job: Job, step: int) -> None:
        if step == (49 if job.group else 9):
            job.barrier()

    script = training(num_steps=num_steps, after_step=after_step)
    first, *_, last = run(script, tmp_path, seed=seed).results
    assert sum(first["lengths"]) == 20
    assert sum(last["lengths"]) == 70
    assert first["lengths"][0] == last["lengths"][0] == 8


def test_one_worker_may_report_and_what_it_logs_is_no_report(tmp_path: Path) -> None:
    def report(job: Job, loss: float) -> None:
        if job.is_chief:
            job.report(torch.tensor(loss))
            job.log({"loss": 9.0})

    outcome = run(training(reports=report), tmp_path)
    assert outcome.results[2]["lengths"] == [*LENGTHS, 1]


def test_without_reports_rounds_stay_and_people_hear_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="psdist"):
        outcome = run(training(reports=lambda *_: None, num_steps=lambda _job: 100), tmp_path)
    assert outcome.results[0]["lengths"] == [*[8] * 12, 4]
    (said,) = [each for each in caplog.messages if each.startswith("local.steps_by = loss")]
    assert said == (
        "local.steps_by = loss: no loss was reported in the first 9 rounds; rounds stay at 8 local "
        "steps until the script calls job.report(loss)"
    )


def test_checkpoints_are_made_between_rounds(tmp_path: Path) -> None:
    def after_step(job: Job, step: int) -> None:
        if step == 9:
            job.checkpoint()

    outcome = run(training(after_step=after_step), tmp_path)
    assert outcome.results[0]["lengths"][:4] == [8, 2, 8, 8]
    assert (tmp_path / "checkpoints" / "step-00000002").is_dir()


def test_checkpoints_that_are_due_are_made_where_rounds_begin_together(tmp_path: Path) -> None:
    outcome = run(passes(96, epochs=2), tmp_path, checkpoint_every="2", local_steps=2)
    assert len({each["clock"] for each in outcome.results}) == 1
    assert outcome.summary["checkpoints"] > 2


def test_what_is_no_loss_ends_the_job(tmp_path: Path) -> None:
    def fails(script: Script, error: str, name: str, **settings: Any) -> None:
        with pytest.raises(UsageError, match=error):
            run(script, tmp_path / name, record=False, **settings)

    fails(training(loss_of=lambda _: -1.0), "job.report: a loss of -1.0; expected 0 or more", "0")
    fails(training(loss_of=lambda _: float("nan")), "job.report: a loss of nan", "1")
    words = training(reports=lambda job, _: job.report("low"))  # type: ignore[arg-type]
    fails(words, "job.report: a str; it takes a number", "2")
    left_out = training(loss_of=lambda clock: float("inf") if clock == 3 else 1.0)
    outcome = run(left_out, tmp_path / "3", on_nonfinite="skip")
    assert outcome.results[0]["lengths"] == [*[8] * 7, 5]

    def has_two(job: Job, _stage: Stage) -> Result:
        model = nn.Linear(1, 1)
        job.prepare(model, [torch.optim.SGD([each], lr=0.1) for each in model.parameters()])
        return {}

    fails(
        has_two, "2 prepared optimizers with local.steps_by = loss: it looks at the rounds of", "4"
    )


def test_where_nothing_reads_it_a_report_does_nothing(tmp_path: Path) -> None:
    script = training(loss_of=lambda clock: float("nan") if clock else -1.0)
    outcome = run(script, tmp_path, steps_by="count")
    assert outcome.results[0]["lengths"] == [*[8] * 7, 5]


def told_unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator tells a worker something else than what it records."""
    whole = FixedSteps.on_ask

    def on_ask(self: FixedSteps, message: AskSteps, *given: Any) -> list[Any]:
        actions = whole(self, message, *given)
        for action in actions[1:]:
            action.message.steps[1] += 1
        return actions

    monkeypatch.setattr(FixedSteps, "on_ask", on_ask)


def ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StepsByLoss.end_step
    monkeypatch.setattr(
        StepsByLoss, "end_step", lambda self, in_round: whole(self, in_round) or in_round == 7
    )


def says_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_round(self: StepsByLoss, clock: int) -> None:
        self._on_round(clock + (clock > 4), self._in_round)

    monkeypatch.setattr(StepsByLoss, "end_round", end_round)


@pytest.mark.parametrize(
    ("breaks", "found"),
    [
        (told_unlike, "worker 2: round 0 is of 9 steps, 8 were fixed"),
        (ends_early, "summary.json says rounds_cut 0; by what workers recorded it is 15"),
        (says_too_much, "round 6 is recorded where round 5 belongs"),
    ],
)
def test_broken_versions_are_found_by_the_check(
    breaks: Callable[[pytest.MonkeyPatch], None],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    breaks(monkeypatch)
    case = Case(
        name="broken",
        script=training(),
        groups=GROUPS,
        settings={"local_steps": 8, "steps_by": "loss", "record": True},
    )
    run_virtually(case, tmp_path, link=WILD)
    report = check_run(tmp_path, read_histories(tmp_path))
    assert set(report.violations_by_rule) == {Rule.HANDS.value}
    assert any(re.search(found, line) for line in report.violations), report.violations


@pytest.mark.parametrize(
    ("key", "change", "found"),
    [
        ("reported", {"total": 0.001}, "what was observed calls for"),
        ("fixed", {"steps": [7, 7]}, r"fixed \[7, 7\]"),
        ("fixed", {"why": "no reason"}, r"\(no reason\); what was observed calls for"),
    ],
)
def test_forged_lines_are_found_by_the_check(
    key: str, change: dict[str, Any], found: str, tmp_path: Path
) -> None:
    run(training(), tmp_path)
    path = tmp_path / "steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    forged = [each for each in lines if key in each][4 if key == "reported" else 2]
    forged[key].update(change)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = check_run(tmp_path, read_histories(tmp_path))
    assert set(report.violations_by_rule) == {Rule.HANDS.value}
    assert any(re.search(found, line) for line in report.violations), report.violations


def test_the_same_steps_over_mpi(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["by loss"]
    outcome.checked()
    for each in outcome.results:
        assert each["lengths"] == [*LENGTHS, 1]
