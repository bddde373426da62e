"""A training script that looks at everything a Job shows to its user.

    psdist run --workers 2 -m tests.support.programs.api_script OUT

Each worker writes what it saw to OUT.<worker>, as JSON; tests/mpi/test_public_api.py reads it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import psdist

from .training.problems import Problem  # relative: python -m finds it, and so must psdist run -m


def main(out: str) -> None:
    job = psdist.init()
    seen: dict[str, Any] = {"numbers": numbers(job)}
    model: torch.nn.Module = Problem(num_inputs=4).model()
    original = torch.optim.SGD(model.parameters(), lr=0.1)
    own = DataLoader(TensorDataset(torch.ones(5, 4)), batch_size=2)
    model, optimizer, loader = job.prepare(model, original, own)
    seen["mistakes"] = mistakes_before_the_first_step(job, model, original)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    assert isinstance(optimizer, psdist.ServedOptimizer)
    seen["mistakes"] |= different_rates_in_the_group(job, optimizer)
    optimizer.step()
    job.log({"loss/train": torch.tensor(0.5)}, epoch=1)
    seen["mean"] = job.mean({"worker": job.worker, "pair": (1, 2.0 * job.worker)})
    seen["per_class"] = job.mean(torch.arange(3.0) * job.worker).tolist()
    seen["batches"] = [len(x) for (x,) in loader]
    seen["sampled"] = list(job.sampler(range(5), shuffle=False))
    seen["flags"] = [job.any(job.is_chief), job.all(job.is_chief), job.all(1)]
    optimizer.zero_grad()
    (model(torch.ones(3, 4)) * (1 + job.worker)).sum().backward()
    seen["norm"] = float(job.clip_grad_norm_(0.1))
    optimizer.step()
    job.save(Path(out).with_name("model.safetensors"))
    Path(f"{out}.{job.worker}").write_text(json.dumps(seen))


def numbers(job: psdist.Job) -> dict[str, int]:
    names = ("rank", "worker", "local_rank", "mpi_rank")
    names += ("world_size", "num_workers", "num_servers", "servers")
    return {name: getattr(job, name) for name in names}


def mistakes_before_the_first_step(
    job: psdist.Job, model: torch.nn.Module, original: torch.optim.Optimizer
) -> dict[str, str]:
    """What each of them is told, and continues."""
    told: dict[str, str] = {}

    def mistake(name: str, make: Callable[[], object]) -> None:
        try:
            make()
        except psdist.UsageError as error:
            told[name] = str(error)

    model(torch.ones(3, 4)).sum().backward()
    mistake("step of the original", original.step)
    mistake("save of initial values", lambda: job.save("never.safetensors"))
    mistake("save under another name", lambda: job.save("model.pt"))
    return told


def different_rates_in_the_group(
    job: psdist.Job, optimizer: torch.optim.Optimizer
) -> dict[str, str]:
    (group,) = optimizer.param_groups
    rate = group["lr"]
    group["lr"] = rate * (1 + job.worker)
    try:
        optimizer.step()
    except psdist.HyperparameterError as error:
        return {"different rates": str(error)}
    finally:
        group["lr"] = rate
    return {}


if __name__ == "__main__":
    main(sys.argv[1])
