"""A training script whose layers sleep: what ``psdist run --trace`` is shown with.

    psdist run -n 4 --servers 2 --group rank --trace --run-dir runs/auto -m \
        tests.benchmarks.steps.traced_step --size 16MiB --compute 0.3
    psdist trace runs/auto --svg docs/step-auto.svg

The layers have real parameters, sleep a third of ``--compute`` seconds in forward and the rest in
backward, and so stand for accelerators (psdist/commands/bench/sleeping.py).
"""

from __future__ import annotations

import argparse

import torch

import psdist
from psdist.commands.bench.sleeping import Sleepers, layer_sizes
from psdist.sizes import parse_bytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="16MiB")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--compute", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    num_bytes = parse_bytes(options.size)
    assert isinstance(num_bytes, int), f"{options.size} is no size"
    job = psdist.init()
    model = Sleepers(layer_sizes(num_bytes, options.layers))
    model.seconds = options.compute
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    job.barrier()
    for _ in range(options.steps):
        optimizer.zero_grad()
        model(torch.zeros(())).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
