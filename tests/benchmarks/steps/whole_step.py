"""A whole iteration with and without the fused kernels called directly (docs/dev/performance.md).

    python -m tests.benchmarks.steps.whole_step                     # all cells, in one process
    python -m tests.benchmarks.steps.whole_step --over mpi --modes sync --sizes-kib 64,1024

An iteration is ``optimizer.step()``: push, fold, step on the server, reply. The server calls
torch's kernels directly in one block of iterations and torch's own ``step`` (fused=True) in the
next, in turns, in one run: what else the machine does strikes both. Printed are medians of blocks,
and the median of the ratios of neighbouring blocks with its quartiles.

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

BLOCK = 20
"""Iterations of one kind in a row ..."""
PAIRS = 40
"""... and how many pairs of such blocks are compared. The first pair warms up."""


def measure(over: str, optimizer: str, num_bytes: int) -> None:
    """A run's own program; the worker writes the seconds of each iteration as JSON."""
    import torch

    import psdist
    from psdist.servers.shard.chunk_optimizer import ChunkOptimizer

    _take_turns(ChunkOptimizer)
    job = psdist.init()
    model = torch.nn.Linear(1, num_bytes // 4, bias=False)
    made: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-4),
    }
    model, joint = job.prepare(model, made[optimizer](model.parameters()))
    model(torch.ones(1, 1)).sum().backward()
    clock = time.perf_counter if over == "mpi" else time.process_time
    torch.set_num_threads(1)
    times = []
    for _ in range(2 * BLOCK * PAIRS):
        before_s = clock()
        joint.step()
        times.append(clock() - before_s)
    Path(os.environ["WHOLE_STEP_FILE"]).write_text(json.dumps(times), encoding="utf-8")


def _take_turns(optimizer_class: Any) -> None:
    """Odd blocks without the kernel: of every chunk, whose steps are the worker's iterations."""
    step = optimizer_class.step
    kernels: dict[int, Any] = {}
    counts: dict[int, int] = {}

    def in_turns(self: Any, **arguments: Any) -> None:
        count = counts[id(self)] = counts.get(id(self), -1) + 1
        if count == 2:  # by now it is proved, or dropped for good
            kernels[id(self)] = self._kernel
            assert self._kernel is not None, "this torch has no kernel that is proved"
        if count >= 2:
            self._kernel = None if count // BLOCK % 2 else kernels[id(self)]
        step(self, **arguments)

    optimizer_class.step = in_turns


def compare(over: str, mode: str, optimizer: str, num_bytes: int) -> str:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        env = {
            "WHOLE_STEP_FILE": str(file),
            "PSDIST_RUN_DIR": str(Path(folder) / "run"),
            "PSDIST_MODE": mode,
            "OMP_NUM_THREADS": "1",
        }
        program = [
            "-m",
            "tests.benchmarks.steps.whole_step",
            "--run",
            over,
            optimizer,
            str(num_bytes),
        ]
        if over == "mpi":
            done = run_mpi(2, program, timeout_s=600, env=env)
        else:
            done = run_program([sys.executable, *program], timeout_s=600, env=env)
        if done.returncode:
            sys.exit(done.text)
        times = json.loads(file.read_text(encoding="utf-8"))
    blocks = [
        statistics.median(times[start : start + BLOCK]) for start in range(0, len(times), BLOCK)
    ][2:]
    direct, by_torch = blocks[::2], blocks[1::2]
    ratios = sorted(b / a for a, b in zip(direct, by_torch, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return (
        f"| {mode} | {optimizer} | {num_bytes >> 10} KiB | {1e6 * statistics.median(direct):.0f} | "
        f"{1e6 * statistics.median(by_torch):.0f} | {100 * (middle - 1):+.1f} % | "
        f"{100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} % |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", default="sync,ssp")
    parser.add_argument("--optimizers", default="SGD,AdamW")
    parser.add_argument("--sizes-kib", default="64,1024,4096,16384")
    parser.add_argument("--over", choices=["process", "mpi"], default="process")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        over, optimizer, num_bytes = options.run
        measure(over, optimizer, int(num_bytes))
        return
    print("| mode | optimizer | parameters | kernel, us | torch's step, us | longer | quartiles |")
    print("|---|---|---|---|---|---|---|")
    for mode in options.modes.split(","):
        for optimizer in options.optimizers.split(","):
            for kib in options.sizes_kib.split(","):
                print(compare(options.over, mode, optimizer, int(kib) << 10), flush=True)


if __name__ == "__main__":
    main()
