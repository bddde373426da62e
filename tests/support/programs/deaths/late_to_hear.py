"""A training script whose coordinator and one worker of the second group are killed by SIGKILL at
once, while the other worker of that group is busy for LATE_S: the job of the first group has ended
before it looks up.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch

import psdist

ITERATIONS = 12
KILL_AT = 6
LATE_S = 4.0


def main() -> None:
    job = psdist.init()
    model = torch.nn.Linear(64, 64)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    busy, killer = job.num_workers - 2, job.num_workers - 1
    for iteration in range(ITERATIONS):
        if iteration == KILL_AT and job.worker == killer:
            ranks = json.loads((Path(os.environ["PSDIST_RUN_DIR"]) / "ranks.json").read_text())
            servers = [each["pid"] for each in ranks if each["role"] == "server"]
            os.kill(servers[0], signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if iteration == KILL_AT and job.worker == busy:
            time.sleep(LATE_S)
            print(f"worker {busy} looks up", flush=True)
        optimizer.zero_grad()
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
    print(f"worker {job.worker} clock {job.clock}", flush=True)


if __name__ == "__main__":
    main()
