"""Placement: equal to the exact solution where that can be had, never above what is proved.

Of the whole room: problem, filling, bound and placement, against
tests/support/exact_placement.py.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import InvariantError, PlacementError
from psdist.topology.solver import Problem, Solution, cost_s, edge_loads
from psdist.topology.solver.filling import (
    FlowTree,
    even_masses,
    fastest_s,
    lower_bound_s,
    own_bytes,
)
from psdist.topology.solver.placement import (
    block,
    choose_num_servers,
    cyclic,
    solve,
)
from tests.benchmarks.placing.placement import make_problem
from tests.support import exact_placement as exact


def close(first: float, second: float, rel: float = 1e-9) -> bool:
    return math.isclose(first, second, rel_tol=rel, abs_tol=1e-12)


def divisible_s(problem: Problem) -> float:
    """The linear program: servers wherever one may sit."""
    return fastest_s(FlowTree.of(problem), own_bytes(problem, problem.candidates))


def tiny_problem(rng: random.Random) -> Problem:
    """Up to 4 nodes under up to 3 switches, up to 6 servers; everything uneven."""
    switches, nodes = rng.randint(1, 3), rng.randint(1, 4)
    num = switches + nodes
    parent = [rng.randrange(s) for s in range(1, switches)]
    parent += [rng.randrange(switches) for _ in range(nodes)]
    speeds = [rng.choice([1.0, 2.0, 4.0, 10.0, rng.uniform(0.5, 10)]) for _ in range(num - 1)]
    groups = [rng.choice([0, 1, 1, 1, 2, 0.5, rng.uniform(0, 3)]) for _ in range(nodes)]
    capacity = [rng.choice([1, 1, 2, 6]) for _ in range(nodes)]
    return Problem(
        parent=(-1, *parent),
        bytes_per_s=(math.inf, *speeds),
        groups=(*[0.0] * switches, *groups),
        capacity=(*[0] * switches, *capacity),
        max_bytes=(math.inf,) * num,
        model_bytes=rng.choice([1.0, 7.3, 4e9]),
        num_servers=rng.randint(1, min(6, sum(capacity))),
    )


def with_short_memory(problem: Problem, rng: random.Random) -> Problem:
    limits = [rng.choice([0.4, 0.7, math.inf]) * problem.model_bytes for _ in problem.parent]
    try:
        return replace(problem, max_bytes=tuple(limits))
    except PlacementError:
        return problem


def larger_problem(rng: random.Random) -> Problem:
    problem = make_problem(
        num_racks=rng.randint(1, 6),
        nodes_per_rack=rng.randint(2, 8),
        oversubscription=rng.choice([1, 2, 4]),
        capacity=rng.choice([1, 2, 4]),
        seed=rng.randrange(1000) if rng.random() < 0.7 else None,
    )
    return replace(problem, num_servers=rng.randint(1, sum(problem.capacity)))


def star(num_workers: int, num_others: int) -> Problem:
    """BytePS's cluster: machines with a group, and machines without, all beside one switch."""
    num = num_workers + num_others
    return Problem(
        parent=(-1, *[0] * num),
        bytes_per_s=(math.inf, *[12e9] * num),
        groups=(0, *[1] * num_workers, *[0] * num_others),
        capacity=(0, *[1] * num),
        max_bytes=(math.inf,) * (num + 1),
        model_bytes=4e9,
        num_servers=num,
    )


def check_solution(problem: Problem, solution: Solution) -> None:
    assert len(solution.servers_at) == len(solution.server_bytes) == problem.num_servers
    for v, places in enumerate(problem.capacity):
        assert solution.servers_at.count(v) <= places
        assert solution.bytes_at[v] <= problem.max_bytes[v] * (1 + 1e-9)
    held = exact.bytes_per_vertex(problem, solution.servers_at, solution.server_bytes)
    assert all(close(a, b) for a, b in zip(held, solution.bytes_at, strict=True))
    assert min(solution.server_bytes) >= 0
    assert close(math.fsum(solution.server_bytes), problem.model_bytes)
    assert close(solution.cost_s, cost_s(problem, held))
    assert solution.bound_s <= solution.cost_s * (1 + 1e-9) + 1e-12


def loads_by_pairs(problem: Problem, bytes_at: Sequence[float]) -> list[float]:
    """Every pair of a group and a server sends over each edge between them."""

    def path(v: int) -> set[int]:
        return {v, *path(problem.parent[v])} if v > 0 else set()

    loads = [0.0] * len(problem.parent)
    for worker, groups in enumerate(problem.groups):
        for server, held in enumerate(bytes_at):
            for edge in path(worker) ^ path(server):
                loads[edge] += groups * held
    return loads


@given(st.randoms(use_true_random=False))
def test_edge_loads_are_what_all_pairs_of_groups_and_servers_send(rng: random.Random) -> None:
    problem = tiny_problem(rng)
    held = [rng.uniform(0, 1) if places else 0.0 for places in problem.capacity]
    loads = edge_loads(problem, held)
    for load, wanted in zip(loads, loads_by_pairs(problem, held), strict=True):
        assert close(load, wanted)


@given(st.randoms(use_true_random=False))
def test_solutions_keep_masses_capacity_and_memory(rng: random.Random) -> None:
    problem = with_short_memory(rng.choice([tiny_problem, larger_problem])(rng), rng)
    check_solution(problem, solve(problem))


def test_solutions_cost_what_the_linear_programs_over_all_places_cost() -> None:
    rng = random.Random(1)
    for _ in range(300):
        problem = tiny_problem(rng)
        if rng.random() < 0.3:
            problem = with_short_memory(problem, rng)
        solution = solve(problem)
        least_s = exact.least_time_s(problem)
        assert close(solution.cost_s, least_s), problem
        assert solution.bound_s <= least_s * (1 + 1e-9) + 1e-12, problem


def test_the_most_loaded_server_is_the_least_possible() -> None:
    rng = random.Random(2)
    for _ in range(40):
        problem = tiny_problem(rng)
        solution, wanted = solve(problem), exact.solve_exact(problem)
        assert close(solution.cost_s, wanted.cost_s), problem
        assert close(max(solution.server_bytes), max(wanted.server_bytes), 1e-7), problem


def test_with_a_less_loaded_server_the_model_would_not_fit() -> None:
    rng = random.Random(12)
    num_uneven = 0
    while num_uneven < 10:
        problem = larger_problem(rng)
        problem = replace(
            problem,
            bytes_per_s=tuple(each * math.exp(rng.uniform(-3, 3)) for each in problem.bytes_per_s),
            groups=tuple(each * rng.uniform(0, 3) for each in problem.groups),
        )
        solution = solve(problem)
        most = max(solution.server_bytes)
        if most * problem.num_servers < 1.001 * problem.model_bytes:
            continue
        num_uneven += 1
        less = exact.most_that_fits(problem, within_s=solution.cost_s, server_bytes=0.9999 * most)
        assert less < (1 - 1e-7) * problem.model_bytes, problem


def far_and_near(num_pairs: int) -> Problem:
    """Two nodes with a group each bound the time; beside them slow and fast nodes for servers."""
    num = 2 * num_pairs
    return Problem(
        parent=(-1, *[0] * (num + 2)),
        bytes_per_s=(math.inf, 1, 1, *[100.0 * num, 200.0 * num] * num_pairs),
        groups=(0, 1, 1, *[0] * num),
        capacity=(0, 0, 0, *[1] * num),
        max_bytes=(math.inf,) * (num + 3),
        model_bytes=1,
        num_servers=num_pairs,
    )


@pytest.mark.parametrize("num_pairs", [1, 2, 40])
def test_among_equally_slow_links_and_loads_the_network_is_used_least(num_pairs: int) -> None:
    problem = far_and_near(num_pairs)
    fast = tuple(v for v, speed in enumerate(problem.bytes_per_s) if speed == 400.0 * num_pairs)
    assert solve(problem).servers_at == fast


def test_the_bound_is_the_linear_program_on_larger_clusters() -> None:
    rng = random.Random(5)
    for _ in range(100):
        problem = larger_problem(rng)
        assert close(divisible_s(problem), exact.linear_bound_s(problem), 1e-8)


def test_fewer_places_than_nodes_are_chosen_as_well_as_by_trying_all_of_them() -> None:
    rng = random.Random(6)
    for _ in range(12):
        problem = make_problem(
            num_racks=2, nodes_per_rack=3, oversubscription=4, seed=rng.randrange(1000)
        )
        problem = replace(problem, num_servers=rng.randint(2, 4))
        assert close(solve(problem).cost_s, exact.least_time_s(problem)), problem


@pytest.mark.parametrize(("n", "k"), [(3, 1), (4, 2), (8, 3), (16, 16), (64, 8)])
def test_a_star_gets_the_shares_that_byteps_published(n: int, k: int) -> None:
    problem = star(n, k)
    share = 2 * (n - 1) * problem.model_bytes / (n * n + k * n - 2 * k)
    wanted_s = n * share / 12e9
    assert close(exact.linear_bound_s(problem), wanted_s, 1e-8)
    assert close(divisible_s(problem), wanted_s)
    solution = solve(problem)
    assert close(solution.cost_s, wanted_s)
    rest = (problem.model_bytes - k * share) / n
    assert solution.bytes_at == pytest.approx([0, *[rest] * n, *[share] * k], abs=100)


def test_no_placement_is_worse_than_the_best_of_block_cyclic_and_random() -> None:
    rng = random.Random(7)
    for _ in range(300):
        problem = larger_problem(rng)
        plain = [
            block(problem),
            cyclic(problem),
            *(exact.random_placement(problem, s) for s in range(3)),
        ]
        solution = solve(problem)
        assert solution.cost_s <= solution.bound_s * (1 + 1e-9)
        equal = min(exact.equal_shards_cost_s(problem, each) for each in plain)
        assert solution.cost_s <= equal * (1 + 1e-9), problem


@given(st.randoms(use_true_random=False))
def test_no_byte_can_move_to_a_less_loaded_server(rng: random.Random) -> None:
    """What characterises the most even masses: each such move breaks a cap."""
    problem = rng.choice([tiny_problem, larger_problem])(rng)
    tree = FlowTree.of(problem)
    caps = tree.caps(lower_bound_s(problem) * rng.choice([1 + 1e-9, 1.1, 1.5]))
    counts = [min(1, places) * rng.randint(1, places or 1) for places in problem.capacity]
    held = even_masses(tree, caps, counts, problem.max_bytes)
    below = list(held)
    for v in reversed(tree.order[1:]):
        below[tree.up[v]] += below[v]
        assert below[v] <= caps[v] + 1e-9 * problem.model_bytes

    def path(v: int) -> list[int]:
        return [] if v == tree.centre else [v, *path(tree.up[v])]

    grain = 1e-9 * problem.model_bytes
    for more in problem.candidates:
        for less in problem.candidates:
            if held[more] / counts[more] > held[less] / counts[less] + grain:
                tight = [below[e] >= caps[e] - grain for e in path(less) if e not in path(more)]
                assert any(tight), (problem, more, less)


def test_servers_of_one_vertex_share_its_bytes_equally() -> None:
    problem = replace(star(2, 0), capacity=(0, 3, 1), num_servers=4)
    solution = solve(problem)
    assert solution.servers_at == (1, 1, 1, 2)
    assert solution.server_bytes == pytest.approx([1e9] * 4)


def test_a_load_that_costs_no_time_is_spread_evenly() -> None:
    problem = replace(star(4, 0), bytes_per_s=(math.inf,) * 5)
    solution = solve(problem)
    assert solution.cost_s == solution.bound_s == 0
    assert solution.server_bytes == pytest.approx([1e9] * 4)


def test_a_server_that_brings_no_more_helps_the_most_loaded_that_it_can() -> None:
    problem = Problem(
        parent=(-1, 0, 0, 0),
        bytes_per_s=(math.inf,) * 4,
        groups=(0, 1, 1, 1),
        capacity=(0, 1, 2, 2),
        max_bytes=(0, math.inf, 0.1, 0.3),
        model_bytes=1,
        num_servers=4,
    )
    solution = solve(problem)
    assert solution.servers_at == (1, 2, 3, 3)
    assert solution.server_bytes == pytest.approx([0.6, 0.1, 0.15, 0.15])


def test_one_vertex_holds_everything_at_no_cost() -> None:
    problem = Problem(
        parent=(-1,),
        bytes_per_s=(math.inf,),
        groups=(2,),
        capacity=(40,),
        max_bytes=(math.inf,),
        model_bytes=4e9,
        num_servers=40,
    )
    solution = solve(problem)
    assert solution.servers_at == (0,) * 40
    assert (solution.cost_s, solution.bound_s) == (0, 0)
    assert choose_num_servers(problem, max_servers=40) == 1


def test_all_servers_go_beside_the_only_group() -> None:
    problem = replace(star(4, 0), groups=(0, 0, 1, 0, 0), num_servers=1)
    solution = solve(problem)
    assert (solution.servers_at, solution.cost_s) == ((2,), 0)
    problem = replace(problem, groups=(0,) * 5, num_servers=4)
    assert solve(problem).cost_s == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_servers": 5}, ["5 servers", "room for 4", "4 nodes"]),
        ({"num_servers": 0}, ["0 servers"]),
        ({"max_bytes": (0, 1e9, 1e9, 1e9, 5e8)}, ["3.5 GB", "4 GB", "more memory"]),
        ({"bytes_per_s": (0, 1, 1, -2.5, 1)}, ["vertex 3", "-2.5"]),
        ({"bytes_per_s": (0, 1, math.nan, 1, 1)}, ["vertex 2", "nan"]),
        ({"model_bytes": 0}, ["0 bytes"]),
    ],
)
def test_a_problem_without_a_solution_says_why_in_one_line(
    change: dict[str, float], words: list[str]
) -> None:
    with pytest.raises(PlacementError) as caught:
        replace(star(4, 0), **change)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parent", [(0, 0), (-1, 1), (-1, -1), (-1,)])
def test_what_is_not_a_tree_is_a_bug(parent: tuple[int, ...]) -> None:
    with pytest.raises(InvariantError):
        replace(star(1, 0), parent=parent)


def test_block_fills_vertices_and_cyclic_deals_out() -> None:
    problem = replace(star(3, 0), capacity=(0, 2, 1, 2), num_servers=4)
    assert block(problem) == (1, 1, 2, 3)
    assert cyclic(problem) == (1, 2, 3, 1)
    assert exact.random_placement(problem, 1) == exact.random_placement(problem, 1)
    assert all(
        exact.random_placement(problem, seed).count(v) <= places
        for seed in range(20)
        for v, places in enumerate(problem.capacity)
    )


def test_the_number_of_servers_is_the_least_within_five_percent_of_the_best() -> None:
    rng = random.Random(11)
    for _ in range(40):
        problem = larger_problem(rng)
        most = rng.randint(1, 30)
        chosen = choose_num_servers(problem, max_servers=most)
        limit = min(most, len(problem.candidates))
        costs = [lower_bound_s(replace(problem, num_servers=num)) for num in range(1, limit + 1)]
        wanted = next(num for num, cost in enumerate(costs, 1) if cost <= 1.05 * costs[-1] + 1e-12)
        assert chosen == wanted, problem
    with pytest.raises(PlacementError, match="allow 1 or more"):
        choose_num_servers(problem, max_servers=0)


def test_placing_loads_no_solver() -> None:
    code = (
        "import sys; from tests.topology.solver.test_placement import *; "
        "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('scipy')]; "
        "solve(make_problem(num_racks=4, nodes_per_rack=8)); "
        "sys.exit('scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
