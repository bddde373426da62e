"""Rounds of local steps weigh alike, however many steps groups have made."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from psdist.job import Job
from tests.support.programs.training.by_pass_cases import PROBLEM
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.problems import flat
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import LinkModel

WILD = LinkModel(latency_s=1e-5, jitter_s=2e-3, duplicate_rate=0.05)
GROUPS = ((0, 1), (2,), (3,))
ROUNDS = ([4, 4, 4], [4, 1, 3], [2, 4, 1])
"""Weights by group; a collective that all enter after other steps cuts them."""


def run(script: Script, path: Path) -> Outcome:
    settings = {"local_steps": 4, "record": True}
    case = Case(name="weights", script=script, groups=GROUPS, servers=2, settings=settings)
    outcome = run_virtually(case, path, link=WILD)
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


def in_torch() -> Tensor:
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
        with torch.no_grad():
            for index, parameter in enumerate(anchor.parameters()):
                there = [list(model.parameters())[index] for model in models]
                parameter -= sum(parameter - each for each in there) / len(there)
    return flat(anchor)


def test_groups_weigh_alike_however_many_steps_they_make(tmp_path: Path) -> None:
    outcome = run(training, tmp_path)
    for result in outcome.results:
        assert torch.allclose(result["parameters"], in_torch(), rtol=1e-4, atol=1e-6)
