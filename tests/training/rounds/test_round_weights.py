"""``round_weights``: rounds of local steps weigh by the steps that groups have made."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist.commands.check import check_run
from psdist.history.rules.findings import Rule
from psdist.history.writers import read_histories
from psdist.job import Job
from psdist.transport.virtual import LinkModel
from psdist.workers.rounds.differences import weight_of
from tests.support.programs.training import by_speed_cases
from tests.support.programs.training.by_pass_cases import PROBLEM, data
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.problems import flat
from tests.support.programs.training.virtual_job import run_virtually

WILD = LinkModel(latency_s=1e-5, jitter_s=2e-3, duplicate_rate=0.05)
GROUPS = ((0, 1), (2,), (3,))
ROUNDS = ([4, 4, 4], [4, 1, 3], [2, 4, 1])
"""Of each group; a collective that all come to after other steps cuts them."""
RULES = ("equal", "steps", "fednova")


def run(script: Script, path: Path, *, seed: int = 0, **settings: Any) -> Outcome:
    groups, resumes = settings.pop("groups", GROUPS), settings.pop("resumes", False)
    given = {"local_steps": 4, "record": True, **settings}
    case = Case(name="weights", script=script, groups=groups, servers=2, settings=given)
    outcome = run_virtually(case, path, seed=seed, link=WILD, resumes=resumes)
    outcome.checked()
    return outcome


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    x, y = PROBLEM.data()
    chosen = torch.arange(4 * worker + 16 * step, 4 * worker + 16 * step + 4) % len(x)
    return x[chosen], y[chosen]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


def training(job: Job, _stage: Stage) -> Result:
    model = PROBLEM.model()
    model, optimizer = job.prepare(model, sgd(model))
    step = 0
    for steps in ROUNDS:
        for _ in range(steps[job.group]):
            x, y = batch(job.worker, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
        job.mean(1.0)
    return {"parameters": flat(model), "clock": job.clock}


def in_torch(weigh: Callable[[list[int]], list[float]]) -> Tensor:
    """``weigh(steps)``: by group, what the differences of a round are multiplied with."""
    anchor, models = PROBLEM.model(), [PROBLEM.model() for _ in GROUPS]
    done = [0] * len(GROUPS)
    for steps in ROUNDS:
        for group, (members, model) in enumerate(zip(GROUPS, models, strict=True)):
            model.load_state_dict(anchor.state_dict())
            optimizer = sgd(model)
            for _ in range(steps[group]):
                optimizer.zero_grad()
                for worker in members:
                    x, y = batch(worker, done[group])
                    (nn.functional.cross_entropy(model(x), y) / len(members)).backward()
                optimizer.step()
                done[group] += 1
        factors = weigh(steps)
        with torch.no_grad():
            for index, parameter in enumerate(anchor.parameters()):
                parameter -= sum(
                    factor * (parameter - list(model.parameters())[index])
                    for factor, model in zip(factors, models, strict=True)
                )
    return flat(anchor)


def normalised(steps: list[int]) -> list[float]:
    """FedNova with tau_eff the harmonic mean: tau_eff p / tau of each group."""
    p = 1 / len(steps)
    tau_eff = 1 / sum(p / tau for tau in steps)
    return [tau_eff * p / tau for tau in steps]


WEIGH: dict[str, Callable[[list[int]], list[float]]] = {
    "equal": lambda steps: [1 / len(steps)] * len(steps),
    "steps": lambda steps: [tau / sum(steps) for tau in steps],
    "fednova": normalised,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_values_are_those_of_torch(rule: str, tmp_path: Path) -> None:
    outcome = run(training, tmp_path, round_weights=rule)
    wanted = in_torch(WEIGH[rule])
    for result in outcome.results:
        assert torch.allclose(result["parameters"], wanted, rtol=1e-4, atol=1e-6)
    others = [in_torch(WEIGH[other]) for other in RULES if other != rule]
    assert not any(torch.allclose(wanted, other, rtol=1e-3, atol=1e-4) for other in others)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("steps", [1, 3, 16])
def test_a_usual_round_weighs_one_and_others_as_the_rule_says(rule: Any, steps: int) -> None:
    assert weight_of(rule, steps=16, usual=16) == 1.0
    wanted = {"equal": 1.0, "steps": steps / 16, "fednova": 16 / steps}[rule]
    assert weight_of(rule, steps=steps, usual=16) == pytest.approx(wanted)


@pytest.mark.parametrize("mode", ["ssp", "async"])
@pytest.mark.parametrize("seed", range(2))
def test_in_ssp_and_async_weights_by_steps_are_proved(mode: str, seed: int, tmp_path: Path) -> None:
    run(training, tmp_path, seed=seed, mode=mode, round_weights="steps", pipeline=seed % 2)


@pytest.mark.parametrize("rule", ["steps", "fednova"])
def test_groups_of_other_speeds_weigh_by_what_they_have_made(rule: str, tmp_path: Path) -> None:
    script = by_speed_cases.training((1.0, 3.0), count=321, epochs=2)
    given: dict[str, Any] = {"steps_by": "speed", "local_steps": 8, "groups": ((0,), (1,))}
    outcome = run(script, tmp_path, round_weights=rule, **given)
    brought = {float(own) for log in outcome.history.workers for own in log.pushes["own"]}
    assert len(brought) > 2, "other numbers of steps"


@pytest.mark.slow
@pytest.mark.parametrize("beside", [{"steps_by": "loss"}, {"outer": "nesterov", "codec": "int8"}])
def test_it_goes_with(beside: dict[str, Any], tmp_path: Path) -> None:
    run(training, tmp_path, round_weights="steps", **beside)


def test_a_resumed_run_has_the_bits_of_one_that_nobody_ended(tmp_path: Path) -> None:
    def script_of(has_checkpoint: bool) -> Script:
        def script(job: Job, _stage: Stage) -> Result:
            model = PROBLEM.model()
            model, optimizer = job.prepare(model, sgd(model))
            job.state.setdefault("step", 0)
            for _ in job.epochs(2):
                for x, y in job.loader(data(), batch_size=2):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    job.state["step"] += 1
                    if has_checkpoint and job.state["step"] == 6:  # in the middle of a round
                        job.checkpoint()
            job.barrier()
            return {"parameters": flat(model)}

        return script

    whole = run(script_of(has_checkpoint=True), tmp_path / "whole", round_weights="fednova")
    again = Path(shutil.copytree(tmp_path / "whole", tmp_path / "again"))
    given: dict[str, Any] = {"round_weights": "fednova", "resumes": True, "resume": True}
    resumed = run(script_of(has_checkpoint=False), again, **given)
    for ours, others in zip(resumed.results, whole.results, strict=True):
        assert torch.equal(ours["parameters"], others["parameters"])


def test_two_sets_are_proved_apart(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        front, back = list(model[0].parameters()), list(model[2:].parameters())
        made = [torch.optim.SGD(each, lr=0.1) for each in (front, back)]
        model, (first, second) = job.prepare(model, made)
        for step in range(10 + job.group):
            x, y = batch(job.worker, step)
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            first.step()
            if step % 2:
                second.step()
        job.barrier()
        return {}

    run(script, tmp_path, round_weights="fednova")


def weighs_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psdist.prepared.weight_of", lambda *_, **__: 1.0)


def weighs_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "psdist.prepared.weight_of",
        lambda _rule, *, steps, usual: weight_of("fednova", steps=steps, usual=usual),
    )


@pytest.mark.parametrize("breaks", [weighs_alike, weighs_the_other_way])
def test_broken_versions_are_found_by_the_check(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    breaks(monkeypatch)
    settings = {"local_steps": 4, "record": True, "round_weights": "steps"}
    case = Case(name="broken", script=training, groups=GROUPS, settings=settings)
    run_virtually(case, tmp_path, link=WILD)
    report = check_run(tmp_path, read_histories(tmp_path))
    assert set(report.violations_by_rule) == {Rule.WEIGHTS.value}
    said = r"worker 2, round 1: brought weight [\d.]+; of 1 steps it weighs 0.333"
    assert any(re.search(said, line) for line in report.violations), report.violations


def test_records_that_lack_a_round_are_told(tmp_path: Path) -> None:
    run(training, tmp_path, round_weights="steps")
    path = tmp_path / "history" / "worker-1.lengths"
    lines = path.read_text().splitlines()
    shutil.copy(path, tmp_path / "kept")
    path.write_text("\n".join(lines[1:]) + "\n")
    report = check_run(tmp_path, read_histories(tmp_path))
    assert any("steps of round 0 are not recorded" in line for line in report.violations)
    path.unlink()
    shutil.copy(tmp_path / "kept", path)
    assert check_run(tmp_path, read_histories(tmp_path)).proved
