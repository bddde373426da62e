"""Groups of different speed, one of whose workers ends its attempt in the middle of a round.

python -m psdist run ... -m tests.support.programs.resuming.by_speed OUT [--end kill|usr1]

Each worker writes OUT-N.json: the samples that it has seen in each epoch, in all attempts together.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import psdist
from tests.support.programs.training.by_speed_cases import dataset

COUNT = 301
EPOCHS = 3
STEP_S = 0.004


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--end", choices=("kill", "usr1"))
    options = parser.parse_args()
    job = psdist.init()
    model = nn.Linear(1, 1)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    loader = job.loader(dataset(COUNT), batch_size=2, shuffle=True)
    job.state.setdefault("seen", {})
    for epoch in job.epochs(EPOCHS):
        for number, (x,) in enumerate(loader):
            job.state["seen"].setdefault(str(epoch), []).extend(x.flatten().int().tolist())
            optimizer.zero_grad()
            model(x).mean().backward()
            time.sleep(STEP_S if job.rank else 3 * STEP_S)
            optimizer.step()
            if epoch == 1 and number == 19 and job.rank == 0 and options.end:
                ends_with = signal.SIGKILL if options.end == "kill" else signal.SIGUSR1
                os.kill(os.getpid(), ends_with)
    Path(f"{options.out}-{job.rank}.json").write_text(json.dumps(job.state["seen"]))


if __name__ == "__main__":
    main()
