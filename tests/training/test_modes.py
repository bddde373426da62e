"""A script that changes the mode, in groups of several workers."""

from __future__ import annotations

from pathlib import Path

import torch

from psdist.job import Job
from tests.support.programs.training.cases import Case, Result, Stage
from tests.support.programs.training.virtual_job import run_virtually


def test_a_group_of_two_sets_the_mode_together(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = torch.nn.Linear(8, 8)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        modes = []
        for iteration in range(6):
            if iteration == 2:
                job.set_mode("ssp", staleness=2)
            modes.append((job.mode, job.staleness))
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
        return {"modes": modes}

    settings = {"set_mode": "allowed"}
    case = Case(name="modes", script=script, groups=((0, 1), (2,)), settings=settings)
    outcome = run_virtually(case, tmp_path / "run")
    assert [each["modes"][2:] for each in outcome.results] == [[("ssp", 2)] * 4] * 3
