"""Several jobs in one process, and what can go wrong between them.

    psdist run -n 4 jobs_script.py OUT three_jobs

Each worker of a way that ends well writes what it saw to OUT.<worker>, as JSON;
tests/mpi/test_close.py reads it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import psdist

MODES = ("ssp", "sync", "async")


def train(job: psdist.Job, model: torch.nn.Module | None = None, iterations: int = 5) -> Any:
    """A model that is the job's, after so many iterations, and its optimizer."""
    torch.manual_seed(0)
    model = model or torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    (batch,) = list(job.loader(torch.ones(6, 8), batch_size=6, shard=False))
    for _ in range(iterations):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    job.log(job=job.clock)
    return model, optimizer


def three_jobs() -> dict[str, Any]:
    """With the same model and with another one; the middle one by close()."""
    seen: dict[str, Any] = {"jobs": []}
    with psdist.init(mode=MODES[0]) as job:
        model, optimizer = train(job)
        first = job
    seen["told"] = uses_after_the_end(first, model, optimizer)
    model(torch.ones(1, 8)).sum().backward()  # a model outlives its job
    note(seen, first, model)
    job = psdist.init(mode=MODES[1])
    assert job is not first
    assert psdist.init() is job
    train(job, model)
    job.save("model.safetensors")
    job.close()
    job.close()
    note(seen, job, model)
    with psdist.init(mode=MODES[2], staleness=1) as job:
        other, _ = train(job)
        assert job.mean(job.worker) == (job.num_workers - 1) / 2
    note(seen, job, other)
    return seen


def note(seen: dict[str, Any], job: psdist.Job, model: torch.nn.Module) -> None:
    flat = [value for each in model.parameters() for value in each.detach().view(-1).tolist()]
    seen["jobs"].append(
        {"mode": job.mode, "clock": job.clock, "rank": job.mpi_rank, "parameters": flat}
    )


def uses_after_the_end(job: psdist.Job, model: Any, optimizer: Any) -> dict[str, str]:
    uses: dict[str, Callable[[], object]] = {
        "prepare": lambda: job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)),
        "save": lambda: job.save("never.safetensors"),
        "step": optimizer.step,
        "mean": lambda: job.mean(1.0),
        "barrier": job.barrier,
        "pull": job.pull,
        "log": lambda: job.log(loss=1.0),
        "loader": lambda: job.loader([1], batch_size=1),
        "sampler": lambda: job.sampler([1]),
    }
    told: dict[str, str] = {}
    for name, use in uses.items():
        try:
            use()
        except psdist.UsageError as error:
            told[name] = str(error)
    return told


def ends_after_close() -> dict[str, Any]:
    job = psdist.init()
    model, _ = train(job)
    job.close()
    seen: dict[str, Any] = {"jobs": []}
    note(seen, job, model)
    return seen


def leaves_while_others_begin_again() -> None:
    with psdist.init() as job:
        train(job)
    if job.worker != job.num_workers - 1:
        psdist.init()


def catches_it_and_leaves() -> dict[str, Any]:
    with psdist.init() as job:
        train(job)
    told = ""
    if job.worker != job.num_workers - 1:
        try:
            psdist.init()
        except psdist.CollectiveError as error:
            told = str(error)
    return {"told": told}


def begins_with_other_settings() -> None:
    with psdist.init(mode="ssp") as job:
        train(job)
    psdist.init(mode="async" if job.is_chief else "ssp")


def fails_inside() -> None:
    with psdist.init() as job:
        train(job)
        if job.is_chief:
            raise RuntimeError("lost its data")
        job.barrier()


def fails_inside_and_goes_on() -> None:
    with suppress(RuntimeError):
        fails_inside()


def fails_inside_and_begins_again() -> None:
    with suppress(RuntimeError):
        fails_inside()
    psdist.init()


def fails_between() -> None:
    with psdist.init() as job:
        train(job)
    if job.is_chief:
        raise RuntimeError("lost its notes")
    psdist.init()


def exits_with_0_inside() -> None:
    with psdist.init() as job:
        train(job)
        sys.exit(0)


def never_steps() -> None:
    with psdist.init() as job:
        model, _ = train(job, iterations=0)
        model(torch.ones(1, 8)).sum().backward()


def second_directory_is_taken() -> None:
    with psdist.init() as job:
        train(job)
    job.close()
    psdist.init()


def many_jobs() -> dict[str, Any]:
    """The faster worker begins the next job as early as it can."""
    seen: dict[str, Any] = {"jobs": []}
    for number in range(12):
        with psdist.init(mode=MODES[number % 3], seed=number) as job:
            model, _ = train(job, iterations=number % 4 + 1)
            if job.is_chief:
                for _ in range(50):
                    job.log(late=number)
        note(seen, job, model)
    return seen


def main(out: str, way: str) -> None:
    seen = globals()[way]()
    if seen is not None:
        (rank,) = {each["rank"] for each in seen.get("jobs", ())} or {psdist_rank()}
        Path(f"{out}.{rank}").write_text(json.dumps(seen))


def psdist_rank() -> int:
    from psdist.ranks.connecting import current

    context = current()
    assert context is not None
    return context.number


if __name__ == "__main__":
    main(*sys.argv[1:])
