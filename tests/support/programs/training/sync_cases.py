"""Mode sync, one worker per group, in several layouts, for tests/training/test_sync.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from psdist.job import Job
from tests.support.programs.training.cases import Case, Result, Script, Stage
from tests.support.programs.training.problems import Problem, flat, train

ITERATIONS = 50
JOINT_BATCH = 24
PROBLEM = Problem()

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3
    ),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2),
}


def script(optimizer_name: str) -> Script:
    def run(job: Job, _stage: Stage) -> Result:
        # The chief's values are used: another worker's own must not matter.
        model = PROBLEM.model(seed=job.worker)
        model, optimizer = job.prepare(model, OPTIMIZERS[optimizer_name](model))
        size = JOINT_BATCH // job.num_workers
        train(
            model,
            optimizer,
            PROBLEM.batches(
                size=size, count=ITERATIONS, part=job.worker, num_parts=job.num_workers
            ),
        )
        return {"parameters": flat(model), "clock": job.clock}

    return run


def case(name: str, optimizer: str, *, groups: int, servers: int) -> Case:
    return Case(
        name=name,
        script=script(optimizer),
        servers=servers,
        groups=tuple((worker,) for worker in range(groups)),
        settings={"mode": "sync", "record": True, "checksum_every": 1},
    )


LAYOUTS = [(groups, servers) for groups in (2, 3) for servers in (1, 3)]

CASES = [
    case(f"{optimizer}-{groups}-groups-{servers}-servers-{which}-run", optimizer,
         groups=groups, servers=servers)
    for optimizer in OPTIMIZERS
    for groups, servers in LAYOUTS
    for which in (("first", "second") if servers == 3 else ("first",))
]  # fmt: skip
