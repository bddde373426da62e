"""A training script that writes down which samples each worker uses. Some workers are killed.

DIES="1 12 step" (separated by commas): kill worker 1 in its iteration 12; ``forward``: before it
pushes, ``step``: while it pushes. SEEN: a folder, with a file for each worker. The file has a line
for each batch that the worker receives, and another after the step with it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import psdist
from tests.support.jobs import after_each_push

EPOCHS, SAMPLES, BATCH, PAUSE_S = 3, 120, 4, 0.005
PLANS = [each.split() for each in filter(None, os.environ.get("DIES", "").split(","))]


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    now: dict[str, Any] = {"clock": -1, "pushes": 0}

    def die_at_second() -> None:
        if phase == "step" and now["clock"] == at:
            now["pushes"] += 1
            if now["pushes"] == 2:
                die()

    after_each_push(die_at_second)
    job = psdist.init()
    mine = [(int(clock), phase) for worker, clock, phase in PLANS if int(worker) == job.worker]
    at, phase = mine[0] if mine else (-1, "never")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    seen = (Path(os.environ["SEEN"]) / f"{job.worker}").open("a", buffering=1)
    loader = job.loader(Numbers(), batch_size=BATCH, shuffle=True)
    for epoch in job.epochs(EPOCHS):
        for batch in loader:
            now["clock"] = job.clock
            line = f"{epoch} {len(loader)} {' '.join(map(str, batch.tolist()))}"
            seen.write(f"gets {line}\n")
            if phase == "forward" and job.clock == at:
                die()
            inputs = batch[:, None].float().expand(-1, 16) / SAMPLES
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            time.sleep(PAUSE_S * (1 + job.worker % 2))
            optimizer.step()
            seen.write(f"saw {line}\n")
    print(f"worker {job.worker} made {job.clock} iterations", flush=True)


if __name__ == "__main__":
    main()
