"""A step of a model of many small tensors, with an optimizer that needs them whole.

    python -m tests.benchmarks.steps.small_tensors
    python -m tests.benchmarks.steps.small_tensors --servers 2 --optimizers Muon --sides 32

Small pieces share a chunk (psdist.protocol.partition); with ``chunk_bytes`` of the size of one
tensor each has a chunk and a message of its own. Both ways are runs of a job over MPI with one
worker, in turns; printed are the medians of each run's steps, and the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.support.mpirun import run_mpi

NUM_TENSORS = 200
STEPS, WARM_UP = 40, 8


def measure(optimizer: str, side: int) -> None:
    """A run's own program; the worker writes the seconds of each step as JSON."""
    import torch

    import psdist

    job = psdist.init()
    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.randn(side, side) for _ in range(NUM_TENSORS)])
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    model, made = job.prepare(model, made)
    for parameter in model:
        parameter.grad = torch.randn(side, side)
    times = []
    for _ in range(WARM_UP + STEPS):
        before_s = time.perf_counter()
        made.step()
        times.append(time.perf_counter() - before_s)
    Path(os.environ["SMALL_TENSORS_FILE"]).write_text(json.dumps(times[WARM_UP:]))


def step_s(optimizer: str, side: int, servers: int, *, chunk_bytes: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        env = {
            "SMALL_TENSORS_FILE": str(file),
            "PSDIST_RUN_DIR": str(Path(folder) / "run"),
            "PSDIST_SERVERS": str(servers),
            "PSDIST_CHUNK_BYTES": chunk_bytes,
            "OMP_NUM_THREADS": "1",
        }
        program = ["-m", "tests.benchmarks.steps.small_tensors", "--run", optimizer, str(side)]
        done = run_mpi(1 + servers, program, timeout_s=300, env=env)
        if done.returncode:
            sys.exit(done.text)
        return statistics.median(json.loads(file.read_text(encoding="utf-8")))


def compare(optimizer: str, side: int, servers: int, pairs: int) -> str:
    """A row of the table."""
    alone, together = [], []
    for _ in range(pairs):
        alone.append(step_s(optimizer, side, servers, chunk_bytes=str(4 * side * side)))
        together.append(step_s(optimizer, side, servers, chunk_bytes="auto"))
    ratios = [a / b for a, b in zip(alone, together, strict=True)]
    return (
        f"| {optimizer} | {NUM_TENSORS} x {4 * side * side >> 10} KiB | {servers} | "
        f"{1e3 * statistics.median(alone):.1f} | {1e3 * statistics.median(together):.1f} | "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizers", default="Adafactor,Muon")
    parser.add_argument("--sides", default="32,64")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        optimizer, side = options.run
        measure(optimizer, int(side))
        return
    print("| optimizer | tensors | servers | alone, ms | together, ms | times as fast |")
    print("|---|---|---|---|---|---|")
    for optimizer in options.optimizers.split(","):
        for side in options.sides.split(","):
            print(compare(optimizer, int(side), options.servers, options.pairs), flush=True)


if __name__ == "__main__":
    main()
