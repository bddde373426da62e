"""Measured against predicted: one exchange on the Slurm test cluster, servers placed three ways.

    python -m tests.benchmarks.placing.cluster_placement --json docs/bench/cluster-placement.json

Four hosts in two racks; hosts' links of 1 Gbit/s, racks' uplinks of 500 Mbit/s; two ranks on each
host, every worker a group of its own. The placements take turns in rounds, so that what else the
machine does meets all of them. The raw exchange of the same bytes between the same ranks, in the
same job, is what the network could do at that moment. Needs root and what the cluster needs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tests.support.mpirun import REPOSITORY
from tests.support.slurm.cluster import SlurmCluster
from tests.support.slurm.hosts import Cluster, state_directory, why_unavailable

PLACEMENTS = ("auto", "cyclic", "block")
RACKS = REPOSITORY / "tests" / "benchmarks" / "placing" / "cluster_racks.toml"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--size", default="4MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if reason := why_unavailable():
        print(reason, file=sys.stderr)
        return 1
    cluster = Cluster(directory=state_directory())
    cluster.up(shape="1gbit", uplink="500mbit", keep=True)
    try:
        results = [
            measure(SlurmCluster(cluster=cluster), options, count) for count in options.servers
        ]
    finally:
        cluster.down()
    if options.json is not None:
        content = {
            "date": time.strftime("%Y-%m-%d"),
            "links": "1 Gbit/s a host, 500 Mbit/s a rack",
            "ranks": "2 on each of 4 hosts, every worker a group",
            "size": options.size,
            "results": results,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(cluster: SlurmCluster, options: argparse.Namespace, servers: int) -> dict[str, object]:
    """All rounds of one number of servers; prints a table."""
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    predicted: dict[str, float] = {}
    for number in range(options.rounds):
        for placement in PLACEMENTS:
            print(f"{servers} servers, round {number + 1}, {placement}", file=sys.stderr)
            row = run(cluster, options, servers, placement)
            predicted[placement] = row["predicted_s"]
            times[placement]["measured"] += row["all_push_pull_s"]
            times[placement]["raw"] += row["all_raw_chunks_s"]
    print(f"\n{servers} servers, {options.size}, {options.rounds} x {options.repeats} exchanges")
    print(f"{'placement':<10}{'predicted':>12}{'measured':>12}{'quartiles':>18}{'raw MPI':>12}")
    for placement in PLACEMENTS:
        measured = times[placement]["measured"]
        low, middle, high = statistics.quantiles(measured, n=4)
        raw = statistics.median(times[placement]["raw"])
        print(
            f"{placement:<10}{predicted[placement] * 1e3:>9.0f} ms{middle * 1e3:>9.0f} ms"
            f"{f'{low * 1e3:.0f} .. {high * 1e3:.0f}':>18}{raw * 1e3:>9.0f} ms"
        )
    return {"servers": servers, "predicted_s": predicted, "times_s": times}


def run(
    cluster: SlurmCluster,
    options: argparse.Namespace,
    servers: int,
    placement: str,
    *,
    racks: Path = RACKS,
) -> dict[str, object]:
    """One job; its row of psdist bench pushpull. ``placement`` may be the path of a plan.json."""
    with tempfile.TemporaryDirectory(dir=cluster.directory("placement")) as folder:
        file = Path(folder) / "pushpull.json"
        done = cluster.srun(
            ["--mpi=pmix", "-N", "4", "--ntasks-per-node=2", "psdist", "bench", "pushpull",
             "--sizes", options.size, "--repeats", str(options.repeats),
             "--servers", str(servers), "--json", str(file)],
            env={
                "PSDIST_PLACEMENT": placement,
                "PSDIST_RACKS": str(racks),
                "PSDIST_RUN_DIR": str(Path(folder) / "run"),
            },
            timeout_s=300,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(done.text)
        row: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))["rows"][0]
        return row


if __name__ == "__main__":
    sys.exit(main())
