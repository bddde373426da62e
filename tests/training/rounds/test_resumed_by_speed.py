"""``steps_by = speed`` with ``--resume``: what is left of a pass is dealt, and no sample twice."""

from __future__ import annotations

import json
import re
import shutil
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
from psdist.servers.protocol.steps import FixedSteps
from psdist.workers.data.assignments import AssignedBatches
from psdist.workers.data.seen import Pass
from tests.support.jobs import occasions_of
from tests.support.programs.training.by_speed_cases import STEP_S, dataset
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.virtual_job import run_virtually

COUNT = 2 * 4 * 8 * 6 + 5
SPEED: dict[str, Any] = {"local_steps": 8, "steps_by": "speed", "record": True}


def script_of(
    *,
    epochs: int = 2,
    stop_at: int | None = None,
    count: int = COUNT,
    evaluates: bool = False,
    keeps: bool = False,
    asks_at: int = -1,
) -> Script:
    """Which samples each worker has seen, in ``job.state`` and so in the checkpoint: by epoch.
    ``stop_at``: after this round the attempt ends; ``asks_at``: after this number of batches there
    is to be a checkpoint, as by a signal."""

    def script(job: Job, stage: Stage) -> Result:
        model = nn.Linear(1, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
        loader = job.loader(dataset(count), batch_size=2, shuffle=True)
        valid = job.loader(dataset(40), batch_size=2)
        state = job.state
        state.setdefault("seen", {})
        steps: list[tuple[int, int]] = []
        for epoch in job.epochs(epochs):
            if evaluates:
                with torch.no_grad():
                    assert sum(len(x) for (x,) in valid)
            for (x,) in loader:
                state["seen"].setdefault(epoch, []).extend(x.flatten().int().tolist())
                optimizer.zero_grad()
                model(x).mean().backward()
                stage.sleep(STEP_S / (1.0, 3.0, 2.0, 2.0)[job.group])
                optimizer.step()
                steps.append((job.clock, job.group))
                if len(steps) == asks_at:
                    occasions_of(job).ask("checkpoint")
                if stop_at is not None and job.clock >= stop_at:
                    return {"seen": dict(state["seen"]), "clock": job.clock, "steps": steps}
            if keeps:
                job.checkpoint()
        return {"seen": dict(state["seen"]), "clock": job.clock, "steps": steps}

    return script


def run(path: Path, script: Script, *, resumes: bool = False, **settings: Any) -> Outcome:
    groups = settings.pop("groups", ((0, 1), (2,), (3,)))
    given = {**SPEED, **settings}
    case = Case(name="speed", script=script, servers=2, groups=groups, settings=given)
    return run_virtually(case, path, resumes=resumes)


def begin(path: Path, *, stop_at: int, every: str = "2", **options: Any) -> None:
    """An attempt that ends in the middle of an epoch, then a checkpoint."""
    settings = {key: options.pop(key) for key in ("groups",) if key in options}
    run(path, script_of(stop_at=stop_at, **options), checkpoint_every=every, **settings)


def each_once(outcome: Outcome, *, count: int = COUNT, epochs: int = 2) -> None:
    for epoch in range(epochs):
        found = Counter(chain.from_iterable(each["seen"][epoch] for each in outcome.results))
        assert found == Counter(range(count))


def lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (path / "steps.jsonl").read_text().splitlines())
    return [line[kind] for line in lines if kind in line]


def violated(path: Path) -> set[str]:
    return set(check_run(path, read_histories(path)).violations_by_rule)


@pytest.mark.parametrize(
    ("stop_at", "evaluates"),
    [
        (5, True),
        pytest.param(3, False, marks=pytest.mark.slow),
        pytest.param(8, False, marks=pytest.mark.slow),
        pytest.param(10, False, marks=pytest.mark.slow),
    ],
)
def test_every_sample_comes_once_across_attempts(
    stop_at: int, evaluates: bool, tmp_path: Path
) -> None:
    begin(tmp_path, stop_at=stop_at, evaluates=evaluates)
    outcome = run(tmp_path, script_of(evaluates=evaluates), resumes=True)
    assert outcome.summary["attempts"] == 2
    each_once(outcome)
    assert violated(tmp_path) == set()
    (resumed,) = lines_of(tmp_path, "resumed")
    assert resumed == lines_of(tmp_path / "attempt-1", "kept")[-1]
    paces = resumed["fidelity"]["paces"]
    assert paces["steps"] != [8, 8, 8], "speeds were not known: nothing is tested"
    before, later = (
        {(each["loader"], each["number"], each["block"]): each["steps"] for each in lines}
        for lines in (lines_of(tmp_path / "attempt-1", "fixed"), lines_of(tmp_path, "fixed"))
    )
    # An evaluation is made again as a whole, by all: of it terms are fixed again.
    begun = {term for term in before.keys() & later.keys() if term[0] == 1}
    assert begun or stop_at != 5
    assert all(before[term] == later[term] for term in begun), "what has begun continues"


def test_other_workers_get_what_is_left(tmp_path: Path) -> None:
    begin(tmp_path, stop_at=4)
    outcome = run(tmp_path, script_of(epochs=1), resumes=True, groups=((0,), (1,)))
    checkpoint = sorted((tmp_path / "attempt-1" / "history").glob("worker-*.hands"))
    assert len(checkpoint) == 4
    cut = int(outcome.summary["resumed_from"].removeprefix("step-"))
    place = max(
        line["stop"]
        for path in checkpoint
        for line in map(json.loads, path.read_text().splitlines()[:-1])
        if line["round"] < cut
    )
    mine = lines_of_hands(tmp_path)
    assert min(line["start"] for line in mine) == place
    assert sum(line["stop"] - line["start"] for line in mine) == COUNT - place
    assert violated(tmp_path) == set()
    assert lines_of(tmp_path, "fixed")[0]["steps"] == [8, 8], "nothing is known of these groups"


def lines_of_hands(path: Path) -> list[dict[str, Any]]:
    files = sorted((path / "history").glob("worker-*.hands"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("settings", [({}, SPEED), (SPEED, {})], ids=["count-first", "speed-first"])
def test_a_pass_goes_on_in_equal_parts_and_back(
    settings: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    groups = ((0,), (1,))
    equal: dict[str, Any] = {"local_steps": 8, "steps_by": "count"}
    first, second = ({**(each or equal), "groups": groups} for each in settings)
    run(tmp_path, script_of(stop_at=3, epochs=1), checkpoint_every="2", **first)
    outcome = run(tmp_path, script_of(epochs=1), resumes=True, **second)
    assert outcome.summary["resumed_from"] == "step-00000002"
    each_once(outcome, epochs=1)
    assert violated(tmp_path) == set()


def test_a_script_keeps_what_it_has_behind_its_loop(tmp_path: Path) -> None:
    settings = {"groups": ((0,), (1,))}
    run(tmp_path, script_of(epochs=1, keeps=True, count=97), **settings)
    outcome = run(tmp_path, script_of(count=97, keeps=True), resumes=True, **settings)
    each_once(outcome, count=97)
    assert violated(tmp_path) == set()


def test_a_checkpoint_that_is_asked_for_within_a_round_comes_behind_it(tmp_path: Path) -> None:
    settings = {"groups": ((0,), (1,))}
    run(tmp_path, script_of(asks_at=3, stop_at=3), **settings)
    outcome = run(tmp_path, script_of(), resumes=True, **settings)
    assert outcome.summary["resumed_from"] in ("step-00000001", "step-00000002")
    each_once(outcome)
    assert violated(tmp_path) == set()


def test_within_a_round_there_is_none(tmp_path: Path) -> None:
    def keeps(job: Job, _stage: Stage) -> Result:
        model = nn.Linear(1, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
        for (x,) in job.loader(dataset(64), batch_size=1):
            model(x).mean().backward()
            optimizer.step()
            job.checkpoint()
        return {}

    groups = ((0,), (1,))
    with pytest.raises(
        UsageError,
        match=r"job.checkpoint with local.steps_by = speed within a round",
    ):
        run(tmp_path / "within", keeps, groups=groups, record=False)


def begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = AssignedBatches.start_pass

    def start_pass(self: AssignedBatches, a_pass: Pass) -> None:
        if a_pass.allocation is not None:
            a_pass.allocation.assignment = a_pass.allocation.start = 0
        whole(self, a_pass)

    monkeypatch.setattr(AssignedBatches, "start_pass", start_pass)


def leaves_some_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = AssignedBatches.start_pass

    def start_pass(self: AssignedBatches, a_pass: Pass) -> None:
        if a_pass.allocation is not None:
            a_pass.allocation.start += 4
        whole(self, a_pass)

    monkeypatch.setattr(AssignedBatches, "start_pass", start_pass)


def leaves_the_pass_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = AssignedBatches.has_any
    monkeypatch.setattr(
        AssignedBatches, "has_any", lambda self: whole(self) and not self._pass.is_resumed
    )


def forgets_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FixedSteps, "go_on_at_pace", lambda *_: None)


@pytest.mark.parametrize(
    ("breaks", "rule", "found"),
    [
        (
            begins_anew,
            Rule.HANDS,
            "continues with hand 0 at sample 0; by step-00000002 hands up to",
        ),
        (leaves_some_out, Rule.HANDS, "attempt 2: pass 0 over loader 1 continues with hand 2"),
        (leaves_the_pass_out, Rule.HANDS, "which was under way at .*, is not dealt to its end"),
        (forgets_speeds, Rule.HANDS, "what was observed calls for"),
    ],
)
def test_broken_versions_are_found_by_the_check(
    breaks: Callable[[pytest.MonkeyPatch], None],
    rule: Rule,
    found: str,
    begun: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = Path(shutil.copytree(begun, tmp_path / "run"))
    breaks(monkeypatch)
    run(path, script_of(), resumes=True, groups=((0,), (1,)))
    report = check_run(path, read_histories(path))
    assert rule.value in report.violations_by_rule
    assert any(re.search(found, line) for line in report.violations), report.violations


@pytest.mark.parametrize("name", ["attempt-1/steps.jsonl", "steps.jsonl"])
def test_other_speeds_than_were_kept_are_found(name: str, begun: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(begun, tmp_path / "run"))
    run(path, script_of(), resumes=True, groups=((0,), (1,)))
    assert violated(path) == set()
    lines = (path / name).read_text().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if line.startswith(('{"kept"', '{"resumed"')))
    lines[place] = re.sub(r'"step_us": \[\[', '"step_us": [[1', lines[place])
    (path / name).write_text("".join(lines))
    assert violated(path) >= {Rule.KEPT.value}
    assert (Rule.HANDS.value in violated(path)) == ("attempt" in name)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("begun") / "run"
    run(path, script_of(stop_at=3), groups=((0,), (1,)), checkpoint_every="2")
    return path
