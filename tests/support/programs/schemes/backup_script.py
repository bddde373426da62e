"""A script whose groups are slow now and then: sys.argv is the folder for what each worker saw, the
number of rounds, seconds of a usual one, and who is slow, ten times as slow as usual:
backup_script.py FOLDER 60 0.02 random, or always, or nobody.

random: one group in twelve rounds, drawn by the last word where that is seed=N; always: the last
group, in every round.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn

import psdist

EVERY, TIMES = 12, 10
folder, num_rounds, usual_s, who = (
    Path(sys.argv[1]),
    int(sys.argv[2]),
    float(sys.argv[3]),
    sys.argv[4],
)
job = psdist.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
model, optimizer = job.prepare(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
    max_grad_norm=0.1 if "clipped" in sys.argv else None,
)
num_samples = 4 * job.num_workers * num_rounds
data = torch.utils.data.TensorDataset(torch.randn(num_samples, 64), torch.arange(num_samples))
seed = sys.argv[-1] if sys.argv[-1].startswith("seed=") else ""
slow_blocks: set[int] = set()


def seconds(round_number: int) -> float:
    """Of this group's computation."""
    if who == "always":
        return usual_s * (TIMES if job.group == job.num_groups - 1 else 1)
    block = round_number // EVERY
    if who == "nobody" or block in slow_blocks:
        return usual_s
    slow_blocks.add(block)
    is_slow = random.Random(f"slow {seed}{block}").randrange(job.num_groups) == job.group
    return usual_s * (TIMES if is_slow else 1)


rounds, samples = [], []
job.barrier()
began_s = time.monotonic()
for x, number in job.loader(data, batch_size=4, shuffle=True):
    rounds.append(job.clock)
    samples += number.tolist()
    time.sleep(seconds(job.clock))
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
took_s = time.monotonic() - began_s
clock = job.clock
mean = job.mean(float(loss.detach()))
job.save(folder / "model.safetensors")
told = {"rounds": rounds, "samples": samples, "clock": clock, "took_s": took_s, "mean": mean}
(folder / f"seen.{job.worker}").write_text(json.dumps(told))
