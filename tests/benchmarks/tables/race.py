"""DLRM with tables on servers, in sync and hybrid, against torchrec and DDP: samples per second.

    pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict pyvers pyre-extensions \
        typing-inspect         # into an environment that also has psdist's packages
    python -m tests.benchmarks.tables.race torchrec sync --python OVERLAY/bin/python
    python -m tests.benchmarks.tables.race torchrec hybrid --python OVERLAY/bin/python --link 1000

26 tables of 100,000 x 16, Zipf 1.05, two workers, batches of 1,024 each. The contestants take
turns, --repeats times each, and the table has the medians. With --link each worker has a host of
the Slurm test cluster, whose link has that many Mbit/s, and psdist has a server on each host. This
needs root, and the cluster for itself. OVERLAY must then not be under /tmp, because each
host has a /tmp of its own. Other options go to tests.benchmarks.tables.racers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.placing.taken_cluster import taken_cluster
from tests.support.slurm.cluster import SlurmCluster

WORKERS = 2
WAYS: dict[str, list[str]] = {
    "torchrec": [],
    "ddp": [],
    "sync": ["mode=sync"],
    "hybrid": ["mode=sync", "tables.mode=async"],
}
"""The contestants; of psdist's the settings."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("ways", nargs="+", choices=WAYS)
    parser.add_argument("--python", default=sys.executable, help="that of torchrec and ddp")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--servers", type=int, help="1; with --link 2")
    parser.add_argument("--link", type=int, help="Mbit/s")
    parser.add_argument("--set", nargs="*", default=[], help="more settings of psdist")
    parser.add_argument("--json", type=Path)
    options, words = parser.parse_known_args()
    options.words = words
    options.servers = options.servers or (1 if options.link is None else WORKERS)
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    with contextlib.ExitStack() as stack:
        cluster = None
        if options.link is not None:
            cluster = stack.enter_context(taken_cluster(shape=f"{options.link}mbit"))
        for _ in range(options.repeats):
            for way in options.ways:
                rows[way].append(race(way, options, cluster))
                print(way, rows[way][-1], flush=True)
    medians = {
        way: statistics.median(each["samples_per_s"] for each in every)
        for way, every in rows.items()
    }
    for way, median in medians.items():
        of_first = median / medians[options.ways[0]]
        print(f"{way:10} {median:8,.0f} samples/s, {of_first:.2f} of {options.ways[0]}")
    if options.json is not None:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "cores": os.cpu_count(),
            "servers": options.servers,
            "link_mbit": options.link,
            "words": words,
            "settings": options.set,
            "medians": medians,
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def race(way: str, options: argparse.Namespace, cluster: SlurmCluster | None) -> dict[str, Any]:
    """One job: the samples of all workers per second, and the largest memory of a worker."""
    shared = None if cluster is None else cluster.directory("race")
    with tempfile.TemporaryDirectory(dir=shared) as name:
        folder = Path(name)
        racer = ["-m", "tests.benchmarks.tables.racers"]
        words = ["--out", str(folder), "--ranks", str(WORKERS), *options.words]
        if WAYS[way]:
            settings = [
                f"--set={each}" for each in (*WAYS[way], "report.progress=off", *options.set)
            ]
            run = ["-m", "psdist", "run", "--servers", str(options.servers), "--group", "rank"]
            run += ["--run-dir", str(folder / "run"), *settings, *racer, "psdist", *words]
            commands = [run]
        else:
            run = [*racer, way, *words, "--store", f"file://{folder / 'store'}"]
            commands = [run if cluster else [*run, "--rank", str(n)] for n in range(WORKERS)]
        if cluster is None:
            start_here(way, commands, options)
        else:
            start_there(way, commands[0], options, cluster)
        reports = [json.loads((folder / f"{n}.json").read_text()) for n in range(WORKERS)]
    return {
        "samples_per_s": round(sum(each["samples_per_s"] for each in reports)),
        "median_ms": round(1e3 * statistics.median(s for each in reports for s in each["seconds"])),
        "busy_ms": round(1e3 * statistics.mean(each["busy_s"] for each in reports)),
        "worker_mib": max(each["peak_kib"] for each in reports) >> 10,
    }


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def start_here(way: str, commands: list[list[str]], options: argparse.Namespace) -> None:
    if WAYS[way]:
        at = commands[0].index("run") + 1
        commands[0][at:at] = ["-n", str(options.servers + WORKERS)]
    python = sys.executable if WAYS[way] else options.python
    environment = {**os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen([python, *each], stderr=subprocess.PIPE, text=True, env=environment)
        for each in commands
    ]
    for each in running:
        error = each.communicate(timeout=180)[1]
        if each.returncode != 0:
            sys.exit(f"{way}: {error[-6000:]}")


def start_there(
    way: str, command: list[str], options: argparse.Namespace, cluster: SlurmCluster
) -> None:
    python, tasks = options.python, WORKERS
    if WAYS[way]:
        python, tasks = "python", WORKERS + options.servers
    done = cluster.srun(
        ["--mpi=pmix", "-w", "h1,h2", "-N", "2", "-n", str(tasks), python, *command],
        # An empty path leaves out the tests' own start-up, with which torchrec is not importable.
        env={
            **ENVIRONMENT,
            "PYTHONPATH": "",
            "OMPI_MCA_btl_tcp_if_include": "eth0",
            "GLOO_SOCKET_IFNAME": "eth0",
        },
        timeout_s=180,
    )
    if done.returncode != 0:
        sys.exit(f"{way}: {done.text[-9000:]}")


if __name__ == "__main__":
    sys.exit(main())
