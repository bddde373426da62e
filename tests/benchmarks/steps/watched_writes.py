"""The cost of comparing a part of the parameters in each step (docs/dev/performance.md).

    python -m tests.benchmarks.steps.watched_writes                 # in one process, CPU time
    python -m tests.benchmarks.steps.watched_writes --over mpi --sizes-kib 4096,65536

A step is ``optimizer.step()``: push, fold, step on the server, reply, with SGD in sync. Blocks of
steps that compare and blocks that do not take turns in one run: what else the machine does strikes
both. Printed are medians of blocks, and the median of the ratios of neighbouring blocks with its
quartiles; *inside* is the time in :class:`ValueSamples` as a share of the step, in the same blocks.

In one process (server and worker over the virtual network, one thread) CPU time counts, which other
work on the machine hardly changes; over MPI (one server, one worker) it is the time on the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.mpirun import run_mpi, run_program

BLOCK = 10
"""Steps of one kind in a row ..."""
PAIRS = 13
"""... and how many pairs of such blocks are compared. The first pair warms up."""
LAYERS = 16
"""Each with a weight, and a bias of 64 elements."""
BIAS = 64


def measure(over: str, num_bytes: int) -> None:
    """A run's own program; the worker writes the seconds of each step, and of those in it."""
    import torch

    import psdist
    from psdist.workers.model.samples import ValueSamples

    torch.set_num_threads(1)
    clock = time.perf_counter if over == "mpi" else time.process_time
    inside = [0.0]
    step_of = {"take": 0, "changed": -1}
    """Values kept in one step are compared in the next one."""

    def in_turns(name: str) -> Callable[..., Any]:
        call = getattr(ValueSamples, name)

        def run(*arguments: Any) -> Any:
            before_s = clock()
            result = [] if (step_of[name] + 1) // BLOCK % 2 else call(*arguments)
            inside[0] += clock() - before_s
            return result

        return run

    for name in step_of:
        setattr(ValueSamples, name, in_turns(name))
    job = psdist.init()
    columns = num_bytes // 4 // LAYERS // BIAS - 1
    model: Any = torch.nn.ModuleList([torch.nn.Linear(columns, BIAS) for _ in range(LAYERS)])
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    times = []
    for number in range(2 * BLOCK * PAIRS):
        step_of["take"], step_of["changed"] = number, number - 1
        inside[0], before_s = 0.0, clock()
        optimizer.step()
        times.append((clock() - before_s, inside[0]))
    Path(os.environ["WATCHED_WRITES_FILE"]).write_text(json.dumps(times), encoding="utf-8")


def compare(over: str, num_bytes: int) -> str:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        env = {
            "WATCHED_WRITES_FILE": str(file),
            "PSDIST_RUN_DIR": str(Path(folder) / "run"),
            "OMP_NUM_THREADS": "1",
        }
        program = ["-m", "tests.benchmarks.steps.watched_writes", "--run", over, str(num_bytes)]
        if over == "mpi":
            done = run_mpi(2, program, timeout_s=600, env=env)
        else:
            done = run_program([sys.executable, *program], timeout_s=600, env=env)
        if done.returncode:
            sys.exit(done.text)
        times = json.loads(file.read_text(encoding="utf-8"))
    steps = [
        statistics.median(step for step, _ in times[start : start + BLOCK])
        for start in range(2 * BLOCK, len(times), BLOCK)
    ]
    shares = [
        statistics.median(inside for _, inside in times[start : start + BLOCK]) / step
        for start, step in zip(range(2 * BLOCK, len(times), BLOCK), steps, strict=True)
    ]
    compared, plain = steps[::2], steps[1::2]
    ratios = [a / b for a, b in zip(compared, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return (
        f"| {num_bytes >> 10} KiB | {1e6 * statistics.median(compared):.0f} | "
        f"{1e6 * statistics.median(plain):.0f} | {100 * (middle - 1):+.1f} % | "
        f"{100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} % | "
        f"{100 * statistics.median(shares[::2]):.2f} % |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes-kib", default="64,1024,4096,65536")
    parser.add_argument("--over", choices=["process", "mpi"], default="process")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        over, num_bytes = options.run
        measure(over, int(num_bytes))
        return
    print("| parameters | compared, us | not, us | longer | quartiles | inside |")
    print("|---|---|---|---|---|---|")
    for kib in options.sizes_kib.split(","):
        print(compare(options.over, int(kib) << 10), flush=True)


if __name__ == "__main__":
    main()
