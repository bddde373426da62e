"""Where a server's speed was measured, its part of the model suits links and servers together."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from psdist.commands.plan import PlanOptions, run
from psdist.errors import PlacementError
from psdist.topology.draw import text as draw_text
from psdist.topology.network import Cluster, Node, Switch
from psdist.topology.plan import Plan
from psdist.topology.plan.planning import PlanRequest, RankFacts, plan_ahead, plan_job
from psdist.topology.solver import Problem
from psdist.topology.solver.placement import solve, solve_with_servers
from tests.topology.plan.test_seating import machine

SPEEDS = (2.5e9, 5e9, 12.5e9, 25e9)
MEASURED = PlanRequest(group="rank", model_bytes=4e9, apply_bytes_per_s=4e9)


def random_cluster(rng: random.Random) -> tuple[Cluster, list[int], int]:
    num_nodes, num_racks = rng.randint(2, 10), rng.randint(1, 3)
    here = machine(cores=8)
    nodes = tuple(
        Node(name=f"n{i}", machine=here, switch=1 + i % num_racks, bytes_per_s=rng.choice(SPEEDS))
        for i in range(num_nodes)
    )
    racks = tuple(
        Switch(name=f"r{i}", parent=0, bytes_per_s=rng.choice((5e9, 12.5e9, 50e9)))
        for i in range(num_racks)
    )
    root = Switch(name="root", parent=-1, bytes_per_s=0.0)
    workers = [rng.randint(1, 4) for _ in range(num_nodes)]
    return (
        Cluster(nodes=nodes, switches=(root, *racks), source="a test"),
        workers,
        rng.randint(1, num_nodes),
    )


@pytest.mark.parametrize("seed", range(30))
def test_links_and_servers_together_are_never_slower_than_links_first(seed: int) -> None:
    cluster, workers, servers = random_cluster(random.Random(seed))
    measured = plan_ahead(cluster, replace(MEASURED, servers=servers), workers=workers)
    guessed = replace(MEASURED, servers=servers, apply_bytes_per_s=None)
    links_first = plan_ahead(cluster, guessed, workers=workers)
    assert measured.exchange_s <= links_first.exchange_s * (1 + 1e-9)
    assert links_first.cost_s <= links_first.bound_s * (1 + 1e-6)
    if measured.limit == "links":
        assert measured.cost_s <= links_first.exchange_s


def test_servers_get_equal_parts_where_the_links_have_time_for_them() -> None:
    cluster, workers, servers = random_cluster(random.Random(168))
    request = replace(MEASURED, servers=servers)
    plan = plan_ahead(cluster, request, workers=workers)
    assert plan.has_equal_parts
    before = plan_ahead(cluster, replace(request, apply_bytes_per_s=None), workers=workers)
    assert before.exchange_s == pytest.approx(3 * plan.exchange_s, rel=1e-6)
    assert before.limit == "servers"
    assert any("--apply" in note for note in before.notes)
    assert not any("--apply" in note for note in plan.notes)


def star(rng: random.Random) -> Problem:
    """Two hosts with a server each, and up to three without."""
    others = rng.randint(0, 3)
    return Problem(
        parent=(-1, *[0] * (2 + others)),
        bytes_per_s=(float("inf"), *(rng.uniform(1, 10) for _ in range(2 + others))),
        groups=(0, *(rng.randint(0, 3) for _ in range(1 + others)), 1),
        capacity=(0, 1, 1, *[0] * others),
        max_bytes=(0.0, 1.0, 1.0, *[0.0] * others),
        model_bytes=1.0,
        num_servers=2,
    )


@pytest.mark.parametrize("seed", range(40))
def test_of_two_servers_no_other_parts_are_faster(seed: int) -> None:
    rng = random.Random(seed)
    problem, speed = star(rng), rng.uniform(0.3, 10)
    groups = sum(problem.groups)

    def exchange_s(held: float) -> float:
        masses = (0.0, held, 1 - held, *[0.0] * (len(problem.parent) - 3))
        links = max(
            (masses[v] * (groups - problem.groups[v]) + problem.groups[v] * (1 - masses[v]))
            / problem.bytes_per_s[v]
            for v in range(1, len(problem.parent))
        )
        return max(links, groups * max(held, 1 - held) / speed)

    best = min(exchange_s(step / 2000) for step in range(2001))
    found = solve_with_servers(problem, apply_bytes_per_s=[speed] * len(problem.parent))
    assert max(found.cost_s, groups * max(found.server_bytes) / speed) <= 1.021 * best
    fast = solve_with_servers(problem, apply_bytes_per_s=[float("inf")] * len(problem.parent))
    assert fast == solve(problem)


def words(plan: Plan, cluster: Cluster) -> str:
    text = draw_text.tree(plan, cluster) + draw_text.explain(plan, cluster)
    return " ".join(text.split())


def test_what_was_proved_of_links_is_not_said_of_servers() -> None:
    cluster, workers, servers = random_cluster(random.Random(168))
    request = replace(MEASURED, servers=servers, apply_bytes_per_s=None)
    plan = plan_ahead(cluster, request, workers=workers)
    assert plan.limit == "servers"
    assert plan.is_at_bound
    assert "is faster" not in words(plan, cluster)
    assert "cannot help" not in words(plan, cluster)
    assert "the servers take longer: of them nothing is proved" in words(plan, cluster)
    faster = replace(plan, servers_s=0.0)
    assert "is faster" in words(faster, cluster)


def test_a_job_has_measured_nothing_and_keeps_its_links_fastest() -> None:
    cluster, _, _ = random_cluster(random.Random(168))
    ranks = [
        RankFacts(rank=index, host=node.name, cpus=node.machine.cpus)
        for index, node in enumerate(node for node in cluster.nodes for _ in range(2))
    ]
    plan = plan_job(cluster, ranks, PlanRequest(group="rank", model_bytes=4e9))
    assert plan.is_at_bound


@pytest.mark.parametrize("value", ["fast", "0", "4Gb"])
def test_a_speed_that_is_none_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="--apply"):
        run(PlanOptions(apply=value, out=tmp_path, launcher="json"))
