"""How long a plan takes: 1,024 nodes with 8 ranks, uneven jobs, and `psdist plan` for 64 nodes.

    python -m tests.benchmarks.placing.planning

CPU seconds of this process, medians of 10 repeats (of uneven jobs: 3); the command is a whole
process, from its start to its end, by the clock.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

from psdist.topology.network import Cluster, Node, Switch
from psdist.topology.plan.planning import (
    Grouping,
    PlanRequest,
    RankFacts,
    plan_ahead,
    plan_job,
)
from tests.topology.plan.test_seating import machine

NODES, RACKS, RANKS = 1024, 32, 8
LINK_BYTES_PER_S = 12e9
REPEATS = 10


def cluster() -> Cluster:
    """Racks of 32 nodes, uplinks 4:1; two sockets of 16 cores, 8 GPUs, one network card."""
    here = machine(cores=16, gpus=(0, 0, 0, 0, 1, 1, 1, 1), nic=0)
    per_rack = NODES // RACKS
    nodes = (
        Node(
            name=f"n{node + 1}",
            machine=here,
            switch=1 + node // per_rack,
            bytes_per_s=LINK_BYTES_PER_S,
        )
        for node in range(NODES)
    )
    racks = (
        Switch(name=f"rack{rack + 1}", parent=0, bytes_per_s=LINK_BYTES_PER_S * per_rack / 4)
        for rack in range(RACKS)
    )
    spine = Switch(name="spine", parent=-1, bytes_per_s=1.0)
    return Cluster(nodes=tuple(nodes), switches=(spine, *racks), source="a benchmark")


def uneven_job(num_nodes: int, *, num_racks: int) -> tuple[Cluster, list[RankFacts]]:
    """Random racks (none: one switch), links and 1 to 8 ranks a node: hardly two are alike."""
    chance = random.Random(1)
    here = machine(cores=16, gpus=(0, 0, 0, 0, 1, 1, 1, 1), nic=0)
    homes = sorted(chance.randrange(num_racks) if num_racks else -1 for _ in range(num_nodes))
    racks = {home: index for index, home in enumerate(sorted(set(homes) - {-1}), start=1)}
    nodes = tuple(
        Node(
            name=f"n{node + 1}",
            machine=here,
            switch=racks.get(home, 0),
            bytes_per_s=chance.uniform(5e9, 30e9),
        )
        for node, home in enumerate(homes)
    )
    spine = Switch(name="spine", parent=-1, bytes_per_s=1.0)
    switches = (
        Switch(name=f"rack{rack}", parent=0, bytes_per_s=chance.uniform(2e10, 3e11))
        for rack in racks.values()
    )
    cluster = Cluster(nodes=nodes, switches=(spine, *switches), source="a benchmark")
    hosts = [node.name for node in nodes for _ in range(chance.randint(1, RANKS))]
    return cluster, [
        RankFacts(rank=rank, host=host, cpus=here.cpus) for rank, host in enumerate(hosts)
    ]


def command() -> None:
    with tempfile.TemporaryDirectory() as folder:
        racks = Path(folder) / "topology.conf"
        lines = [f"SwitchName=r{rack} Nodes=n[{8 * rack + 1}-{8 * rack + 8}]" for rack in range(8)]
        racks.write_text("\n".join([*lines, "SwitchName=spine Switches=r[0-7]"]) + "\n")
        subprocess.run(
            [sys.executable, "-m", "psdist", "plan", "--racks", str(racks), "--nodes", "n[1-64]",
             "--workers-per-node", "1", "--model-bytes", "4G", "--emit", "slurm",
             "--out", f"{folder}/out", "--svg", f"{folder}/plan.svg", "--explain"],
            check=True, capture_output=True,
        )  # fmt: skip


def median_s(
    clock: Callable[[], float], run: Callable[[], object], *, repeats: int = REPEATS
) -> float:
    times = []
    for _ in range(repeats):
        before = clock()
        run()
        times.append(clock() - before)
    return statistics.median(times)


def main() -> None:
    here = cluster()
    cpus = here.nodes[0].machine.cpus
    ranks = [
        RankFacts(rank=rank, host=f"n{1 + rank // RANKS}", cpus=cpus)
        for rank in range(NODES * RANKS)
    ]
    print(f"{NODES} nodes in {RACKS} racks, {RANKS} ranks each")
    for name, run in (
        ("before a job", lambda: plan_ahead(here, PlanRequest(), workers=[RANKS] * NODES)),
        ("in a job", lambda: plan_job(here, ranks, PlanRequest())),
        ("in a job, group socket", lambda: plan_job(here, ranks, PlanRequest(group="socket"))),
    ):
        print(f"  {name:<24}{median_s(time.process_time, run):6.2f} s")
    print(f"in a job with 1 to {RANKS} ranks a node and uneven racks and links")
    for num_nodes, num_racks in ((64, 3), (NODES, RACKS), (NODES, 0), (NODES, NODES // 3)):
        job = uneven_job(num_nodes, num_racks=num_racks)
        for group in get_args(Grouping):
            request = PlanRequest(group=group)
            run = partial(plan_job, *job, request)
            taken = median_s(time.process_time, run, repeats=3)
            print(
                f"  {f'{num_nodes} nodes, {num_racks} racks, group {group}':<36}{taken:6.2f} s",
                flush=True,
            )
    print("psdist plan, 64 nodes, with --emit, --svg and --explain")
    print(f"  {'the whole command':<24}{median_s(time.perf_counter, command):6.2f} s")


if __name__ == "__main__":
    main()
