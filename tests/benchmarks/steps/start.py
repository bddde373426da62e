"""Time from the command to the first step, against torchrun, and the memory of a server.

    python -m tests.benchmarks.steps.start                        # 2 and 4 workers, 5 alternations
    python -m tests.benchmarks.steps.start --workers 2 --repeats 7 --json start.json

``psdist run --workers N`` (one server on one host) and torchrun (DDP, gloo) start this module in
turns: a linear layer, SGD, one step. *begins* is the first line of the last worker's script, *step*
the end of its first step. *CPU* counts all processes from start to exit. *beyond* is the VmRSS of
the server after that step, less its shard. Bytecode is written before the first alternation, as pip
does at an installation; without it every rank compiles every module, which takes seconds.
"""

from __future__ import annotations

import time

BEGAN_S = time.time()
"""The script begins before any other import."""

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import resource  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

WIDTH = 512
SHARD_BYTES = WIDTH * (WIDTH + 1) * 4
BIN = Path(sys.executable).parent
MODULE = "tests.benchmarks.steps.start"
WAYS = {
    "psdist": [str(BIN / "psdist"), "run", "--workers={}", "-m", MODULE, "psdist"],
    "torchrun": [
        str(BIN / "torchrun"),
        "--standalone",
        "--nproc_per_node={}",
        "-m",
        MODULE,
        "torchrun",
    ],
}
FOLDER = "PSDIST_INTERNAL_START_FOLDER"


def train(way: str) -> None:
    """The script of both ways. Each worker writes its times on time.time()."""
    import torch

    torch.set_num_threads(1)
    folder = Path(os.environ[FOLDER])
    model: torch.nn.Module = torch.nn.Linear(WIDTH, WIDTH)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "psdist":
        import psdist

        job = psdist.init()
        model, optimizer = job.prepare(model, optimizer)
    else:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer.zero_grad()
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    seen = {"begins": BEGAN_S, "step": time.time()}
    if way == "psdist" and os.environ["RANK"] == "0":
        ranks = json.loads((folder / "run" / "ranks.json").read_text(encoding="utf-8"))
        (server,) = [each["pid"] for each in ranks if each["role"] == "server"]
        status = Path(f"/proc/{server}/status").read_text(encoding="ascii")
        (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
        seen["beyond"] = int(kib) / 1024 - SHARD_BYTES / 2**20
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(seen), encoding="utf-8")
    if way == "torchrun":
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def measure(way: str, num_workers: int) -> dict[str, float]:
    """Seconds from the command on, by the slowest worker; CPU seconds; MiB of the server."""
    from tests.support.mpirun import run_program  # pytest, which the script does not need

    with tempfile.TemporaryDirectory() as path:
        env = {
            FOLDER: path,
            "PSDIST_RUN_DIR": f"{path}/run",
            "PSDIST_PROGRESS": "off",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": "",  # without tests/support/startup, which replaces torch._dynamo
        }
        before_s, began_s = _cpu_s(), time.time()
        command = [word.format(num_workers) for word in WAYS[way]]
        done = run_program(command, timeout_s=120, env=env)
        assert done.returncode == 0, done.text
        seen = [
            json.loads((Path(path) / f"{worker}.json").read_text(encoding="utf-8"))
            for worker in range(num_workers)
        ]
    ends = {key: max(each[key] for each in seen) - began_s for key in ("begins", "step")}
    return {**ends, "cpu": _cpu_s() - before_s, "beyond": seen[0].get("beyond", 0.0)}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for num_workers in arguments.workers:
        for way in WAYS:
            measure(way, num_workers)
        pairs = [{way: measure(way, num_workers) for way in WAYS} for _ in range(arguments.repeats)]
        rows.append({"workers": num_workers, "pairs": pairs})
        ratios = sorted(each["psdist"]["step"] / each["torchrun"]["step"] for each in pairs)
        for way in WAYS:
            middle = {
                key: statistics.median(each[way][key] for each in pairs) for key in pairs[0][way]
            }
            print(
                f"{num_workers} workers  {way:8}  begins {middle['begins']:5.2f} s  "
                f"step {middle['step']:5.2f} s  CPU {middle['cpu']:5.2f} s  "
                f"server beyond its shard {middle['beyond']:3.0f} MiB"
            )
        print(
            f"{num_workers} workers  psdist / torchrun {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] in (["psdist"], ["torchrun"]):
        train(sys.argv[1])
    else:
        main()
