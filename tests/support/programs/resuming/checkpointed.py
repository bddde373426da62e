"""A training with checkpoints, that may be killed on the way: two optimizers, batches by clock.

    psdist run ... -m tests.support.programs.resuming.checkpointed OUT OPTIMIZER STEPS KILL

makes STEPS iterations, with a checkpoint after every third, and saves the model to OUT; where it
resumes from a checkpoint, the rest of them. After iteration KILL the last worker is killed (-1:
never), in the middle of a checkpoint, which waits for the one before: that is complete.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable

import torch

import psdist

EVERY = 3
OPTIMIZERS: dict[str, Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


def main(out: str, optimizer: str, steps: int, kill: int, dtype: str = "float32") -> None:
    torch.manual_seed(0)
    job = psdist.init()
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 100), torch.nn.ReLU(), torch.nn.Linear(100, 3)
    ).to(getattr(torch, dtype))
    first, last = model[0].parameters(), model[2].parameters()
    make = OPTIMIZERS[optimizer]
    model, optimizers = job.prepare(model, [make(first), make(last)])
    print(f"worker {job.worker} begins at {job.clocks}", flush=True)
    while job.clock < steps:
        generator = torch.Generator().manual_seed(1000 * job.clock + job.worker)
        x = torch.randn(8, 40, generator=generator).to(getattr(torch, dtype))
        y = torch.randint(0, 3, (8,), generator=generator)
        for each in optimizers:
            each.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        for each in optimizers:
            each.step()
        if job.clock % EVERY == 0:
            job.checkpoint()
        if job.clock == kill:
            job.checkpoint()
            if job.worker == job.num_workers - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    job.save(out)


if __name__ == "__main__":
    out, optimizer, steps, kill, *dtype = sys.argv[1:]
    main(out, optimizer, int(steps), int(kill), *dtype)
