"""Groups of one and of three workers in one job, for tests/training/test_group.py."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from psdist.errors import CollectiveError, NonFiniteGradientError
from psdist.job import Job
from tests.support.programs.training.cases import Case, Result, Script, Stage
from tests.support.programs.training.problems import Batch, Problem, flat, train
from tests.support.programs.training.sync_cases import OPTIMIZERS

PROBLEM = Problem()
GROUPS = ((0,), (1, 2, 3))
NUM_WORKERS = 4
ITERATIONS = 30
SIZE = 6
OVERFLOWS = {3: 2, 11: 1}
"""Iteration -> the worker whose gradient overflows there; both are of the group of three."""


def batches_of(job: Job, *, count: int = ITERATIONS) -> list[Batch]:
    return list(PROBLEM.batches(size=SIZE, count=count, part=job.worker, num_parts=job.num_workers))


def trained(optimizer_name: str) -> Script:
    def run(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model(seed=job.worker)  # the chief's values are used
        model, optimizer = job.prepare(model, OPTIMIZERS[optimizer_name](model))
        train(model, optimizer, batches_of(job))
        return {"parameters": flat(model), "mean": job.mean(job.worker)}

    return run


def skewed(job: Job, stage: Stage) -> Result:
    """The group of one is fast; in the other one worker holds its group up."""
    model = PROBLEM.model()
    model, optimizer = job.prepare(model, OPTIMIZERS["sgd"](model))
    seen = []

    def after_step() -> None:
        seen.append(flat(model))
        if job.clock == 20:
            job.pull()
        stage.sleep(8e-3 if job.worker == 2 else 2e-3)

    train(model, optimizer, batches_of(job), after_step=after_step)
    return {"seen": torch.stack(seen)}


class HeadOfPart(nn.Module):
    """Each worker trains a head of its own, all of them the body, nobody head 4."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(20, 64)
        self.heads = nn.ModuleList([nn.Linear(64, 5) for _ in range(5)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        logits: Tensor = self.heads[head](torch.tanh(self.body(x)))
        return logits


def heads_model() -> HeadOfPart:
    torch.manual_seed(3)
    return HeadOfPart()


def head_of(worker: int, step: int) -> int:
    # Sometimes group 1 as a whole has no gradient for the head that group 0 trains, and the other
    # way round; sometimes one worker's head is also another's.
    return (worker + step // 4) % 4 if step % 2 else worker % 2


def heads(optimizer_name: str) -> Script:
    def run(job: Job, _stage: Stage) -> Result:
        model = heads_model()
        model, optimizer = job.prepare(model, OPTIMIZERS[optimizer_name](model))
        for step, (x, y) in enumerate(batches_of(job)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x, head_of(job.worker, step)), y).backward()
            optimizer.step()
        return {"parameters": flat(model)}

    return run


def scaled(job: Job, _stage: Stage) -> Result:
    """One worker's overflow makes its whole group skip the iteration."""
    model = PROBLEM.model()
    model, optimizer = job.prepare(model, OPTIMIZERS["adamw"](model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    for step, (x, y) in enumerate(batches_of(job)):
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        if OVERFLOWS.get(step) == job.worker:
            _gradient(model)[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
    return {"parameters": flat(model), "scale": scaler.get_scale(), "clock": job.clock}


def _gradient(model: nn.Module) -> Tensor:
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return gradient


def not_finite(job: Job, _stage: Stage) -> Result:
    """Nothing of the group is pushed, every worker of it is told, and can continue."""
    model = PROBLEM.model()
    model, optimizer = job.prepare(model, OPTIMIZERS["sgd"](model))
    told = ""
    for step, (x, y) in enumerate(batches_of(job, count=6)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if step == 3 and job.worker == 3:
            _gradient(model)[1, 1] = math.nan
        try:
            optimizer.step()
        except NonFiniteGradientError as error:
            told = str(error)
            optimizer.zero_grad()
            optimizer.step()  # the group gives nothing to this iteration
    return {"parameters": flat(model), "told": told, "clock": job.clock}


def half(dtype: torch.dtype) -> Script:
    def run(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model().to(dtype)
        model, optimizer = job.prepare(model, OPTIMIZERS["sgd"](model))
        batches = [(x.to(dtype), y) for x, y in batches_of(job)]
        train(model, optimizer, batches)
        return {"parameters": flat(model)}

    return run


def in_the_group(job: Job, _stage: Stage) -> Result:
    """torch.distributed's default process group is the group; mistakes are told, not hung in."""
    model = PROBLEM.model()
    size = dist.get_world_size()
    numbers = torch.tensor([float(job.worker)])
    dist.all_reduce(numbers)
    mesh = init_device_mesh("cpu", (size,))
    result: dict[str, Any] = {
        "rank": dist.get_rank(),
        "size": size,
        "sum": float(numbers),
        "mesh": mesh.size(),
        "told": "",
        "channel": type(job._group).__name__,
    }
    model, optimizer = job.prepare(model, OPTIMIZERS["sgd"](model))
    train(model, optimizer, batches_of(job, count=2))
    if size > 1:
        try:
            if job.worker == 2:
                job.pull()
            else:
                optimizer.step()
        except CollectiveError as error:
            result["told"] = str(error)
    with suppress(CollectiveError):
        job.barrier()
    return result


def case(
    name: str,
    script: Script,
    *,
    groups: tuple[tuple[int, ...], ...] = GROUPS,
    servers: int = 2,
    **settings: object,
) -> Case:
    recorded = {"mode": "sync", "record": True, "checksum_every": 1}
    return Case(
        name=name, script=script, servers=servers, groups=groups, settings={**recorded, **settings}
    )


CASES = [
    *(case(f"trained-{name}", trained(name)) for name in OPTIMIZERS),
    case("trained-again-adamw", trained("adamw")),
    case("one-server-adamw", trained("adamw"), servers=1),
    case("torch-adamw", trained("adamw"), group_tier="torch"),
    case("torch-bf16", half(torch.bfloat16), group_tier="torch"),
    case("mpi-adamw", trained("adamw"), group_tier="mpi"),
    case("mpi-bf16", half(torch.bfloat16), group_tier="mpi"),
    case("three-and-one", trained("adamw"), groups=((0, 2, 3), (1,))),
    # One chunk: two of the three workers have nothing to push and are given what the third has.
    case("one-chunk", trained("adamw"), chunk_bytes=1 << 20),
    *(case(f"heads-{name}", heads(name)) for name in OPTIMIZERS),
    case("skewed-ssp-2", skewed, mode="ssp", staleness=2),
    case("skewed-async", skewed, mode="async"),
    case("scaled", scaled),
    case("not-finite", not_finite),
    case("bf16", half(torch.bfloat16)),
    case("fp16", half(torch.float16)),
    case("in-the-group", in_the_group),
]
