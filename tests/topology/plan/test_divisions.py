"""In a job a server costs a worker: the choice of servers against every other one."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from psdist.topology.draw import text as draw_text
from psdist.topology.network import Cluster
from psdist.topology.plan import serving_hosts
from psdist.topology.plan.planning import PlanRequest, RankFacts, plan_job
from psdist.topology.solver import divisions
from psdist.topology.solver.divisions import STEP_NUMBERS, Division, all_ways, climb
from tests.support.divisions import random_job
from tests.topology.plan.test_planning import GBIT, running, two_racks

ALL_WAYS_OF = 1000
"""Choices that the slow enumeration of a test tries, at most."""


def uneven_racks() -> tuple[Cluster, list[RankFacts], PlanRequest]:
    cluster = two_racks(per_rack=(4, 5)).with_links(
        switch_bytes_per_s={"rack1": 400 * GBIT, "rack2": 100 * GBIT},
        node_bytes_per_s={f"h{number}": 100 * GBIT for number in range(1, 10)},
    )
    request = PlanRequest(servers=9, group="rank")
    return cluster, running(cluster, [2] * 9), request


def test_many_ways_in_uneven_racks_are_compared_and_not_guessed() -> None:
    """Five candidates with the groups they make were 320 ms."""
    cluster, ranks, request = uneven_racks()
    plan = plan_job(cluster, ranks, request)
    assert plan.cost_s == pytest.approx(0.232727, rel=1e-5)
    assert plan.bound_s == pytest.approx(plan.cost_s)
    servers = Counter(each.host for each in plan.ranks if each.role == "server")
    assert sum(servers[f"h{host}"] for host in range(1, 5)) == 6


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_of_servers_among_the_ranks_is_faster(seed: int) -> None:
    job = random_job(random.Random(seed), most_ways=ALL_WAYS_OF)
    plan, least_s = job.plan(), job.least_s()
    assert plan.cost_s <= 1.01 * least_s
    assert plan.bound_s == pytest.approx(least_s)


@pytest.mark.parametrize("seed", range(40))
def test_climbing_ends_near_the_best_choice_and_claims_no_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = random_job(random.Random(seed), most_ways=ALL_WAYS_OF)
    monkeypatch.setattr(serving_hosts, "MOST_WAYS", 0)
    plan = job.plan()
    assert plan.cost_s <= 1.01 * job.least_s()
    assert plan.bound_s == 0


def test_what_was_not_proved_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, ranks, request = uneven_racks()
    proved = plan_job(cluster, ranks, request)
    for words in (draw_text.tree(proved, cluster), draw_text.explain(proved, cluster)):
        assert "at the lower bound of the links of 233 ms" in " ".join(words.split())
    monkeypatch.setattr(serving_hosts, "MOST_WAYS", 0)
    plan = plan_job(cluster, ranks, request)
    for words in (draw_text.tree(plan, cluster), draw_text.explain(plan, cluster)):
        assert "lower bound" not in words
        assert "cannot help" not in words
        assert "is faster was not proved" in words or "may be faster" in words


@pytest.mark.parametrize("numbers", [0, 20_000, 100_000])
def test_a_climb_in_a_large_job_ends_after_so_much_work(numbers: int) -> None:
    speeds = (1.0, *(1.0 + node / 100 for node in range(100)))
    job = replace(
        division((100,), size=3, servers=50),
        bytes_per_s=(1.0, *speeds),
        max_bytes=(1.0,) * 102,
    )
    start = (0, 0, *[1] * 50, *[0] * 50)
    found, again = (climb(job, [start], numbers=numbers) for _ in range(2))
    assert found is not None
    assert found == again
    last_step = STEP_NUMBERS // len(job.parent) + 1
    assert 1 <= found.tried <= numbers / 2 / len(job.parent) + last_step
    assert (found.tried == 1) == (numbers == 0)


def test_all_ways_are_given_up_once_listing_them_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = division((3, 3), size=3, servers=9)
    assert all_ways(job, most=5000)
    monkeypatch.setattr(divisions, "LIST_STEPS", 0)
    assert all_ways(job, most=5000) is None


def test_a_plan_that_is_not_the_best_of_all_says_how_many_ways_were_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, ranks, request = uneven_racks()
    assert not any("ways tried" in note for note in plan_job(cluster, ranks, request).notes)
    monkeypatch.setattr(serving_hosts, "WAYS_NUMBERS", 0)
    plan = plan_job(cluster, ranks, request)
    (note,) = [each for each in plan.notes if "ways tried" in each]
    assert re.fullmatch(
        r"which ranks serve is the best of [\d,]+ ways tried, not of all: .* may exist", note
    )
    assert plan.bound_s == 0


def test_a_plan_above_its_bound_is_not_said_to_be_the_fastest() -> None:
    cluster, ranks, _ = uneven_racks()
    request = PlanRequest(servers=9, group="rank", placement="cyclic")
    plan = plan_job(cluster, ranks, request)
    words = draw_text.tree(plan, cluster)
    assert "above the lower bound of 233 ms" in words
    assert "is faster" not in words


def division(racks: tuple[int, ...], *, size: int, servers: int) -> Division:
    """Racks of so many equal hosts with as many ranks each, every rank a group."""
    nodes = [1 + rack for rack, count in enumerate(racks) for _ in range(count)]
    num_switches = 1 + len(racks)
    return Division(
        parent=(-1, *[0] * len(racks), *nodes),
        bytes_per_s=(1.0,) * (num_switches + len(nodes)),
        max_bytes=(1.0,) * (num_switches + len(nodes)),
        sizes=(*[0] * num_switches, *[size] * len(nodes)),
        groups_with=lambda v, count: float(size - count) if v >= num_switches else 0.0,
        model_bytes=1.0,
        num_servers=servers,
    )


@pytest.mark.parametrize(
    ("racks", "size", "servers", "ways"),
    [
        ((64,), 1, 32, 1),
        ((4,), 2, 4, 3),  # 2 2 0 0, 2 1 1 0, 1 1 1 1
        ((2, 2), 1, 2, 2),  # both in a rack, one in each
        ((2, 3), 1, 2, 3),
    ],
)
def test_of_hosts_and_racks_that_are_alike_one_order_is_tried(
    racks: tuple[int, ...], size: int, servers: int, ways: int
) -> None:
    found = all_ways(division(racks, size=size, servers=servers), most=5000)
    assert found is not None
    assert len(found) == len(set(found)) == ways
    assert all(sum(way) == servers for way in found)


def test_more_ways_than_asked_for_are_not_made() -> None:
    assert all_ways(division((8, 9, 10, 11), size=3, servers=50), most=5000) is None
