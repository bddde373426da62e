"""Cost of a step with a replica of every shard, compared with the bound of its bytes and applies.

    python -m tests.benchmarks.deaths.second_copies --mib 32                      # on this host
    python -m tests.benchmarks.deaths.second_copies --mib 32 --hosts 4 --link 256 # on four

tests/support/programs/timed_steps.py under ``mpirun --with-ft ulfm``, with as many servers as
workers, each a group, in sync and in ssp, without and with ``replication = buddy`` in turns: starts
of their own, medians of all their steps. The bound is

    seconds without  x  bytes with / bytes without  +  the applies of the copy

with the bytes that the busiest host sends (on this host: all of them), and the applies timed alone,
in this process. Pushes and pulls are the whole model each, for every group; a second copy gets the
mean of each step in sync, every push in ssp (docs/concepts/replication.md). With ``--hosts 4`` the
Slurm test cluster is brought up and taken down: no other job may use it then, and it needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from tests.benchmarks.placing.taken_cluster import taken_cluster
from tests.support.mpirun import REPOSITORY, run_mpi
from tests.support.slurm.cluster import SlurmCluster

PROGRAM: Final = str(REPOSITORY / "tests" / "support" / "programs" / "timed_steps.py")
MODES: Final = {"sync": "--mode sync", "ssp": "--mode ssp --staleness 1"}
WATCHED: Final = 5
ULFM: Final = ("--with-ft", "ulfm")
LIMIT_S: Final = 240

Start = Callable[[list[str], Path], None]
"""Runs psdist with these words, in this folder; exits where that fails."""


def words(mode: str, replication: str, pairs: int, options: argparse.Namespace) -> list[str]:
    return [
        *("-m", "psdist", "run", *MODES[mode].split(), "--servers", str(pairs)),
        *("--placement", "cyclic", "--group", "rank", "--set", f"replication={replication}"),
        *("--set", "progress=off", PROGRAM),
        *(str(options.mib << 20), str(WATCHED), str(options.steps)),
    ]


def on_this_host(pairs: int) -> Start:
    def start(given: list[str], folder: Path) -> None:
        done = run_mpi(
            2 * pairs,
            [*given, str(folder / "found.json")],
            timeout_s=LIMIT_S,
            env={"PSDIST_RUN_DIR": str(folder / "run")},
            launcher_args=ULFM,
        )
        if done.returncode:
            raise SystemExit(done.text)

    return start


def on_the_cluster(cluster: SlurmCluster, pairs: int) -> Start:
    def start(given: list[str], folder: Path) -> None:
        script = folder / "job.sbatch"
        job = f"mpirun -n {2 * pairs} --bind-to none {shlex.join(ULFM)} python".split()
        script.write_text(
            '#!/bin/sh\nexport PATH="$VENV/bin:$PATH"\nexec '
            + shlex.join([*job, *given, str(folder / "found.json")])
        )
        done = cluster.sbatch(
            script,
            sbatch_args=[f"--nodes={pairs}", "--ntasks-per-node=2"],
            timeout_s=LIMIT_S,
            env={
                "PYTHONPATH": str(REPOSITORY),
                "PSDIST_RUN_DIR": str(folder / "run"),
                "OMPI_MCA_btl_tcp_if_include": "eth0",
                "OMP_NUM_THREADS": "1",
            },
        )
        if done.returncode:
            raise SystemExit(done.text)

    return start


def bytes_of_a_step(mode: str, replication: str, pairs: int, hosts: int) -> float:
    """Models that the busiest host sends to others; on one host, that all ranks send."""
    copies = {"none": 0, "sync": 1, "ssp": pairs}[mode if replication == "buddy" else "none"]
    if hosts == 1:
        return 2 * pairs + copies
    # Every host has a worker and a server, with one shard; there are as many shards as hosts.
    elsewhere = (hosts - 1) / hosts
    return 2 * elsewhere + copies / hosts


def applies_s(mode: str, pairs: int, options: argparse.Namespace) -> float:
    """Time of the steps of one copy, alone: the median of 20."""
    values = torch.zeros((options.mib << 18) // pairs, requires_grad=True)
    values.grad = torch.ones_like(values)
    optimizer = torch.optim.SGD([values], lr=0.1, fused=True)
    times = []
    for _ in range(20):
        began_s = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times) * (1 if mode == "sync" else pairs)


def measure(start: Start, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    pairs = options.hosts if options.hosts > 1 else 2
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(options.turns):
        for mode in MODES:
            for replication in ("none", "buddy"):
                place = folder / f"{mode}-{replication}-{turn}"
                place.mkdir()
                start(words(mode, replication, pairs, options), place)
                found = json.loads((place / "found.json").read_text("utf-8"))
                seconds.setdefault((mode, replication), []).extend(found["seconds"])
    rows = []
    for mode in MODES:
        without, with_copies = (seconds[mode, each] for each in ("none", "buddy"))
        without_s = statistics.median(without)
        sent = {each: bytes_of_a_step(mode, each, pairs, options.hosts)
                for each in ("none", "buddy")}  # fmt: skip
        apply_s = applies_s(mode, pairs, options)
        bound_s = without_s * sent["buddy"] / sent["none"] + apply_s
        with_s = statistics.median(with_copies)
        rows.append(
            {
                "mode": mode,
                "hosts": options.hosts,
                "servers": pairs,
                "workers": pairs,
                "mib": options.mib,
                "link_mbit": options.link if options.hosts > 1 else None,
                "steps": len(without),
                "without_s": round(without_s, 4),
                "with_s": round(with_s, 4),
                "quartiles_s": [
                    [round(each, 4) for each in statistics.quantiles(times, n=4)]
                    for times in (without, with_copies)
                ],
                "bytes_ratio": round(sent["buddy"] / sent["none"], 4),
                "applies_s": round(apply_s, 4),
                "bound_s": round(bound_s, 4),
                "of_the_bound": round(with_s / bound_s, 3),
                "load": round(os.getloadavg()[0], 1),
                "date": time.strftime("%Y-%m-%d"),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the cost of replicas of shards.")
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6, help="measured, of each start")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--hosts", type=int, choices=(1, 4), default=1)
    parser.add_argument("--link", type=int, default=256, help="Mbit/s, of four hosts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.hosts == 1:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(on_this_host(2), Path(folder), options)
    else:
        with taken_cluster(shape=f"{options.link}mbit") as cluster:
            start = on_the_cluster(cluster, options.hosts)
            rows = measure(start, cluster.directory("copies"), options)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
