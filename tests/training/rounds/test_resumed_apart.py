"""``steps_by = speed`` with ``--resume`` in ssp and async: groups are in different hands of a pass
when a checkpoint is made, each continues with its own next one, and no sample comes twice."""

from __future__ import annotations

import json
import random
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
from torch.utils.data import Subset

from psdist.commands.check import check_run
from psdist.controller.steps import window_of
from psdist.errors import UsageError
from psdist.history.lines import HandLine, read_worker_lines
from psdist.history.rules.findings import Rule
from psdist.history.writers import read_histories, read_history
from psdist.job import Job
from psdist.servers.protocol.steps import FixedSteps
from psdist.workers.data.assignments import AssignedBatches
from psdist.workers.data.seen import Pass
from tests.support.programs.training.by_speed_cases import STEP_S, dataset
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.virtual_job import run_virtually
from tests.training.rounds.test_resumed_by_speed import begins_anew, leaves_the_pass_out

COUNT, EPOCHS = 2 * 4 * 8 * 8 + 5, 2
GROUPS = ((0, 1), (2,), (3,))
SSP: dict[str, Any] = {
    "local_steps": 8,
    "steps_by": "speed",
    "record": True,
    "mode": "ssp",
    "staleness": 4,
}
ASYNC = {**SSP, "mode": "async"}


def script_of(*, stop_at: int | None = None, held_up: int = 1, seed: int = 0) -> Script:
    """Which samples each worker has seen, in ``job.state`` and so in the checkpoint: by epoch.
    ``stop_at``: after this round a worker ends; the group ``held_up`` is slow at first, another
    one, drawn by ``seed``, later."""

    def script(job: Job, stage: Stage) -> Result:
        model = nn.Linear(1, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
        loader = job.loader(dataset(COUNT), batch_size=2, shuffle=True)
        state = job.state
        state.setdefault("seen", {})
        later = random.Random(seed).randrange(3)
        for epoch in job.epochs(EPOCHS):
            for (x,) in loader:
                state["seen"].setdefault(epoch, []).extend(x.flatten().int().tolist())
                optimizer.zero_grad()
                model(x).mean().backward()
                is_slow = job.group == (held_up if job.clock < 3 else later)
                stage.sleep(STEP_S / (1.0, 3.0, 2.0)[job.group] * (6 if is_slow else 1))
                optimizer.step()
                if stop_at is not None and job.clock >= stop_at:
                    return {"seen": dict(state["seen"]), "clock": job.clock}
        return {"seen": dict(state["seen"]), "clock": job.clock}

    return script


def run(path: Path, script: Script, *, resumes: bool = False, **settings: Any) -> Outcome:
    groups = settings.pop("groups", GROUPS)
    given = {**SSP, **settings}
    case = Case(name="apart", script=script, servers=2, groups=groups, settings=given)
    return run_virtually(case, path, resumes=resumes)


def each_once(outcome: Outcome, *, count: int = COUNT) -> None:
    for epoch in range(EPOCHS):
        found = Counter(chain.from_iterable(each["seen"][epoch] for each in outcome.results))
        assert found == Counter(range(count))


def violated(path: Path) -> set[str]:
    return set(check_run(path, read_histories(path)).violations_by_rule)


def lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (path / "steps.jsonl").read_text().splitlines())
    return [line[kind] for line in lines if kind in line]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("begun") / "run"
    run(path, script_of(stop_at=7), checkpoint_every="3")
    return path


def again(begun: Path, path: Path) -> Path:
    return Path(shutil.copytree(begun, path))


def test_each_group_goes_on_with_its_own_next_hand(begun: Path, tmp_path: Path) -> None:
    path = again(begun, tmp_path / "run")
    outcome = run(path, script_of(), resumes=True)
    each_once(outcome)
    assert violated(path) == set()
    clocks = read_history(path).run.first_clocks
    assert len(set(clocks)) > 1, "no group is ahead: nothing is tested"
    (resumed,) = lines_of(path, "resumed")
    assert resumed == lines_of(path / "attempt-1", "kept")[-1]
    (kept,) = resumed["fidelity"]["paces"]["passes"]
    assert len(kept["starts"]) > 1, "all terms have the same steps: nothing is tested"
    fixed = [each["block"] for each in lines_of(path, "fixed") if not each["number"]]
    assert min(fixed, default=kept["num_fixed"]) == kept["num_fixed"], "what was fixed stays so"
    told = path / "steps.jsonl"
    told.write_text(told.read_text().replace('"num_fixed": ', '"num_fixed": 1000000000', 1))
    report = check_run(path, read_histories(path))
    assert any("continued with more than" in line for line in report.violations)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssp", "async"])
@pytest.mark.parametrize("seed", range(8))
def test_attempt_behind_attempt_every_sample_comes_once(
    seed: int, mode: str, tmp_path: Path
) -> None:
    pick = random.Random(seed)
    path, settings = tmp_path / "run", {"mode": mode, "staleness": pick.randint(1, 6)}
    for attempt, stop_at in enumerate((pick.randint(3, 7), pick.randint(8, 14), None)):
        script = script_of(stop_at=stop_at, held_up=pick.randrange(3), seed=pick.randrange(9))
        every = str(pick.randint(1, 3))
        outcome = run(path, script, resumes=attempt > 0, checkpoint_every=every, **settings)
    each_once(outcome)
    assert violated(path) == set()


@pytest.mark.parametrize(
    "settings",
    [
        {"groups": ((0,), (1,), (2, 3))},
        {"mode": "sync", "staleness": 0},
        {"steps_by": "count"},
    ],
)
def test_otherwise_nobody_goes_on(settings: dict[str, Any], begun: Path, tmp_path: Path) -> None:
    path = again(begun, tmp_path / "run")
    mine = " \\| ".join(" ".join(map(str, each)) for each in settings.get("groups", GROUPS))
    found = (
        r"made in mode ssp, local.steps_by = speed, groups of the workers 0 1 \| 2 \| 3, where .* "
        rf"groups of the workers {mine}: resume it as it was"
    )
    with pytest.raises(UsageError, match=found):
        run(path, script_of(), resumes=True, record=False, **settings)


def with_evaluations(
    where: str, *, stop_at: int | None = None, of: str = "another", count: int = COUNT
) -> Script:
    """Which samples each worker has seen, by epoch, with an evaluation before each, or inside of it
    ``of`` another dataset, the same one, or by the same loader."""

    def script(job: Job, stage: Stage) -> Result:
        model = nn.Linear(1, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
        samples = dataset(count)
        loader = job.loader(samples, batch_size=2, shuffle=True)
        given = samples if of == "same" else Subset(samples, range(count))
        other = loader if of == "loader" else job.loader(given, batch_size=2)
        state = job.state
        state.setdefault("seen", {})

        def evaluate() -> None:
            with torch.no_grad():
                assert sum(len(x) for (x,) in other)

        for epoch in job.epochs(EPOCHS):
            if where == "before":
                evaluate()
            for batch, (x,) in enumerate(loader):
                if where == "inside" and batch % 20 == 3:
                    evaluate()
                state["seen"].setdefault(epoch, []).extend(x.flatten().int().tolist())
                optimizer.zero_grad()
                model(x).mean().backward()
                stage.sleep(STEP_S / (1.0, 5.0, 2.0)[job.group])
                optimizer.step()
                if stop_at is not None and job.clock >= stop_at:
                    return {"seen": dict(state["seen"])}
        return {"seen": dict(state["seen"])}

    return script


def numbers(path: Path, worker: int) -> list[int]:
    """Numbers of passes in which this worker has evaluated, in order."""
    told = read_worker_lines(path / "history", HandLine, num_workers=4)[worker]
    return sorted({each.number for each in told.lines if each.loader == 2})


def test_an_evaluation_that_is_made_again_keeps_its_number(tmp_path: Path) -> None:
    path, count = tmp_path / "run", 2 * 4 * 8 * 3 + 3
    script = with_evaluations("before", stop_at=4, count=count)
    run(path, script, checkpoint_every="1", staleness=1)
    outcome = run(path, with_evaluations("before", count=count), resumes=True, staleness=1)
    each_once(outcome, count=count)
    assert violated(path) == set()
    assert tuple(read_history(path).run.first_clocks) == (2, 3, 3), "an epoch is of three hands"
    made = [numbers(path, worker) for worker in range(4)]
    assert made == [[0, 1], [0, 1], [1], [1]], "one group inside the first epoch, two after it"


@pytest.mark.slow
def test_evaluations_inside_of_an_epoch_are_of_another_dataset(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(path, with_evaluations("inside", stop_at=12), checkpoint_every="1")
    outcome = run(path, with_evaluations("inside"), resumes=True)
    each_once(outcome)
    assert violated(path) == set()


@pytest.mark.parametrize("of", ["same", "loader"])
def test_a_pass_inside_of_another_one_over_the_dataset_is_refused(of: str, tmp_path: Path) -> None:
    found = r"^local.steps_by = speed: .* inside another pass over it, .* a dataset of its own"
    with pytest.raises(UsageError, match=found):
        run(tmp_path / "run", with_evaluations("inside", of=of), record=False)


@pytest.mark.slow
def test_batches_of_the_scripts_own_go_on_with_the_steps_of_their_rounds(tmp_path: Path) -> None:
    def script(job: Job, stage: Stage) -> Result:
        model = nn.Linear(1, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
        steps: dict[int, int] = {}
        for _ in range(3 * 8 * (2, 1)[job.group]):
            stage.sleep(STEP_S / (2.0, 1.0)[job.group])
            optimizer.zero_grad()
            model(torch.ones(1, 1)).mean().backward()
            steps[job.clock] = steps.get(job.clock, 0) + 1
            optimizer.step()
        job.checkpoint()
        return {"clock": job.clock, "steps": steps}

    groups = ((0,), (1,))
    first = run(tmp_path, script, groups=groups).results
    before = lines_of(tmp_path, "fixed")
    again = run(tmp_path, script, groups=groups, resumes=True).results
    assert violated(tmp_path) == set()
    (resumed,) = lines_of(tmp_path, "resumed")
    (kept,) = resumed["fidelity"]["paces"]["passes"]
    assert kept["loader"] == 0
    assert [each["block"] for each in lines_of(tmp_path, "fixed")][:1] == [kept["num_fixed"]]
    for results, fixed in ((first, before), (again, [*before, *lines_of(tmp_path, "fixed")])):
        steps_of = {each["block"]: each["steps"] for each in fixed}
        for group, result in enumerate(results):
            *whole, (last, rest) = sorted(result["steps"].items())
            assert whole, "no round is whole: nothing is tested"
            for clock, steps in whole:
                assert steps == steps_of[window_of(clock)][group]
            assert rest <= steps_of[window_of(last)][group]


def all_where_the_first_is(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = AssignedBatches.start_pass
    first: list[tuple[int, int]] = []

    def start_pass(self: AssignedBatches, a_pass: Pass) -> None:
        if a_pass.allocation is not None:
            first.append((a_pass.allocation.assignment, a_pass.allocation.start))
            a_pass.allocation.assignment, a_pass.allocation.start = first[0]
        whole(self, a_pass)

    monkeypatch.setattr(AssignedBatches, "start_pass", start_pass)


def fixes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FixedSteps.go_on_at_pace

    def go_on(self: FixedSteps, kept: Any) -> None:
        whole(self, kept)
        self._passes.clear()

    monkeypatch.setattr(FixedSteps, "go_on_at_pace", go_on)


@pytest.mark.parametrize(
    ("breaks", "found"),
    [
        (begins_anew, "continues with hand 0 on worker 0; by step-.* hands up to"),
        pytest.param(
            all_where_the_first_is, "continues with hand .* on worker", marks=pytest.mark.slow
        ),
        pytest.param(fixes_anew, "is fixed twice", marks=pytest.mark.slow),
        pytest.param(
            leaves_the_pass_out, "which was under way at .*, is not dealt", marks=pytest.mark.slow
        ),
    ],
)
def test_broken_versions_are_found_by_the_check(
    breaks: Callable[[pytest.MonkeyPatch], None],
    found: str,
    begun: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = again(begun, tmp_path / "run")
    breaks(monkeypatch)
    run(path, script_of(), resumes=True)
    report = check_run(path, read_histories(path))
    assert Rule.HANDS.value in report.violations_by_rule
    assert any(re.search(found, line) for line in report.violations), report.violations


def test_other_steps_than_were_fixed_are_found(begun: Path, tmp_path: Path) -> None:
    path = again(begun, tmp_path / "run")
    lines = (path / "steps.jsonl").read_text().splitlines(keepends=True)
    place = max(n for n, line in enumerate(lines) if line.startswith('{"kept"'))
    lines[place] = re.sub(r'"num_fixed": (\d+)', r'"num_fixed": 1000000000\1', lines[place])
    (path / "steps.jsonl").write_text("".join(lines))
    assert violated(path) == {Rule.HANDS.value}
