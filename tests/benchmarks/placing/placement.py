"""How good placements are, and how long they take to find (docs/guides/placement.md).

    python -m tests.benchmarks.placing.placement

First the cost over the proven bound on racks whose uplinks are 4 times oversubscribed (values, the
same on every machine), then seconds of CPU time for 1,024 nodes.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from psdist.topology.solver import Problem, cost_s, edge_times_s
from psdist.topology.solver.filling import FlowTree, fastest_s, own_bytes
from psdist.topology.solver.placement import block, choose_num_servers, cyclic, solve
from tests.support import exact_placement as exact

NODE_BYTES_PER_S = 12e9
SOCKET_BYTES_PER_S = 20e9


def make_problem(
    *,
    num_racks: int,
    nodes_per_rack: int,
    oversubscription: float = 4,
    capacity: int = 1,
    sockets: int = 0,
    num_spines: int = 0,
    seed: int | None = None,
) -> Problem:
    """Racks of equal nodes with a group each, a server wherever one may sit.

    With ``sockets``, groups and servers are at those (a group in equal parts). With
    ``num_spines``, a level of switches between the racks and the root. With a ``seed``, links are
    of different speeds and some nodes have no group.
    """
    rng = random.Random(seed)
    parent, speed, groups, room = [-1], [math.inf], [0.0], [0]

    def add(above: int, bytes_per_s: float, num_groups: float, places: int) -> int:
        parent.append(above)
        speed.append(bytes_per_s)
        groups.append(num_groups)
        room.append(places)
        return len(parent) - 1

    rack_speed = nodes_per_rack * NODE_BYTES_PER_S / oversubscription
    spines = [
        add(0, rack_speed * num_racks / num_spines / 2, 0.0, 0) for _ in range(num_spines)
    ] or [0]
    racks = []
    for rack in range(num_racks):
        factor = 1.0 if seed is None else rng.choice([0.5, 1.0, 2.0])
        racks.append(add(spines[rack % len(spines)], rack_speed * factor, 0.0, 0))
    for rack in racks:
        for _ in range(nodes_per_rack):
            factor = 1.0 if seed is None else rng.choice([0.5, 1.0, 1.0, 2.0])
            num_groups = 1.0 if seed is None else rng.choice([0.0, 1.0, 1.0, 1.0])
            if not sockets:
                add(rack, NODE_BYTES_PER_S * factor, num_groups, capacity)
                continue
            node = add(rack, NODE_BYTES_PER_S * factor, 0.0, 0)
            for _ in range(sockets):
                add(node, SOCKET_BYTES_PER_S, num_groups / sockets, capacity)
    return Problem(
        parent=tuple(parent),
        bytes_per_s=tuple(speed),
        groups=tuple(groups),
        capacity=tuple(room),
        max_bytes=(math.inf,) * len(parent),
        model_bytes=4e9,
        num_servers=sum(room),
    )


def compare() -> None:
    print("| cluster | servers | block | cyclic | random | solve |\n|---|---|---|---|---|---|")
    small = make_problem(num_racks=4, nodes_per_rack=8, capacity=2)
    uneven = make_problem(num_racks=4, nodes_per_rack=8, capacity=2, seed=1)
    large = make_problem(num_racks=32, nodes_per_rack=32, capacity=2)
    for name, problem, num in (
        *(("4 x 8", small, num) for num in (8, 16, 32, 48)),
        *(("4 x 8, uneven", uneven, num) for num in (16, 32)),
        ("32 x 32", large, 1024),
    ):
        problem = replace(problem, num_servers=num)
        print(f"| {name} | {num} | {' | '.join(row(problem))} |")


def row(problem: Problem) -> list[str]:
    """Cost over the bound: of equal shards at plain places, and of what ``solve`` chooses."""
    solution = solve(problem)

    def over_bound(servers_at: Sequence[int]) -> float:
        return exact.equal_shards_cost_s(problem, servers_at) / solution.bound_s

    drawn = [over_bound(exact.random_placement(problem, seed)) for seed in range(10)]
    return [
        f"{over_bound(block(problem)):.2f}",
        f"{over_bound(cyclic(problem)):.2f}",
        f"{min(drawn):.2f} to {max(drawn):.2f}",
        f"{solution.cost_s / solution.bound_s:.4f}",
    ]


def show_sums() -> None:
    """The sum over all links tells placements apart far less than the worst link does."""
    problem = replace(make_problem(num_racks=4, nodes_per_rack=8, capacity=2), num_servers=32)
    print("\n| placement | worst link, s | sum over links, s |\n|---|---|---|")
    for name, servers_at in (
        ("block", block(problem)),
        ("cyclic", cyclic(problem)),
        ("random", exact.random_placement(problem, 0)),
        ("solve", solve(problem).servers_at),
    ):
        share = [problem.model_bytes / problem.num_servers] * problem.num_servers
        held = exact.bytes_per_vertex(problem, servers_at, share)
        total_s = math.fsum(edge_times_s(problem, held))
        print(f"| {name} | {cost_s(problem, held):.2f} | {total_s:.1f} |")


def seconds(function: Callable[[], object], repeats: int = 3) -> float:
    best = math.inf
    for _ in range(repeats):
        start = time.process_time()
        function()
        best = min(best, time.process_time() - start)
    return best


def measure() -> None:
    print("\n| 32 racks x 32 nodes, 4 spines | servers | solve, s | number, s | LP, s |")
    print("|---|---|---|---|---|")
    for name, problem, num in (
        ("equal", make_problem(num_racks=32, nodes_per_rack=32, num_spines=4), 1024),
        ("uneven", make_problem(num_racks=32, nodes_per_rack=32, num_spines=4, seed=1), 1024),
        ("uneven", make_problem(num_racks=32, nodes_per_rack=32, num_spines=4, seed=1), 300),
        (
            "uneven, 8 servers a node",
            make_problem(num_racks=32, nodes_per_rack=32, num_spines=4, seed=1, capacity=8),
            1024,
        ),
        (
            "uneven, 2 sockets",
            make_problem(num_racks=32, nodes_per_rack=32, num_spines=4, seed=1, sockets=2),
            1024,
        ),
    ):
        problem = replace(problem, num_servers=num)
        found = (
            seconds(partial(solve, problem)),
            seconds(partial(choose_num_servers, problem, max_servers=2048)),
            seconds(partial(exact.linear_bound_s, problem)),
        )
        tree, own = FlowTree.of(problem), own_bytes(problem, problem.candidates)
        difference = exact.linear_bound_s(problem) / fastest_s(tree, own) - 1
        assert abs(difference) < 1e-8, difference
        print(f"| {name} | {num} | {' | '.join(f'{each:.3f}' for each in found)} |")


if __name__ == "__main__":
    compare()
    show_sums()
    measure()
