"""A job with rounds of local steps, groups of two and one."""

from __future__ import annotations

import torch
from torch import nn

from psdist.job import Job
from tests.support.programs.training.cases import Case, Result, Stage
from tests.support.programs.training.problems import Problem, flat

PROBLEM = Problem()


def train_in_rounds(job: Job, _stage: Stage) -> Result:
    model = PROBLEM.model()
    model, optimizer = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    batches = PROBLEM.batches(size=8, count=10, part=job.worker, num_parts=job.num_workers)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    job.barrier()
    return {"parameters": flat(model), "clock": job.clock}


CASES = (
    Case(
        name="rounds",
        script=train_in_rounds,
        servers=2,
        groups=((0, 1), (2,)),
        settings={"local_steps": 4, "outer": "nesterov", "record": True},
    ),
)
