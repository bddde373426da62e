"""A training that is saved with its optimizer's state, and another job that continues from it.

psdist run -n 4 --servers 2 -m tests.support.programs.resuming.continued CHECKPOINT FIRST LAST

makes the steps FIRST to LAST, from CHECKPOINT if that is there, and writes what there is then.
tests/mpi/test_optimizer_state.py does the same in one process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import psdist

NUM_WORKERS = 2


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 9))
    weights = {"params": [each for each in model.parameters() if each.dim() == 2], "lr": 1e-2}
    biases = {"params": [each for each in model.parameters() if each.dim() == 1], "amsgrad": True}
    return model, torch.optim.AdamW([weights, biases], lr=3e-3)


def train(model: Any, optimizer: Any, steps: range, workers: range) -> None:
    for step in steps:
        batches = []
        for worker in workers:
            generator = torch.Generator().manual_seed(1000 * worker + step)
            batches.append(torch.randn(8, 64, generator=generator))
        optimizer.zero_grad()
        model(torch.cat(batches)).sin().square().mean().backward()
        optimizer.step()


def refused(job: psdist.Job) -> str:
    """What a script is told of state that cannot be cut."""
    model, _ = make()
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, range(1), range(1))
    try:
        job.prepare(model, optimizer)
    except psdist.OptimizerRefusedError as error:
        return str(error)
    return "nothing"


def main(path: str, first: str, last: str) -> None:
    job = psdist.init()
    model, optimizer = make()
    if os.path.exists(path):
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    model, served = job.prepare(model, optimizer)
    train(model, served, range(int(first), int(last)), range(job.worker, job.worker + 1))
    state = job.optimizer_state()
    assert (state is not None) == job.is_chief
    if job.is_chief:
        torch.save({"model": model.state_dict(), "optimizer": state}, f"{path}.partial")
        os.replace(f"{path}.partial", path)


if __name__ == "__main__":
    if sys.argv[1] == "refused":
        job = psdist.init()
        print(f"worker {job.worker} was told: {refused(job)}", flush=True)
    else:
        main(*sys.argv[1:])
