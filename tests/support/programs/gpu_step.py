"""How long a step takes on a GPU, with and without overlap: run by hand where there is one.

    psdist run -n 2 --servers 1 tests/support/programs/gpu_step.py

Medians of one run on the same ranks; the computation alone beside them, and whether the parameters
are the same to the bit in the end.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Literal

import torch
from torch import nn

import psdist

LAYERS = 16
WIDTH = 2048
BATCH = 4096
STEPS = 24
SKIPPED = 6
"""In the first ones overlap watches, and memory is made."""


def make() -> nn.Module:
    torch.manual_seed(0)
    layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).cuda()


def timed(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_alone: bool) -> float:
    """Seconds of a step. ``is_alone``: no step is made."""
    x = torch.randn(BATCH, WIDTH, device="cuda")
    times = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.cuda.synchronize()
        before_s = time.perf_counter()
        model(x).square().mean().backward()
        if not is_alone:
            optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - before_s)
    return statistics.median(times[SKIPPED:])


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU: nothing to measure")
    job = psdist.init()
    plain = make()
    alone_s = timed(plain, torch.optim.SGD(plain.parameters()), is_alone=True)
    ways: tuple[Literal["off", "auto"], ...] = ("off", "auto")
    values, told = [], [f"computation alone {1e3 * alone_s:.1f} ms"]
    for overlap in ways:
        model = make()
        made = torch.optim.SGD(model.parameters(), lr=1e-3)
        model, optimizer = job.prepare(model, made, overlap=overlap)
        torch.manual_seed(job.worker)
        told.append(f"{overlap} {1e3 * timed(model, optimizer, is_alone=False):.1f} ms")
        values.append(torch.cat([each.detach().view(-1) for each in model.parameters()]))
    is_same = torch.equal(values[0].view(torch.int32), values[1].view(torch.int32))
    print(f"worker {job.worker}: {', '.join(told)}; same bits: {is_same}", flush=True)


if __name__ == "__main__":
    main()
