"""A script whose workers differ in speed: sys.argv is the folder for what each worker saw, the
number of passes, and each worker's seconds of a step: speeds_script.py FOLDER 5 0.03 0.01 0.01."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import psdist

folder, num_passes, steps_s = Path(sys.argv[1]), int(sys.argv[2]), [float(s) for s in sys.argv[3:]]
job = psdist.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
data = torch.utils.data.TensorDataset(torch.randn(2048, 64), torch.arange(2048))
samples, waited_s, num_steps = [], 0.0, 0
job.barrier()
began_s = time.monotonic()
loader = job.loader(data, batch_size=2, shuffle=True)
for _ in range(num_passes):
    for x, number in loader:
        samples += number.tolist()
        time.sleep(steps_s[job.worker])
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        computed_s = time.monotonic()
        optimizer.step()
        waited_s += time.monotonic() - computed_s
        num_steps += 1
took_s = time.monotonic() - began_s
told = {"samples": samples, "took_s": took_s, "waited_s": waited_s, "steps": num_steps}
(folder / f"seen.{job.worker}").write_text(json.dumps({**told, "clock": job.clock}))
