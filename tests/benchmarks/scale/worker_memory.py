"""What a worker holds beside a plain run, with and without overlap (docs/guides/memory.md).

    python -m tests.benchmarks.scale.worker_memory --mib 64 256

One server and one worker over MPI, and the same script without psdist's job, each in processes of
its own. Printed is the most memory that each has held (VmHWM), less that of the plain run, in
copies of the parameters. Batches are as small as can be, so that activations are nothing. Of
several sizes also what is in proportion to them, and what is not: by the smallest and the largest.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from typing import Literal

from tests.support.mpirun import run_mpi, run_program

LAYERS, STEPS = 16, 8


def highest() -> int:
    """Bytes of this process at its largest."""
    with open("/proc/self/status", encoding="ascii") as status:
        (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", status.read())
    return int(kib) * 1024


def train(way: Literal["plain", "off", "auto"], mib: int) -> None:
    import time

    import torch

    import psdist

    torch.set_num_threads(1)
    width = int((mib * 2**20 / 4 / LAYERS) ** 0.5)
    job = None if way == "plain" else psdist.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if job is not None:
        assert way != "plain"
        model, optimizer = job.prepare(model, optimizer, overlap=way)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(1, width)).sum().backward()
        time.sleep(0.1)  # gradients leave
        optimizer.step()
    print(f"highest {highest()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[64])
    parser.add_argument("--train", choices=["plain", "off", "auto"])
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.mib[0])
        return
    sizes = sorted(arguments.mib)
    held = {mib: measure(mib) for mib in sizes}
    first, last = sizes[0], sizes[-1]
    for way in ("off", "auto") if first < last else ():
        low, high = (held[mib][way] - held[mib]["plain"] for mib in (first, last))
        share = (high - low) / (last - first) / 2**20
        fixed = low / 2**20 - share * first
        print(f"{way:6} {share:.2f} x the parameters and {fixed:.0f} MiB above plain")


def measure(mib: int) -> dict[str, int]:
    """Bytes at the most, by way."""
    held = {}
    program = ["-m", "tests.benchmarks.scale.worker_memory", "--mib", str(mib)]
    for way in ("plain", "off", "auto"):
        words = [*program, "--train", way]
        with tempfile.TemporaryDirectory() as path:
            env = {"PSDIST_RUN_DIR": f"{path}/run", "PSDIST_PROGRESS": "off", "PSDIST_SERVERS": "1"}
            if way == "plain":
                done = run_program([sys.executable, *words], timeout_s=120)
            else:
                done = run_mpi(2, words, timeout_s=120, env=env)
        assert done.returncode == 0, done.text
        (found,) = re.findall(r"highest (\d+)", done.stdout)
        held[way] = int(found)
    for way, num_bytes in held.items():
        more = (num_bytes - held["plain"]) / mib / 2**20
        print(
            f"{mib:4} MiB {way:6} {num_bytes / 2**20:8.1f} MiB   "
            f"{more:5.2f} x the parameters above plain",
            flush=True,
        )
    return held


if __name__ == "__main__":
    main()
