"""A script whose mode changes: sys.argv is the folder for what each worker saw, the number of
iterations, and after how many of them which mode is set: modes_script.py FOLDER 12 4=ssp:2 8=sync;
slow=25: in each of them another worker takes 25 ms; dies=40: in that one the last worker fails.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import psdist

folder, num_iterations = Path(sys.argv[1]), int(sys.argv[2])
changes = dict(word.split("=") for word in sys.argv[3:])
job = psdist.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
modes = []
for iteration in range(num_iterations):
    if str(iteration) in changes:
        mode, _, bound = changes[str(iteration)].partition(":")
        job.set_mode(mode, staleness=int(bound) if bound else None)
    modes.append([job.mode, job.staleness])
    if changes.get("dies") == str(iteration) and job.worker == job.num_workers - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(100 * iteration + job.worker)
    if (iteration * 7 // 3) % job.num_workers == job.worker:
        time.sleep(float(changes.get("slow", 0)) / 1000)
    loss = model(torch.randn(16, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
(folder / f"seen.{job.worker}").write_text(json.dumps({"modes": modes, "weights": weights.hex()}))
