"""What a rank takes of a core while a barrier is held up by one worker, more ranks than cores.

    python -m tests.benchmarks.steps.idle --json docs/bench/idle-at-a-barrier.json

Eight ranks on this machine's cores, two of them servers; worker 0 comes to ``job.barrier()`` five
seconds later than the others. CPU time is the kernel's (/proc/PID/stat), of 3.5 s in between.
Worker 0 sleeps: it is counted apart. By ``--group``: each worker a group, or all of them one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS, SERVERS = 8, 2
HELD_S, WATCHED_S = 5.0, 4.0
POLL_S = 0.02
LIMIT = 0.15


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", type=Path, help="be the training script; the file to touch")
    parser.add_argument("--group", nargs="+", default=["rank", "node"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.script is not None:
        hold_up(options.script)
        return 0
    rows = []
    for group in options.group:
        row = measure(group)
        rows.append(row)
        print(
            f"group {group}: " + ", ".join(
                f"{each['who']} {each['share']:.1%}" for each in row["ranks"]
            ),
            flush=True,
        )  # fmt: skip
    most = max(each["share"] for row in rows for each in row["ranks"])
    print(f"at most {most:.1%} of a core (target: {LIMIT:.0%})")
    if options.json is not None:
        told = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": round(os.getloadavg()[0], 1),
            "rows": rows,
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0 if most < LIMIT else 1


def hold_up(marker: Path) -> None:
    """The training script."""
    import torch

    import psdist

    job = psdist.init()
    model = torch.nn.Linear(256, 256)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(4, 256)).sum().backward()
        optimizer.step()
    job.barrier()
    if job.is_chief:
        marker.touch()
        time.sleep(HELD_S)
    job.barrier()


def measure(group: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        marker, run_dir = Path(folder) / "held", Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "psdist", "run", "-n", str(RANKS), "--servers", str(SERVERS)),
            *("--group", group, "--run-dir", str(run_dir)),
            *(
                "--set",
                "progress=off",
                "-m",
                "tests.benchmarks.steps.idle",
                "--script",
                str(marker),
            ),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        while not marker.exists() and running.poll() is None:
            time.sleep(POLL_S)
        time.sleep((HELD_S - WATCHED_S) / 2)
        ranks = json.loads((run_dir / "ranks.json").read_text(encoding="utf-8"))
        before, began_s = [cpu_s(each["pid"]) for each in ranks], time.monotonic()
        time.sleep(WATCHED_S - (HELD_S - WATCHED_S) / 2)
        after, took_s = [cpu_s(each["pid"]) for each in ranks], time.monotonic() - began_s
        if running.wait(timeout=60):
            raise SystemExit(f"psdist run ended with {running.returncode}")
    servers = iter(range(SERVERS))
    return {
        "group": group,
        "ranks": [
            {
                "who": f"server {next(servers)}"
                if each["role"] == "server"
                else f"worker {each['worker']}" + " (sleeps)" * (each["worker"] == 0),
                "share": round((late - early) / took_s, 4),
            }
            for each, early, late in zip(ranks, before, after, strict=True)
        ],
    }


def cpu_s(pid: int) -> float:
    """User and system time of a process, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
