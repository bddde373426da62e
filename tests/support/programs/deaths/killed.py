"""A training job in which the rank that KILLED names ends by SIGKILL after some iterations.

    KILLED=2 mpirun -n 3 psdist run tests/support/programs/deaths/killed.py
    KILLED=0 ...                    # a server: worker 0 kills it

A worker kills itself in the middle of the script. A server runs no script, so worker 0 looks up its
process in ranks.json. The others would train for ever.
"""

import json
import os
import signal
from itertools import count
from pathlib import Path

import torch

import psdist

AFTER = 5

job = psdist.init()
model = torch.nn.Linear(64, 64)  # a share for every server
model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
ranks = json.loads((Path(os.environ["PSDIST_RUN_DIR"]) / "ranks.json").read_text())
killed = next(each for each in ranks if each["rank"] == int(os.environ["KILLED"]))
i_kill = killed["pid"] == os.getpid() if killed["role"] == "worker" else job.is_chief
for iteration in count():
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    if iteration == AFTER and i_kill:
        os.kill(killed["pid"], signal.SIGKILL)
