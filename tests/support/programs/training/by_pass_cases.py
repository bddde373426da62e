"""Rounds of local steps that end with the passes over the loader, groups of two and one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import TensorDataset

from psdist.job import Job
from tests.support.programs.training.cases import Case, Result, Script, Stage
from tests.support.programs.training.problems import Problem, flat

PROBLEM = Problem(num_samples=60)
EPOCHS = 3


def nothing(_job: Job, _step: int) -> None: ...


def data() -> TensorDataset:
    """60 samples: ten batches of two for each of three workers."""
    return TensorDataset(*PROBLEM.data())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def training(after_step: Callable[[Job, int], None] = nothing, *, epochs: int = EPOCHS) -> Script:
    """How many steps each round had, by worker, and the parameters."""

    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, optimizer_of(model))
        loader = job.loader(data(), batch_size=2)
        lengths, step = [0], 0
        job.state.setdefault("clocks", [])
        for _ in job.epochs(epochs):
            for x, y in loader:
                lengths += [0] * (job.clock + 1 - len(lengths))
                lengths[job.clock] += 1
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                after_step(job, step)
                step += 1
            job.state["clocks"].append(job.clock)
        return {
            "lengths": lengths,
            "clocks": job.state["clocks"],
            "parameters": flat(model),
        }

    return script


CASES = (
    Case(
        name="by pass",
        script=training(),
        servers=2,
        groups=((0, 1), (2,)),
        settings={"local_steps": "epoch", "outer": "nesterov", "record": True},
    ),
)
