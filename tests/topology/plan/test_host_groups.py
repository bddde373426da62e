"""Groups of several hosts: who is in one, what it sends, and which kind of groups is faster."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psdist.errors import PlacementError
from psdist.topology.draw import text as draw_text
from psdist.topology.network import Cluster, one_rack
from psdist.topology.plan import Plan, decode, encode, host_groups
from psdist.topology.plan.planning import (
    Grouping,
    PlanRequest,
    on_hosts,
    plan_ahead,
    plan_job,
)
from psdist.topology.plan.what_if import what_if
from tests.topology.plan.test_planning import GBIT, running, two_racks
from tests.topology.plan.test_seating import machine

WIDE: tuple[Grouping, ...] = ("rack", 1, 2, 3)
SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=6)


def hosts_of(plan: Plan) -> list[list[str]]:
    """The hosts of each group, in rank order."""
    found: dict[int, dict[str, None]] = {}
    for each in plan.ranks:
        if each.role == "worker":
            found.setdefault(each.group, {})[each.host] = None
    return [list(found[group]) for group in sorted(found)]


def test_neighbours_under_one_switch_that_have_workers_are_a_group() -> None:
    cluster = two_racks(per_rack=(3, 2))
    assert host_groups.of_hosts(cluster, [1, 0, 2, 1, 1], "rack") == [[0, 2], [3, 4]]
    assert host_groups.of_hosts(cluster, [1, 1, 1, 1, 1], 2) == [[0, 1], [2], [3, 4]]
    assert host_groups.of_hosts(cluster, [1, 1, 1, 0, 1], 1) == [[0], [1], [2], [4]]


def test_a_group_counts_on_each_host_by_its_workers_there() -> None:
    cluster = two_racks(per_rack=(3, 2))
    assert host_groups.parts(cluster, [1, 0, 3, 2, 2], "rack") == [0.25, 0.0, 0.75, 0.5, 0.5]


def bytes_over_links(plan: Plan, cluster: Cluster) -> tuple[Counter[str], Counter[str]]:
    """What goes over each link in one direction, worker by worker: with servers, and in groups."""
    node = {each.name: index for index, each in enumerate(cluster.nodes)}
    above = {
        host: {cluster.switches[s].name for s in cluster.path(index)} | {host}
        for host, index in node.items()
    }
    members = Counter(each.group for each in plan.ranks if each.role == "worker")
    servers = [each for each in plan.ranks if each.role == "server"]
    exchange, within = Counter[str](), Counter[str]()
    for each in plan.ranks:
        if each.role == "server":
            continue
        share = plan.model_bytes / members[each.group]
        for server in servers:
            for link in above[each.host] ^ above[server.host]:
                exchange[link] += share * plan.weights[server.index]
        others = {its.host for its in plan.ranks if its.group == each.group} - {each.host}
        for host in others:
            # This worker's slice comes from there once, and goes there once: one each way.
            for link in above[each.host] ^ above[host]:
                within[link] += share
    return exchange, within


@settings(max_examples=60, deadline=None)
@given(SIZES, st.data(), st.sampled_from(WIDE), st.booleans())
def test_links_carry_what_workers_send_to_servers_and_to_other_hosts_of_their_group(
    sizes: list[int], data: st.DataObject, group: Grouping, is_cyclic: bool
) -> None:
    cluster = two_racks(per_rack=(len(sizes) // 2, len(sizes) - len(sizes) // 2))
    servers = data.draw(st.integers(1, sum(sizes) - 1))
    placement = data.draw(st.sampled_from(["auto", "block", "cyclic"]))
    request = PlanRequest(servers=servers, group=group, placement=placement, model_bytes=1e6)  # type: ignore[arg-type]
    plan = plan_job(cluster, running(cluster, sizes, is_cyclic=is_cyclic), request)
    exchange, within = bytes_over_links(plan, cluster)
    for link in plan.links:
        assert link.num_bytes == pytest.approx(exchange[link.name], abs=1e-3)
        assert link.group_bytes == pytest.approx(within[link.name], abs=1e-3)
    assert plan.groups_s == pytest.approx(max(link.group_seconds for link in plan.links))
    rack = {each.name: each.switch for each in cluster.nodes}
    for hosts in hosts_of(plan):
        assert len({rack[host] for host in hosts}) == 1
        assert group == "rack" or len(hosts) <= int(group)
    assert decode(encode(plan), where="plan") == plan
    assert math.isclose(sum(plan.weights), 1.0)


def test_a_rack_is_one_group_and_sends_half_of_what_two_hosts_send_over_its_uplink() -> None:
    cluster = two_racks(uplink=GBIT / 4)
    plans = {
        group: plan_job(
            cluster,
            running(cluster, [2] * 4),
            PlanRequest(servers=4, group=group, placement="cyclic", model_bytes=1e9),
        )
        for group in ("node", "rack")
    }
    assert hosts_of(plans["rack"]) == [["h1", "h2"], ["h3", "h4"]]
    uplinks = {
        group: [link.num_bytes for link in plan.links if link.kind == "switch"]
        for group, plan in plans.items()
    }
    assert uplinks == {"node": [2e9, 2e9], "rack": [1e9, 1e9]}
    assert [link.group_bytes for link in plans["rack"].links] == [0.0, 0.0, *[1e9] * 4]
    # The gradients of half a gigabyte each way, and as many parameters.
    assert plans["rack"].groups_s == pytest.approx(8.0)
    assert plans["rack"].whole_s / plans["node"].whole_s == pytest.approx(0.625)


def test_workers_of_a_group_are_as_many_on_each_host_where_nothing_is_lost_by_that() -> None:
    cluster = two_racks()
    plan = plan_job(cluster, running(cluster, [3] * 4), PlanRequest(servers=4, group="rack"))
    workers = Counter(each.host for each in plan.ranks if each.role == "worker")
    assert set(workers.values()) == {2}
    assert plan.bound_s == 0
    assert "not of all" in plan.notes[-1]


def test_racks_are_asked_for_where_nobody_told_of_any() -> None:
    flat = one_rack(["h1", "h2"], machine(cores=4))
    said = r"group = rack: nothing is known of racks.*racks="
    with pytest.raises(PlacementError, match=said):
        plan_job(flat, running(flat, [2, 2]), PlanRequest(group="rack"))
    with pytest.raises(PlacementError, match=said):
        plan_ahead(flat, PlanRequest(group="rack"), workers=[1, 1])
    plan = plan_job(flat, running(flat, [2, 2]), PlanRequest(servers=2, group=2))
    assert hosts_of(plan) == [["h1", "h2"]]
    alone = one_rack(["h1"], machine(cores=4))
    assert hosts_of(plan_job(alone, running(alone, [3]), PlanRequest(group="rack"))) == [["h1"]]


def test_a_racks_last_group_may_have_fewer_hosts_and_the_plan_says_so() -> None:
    cluster = two_racks(per_rack=(3, 2))
    plan = plan_ahead(cluster, PlanRequest(group=2), workers=[1] * 5)
    assert hosts_of(plan) == [["h1", "h2"], ["h3"], ["h4", "h5"]]
    (note,) = (each for each in plan.notes if "fewer hosts" in each)
    assert note.startswith("group = 2: some groups have fewer hosts (1 of 1), ")
    even = plan_ahead(two_racks(), PlanRequest(group=2), workers=[1] * 4)
    assert not [each for each in even.notes if "fewer hosts" in each]


@pytest.mark.parametrize(("uplink", "taken"), [(GBIT / 4, "rack"), (4 * GBIT, "node")])
def test_auto_takes_racks_where_that_is_predicted_to_be_faster_and_says_both_times(
    uplink: float, taken: Grouping
) -> None:
    cluster = two_racks(uplink=uplink)
    request = PlanRequest(servers=4, model_bytes=1e9)
    by_kind = {
        group: plan_ahead(cluster, replace(request, group=group), workers=[2] * 4)
        for group in ("node", "rack")
    }
    plan = plan_ahead(cluster, replace(request, group="auto"), workers=[2] * 4)
    assert hosts_of(plan) == hosts_of(by_kind[str(taken)])
    assert by_kind[str(taken)].whole_s == min(each.whole_s for each in by_kind.values())
    note = plan.notes[-1]
    assert note.startswith(f"group = auto: {taken}; ")
    for group, each in by_kind.items():
        assert f"{each.whole_s:.3g} s with {group}" in note


def test_auto_is_groups_of_a_host_where_nothing_is_known_of_racks_or_there_is_one_host() -> None:
    flat = one_rack(["h1", "h2"], machine(cores=4))
    plan = plan_job(flat, running(flat, [2, 2]), PlanRequest(servers=2, group="auto"))
    assert hosts_of(plan) == [["h1"], ["h2"]]
    assert plan.notes[-1] == "group = auto: node, since nothing is known of racks"
    alone = one_rack(["h1"], machine(cores=4))
    plan = plan_job(alone, running(alone, [3]), PlanRequest(group="auto"))
    assert hosts_of(plan) == [["h1"]]


def test_a_plan_with_groups_over_hosts_may_be_started_on_other_hosts() -> None:
    cluster = two_racks()
    plan = plan_job(cluster, running(cluster, [2] * 4), PlanRequest(servers=4, group="rack"))
    turned = [each.host for each in plan.ranks]
    assert on_hosts(plan, cluster, turned).links == plan.links
    swapped = {"h1": "h1", "h2": "h3", "h3": "h2", "h4": "h4"}
    moved = on_hosts(plan, cluster, [swapped[host] for host in turned])
    exchange, within = bytes_over_links(moved, cluster)
    for link in moved.links:
        assert link.num_bytes == pytest.approx(exchange[link.name])
        assert link.group_bytes == pytest.approx(within[link.name])
    assert {link.name: link.group_bytes for link in moved.links}["rack1"] > 0


def test_the_drawing_says_what_is_reduced_between_hosts_and_explains_parts_of_groups() -> None:
    cluster = two_racks(uplink=10 * GBIT)
    request = PlanRequest(servers=4, group="rack", model_bytes=1e9)
    plan = plan_ahead(cluster, request, workers=[2] * 4)
    assert (
        "8.00 s predicted in addition for reducing between the hosts of a group (1.00 GB each way "
        "over h1)"
    ) in " ".join(draw_text.tree(plan, cluster, width=200).split())
    found = what_if(cluster, plan, request, workers=[2] * 4)
    told = draw_text.explain(plan, cluster, alternatives=found, width=200)
    assert "with 25.0 % of the model, and 0.5 groups of 2" in told
    assert "groups of whole nodes (--group node)" in told
