"""A linear map of rank 3 to be learnt, by two layers; on the virtual network, for tests of codecs.

outcome = learn(path, steps=25, pause=lambda worker, step: 1e-3, codec="int8")
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result, Stage
from tests.support.programs.training.virtual_job import run_virtually

GROUPS: Final = ((0,), (1, 2), (3,))
WIDTH: Final = 40
_HIDDEN: Final = 32


def learn(
    path: Path,
    *,
    steps: int,
    pause: Callable[[int, int], float] = lambda worker, step: 1e-3,  # noqa: ARG005 - as named
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    servers: int = 2,
    **settings: Any,
) -> Outcome:
    """``pause(worker, step)``: seconds of each step; ``optimizer``: SGD, or one with an lr. A
    worker's result has its ``losses``, and the chief's what it has ``saved``."""

    def train(job: Job, stage: Stage) -> Result:
        torch.manual_seed(0)
        target = torch.randn(WIDTH, 3) @ torch.randn(3, WIDTH) / WIDTH**0.5
        layers = torch.nn.Linear(WIDTH, _HIDDEN), torch.nn.Linear(_HIDDEN, WIDTH)
        model = torch.nn.Sequential(*layers)
        hyper = {"lr": 0.3, "momentum": 0.5} if optimizer is torch.optim.SGD else {"lr": 0.01}
        model, served = job.prepare(model, optimizer(model.parameters(), **hyper))
        generator = torch.Generator().manual_seed(job.worker)
        losses = []
        for step in range(steps):
            x = torch.randn(32, WIDTH, generator=generator)
            served.zero_grad()
            loss = (model(x) - x @ target.T).square().mean()
            loss.backward()
            served.step()
            losses.append(loss.item())
            stage.sleep(pause(job.worker, step))
        file = stage.path / "model.safetensors"
        job.save(file)
        return {"losses": losses, "saved": load_file(file) if job.is_chief else {}}

    # Chunks of 1,024 values cut both matrices, in the middle of rows.
    given = {"chunk_bytes": 4096, "record": True, **settings}
    case = Case(name="learn", script=train, servers=servers, groups=GROUPS, settings=given)
    return run_virtually(case, path)
