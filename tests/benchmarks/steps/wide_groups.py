"""Groups of a rack against groups of a host, and two workers on a host against one.

    python -m tests.benchmarks.steps.wide_groups --json docs/bench/wide-groups.json

On the Slurm test cluster: four hosts in two racks, a server on each. With uplinks of a quarter of
the links: one worker a host in groups of a host and of a rack; without: one and two workers a host
in groups of a host; and DDP over gloo on both. Links are slow (256 Mbit/s), so that they and not
the one machine that plays all hosts are what limits. What links carry is counted on their
interfaces, as the difference of a long and a short run. Brings the cluster up and takes it down:
nobody else may use it then. Needs root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, Final

from tests.benchmarks.placing.taken_cluster import taken_cluster
from tests.support.mpirun import REPOSITORY
from tests.support.slurm import network
from tests.support.slurm.cluster import SlurmCluster

PROGRAM = str(REPOSITORY / "tests" / "support" / "programs" / "timed_steps.py")
RACKS: Final = """
[[switch]]
name = "rack1"
nodes = "h[1-2]"
link = "{link}"
uplink = "{uplink}"
parent = "spine"

[[switch]]
name = "rack2"
nodes = "h[3-4]"
link = "{link}"
uplink = "{uplink}"
parent = "spine"

[[switch]]
name = "spine"
"""
WATCHED: Final = 5
CASES: Final = (
    ("racks", "node", 1),
    ("racks", "rack", 1),
    ("racks", "ddp", 1),
    ("flat", "node", 1),
    ("flat", "node", 2),
    ("flat", "ddp", 1),
)
"""Network, group, workers on each host."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=16, help="MiB")
    parser.add_argument("--link", type=int, default=256, help="Mbit/s; uplinks a quarter of it")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", nargs="*", type=int, help="numbers of cases, from 0")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    with taken_cluster(shape=f"{options.link}mbit") as cluster:
        for number, case in enumerate(CASES):
            if options.only is None or number in options.only:
                found.append(measure(cluster, case, options))
                print(json.dumps(found[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(
    cluster: SlurmCluster, case: tuple[str, str, int], options: argparse.Namespace
) -> dict[str, Any]:
    """Medians of a long run, and the bytes that each of its steps sends over the links."""
    where, group, workers = case
    uplink = f"{options.link // 4}mbit" if where == "racks" else None
    with cluster.shaped(f"{options.link}mbit", uplink=uplink):
        _, short = run(cluster, case, options, measured=0)
        told, long = run(cluster, case, options, measured=options.repeats)
    seconds = told["seconds"]
    carried = {
        name: round(
            statistics.fmean(b - a for a, b in zip(short[name], long[name], strict=True))
            / options.repeats
        )
        for name in long
    }
    return {
        "network": where,
        "group": group,
        "workers_per_host": workers,
        "bytes": options.size << 20,
        "link_mbit": options.link,
        "median_s": round(statistics.median(seconds), 4),
        "least_s": round(min(seconds), 4),
        "most_s": round(max(seconds), 4),
        "repeats": len(seconds),
        "bytes_each_way_a_step": carried,
        "digest": told["digest"][:16],
    }


def run(
    cluster: SlurmCluster,
    case: tuple[str, str, int],
    options: argparse.Namespace,
    *,
    measured: int,
) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    where, group, workers = case
    folder = cluster.directory("wide")
    file, racks = folder / "found.json", folder / "racks.toml"
    uplink = options.link // 4 if where == "racks" else 2 * options.link
    racks.write_text(RACKS.format(link=f"{options.link}Mbit", uplink=f"{uplink}Mbit"))
    numbers = [str(options.size << 20), str(WATCHED), str(measured), str(file)]
    words = ["python", PROGRAM, "ddp", *numbers]
    tasks = workers
    if group != "ddp":
        tasks = workers + 1
        words = ["psdist", "run", "--group", group, "--servers", "4", "--placement", "cyclic"]
        words += ["--run-dir", str(folder / "run"), "--set", f"racks={racks}"]
        words += ["--set", "progress=off", PROGRAM, *numbers]
    env = {f"ADDRESS_OF_h{n}": network.address(f"h{n}") for n in range(1, 5)}
    env |= {"OMP_NUM_THREADS": "1", "OMPI_MCA_btl_tcp_if_include": "eth0"}
    if group == "ddp":
        env["GLOO_SOCKET_IFNAME"] = "eth0"
    before = network.counted_bytes()
    done = cluster.srun(
        ["--mpi=pmix", "-N", "4", f"--ntasks-per-node={tasks}", *words], env=env, timeout_s=240
    )
    if done.returncode:
        raise SystemExit(done.text)
    after = network.counted_bytes()
    carried = {
        name: (sent - before[name][0], received - before[name][1])
        for name, (sent, received) in after.items()
    }
    return json.loads(file.read_text()), carried


if __name__ == "__main__":
    sys.exit(main())
