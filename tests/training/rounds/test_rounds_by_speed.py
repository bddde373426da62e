"""``steps_by = speed``: groups of different speed take different numbers of local steps, arrive
together, and see every sample of an epoch once."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psdist.commands.check import check_run
from psdist.controller.observed import StepsObserved
from psdist.errors import UsageError
from psdist.history.rules.findings import Rule
from psdist.history.writers import read_histories
from psdist.job import Job
from psdist.protocol.control import AskSteps, RoundTook
from psdist.servers.protocol.steps import FixedSteps
from psdist.workers.data.assignments import Assignment, assign
from psdist.workers.rounds.lengths import StepsBySpeed
from tests.support.programs.training.by_speed_cases import COUNT, STEP_S, dataset, training
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import LinkModel

LINK = LinkModel(latency_s=1e-5, jitter_s=1e-4, duplicate_rate=0.02)
OVER_MPI = "by_speed_cases"


def run(script: Script, path: Path, *, seed: int = 0, **settings: Any) -> Outcome:
    groups = settings.pop("groups", ((0,), (1,), (2,), (3,)))
    given = {"local_steps": 8, "steps_by": "speed", "record": True, **settings}
    case = Case(name="speed", script=script, groups=groups, servers=2, settings=given)
    outcome = run_virtually(case, path, seed=seed, link=LINK)
    if given["record"]:
        outcome.checked()
    return outcome


def each_once(outcome: Outcome, count: int, epochs: int) -> None:
    for epoch in range(epochs):
        seen = Counter(chain.from_iterable(each["seen"][epoch] for each in outcome.results))
        assert seen == Counter(range(count))


def share_waited(outcome: Outcome, epochs: slice = slice(None)) -> float:
    """Part of all workers' time that ``step()`` takes."""
    waited_s = sum(sum(each["waited_s"][epochs]) for each in outcome.results)
    return waited_s / sum(each["took_s"] for each in outcome.results)


def test_groups_of_different_speed_arrive_together(tmp_path: Path) -> None:
    speeds, count = (3.0, 3.0, 3.0, 1.0), 2 * 4 * 8 * 30 + 5
    by_speed = run(training(speeds, count=count), tmp_path / "speed")
    equal = run(training(speeds, count=count), tmp_path / "equal", steps_by="count")
    for outcome in (by_speed, equal):
        each_once(outcome, count, 1)
    assert share_waited(equal) > 0.49
    assert share_waited(by_speed) < 0.1
    assert len({tuple(each["clocks"]) for each in by_speed.results}) == 1
    numbers = [len(each["seen"][0]) for each in by_speed.results]
    assert min(numbers[:3]) > 2.5 * numbers[3]
    took_s, before_s = (max(each["took_s"] for each in of.results) for of in (by_speed, equal))
    assert took_s < 0.5 * before_s


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
def test_every_sample_comes_once_in_every_epoch_while_speeds_change(
    mode: str, tmp_path: Path
) -> None:
    count, groups = 2 * 3 * 6 * 14 + 3, ((0, 1), (2,))
    script = training((1.0, 4.0), count=count, epochs=4, changes_in=2)
    outcome = run(script, tmp_path, seed=3, mode=mode, groups=groups, local_steps=6)
    each_once(outcome, count, 4)
    assert len({tuple(each["clocks"]) for each in outcome.results}) == 1
    assert outcome.summary["rounds_cut"] == 0
    numbers = [[len(each["seen"][epoch]) for each in outcome.results] for epoch in range(4)]
    assert numbers[1][2] > 3 * numbers[1][0]
    assert numbers[2][2] < numbers[1][2]
    assert numbers[3][2] > 1.5 * numbers[3][0], "it comes back"


def test_what_an_incomplete_last_batch_would_be_is_left_out(tmp_path: Path) -> None:
    count = 4 * 40 + 3
    script = training((1.0, 2.0, 1.0, 1.0), count=count, drop_last=True)
    outcome = run(script, tmp_path, local_steps=4)
    seen = Counter(chain.from_iterable(each["seen"][0] for each in outcome.results))
    assert set(seen.values()) == {1}
    assert count - 8 < len(seen) < count


def test_rounds_of_a_scripts_own_batches_are_as_long_as_the_coordinator_says(
    tmp_path: Path,
) -> None:
    def script(job: Job, stage: Stage) -> Result:
        model = nn.Linear(1, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
        clocks = []
        for _ in range(60 if job.group else 20):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).mean().backward()
            stage.sleep(STEP_S / (3 if job.group else 1))
            optimizer.step()
            clocks.append(job.clock)
        return {"clocks": clocks}

    slow, fast = run(script, tmp_path, groups=((0,), (1,)), local_steps=4).results
    assert Counter(slow["clocks"])[1] == 2
    assert Counter(fast["clocks"])[1] == 6


def fails(script: Script, path: Path, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        run(script, path, groups=((0,), (1,)), record=False)


def test_what_rounds_by_speed_cannot_be_made_of_is_refused(tmp_path: Path) -> None:
    def job_of(job: Job) -> tuple[nn.Module, Any, Any]:
        model = nn.Linear(1, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
        return model, optimizer, job.loader(dataset(64), batch_size=1)

    def accumulates(job: Job, _stage: Stage) -> Result:
        model, optimizer, loader = job_of(job)
        for number, (x,) in enumerate(loader):
            model(x).mean().backward()
            if number % 2:
                optimizer.step()
        return {}

    def has_others(job: Job, _stage: Stage) -> Result:
        model, optimizer, loader = job_of(job)
        for (x,) in loader:
            for _ in range(2):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
        return {}

    def has_two(job: Job, _stage: Stage) -> Result:
        model = nn.Linear(1, 1)
        parts = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]
        job.prepare(model, parts)
        return {}

    fails(accumulates, tmp_path / "1", "a step of 2 batches of psdist's loaders; it must be one")
    fails(has_others, tmp_path / "2", "a step of 0 batches")
    fails(has_two, tmp_path / "3", "2 prepared optimizers with local.steps_by = speed")


def told_unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator tells workers different things."""
    whole = FixedSteps.on_ask

    def on_ask(self: FixedSteps, message: AskSteps, *given: Any) -> list[Any]:
        *actions, last = whole(self, message, *given)
        if message.worker == 1 and message.block == 2:
            fixed = last.message
            last.message = replace(fixed, steps=[each + 1 for each in fixed.steps])
        return [*actions, last]

    monkeypatch.setattr(FixedSteps, "on_ask", on_ask)


def goes_on_behind_its_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StepsBySpeed.end_step
    monkeypatch.setattr(
        StepsBySpeed, "end_step", lambda self, in_round: whole(self, in_round) and in_round > 8
    )


def does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_took(self: FixedSteps, message: RoundTook) -> list[Any]:
        return [StepsObserved(self._leaders[message.worker], message.round, message.step_us)]

    monkeypatch.setattr(FixedSteps, "on_took", on_took)


def loses_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Assignment.batches

    def batches(self: Assignment, *, group: int, place: int) -> list[range]:
        found = whole(self, group=group, place=place)
        return found[:-1] if len(found) > 8 else found

    monkeypatch.setattr(Assignment, "batches", batches)


def ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_early(start: int, num_samples: int, **options: Any) -> Assignment | None:
        hand = assign(start, num_samples, **options)
        assert hand is not None
        return replace(hand, is_last=hand.is_last or start > 100)

    monkeypatch.setattr("psdist.workers.data.assignments.assign", too_early)


@pytest.mark.parametrize(
    ("breaks", "found"),
    [
        (told_unlike, "batches, 12 were fixed|those before end at"),
        (goes_on_behind_its_hand, "ended in round 0, as the hand before it"),
        (does_not_listen, r"what was observed calls for \[4, 12\]"),
        (loses_a_batch, "those before end at"),
        (ends_early, "leaves out"),
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
        script=training((1.0, 3.0), count=320),
        groups=((0,), (1,)),
        settings={"local_steps": 8, "steps_by": "speed", "record": True},
    )
    run_virtually(case, tmp_path, link=LINK)
    report = check_run(tmp_path, read_histories(tmp_path))
    assert set(report.violations_by_rule) == {Rule.HANDS.value}
    assert any(re.search(found, line) for line in report.violations), report.violations


def test_every_sample_comes_once_over_mpi(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["by speed"]
    outcome.checked()
    each_once(outcome, COUNT, 2)
    assert len({tuple(each["clocks"]) for each in outcome.results}) == 1
    chosen = [json.loads(line) for line in (outcome.path / "steps.jsonl").read_text().splitlines()]
    assert any(line.get("fixed", {}).get("why") for line in chosen), "another number of steps"
