"""docs/plan-4-nodes.svg and docs/plan-64-nodes.svg: how plans of two invented clusters look.

    python docs/draw_plans.py

The machines have two packages of eight cores with a GPU beside each, and one network card; the
uplinks of a rack carry a quarter of what its nodes' links do. The plans are psdist's own.
"""

from __future__ import annotations

from pathlib import Path

from psdist.topology.draw.svg import picture
from psdist.topology.machine import Core, Device, Machine, NumaNode, Package
from psdist.topology.network import Cluster, Node, Switch
from psdist.topology.plan.planning import PlanRequest, plan_ahead

CORES = 8
LINK_BYTES_PER_S = 12e9


def machine() -> Machine:
    halves = [frozenset(range(CORES)), frozenset(range(CORES, 2 * CORES))]

    def device(name: str, pci: str, package: int) -> Device:
        return Device(
            kind="gpu" if name.startswith("cuda") else "nic",
            names=(name,),
            pci=pci,
            cpus=halves[package],
            package=package,
            numa=package,
        )

    return Machine(
        name="",
        packages=tuple(Package(os_index=i, cpus=cpus) for i, cpus in enumerate(halves)),
        dies=(),
        numa_nodes=tuple(
            NumaNode(os_index=i, cpus=cpus, memory_bytes=64 << 30, is_dram=True)
            for i, cpus in enumerate(halves)
        ),
        l3_groups=tuple(halves),
        cores=tuple(
            Core(logical=i, cpus=(i,), package=i // CORES, numa=i // CORES, l3=i // CORES)
            for i in range(2 * CORES)
        ),
        devices=(
            device("cuda0", "0000:3b:00.0", 0),
            device("cuda1", "0000:86:00.0", 1),
            device("mlx5_0", "0000:17:00.0", 0),
        ),
    )


def cluster(num_racks: int, nodes_per_rack: int) -> Cluster:
    host = machine()
    uplink = LINK_BYTES_PER_S * nodes_per_rack / 4
    return Cluster(
        nodes=tuple(
            Node(
                name=f"n{i + 1}",
                machine=host,
                switch=1 + i // nodes_per_rack,
                bytes_per_s=LINK_BYTES_PER_S,
            )
            for i in range(num_racks * nodes_per_rack)
        ),
        switches=(
            Switch(name="core", parent=-1, bytes_per_s=uplink),
            *(Switch(name=f"rack{i + 1}", parent=0, bytes_per_s=uplink) for i in range(num_racks)),
        ),
        source="an invented cluster",
    )


def main() -> None:
    for num_racks, nodes_per_rack, workers, servers in ((2, 2, 2, 4), (4, 16, 7, 32)):
        where = cluster(num_racks, nodes_per_rack)
        request = PlanRequest(servers=servers, model_bytes=4e9)
        plan = plan_ahead(where, request, workers=[workers] * len(where.nodes))
        target = Path(__file__).parent / f"plan-{len(where.nodes)}-nodes.svg"
        target.write_text(picture(plan, where), encoding="utf-8")


if __name__ == "__main__":
    main()
