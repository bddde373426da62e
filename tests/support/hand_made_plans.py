"""Small machines, clusters and plans, written down by hand: no planner, no parser.

cluster = one_rack(["n1", "n2"], machine_of(hyperthreaded(8)))
plan = planned(cluster, [("n1", "server", [0]), ("n2", "worker", range(1, 8))])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from psdist.topology.machine import Core, Machine, NumaNode, Package
from psdist.topology.network import Cluster
from psdist.topology.plan import LinkLoad, Plan, PlannedRank

Place: TypeAlias = tuple[str, Literal["server", "worker"], Iterable[int]]
"""Host, role and logical cores of a rank."""


def machine_of(cores: Sequence[tuple[int, ...]], *, first_logical: int = 0) -> Machine:
    """A machine of one package, with the OS numbers of each core's PUs."""
    cpus = frozenset(cpu for core in cores for cpu in core)
    return Machine(
        name="",
        packages=(Package(os_index=0, cpus=cpus),),
        dies=(),
        numa_nodes=(NumaNode(os_index=0, cpus=cpus, memory_bytes=0, is_dram=True),),
        l3_groups=(),
        cores=tuple(
            Core(logical=first_logical + index, cpus=core, package=0, numa=0, l3=0)
            for index, core in enumerate(cores)
        ),
    )


def hyperthreaded(num_cores: int, *, first_cpu: int = 0) -> list[tuple[int, ...]]:
    """Two PUs a core, numbered as Linux does on most machines: all first threads come first."""
    return [(first_cpu + core, first_cpu + num_cores + core) for core in range(num_cores)]


def planned(cluster: Cluster, places: Sequence[Place]) -> Plan:
    """A plan with these ranks, equal weights, a group on each host; its figures mean nothing."""
    cpus_of = {
        node.name: {core.logical: core.cpus for core in node.machine.cores}
        for node in cluster.nodes
    }
    counts = {"server": 0, "worker": 0}
    groups: dict[str, int] = {}
    ranks = []
    for rank, (host, role, chosen) in enumerate(places):
        cores = tuple(chosen)
        ranks.append(
            PlannedRank(
                rank=rank,
                host=host,
                role=role,
                index=counts[role],
                group=-1 if role == "server" else groups.setdefault(host, len(groups)),
                cores=cores,
                cpus=tuple(sorted(cpu for core in cores for cpu in cpus_of[host][core])),
                package=0,
                numa=0,
                gpu="",
                nic="",
            )
        )
        counts[role] += 1
    return Plan(
        ranks=tuple(ranks),
        weights=(1 / counts["server"],) * counts["server"],
        links=tuple(
            LinkLoad(name=node.name, kind="node", num_bytes=1e9, bytes_per_s=12e9)
            for node in cluster.nodes
        ),
        model_bytes=4e9,
        placement="auto",
        cost_s=0.25,
        bound_s=0.25,
        compared={"block": 0.5, "cyclic": 0.3},
        source=cluster.source,
    )
