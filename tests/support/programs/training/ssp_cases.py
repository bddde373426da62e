"""Modes ssp and async, with a slow group among others, for tests/training/test_ssp.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from psdist.job import Job
from tests.support.programs.training.cases import Case, Result, Script, Stage
from tests.support.programs.training.problems import Problem, flat, train

PROBLEM = Problem()
ITERATIONS = 30
BOUNDS = (0, 1, 4)
PACE_S = 1e-2
"""What an iteration of a fast group lasts at least; a slow one sleeps three times as long. Far more
than its computation takes, also on a busy machine."""


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def paced(job: Job, stage: Stage, *, slow: int | None) -> Callable[[], None]:
    return lambda: stage.sleep(3 * PACE_S if job.worker == slow else PACE_S)


def with_a_slow_group(*, slow: int | None, has_collectives: bool = False) -> Script:
    """Everybody makes ITERATIONS iterations; worker ``slow`` is three times slower."""

    def run(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        )
        pause = paced(job, stage, slow=slow)

        def after_step() -> None:
            pause()
            if has_collectives and job.clock % 10 == 5:
                job.mean(job.clock)
            if has_collectives and job.clock % 10 == 7:
                job.pull()

        train(
            model,
            optimizer,
            PROBLEM.batches(size=8, count=ITERATIONS, part=job.worker, num_parts=job.num_workers),
            after_step=after_step,
        )
        return {"parameters": flat(model), "clock": job.clock}

    return run


def unpaced(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    iterations: int,
    has_same_data: bool = False,
) -> Script:
    """As fast as it goes; the result holds what the servers have in the end."""

    def run(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        start = flat(model)
        model, optimizer = job.prepare(model, make_optimizer(model))
        part, num_parts = (0, 1) if has_same_data else (job.worker, job.num_workers)
        size = PROBLEM.num_samples if has_same_data else 24 // job.num_workers
        train(
            model,
            optimizer,
            PROBLEM.batches(size=size, count=iterations, part=part, num_parts=num_parts),
        )
        job.barrier()
        job.pull()
        movement = torch.linalg.vector_norm(flat(model) - start)
        return {"parameters": flat(model), "movement": float(movement)}

    return run


def leaving(*, early: int, after: int) -> Script:
    """Worker ``early`` finishes after so many iterations, the others after ITERATIONS."""

    def run(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, plain_sgd(model))
        count = after if job.worker == early else ITERATIONS
        batches = PROBLEM.batches(size=8, count=count, part=job.worker, num_parts=job.num_workers)
        train(model, optimizer, batches)
        return {"parameters": flat(model), "clock": job.clock}

    return run


def saving() -> Script:
    """Worker 1 is ahead when both save: the chief's memory is then older than what it saves."""

    def run(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, plain_sgd(model))
        for x, y in PROBLEM.batches(size=8, count=ITERATIONS, part=job.worker, num_parts=2):
            nn.functional.cross_entropy(model(x), y).backward()
            if job.worker == 1 and job.clock == 5:
                stage.sleep(10 * PACE_S)
            optimizer.step()
            optimizer.zero_grad()
            stage.sleep(PACE_S)
            if job.clock % 10 == 4:
                job.save(stage.path / "model.safetensors")
        return {"clock": job.clock}

    return run


def groups_of_one(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple((worker,) for worker in range(count))


def case(
    name: str,
    script: Script,
    *,
    mode: str,
    groups: int,
    staleness: int = 0,
    servers: int = 2,
    **settings: object,
) -> Case:
    settings = {
        "mode": mode, "staleness": staleness, "record": True, "checksum_every": 2, **settings
    }  # fmt: skip
    return Case(
        name=name, script=script, servers=servers, groups=groups_of_one(groups), settings=settings
    )


ADAM_CLOCKS = 40
SAME_DATA = unpaced(adam, iterations=ADAM_CLOCKS, has_same_data=True)
PLAIN = unpaced(plain_sgd, iterations=50)

CASES = [
    *(
        case(f"slow-ssp-{bound}", with_a_slow_group(slow=2), mode="ssp", groups=3, staleness=bound)
        for bound in BOUNDS
    ),
    case(
        "collectives-ssp-4", with_a_slow_group(slow=2, has_collectives=True),
        mode="ssp", groups=3, staleness=4,
    ),
    case(
        "pipelined-ssp-4", with_a_slow_group(slow=2, has_collectives=True),
        mode="ssp", groups=3, staleness=4, pipeline=1,
    ),
    case("slow-async", with_a_slow_group(slow=1), mode="async", groups=2),
    case("plain-sync", PLAIN, mode="sync", groups=3),
    case("plain-ssp-0", PLAIN, mode="ssp", groups=3, staleness=0),
    case("adam-sync", SAME_DATA, mode="sync", groups=4),
    case("adam-ssp-3", SAME_DATA, mode="ssp", groups=4, staleness=3),
    case("leaving-ssp", leaving(early=1, after=12), mode="ssp", groups=3, staleness=2),
    case("leaving-sync", leaving(early=1, after=12), mode="sync", groups=3),
]  # fmt: skip
