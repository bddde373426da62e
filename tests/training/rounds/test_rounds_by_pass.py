"""``local_steps = epoch``: a round is a pass over the loader, as FedAvg's with E = 1."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from psdist.commands.check import check_run
from psdist.errors import UsageError
from psdist.history.rules.findings import Rule
from psdist.history.writers import read_histories
from psdist.job import Job
from psdist.workers.rounds.lengths import PassSteps
from psdist.workers.trainer import Trainer
from tests.support.programs.training.by_loss_cases import Samples
from tests.support.programs.training.by_pass_cases import (
    EPOCHS,
    PROBLEM,
    data,
    optimizer_of,
    training,
)
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.problems import flat
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import LinkModel

OVER_MPI = "by_pass_cases"
WILD = LinkModel(latency_s=1e-5, jitter_s=2e-3, duplicate_rate=0.05)
GROUPS = ((0, 1), (2,))
PER_PASS = 10
"""Steps: 60 samples, three workers, two each."""
Make = Callable[[Any], torch.optim.Optimizer]
OUTERS: dict[str, Make] = {
    "average": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True),
}


def run(script: Script, path: Path, *, seed: int = 0, **settings: Any) -> Outcome:
    groups, resumes = settings.pop("groups", GROUPS), settings.pop("resumes", False)
    given = {"local_steps": "epoch", "record": True, **settings}
    case = Case(name="pass", script=script, groups=groups, servers=2, settings=given)
    outcome = run_virtually(case, path, seed=seed, link=WILD, resumes=resumes)
    if given["record"]:
        outcome.checked()
    return outcome


def in_torch(make_outer: Make, *, epochs: int = EPOCHS) -> Tensor:
    """The same by torch alone: of six samples the first two are worker 0's."""
    x, y = PROBLEM.data()
    models = [PROBLEM.model() for _ in GROUPS]
    inner = [optimizer_of(model) for model in models]
    anchor = PROBLEM.model()
    outer = make_outer(anchor.parameters())
    for _ in range(epochs):
        for step in range(PER_PASS):
            for members, model, optimizer in zip(GROUPS, models, inner, strict=True):
                optimizer.zero_grad()
                for worker in members:
                    first = 6 * step + 2 * worker
                    loss = nn.functional.cross_entropy(
                        model(x[first : first + 2]), y[first : first + 2]
                    )
                    (loss / len(members)).backward()
                optimizer.step()
        for index, parameter in enumerate(anchor.parameters()):
            there = [list(model.parameters())[index].detach() for model in models]
            parameter.grad = sum(parameter.detach() - each for each in there) / len(there)
        outer.step()
        for model in models:
            model.load_state_dict(anchor.state_dict())
    return flat(anchor)


@pytest.mark.parametrize("outer", OUTERS)
def test_a_round_is_an_epoch_and_the_values_are_those_of_torch(outer: str, tmp_path: Path) -> None:
    outcome = run(training(), tmp_path, outer=outer)
    wanted = in_torch(OUTERS[outer])
    for each in outcome.results:
        assert torch.allclose(each["parameters"], wanted, rtol=1e-4, atol=1e-6)
        assert each["lengths"] == [PER_PASS] * EPOCHS
        assert each["clocks"] == [1, 2, 3]  # the exchange has ended when the loop is
    assert outcome.summary["rounds_cut"] == 0
    assert outcome.summary["local_steps"] == 3 * PER_PASS * EPOCHS


@pytest.mark.parametrize("mode", ["ssp", "async"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_in_ssp_and_async_a_round_is_an_epoch(mode: str, seed: int, tmp_path: Path) -> None:
    outcome = run(training(), tmp_path, seed=seed, mode=mode)
    assert all(each["lengths"] == [PER_PASS] * EPOCHS for each in outcome.results)
    assert outcome.summary["rounds_cut"] == 0
    start = flat(PROBLEM.model())
    wanted = in_torch(OUTERS["average"]) - start
    for each in outcome.results:
        moved = each["parameters"] - start
        assert float(moved @ wanted / moved.norm() / wanted.norm()) > 0.7


@pytest.mark.parametrize(
    "beside", [{"replication": "buddy"}, {"global_batch": 6, "codec": "int8"}], ids=str
)
def test_what_goes_with_rounds_of_an_epoch(beside: dict[str, Any], tmp_path: Path) -> None:
    outcome = run(training(), tmp_path, **beside)
    wanted = in_torch(OUTERS["average"])
    for each in outcome.results:
        assert torch.allclose(each["parameters"], wanted, rtol=0.05, atol=0.01)
        assert each["lengths"] == [PER_PASS] * EPOCHS


def test_a_collective_cuts_a_round_and_the_pass_ends_the_next_one(tmp_path: Path) -> None:
    def after_step(job: Job, step: int) -> None:
        if step in (3, 2 * PER_PASS - 1):  # and one after the last step of a pass
            job.mean(1.0)

    outcome = run(training(after_step), tmp_path)
    assert all(each["lengths"] == [4, 6, 10, 10] for each in outcome.results)
    assert outcome.summary["rounds_cut"] == 2 * 3


def test_a_pass_that_the_script_leaves_ends_with_the_next_one_s_first_batch(
    tmp_path: Path,
) -> None:
    """A round never is of two passes, nor is anything lost."""

    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, optimizer_of(model))
        loader, clocks = job.loader(data(), batch_size=2), []
        for _ in range(2):
            for step, (x, y) in enumerate(loader):
                clocks.append(job.clock)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if step == 3:
                    break
        return {"clocks": clocks}

    outcome = run(script, tmp_path)
    assert all(each["clocks"] == [0] * 4 + [1] * 4 for each in outcome.results)
    assert outcome.summary["rounds_cut"] == 2 * 3
    assert outcome.summary["clocks"] == [2, 2]


def test_passes_that_do_not_train_end_no_round(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer, loader = job.prepare(
            model, optimizer_of(model), DataLoader(data(), batch_size=2)
        )
        for _ in range(2):
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if step == 4:
                    clock = job.clock
                    with torch.no_grad():
                        losses = [float(model(each).sum()) for each, _ in loader]
                    for each, _ in job.loader(data(), batch_size=4):
                        model(each)  # no step is made of it
                    assert losses
                    assert job.clock == clock
        return {"clock": job.clock}

    outcome = run(script, tmp_path)
    assert all(each["clock"] == 2 for each in outcome.results)
    assert outcome.summary["rounds_cut"] == 0


@pytest.mark.parametrize(
    "count", [25, *(pytest.param(each, marks=pytest.mark.slow) for each in (24, 27, 37))]
)
def test_workers_with_fewer_batches_end_the_round_with_their_group(
    count: int, tmp_path: Path
) -> None:
    """A dataset without indices: with 25 samples some have none for a 7th step."""

    def script(job: Job, _stage: Stage) -> Result:
        model = nn.Linear(1, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
        for _ in range(EPOCHS):
            for x in job.loader(Samples(count), batch_size=1):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
        return {"clock": job.clock}

    outcome = run(script, tmp_path, seed=count, groups=((0, 1), (2, 3)))
    assert all(each["clock"] == EPOCHS for each in outcome.results)
    assert outcome.summary["rounds_cut"] == 0


def test_what_is_left_of_a_pass_by_accumulating_is_in_the_next_round(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, optimizer_of(model))
        loader, clocks = job.loader(data(), batch_size=2), []
        for _ in range(2):
            for step, (x, y) in enumerate(loader):
                nn.functional.cross_entropy(model(x), y).backward()
                if step % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
            optimizer.step()  # of the last two batches
            optimizer.zero_grad()
            clocks.append(job.clock)
        return {"clocks": clocks}

    outcome = run(script, tmp_path)
    assert all(each["clocks"] == [1, 2] for each in outcome.results)
    assert outcome.summary["clocks"] == [3, 3]
    assert outcome.summary["rounds_cut"] == 3  # the end of the script


def own_batches(job: Job, _stage: Stage) -> Result:
    model = PROBLEM.model()
    model, optimizer = job.prepare(model, optimizer_of(model))
    x, y = PROBLEM.data()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    return {}


def own_sampler(job: Job, _stage: Stage) -> Result:
    model = PROBLEM.model()
    model, optimizer = job.prepare(model, optimizer_of(model))
    for x, y in DataLoader(data(), batch_size=2, sampler=job.sampler(data())):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {}


def goes_on_behind_it(job: Job, _stage: Stage) -> Result:
    model = PROBLEM.model()
    model, optimizer = job.prepare(model, optimizer_of(model))
    for x, y in job.loader(data(), batch_size=2):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.step()
    return {}


@pytest.mark.parametrize("script", [own_batches, own_sampler, goes_on_behind_it])
def test_a_step_without_a_pass_is_an_error(script: Script, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"local.steps = epoch: a step after a pass over"):
        run(script, tmp_path, record=False)


def test_a_second_optimizer_is_refused(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = nn.Linear(1, 1)
        job.prepare(model, [torch.optim.SGD([each], lr=0.1) for each in model.parameters()])
        return {}

    with pytest.raises(UsageError, match=r"2 prepared optimizers with local.steps = epoch"):
        run(script, tmp_path, record=False)


@pytest.mark.parametrize("step", [2 * PER_PASS - 1, 13], ids=["behind-a-pass", "within-one"])
def test_a_resumed_run_has_the_bits_of_one_that_nobody_ended(step: int, tmp_path: Path) -> None:
    def after_step(job: Job, now: int) -> None:
        if now == step:
            job.checkpoint()

    whole = run(training(after_step), tmp_path / "whole")
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "whole", again)
    resumed = run(training(), again, resumes=True, resume=True)
    for ours, others in zip(resumed.results, whole.results, strict=True):
        assert torch.equal(ours["parameters"], others["parameters"])
        assert ours["clocks"] == others["clocks"]


def test_checkpoints_of_psdist_s_own_are_made_between_passes(tmp_path: Path) -> None:
    outcome = run(training(epochs=4), tmp_path, checkpoint_every="1")
    assert outcome.summary["rounds_cut"] == 0
    assert outcome.summary["checkpoints"] >= 3


def ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassSteps, "end_step", lambda self, in_round: _after(self, in_round, 7))


def _after(length: PassSteps, in_round: int, steps: int) -> bool:
    length._in_round = in_round
    return in_round == steps


def ends_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every second pass."""
    whole, calls = Trainer.end_round, [0] * 3

    def end_round(self: Trainer, call: str, *, is_cut: bool) -> int:
        worker = self.strategy.loop.core.seat.worker
        calls[worker] += 1
        return whole(self, call, is_cut=is_cut) if calls[worker] % 2 == 0 else -1

    monkeypatch.setattr(Trainer, "end_round", end_round)


def counts_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_round(self: PassSteps, clock: int) -> None:
        self._on_round(clock, self._in_round - (clock == 1))

    monkeypatch.setattr(PassSteps, "end_round", end_round)


@pytest.mark.parametrize(
    ("breaks", "found"),
    [
        (ends_early, "summary.json says rounds_cut 0; by what workers recorded it is 9"),
        (ends_late, "pass 0 was over after 10 steps, and no round ended there"),
        (counts_less, "pass 1 was over after 20 steps, round 1 after 19"),
    ],
)
def test_broken_versions_are_found_by_the_check(
    breaks: Callable[[pytest.MonkeyPatch], None],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    breaks(monkeypatch)
    settings = {"local_steps": "epoch", "record": True}
    case = Case(name="broken", script=training(), groups=GROUPS, settings=settings)
    run_virtually(case, tmp_path, link=WILD)
    report = check_run(tmp_path, read_histories(tmp_path))
    assert set(report.violations_by_rule) == {Rule.HANDS.value}
    assert any(re.search(found, line) for line in report.violations), report.violations


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"steps": 19}, "after 19 steps, round 1 after 20"),
        ({"round": 0}, "after 20 steps, round 0 after 10"),
        ({"round": -1, "steps": 21}, "after 21 steps, and no round ended there"),
        ({"is_whole": False}, "summary.json says rounds_cut 0; by what workers recorded it is 1"),
    ],
)
def test_forged_lines_are_found_by_the_check(
    change: dict[str, Any], found: str, tmp_path: Path
) -> None:
    run(training(), tmp_path)
    path = tmp_path / "history" / "worker-1.passes"
    lines = path.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **change})
    path.write_text("\n".join(lines) + "\n")
    report = check_run(tmp_path, read_histories(tmp_path))
    assert set(report.violations_by_rule) == {Rule.HANDS.value}
    assert any(re.search(found, line) for line in report.violations), report.violations


def test_the_same_over_mpi(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["by pass"]
    outcome.checked()
    wanted = in_torch(OUTERS["nesterov"])
    for each in outcome.results:
        assert each["lengths"] == [PER_PASS] * EPOCHS
        assert torch.allclose(each["parameters"], wanted, rtol=1e-4, atol=1e-6)
