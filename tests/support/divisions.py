"""Jobs in which some ranks are to serve, and the best choice of them by trying every one.

    job = random_job(rng, most_ways=300)
    job.plan().cost_s / job.least_s()        # 1.0

Nothing here is shared with :mod:`psdist.topology.solver.divisions`: ways are products, and each
one's time is that of the exact solver for given groups.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement, product

from psdist.topology.machine import flat_machine
from psdist.topology.network import Cluster, Node, Switch
from psdist.topology.plan import Plan
from psdist.topology.plan.planning import Grouping, PlanRequest, RankFacts, plan_job
from psdist.topology.plan.serving_hosts import problem_of
from psdist.topology.solver.filling import lower_bound_s

GBIT = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Job:
    cluster: Cluster
    sizes: tuple[int, ...]
    """Ranks on each node."""
    group: Grouping
    servers: int

    def plan(self) -> Plan:
        hosts = [
            node.name
            for node, size in zip(self.cluster.nodes, self.sizes, strict=True)
            for _ in range(size)
        ]
        ranks = [
            RankFacts(rank=rank, host=host, cpus=frozenset(range(4)))
            for rank, host in enumerate(hosts)
        ]
        return plan_job(self.cluster, ranks, PlanRequest(servers=self.servers, group=self.group))

    def ways(self) -> Iterator[tuple[int, ...]]:
        """Servers on each node; of nodes alike in a rack only one order."""
        alike: dict[tuple[float, ...], list[int]] = defaultdict(list)
        for index, node in enumerate(self.cluster.nodes):
            alike[node.switch, node.bytes_per_s, self.sizes[index]].append(index)
        kinds = list(alike.items())
        for parts in product(
            *(
                combinations_with_replacement(range(int(size) + 1), len(nodes))
                for (_, _, size), nodes in kinds
            )
        ):
            if sum(map(sum, parts)) == self.servers:
                way = [0] * len(self.sizes)
                for (_, nodes), counts in zip(kinds, parts, strict=True):
                    for node, count in zip(nodes, counts, strict=True):
                        way[node] = count
                yield tuple(way)

    def seconds(self, way: tuple[int, ...]) -> float:
        left = [size - count for size, count in zip(self.sizes, way, strict=True)]
        groups = [float(each if self.group == "rank" else min(each, 1)) for each in left]
        if not any(groups):
            return math.inf
        problem = problem_of(self.cluster, way, groups, PlanRequest(), self.servers)
        return lower_bound_s(problem)

    def least_s(self) -> float:
        return min(map(self.seconds, self.ways()))


def random_job(rng: random.Random, *, most_ways: int) -> Job:
    """2 to 12 hosts with 1 to 3 ranks each in uneven racks, in which that many ways remain."""
    while True:
        num_nodes = rng.randint(2, 12)
        num_racks = rng.randint(1, min(3, num_nodes))
        racks = [*range(num_racks), *(rng.randrange(num_racks) for _ in range(num_nodes))]
        speeds = rng.choice([[100.0], [100.0], [100.0, 200.0]])
        most = rng.choice([1, 2, 2, 3])
        least = rng.choice([1, most])
        sizes = tuple(rng.randint(least, most) for _ in range(num_nodes))
        if sum(sizes) < 2:
            continue
        switches = [Switch(name="spine", parent=-1, bytes_per_s=1.0)] + [
            Switch(name=f"rack{rack}", parent=0, bytes_per_s=rng.choice([50, 100, 200, 400]) * GBIT)
            for rack in range(num_racks)
        ]
        here = flat_machine(range(4))
        nodes = tuple(
            Node(
                name=f"h{index}",
                machine=here,
                switch=1 + rack,
                bytes_per_s=rng.choice(speeds) * GBIT,
            )
            for index, rack in enumerate(sorted(racks[:num_nodes]))
        )
        job = Job(
            cluster=Cluster(nodes=nodes, switches=tuple(switches), source="a test"),
            sizes=sizes,
            group=rng.choice(["node", "rank"]),
            servers=rng.randint(1, sum(sizes) - 1),
        )
        if sum(1 for _ in zip(job.ways(), range(most_ways + 1), strict=False)) <= most_ways:
            return job
