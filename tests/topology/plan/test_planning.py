"""Plans: every rank has one role and one seat, and the numbers say what the links really carry.

Of planning, serving_hosts and what_if; seats have a module of their own, and so has plan.json.

Longer than other modules: the same clusters are planned in every way.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psdist.errors import PlacementError
from psdist.topology.draw import svg as draw_svg
from psdist.topology.draw import text as draw_text
from psdist.topology.machine import Device, Machine, flat_machine
from psdist.topology.network import Cluster, Node, Switch
from psdist.topology.network.same_host import is_same_host
from psdist.topology.plan import Plan, planning
from psdist.topology.plan.gpu_shares import Role
from psdist.topology.plan.planning import (
    Grouping,
    PlanRequest,
    RankFacts,
    Strategy,
    on_hosts,
    plan_ahead,
    plan_job,
)
from psdist.topology.plan.seating import seat
from psdist.topology.plan.serving_hosts import problem_of
from psdist.topology.plan.what_if import what_if
from tests.support.exact_placement import linear_bound_s
from tests.topology.plan.test_seating import machine

GBIT = 1e9 / 8
GROUPS: tuple[Grouping, ...] = ("node", "socket", "numa", "rank")


def two_racks(
    *,
    per_rack: Sequence[int] = (2, 2),
    link: float = GBIT,
    uplink: float = GBIT / 2,
    here: Machine | None = None,
) -> Cluster:
    """Racks of so many nodes, h1, h2 ..., under a spine."""
    nodes = [
        Node(
            name=f"h{1 + sum(per_rack[:rack]) + index}",
            machine=here or machine(cores=4),
            switch=1 + rack,
            bytes_per_s=link,
        )
        for rack, count in enumerate(per_rack)
        for index in range(count)
    ]
    racks = [
        Switch(name=f"rack{rack + 1}", parent=0, bytes_per_s=uplink)
        for rack in range(len(per_rack))
    ]
    spine = Switch(name="spine", parent=-1, bytes_per_s=1.0)
    return Cluster(nodes=tuple(nodes), switches=(spine, *racks), source="a test")


def running(cluster: Cluster, sizes: Sequence[int], *, is_cyclic: bool = False) -> list[RankFacts]:
    """So many ranks on each node, all of them with all of its PUs."""
    hosts = [node for node, size in zip(cluster.nodes, sizes, strict=True) for _ in range(size)]
    if is_cyclic:
        rounds = max(sizes)
        hosts = [
            node
            for turn in range(rounds)
            for node, size in zip(cluster.nodes, sizes, strict=True)
            if turn < size
        ]
    return [
        RankFacts(rank=rank, host=node.name, cpus=node.machine.cpus)
        for rank, node in enumerate(hosts)
    ]


def bytes_over_links(plan: Plan, cluster: Cluster) -> dict[str, float]:
    """What every link carries in one direction, counted pair by pair from who sits where.

    A group pushes every shard from its host to the shard's server, and gets as much back.
    """
    node = {each.name: index for index, each in enumerate(cluster.nodes)}
    above = {
        host: {cluster.switches[s].name for s in cluster.path(index)} | {host}
        for host, index in node.items()
    }
    groups = {(each.host, each.group) for each in plan.ranks if each.role == "worker"}
    servers = [each.host for each in plan.ranks if each.role == "server"]
    sent: Counter[str] = Counter()
    for group_host, _ in groups:
        for server_host, weight in zip(servers, plan.weights, strict=True):
            # Up from one, down to the other: a push one way, its reply the other way.
            for link in above[group_host] ^ above[server_host]:
                sent[link] += weight * plan.model_bytes
    return dict(sent)


SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=5)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.data(), st.sampled_from(GROUPS), st.booleans())
def test_every_running_rank_has_one_role_and_every_worker_one_group(
    sizes: list[int], data: st.DataObject, group: Grouping, is_cyclic: bool
) -> None:
    per_rack = (len(sizes) // 2, len(sizes) - len(sizes) // 2)
    cluster = two_racks(per_rack=per_rack)
    servers = data.draw(st.integers(1, sum(sizes) - 1))
    placement = data.draw(st.sampled_from(["auto", "block", "cyclic"]))
    ranks = running(cluster, sizes, is_cyclic=is_cyclic)
    request = PlanRequest(servers=servers, group=group, placement=placement)  # type: ignore[arg-type]
    plan = plan_job(cluster, ranks, request)
    assert [each.rank for each in plan.ranks] == list(range(len(ranks)))
    assert [each.host for each in plan.ranks] == [each.host for each in ranks]
    assert [each.index for each in plan.ranks if each.role == "server"] == list(range(servers))
    workers = [each for each in plan.ranks if each.role == "worker"]
    assert [each.index for each in workers] == list(range(len(workers)))
    assert {each.group for each in workers} == set(range(len({each.group for each in workers})))
    for number in {each.group for each in workers}:
        members = [each for each in workers if each.group == number]
        assert len({each.host for each in members}) == 1
        if group == "socket":
            assert len({each.package for each in members}) == 1
        if group == "rank":
            assert len(members) == 1
    assert math.isclose(sum(plan.weights), 1.0)
    bound = [cpu for each in plan.ranks if each.host == "h1" for cpu in each.cpus]
    assert len(bound) == len(set(bound))


@settings(max_examples=60, deadline=None)
@given(SIZES, st.data(), st.sampled_from(GROUPS))
def test_the_links_carry_what_pairs_of_groups_and_servers_send(
    sizes: list[int], data: st.DataObject, group: Grouping
) -> None:
    cluster = two_racks(per_rack=(1, len(sizes) - 1))
    servers = data.draw(st.integers(1, sum(sizes) - 1))
    request = PlanRequest(servers=servers, group=group, model_bytes=1e6)
    plan = plan_job(cluster, running(cluster, sizes), request)
    counted = bytes_over_links(plan, cluster)
    for link in plan.links:
        assert link.num_bytes == pytest.approx(counted.get(link.name, 0.0), abs=1e-3)
    assert plan.cost_s == pytest.approx(max(link.seconds for link in plan.links))
    assert plan.bound_s <= plan.cost_s * (1 + 1e-9)
    assert plan.cost_s <= min(plan.compared.values()) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.data(), st.sampled_from(GROUPS))
def test_on_few_hosts_no_other_choice_of_servers_is_faster(
    sizes: list[int], data: st.DataObject, group: Grouping
) -> None:
    """Against every number of servers on every host, with shards cut by the linear program."""
    speeds = data.draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=4, max_size=4))
    cluster = two_racks(per_rack=(1, len(sizes) - 1)).with_links(
        node_bytes_per_s={f"h{1 + node}": speed for node, speed in enumerate(speeds)}
    )
    servers = data.draw(st.integers(1, sum(sizes) - 1))
    plan = plan_job(cluster, running(cluster, sizes), PlanRequest(servers=servers, group=group))
    best = math.inf
    for counts in itertools.product(*(range(size + 1) for size in sizes)):
        if sum(counts) == servers:
            # The first ranks of a host serve: the groups that the others make are block's there.
            groups = groups_left(cluster, sizes, counts, group)
            problem = problem_of(cluster, counts, groups, PlanRequest(), servers)
            best = min(best, linear_bound_s(problem))
    assert plan.cost_s == pytest.approx(best, rel=1e-6)


def groups_left(
    cluster: Cluster, sizes: Sequence[int], counts: Sequence[int], group: Grouping
) -> list[float]:
    """Groups that the workers of each host make, from seats."""
    found: list[float] = []
    for node, size, count in zip(cluster.nodes, sizes, counts, strict=True):
        roles: list[Role] = ["server"] * count + ["worker"] * (size - count)
        workers = seat(node.machine, roles, masks=[node.machine.cpus] * size)[count:]
        kinds = {
            "node": {0 for _ in workers},
            "rank": set(range(len(workers))),
            "socket": {each.package for each in workers},
            "numa": {each.numa for each in workers},
        }
        found.append(float(len(kinds[group])))
    return found


def test_servers_go_where_the_uplinks_carry_least() -> None:
    """Groups of one rank, two ranks a host: a rack that loses two workers to servers is left with
    two groups, and a balanced choice moves 3 models over the uplinks, not 4."""
    cluster = two_racks()
    request = PlanRequest(servers=2, group="rank", model_bytes=1.0)
    plan = plan_job(cluster, running(cluster, [2] * 4), request)
    uplinks = [link.num_bytes for link in plan.links if link.kind == "switch"]
    assert uplinks == pytest.approx([3.0, 3.0])
    hosts = {each.host for each in plan.ranks if each.role == "server"}
    assert len(hosts & {"h1", "h2"}) == 1
    assert plan.cost_s == pytest.approx(3.0 / (GBIT / 2))
    assert plan.compared["cyclic"] == pytest.approx(4.0 / (GBIT / 2))


@pytest.mark.parametrize("num_nodes", [3, 4, 8])
def test_auto_takes_a_server_on_every_node_of_one_rack(num_nodes: int) -> None:
    cluster = two_racks(per_rack=(num_nodes,))
    plan = plan_job(cluster, running(cluster, [3] * num_nodes), PlanRequest())
    assert Counter(each.host for each in plan.ranks if each.role == "server") == Counter(
        node.name for node in cluster.nodes
    )
    assert plan.cost_s == pytest.approx(2 * (1 - 1 / num_nodes) * 1e9 / GBIT)
    assert plan.bound_s == pytest.approx(plan.cost_s)


def test_hosts_only_serve_where_that_is_faster_for_as_many_workers() -> None:
    """8 hosts with 2 ranks each: 4 that serve carry 1 model each, a server on every host 1.75."""
    cluster = two_racks(per_rack=(8,))
    plan = plan_job(cluster, running(cluster, [2] * 8), PlanRequest(servers=8))
    assert plan.cost_s == pytest.approx(1e9 / GBIT)
    assert len({each.host for each in plan.ranks if each.role == "worker"}) == 4
    assert any("only serve" in note for note in plan.notes)


def test_between_two_nodes_one_server_is_as_good_as_two_and_leaves_a_worker_more() -> None:
    cluster = two_racks(per_rack=(2,))
    one = plan_job(cluster, running(cluster, [2, 2]), PlanRequest())
    two = plan_job(cluster, running(cluster, [2, 2]), PlanRequest(servers=2))
    assert len(one.weights) == 1
    assert one.cost_s == pytest.approx(two.cost_s)


def test_auto_does_not_leave_a_few_of_many_hosts_without_a_server() -> None:
    cluster = two_racks(per_rack=(64,))
    plan = plan_job(cluster, running(cluster, [4] * 64), PlanRequest())
    assert len(plan.weights) == 64


def test_auto_never_takes_more_than_half_of_the_ranks() -> None:
    cluster = two_racks(per_rack=(3,))
    plan = plan_job(cluster, running(cluster, [1, 1, 1]), PlanRequest())
    assert len(plan.weights) == 1
    plan = plan_job(cluster, running(cluster, [1, 1, 2]), PlanRequest())
    assert len(plan.weights) == 2


def test_a_slow_link_gets_a_small_shard() -> None:
    cluster = two_racks(per_rack=(3,)).with_links(node_bytes_per_s={"h3": GBIT * 0.8})
    plan = plan_job(cluster, running(cluster, [4] * 3), PlanRequest(servers=3))
    by_host = {each.host: plan.weights[each.index] for each in plan.ranks if each.role == "server"}
    assert by_host["h3"] < by_host["h1"]
    assert by_host["h1"] == pytest.approx(by_host["h2"])
    assert plan.cost_s < min(plan.compared.values())


def test_one_host_has_no_links_and_its_first_ranks_serve() -> None:
    cluster = two_racks(per_rack=(1,))
    plan = plan_job(cluster, running(cluster, [4]), PlanRequest(servers=2))
    assert plan.server_ranks == (0, 1)
    assert plan.links == ()
    assert plan.cost_s == plan.bound_s == 0.0
    assert plan_job(cluster, running(cluster, [4]), PlanRequest()).server_ranks == (0,)


def test_hosts_that_share_a_kernel_are_not_bound() -> None:
    cluster = two_racks(per_rack=(2,))
    ranks = [
        RankFacts(rank=rank, host=f"h{1 + rank // 2}", cpus=frozenset(range(4)), kernel="same")
        for rank in range(4)
    ]
    plan = plan_job(cluster, ranks, PlanRequest())
    assert all(each.cpus == () for each in plan.ranks)
    assert any("share one kernel" in note for note in plan.notes)


def test_a_server_that_was_bound_by_the_launcher_is_the_rank_beside_the_network_card() -> None:
    here = machine(cores=2, nic=1)
    cluster = two_racks(per_rack=(1,), here=here)
    ranks = [RankFacts(rank=cpu, host="h1", cpus=frozenset({cpu})) for cpu in range(4)]
    plan = plan_job(cluster, ranks, PlanRequest(servers=1))
    assert plan.server_ranks == (2,)
    assert [each.cpus for each in plan.ranks] == [(0,), (1,), (2,), (3,)]


def test_among_equal_places_servers_are_spread_over_the_racks() -> None:
    plan = plan_ahead(two_racks(), PlanRequest(servers=2), workers=[2] * 4)
    assert [each.host for each in plan.ranks if each.role == "server"] == ["h1", "h3"]
    assert plan.cost_s == pytest.approx(plan.bound_s)


@pytest.mark.parametrize("servers", [4, 9])
def test_more_servers_than_ranks_are_refused_with_both_numbers(servers: int) -> None:
    cluster = two_racks()
    with pytest.raises(PlacementError, match=rf"servers = {servers} with 4 ranks.*at most 3"):
        plan_job(cluster, running(cluster, [1] * 4), PlanRequest(servers=servers))


def test_a_plan_on_other_hosts_keeps_roles_and_counts_the_real_links() -> None:
    cluster = two_racks(per_rack=(2, 2))
    request = PlanRequest(servers=2, model_bytes=1e6)
    plan = plan_job(cluster, running(cluster, [2] * 4), request)
    moved = ["h4", "h4", "h2", "h2", "h3", "h3", "h1", "h1"]
    after = on_hosts(plan, cluster, moved)
    assert [each.role for each in after.ranks] == [each.role for each in plan.ranks]
    assert [each.host for each in after.ranks] == moved
    assert [bool(each.cpus) for each in after.ranks] == [
        each.host == host for each, host in zip(plan.ranks, moved, strict=True)
    ]
    counted = bytes_over_links(after, cluster)
    for link in after.links:
        assert link.num_bytes == pytest.approx(counted.get(link.name, 0.0), abs=1e-3)
    same = on_hosts(plan, cluster, [each.host for each in plan.ranks])
    assert (same.ranks, same.cost_s, same.notes) == (plan.ranks, plan.cost_s, ())
    assert any("made for other hosts" in note for note in after.notes)


def test_a_given_plan_is_not_refused_for_the_memory_of_a_guessed_model() -> None:
    """Inside a job nobody knows the model yet; the plan that a run leaves says 1 GB."""
    here = machine(cores=4)
    nodes = tuple(replace(node, memory_bytes=10**8) for node in here.numa_nodes)
    cluster = two_racks(per_rack=(2,), here=replace(here, numa_nodes=nodes))
    plan = plan_job(cluster, running(cluster, [2, 2]), PlanRequest())
    again = on_hosts(plan, cluster, [each.host for each in plan.ranks])
    assert (again.cost_s, again.bound_s) == (plan.cost_s, 0.0)


def test_workers_on_several_numa_nodes_each_are_grouped_by_socket_at_least() -> None:
    cluster = two_racks(per_rack=(1,), here=machine(packages=2, numa=2, cores=2))
    masks = [{0}, {1, 2, 3}, {4, 5, 6, 7}]
    ranks = [
        RankFacts(rank=rank, host="h1", cpus=frozenset(mask)) for rank, mask in enumerate(masks)
    ]
    plan = plan_job(cluster, ranks, PlanRequest(servers=1, group="numa"))
    assert [each.group for each in plan.ranks] == [-1, 0, 1]


def test_a_plan_whose_group_would_lie_on_two_hosts_is_refused() -> None:
    cluster = two_racks(per_rack=(2,))
    plan = plan_job(cluster, running(cluster, [3, 3]), PlanRequest(servers=2))
    with pytest.raises(PlacementError, match=r"group 0 of the plan lies on h1, h2"):
        on_hosts(plan, cluster, ["h1", "h2", "h1", "h2", "h1", "h2"])


# -- before the job ----------------------------------------------------------------------------


def test_servers_come_in_addition_to_the_workers_and_share_the_cores_with_them() -> None:
    cluster = two_racks(per_rack=(2, 2))
    plan = plan_ahead(cluster, PlanRequest(servers=4, model_bytes=1e6), workers=[3] * 4)
    assert len(plan.worker_ranks) == 12
    assert len(plan.server_ranks) == 4
    assert [each.host for each in plan.ranks] == [f"h{1 + rank // 4}" for rank in range(16)]
    assert {len(each.cores) for each in plan.ranks if each.role == "server"} == {1}
    assert {len(each.cores) for each in plan.ranks if each.role == "worker"} == {2, 3}


@pytest.mark.parametrize(
    ("here", "workers", "servers", "group"),
    [
        (machine(packages=3, numa=2, cores=3), [2, 3], 3, "numa"),
        (machine(packages=3, numa=2, cores=1), [3, 2], 4, "socket"),
        (machine(packages=3, cores=2), [2, 1, 2], 4, "socket"),
        (machine(packages=2, cores=3), [3, 2], 4, "numa"),
    ],
)
def test_servers_that_move_workers_apart_are_judged_with_the_groups_that_these_make(
    here: Machine, workers: list[int], servers: int, group: Grouping
) -> None:
    cluster = two_racks(per_rack=(len(workers),), here=here)
    request = PlanRequest(servers=servers, group=group, model_bytes=1e6)
    plan = plan_ahead(cluster, request, workers=workers)
    assert plan.cost_s <= min(plan.compared.values()) * (1 + 1e-9)
    counted = bytes_over_links(plan, cluster)
    for link in plan.links:
        assert link.num_bytes == pytest.approx(counted.get(link.name, 0.0))


def test_servers_do_not_move_workers_from_where_they_sit_alone() -> None:
    """Workers come first, so the groups are the same beside servers, and the bound holds."""
    cluster = two_racks(per_rack=(3,), here=machine(cores=2, nic=0))
    request = PlanRequest(servers=2, group="socket", placement="block", model_bytes=1e6)
    plan = plan_ahead(cluster, request, workers=[2] * 3)
    assert {each.group for each in plan.ranks if each.host == "h1"} == {-1, 0, 1}
    assert {each.group for each in plan.ranks if each.host != "h1"} == {2, 3, 4, 5}
    counted = bytes_over_links(plan, cluster)
    for link in plan.links:
        assert link.num_bytes == pytest.approx(counted.get(link.name, 0.0), abs=1e-3)
    assert 0 < plan.bound_s <= plan.cost_s


def test_server_nodes_have_servers_only_and_all_of_them() -> None:
    cluster = two_racks(per_rack=(2, 2))
    plan = plan_ahead(
        cluster, PlanRequest(servers=2), workers=[0, 2, 0, 2], server_nodes=["h1", "h3"]
    )
    assert [(each.host, each.role) for each in plan.ranks] == [
        ("h1", "server"), ("h2", "worker"), ("h2", "worker"),
        ("h3", "server"), ("h4", "worker"), ("h4", "worker"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "servers", "text"),
    [
        ([9, 1, 1, 1], 1, "9 workers on h1, whose cores are 8"),
        ([8, 8, 8, 8], 1, "1 servers asked for, but there is room for 0"),
        ([8, 8, 8, 8], "auto", "no node has a core left for a server"),
        ([0, 0, 0, 0], 1, "no node has a worker"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(
    workers: list[int], servers: int, text: str
) -> None:
    with pytest.raises(PlacementError, match=text) as caught:
        plan_ahead(two_racks(), PlanRequest(servers=servers), workers=workers)
    assert "\n" not in str(caught.value)


def test_a_model_that_memory_cannot_hold_is_refused() -> None:
    here = flat_machine(range(4))
    small = here.__class__(
        **{
            **{name: getattr(here, name) for name in here.__dataclass_fields__},
            "numa_nodes": (
                here.numa_nodes[0].__class__(
                    os_index=0, cpus=here.cpus, memory_bytes=3 * 10**9, is_dram=True
                ),
            ),
        }
    )
    cluster = two_racks(per_rack=(2,), here=small)
    plan_ahead(cluster, PlanRequest(model_bytes=1.5e9), workers=[1, 1])
    with pytest.raises(PlacementError, match="memory"):
        plan_ahead(cluster, PlanRequest(model_bytes=2e9), workers=[1, 1])


def test_more_ranks_than_a_plan_may_have_are_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_args: object, **_more: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(planning, "choose", never)
    monkeypatch.setattr(planning, "choose_among_ranks", never)
    cluster = two_racks(per_rack=(2,))
    with pytest.raises(PlacementError, match=r"65,537 ranks are more than the 65,536"):
        plan_ahead(cluster, PlanRequest(), workers=[32_768, 32_768])
    ranks = [RankFacts(rank=rank, host="h1", cpus=frozenset()) for rank in range(65_538)]
    with pytest.raises(PlacementError, match=r"65,538 ranks are more than the 65,536"):
        plan_job(cluster, ranks, PlanRequest())


def test_what_would_help_is_planned_and_not_guessed() -> None:
    cluster = two_racks(per_rack=(6,))
    request = PlanRequest(servers=1, model_bytes=1e6)
    plan = plan_ahead(cluster, request, workers=[2] * 6)
    helped = dict(what_if(cluster, plan, request, workers=[2] * 6))
    again = plan_ahead(cluster, PlanRequest(servers=2, model_bytes=1e6), workers=[2] * 6)
    assert helped["one more server"] == again.cost_s < plan.cost_s
    assert plan.worst_link is not None
    assert helped[f"twice the bandwidth on {plan.worst_link.name}"] < plan.cost_s


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("n1", "n1", True),
        ("n1", "n1.example.org", True),
        ("n1.example.org", "n1.example.org", True),
        ("n1.a.org", "n1.b.org", False),
        ("n1", "n10", False),
        ("n1", "n10.example.org", False),
    ],
)
def test_a_short_name_is_the_same_host_as_the_long_one(one: str, other: str, is_same: bool) -> None:
    assert is_same_host(one, other) is is_same_host(other, one) is is_same


def test_cores_that_nobody_gets_and_a_share_across_packages_are_said() -> None:
    cluster = two_racks(per_rack=(3,), here=machine(packages=4, cores=6))
    plan = plan_ahead(cluster, PlanRequest(servers=1), workers=[5, 5, 1])
    assert [note for note in plan.notes if "idle" in note] == [
        "h1: 5 of 24 cores idle, since workers get equal shares, none across packages, and "
        "servers what applying needs",
        "h2: 6 of 24 cores idle, since workers get equal shares, none across packages, and "
        "servers what applying needs",
    ]
    assert sum("h3: one rank on several packages" in note for note in plan.notes) == 1


def test_a_server_gets_the_cores_with_which_it_applies_what_its_link_brings() -> None:
    here = machine(packages=2, cores=32)
    cluster = two_racks(per_rack=(2,), link=12e9, here=here)
    plan = plan_ahead(cluster, PlanRequest(servers=2), workers=[2, 2])
    assert {len(each.cores) for each in plan.ranks if each.role == "server"} == {3}
    assert {len(each.cores) for each in plan.ranks if each.role == "worker"} == {29, 30}


@pytest.mark.parametrize("is_ahead", [True, False])
def test_auto_makes_no_server_that_would_hold_nothing(is_ahead: bool) -> None:
    """Every byte on the last host, whose link is the slowest, would make an exchange longer."""
    if is_ahead:
        cluster = two_racks(per_rack=(64,)).with_links(node_bytes_per_s={"h64": GBIT / 1.98413})
        plan = plan_ahead(cluster, PlanRequest(), workers=[1] * 64)
    else:
        cluster = two_racks(per_rack=(5, 2), link=GBIT).with_links(
            switch_bytes_per_s={"rack1": GBIT, "rack2": 2 * GBIT}
        )
        plan = plan_job(cluster, running(cluster, [2] * 7), PlanRequest(group="rank"))
    assert min(plan.weights) * len(plan.weights) > 0.01
    assert not any("hold nothing" in note for note in plan.notes)


def test_ranks_that_everybody_would_wait_for_idle_and_that_is_said() -> None:
    """As a worker, the rank on h9 would make an exchange 50,000 times longer."""
    cluster = two_racks(per_rack=(9,)).with_links(node_bytes_per_s={"h9": GBIT / 1e5})
    plan = plan_job(cluster, running(cluster, [3] * 8 + [1]), PlanRequest())
    assert plan.ranks[-1].role == "server"
    assert any("hold nothing" in note and "as workers" in note for note in plan.notes)


def test_servers_that_were_asked_for_and_hold_nothing_are_said() -> None:
    cluster = two_racks(per_rack=(9,)).with_links(node_bytes_per_s={"h9": GBIT / 100})
    plan = plan_ahead(cluster, PlanRequest(servers=9), workers=[2] * 9)
    assert any("1 of 9 servers hold nothing" in note for note in plan.notes)


def slow_servers() -> tuple[Cluster, PlanRequest]:
    """Links that are faster than what one core applies."""
    cluster = two_racks(per_rack=(4,), link=40e9, here=machine(cores=2))
    return cluster, PlanRequest(servers=1, model_bytes=1e9)


def test_the_time_of_an_exchange_is_that_of_the_slowest_part_and_says_which() -> None:
    cluster, request = slow_servers()
    plan = plan_ahead(cluster, request, workers=[1] * 4)
    assert plan.cost_s == pytest.approx(3 / 40)
    assert plan.exchange_s == plan.servers_s == pytest.approx(4 / 4)
    assert plan.limit == "servers"
    text = " ".join(draw_text.tree(plan, cluster).split())
    assert "1.00 s predicted for a push and a pull of 1.00 GB: the servers limit" in text
    assert "One exchange takes 1.00 s (servers)" in draw_svg.picture(plan, cluster)
    assert any("servers, not the links, limit" in note for note in plan.notes)


def test_note_and_explanation_give_one_advice_where_servers_limit() -> None:
    cluster, request = slow_servers()
    plan = plan_ahead(cluster, request, workers=[1] * 4)
    assert any("ask for more servers" in note for note in plan.notes)
    helped = dict(what_if(cluster, plan, request, workers=[1] * 4))
    assert helped["one more server"] < plan.exchange_s
    assert plan.worst_link is not None
    faster_s = helped[f"twice the bandwidth on {plan.worst_link.name}"]
    assert faster_s == pytest.approx(plan.exchange_s)
    assert "The servers limit" in draw_text.explain(plan, cluster)
    auto = plan_ahead(cluster, replace(request, servers="auto"), workers=[1] * 4)
    assert len(auto.weights) == 4
    assert not any("ask for more servers" in note for note in auto.notes)


def test_a_network_card_on_a_slow_bus_limits_and_is_named() -> None:
    here = machine(cores=4, nic=0)
    (card,) = here.devices
    slow = replace(here, devices=(replace(card, bytes_per_s=GBIT / 10),))
    cluster = two_racks(per_rack=(2,), here=slow)
    plan = plan_ahead(cluster, PlanRequest(servers=2, model_bytes=1e6), workers=[1, 1])
    assert plan.limit == "network cards"
    assert plan.exchange_s == pytest.approx(10 * plan.cost_s)


def four_cards() -> Machine:
    """Cores for many servers, beside four cards of a gigabyte a second each."""
    devices = tuple(
        Device(
            kind="nic",
            names=(f"mlx5_{card}",),
            pci=f"0000:0{card}:00.0",
            cpus=frozenset(range(64)),
            package=0,
            numa=0,
            bytes_per_s=1e9,
        )
        for card in range(4)
    )
    return replace(machine(cores=64), devices=devices)


@pytest.mark.parametrize("placement", ["block", "cyclic"])
@pytest.mark.parametrize("per_node", [1, 3])
def test_what_a_plan_is_compared_with_is_judged_as_it_is_cards_too(
    placement: Strategy, per_node: int
) -> None:
    cluster = two_racks(here=four_cards(), link=4e9, uplink=8e9)
    request = PlanRequest(servers=2, group="node", placement=placement, model_bytes=1e9)
    plan = plan_ahead(cluster, request, workers=[per_node] * 4)
    assert plan.limit == "network cards"
    assert plan.compared[placement] == plan.exchange_s
    ranks = [
        RankFacts(rank=rank, host=f"h{1 + rank // 3}", cpus=frozenset(range(64)))
        for rank in range(12)
    ]
    job = plan_job(cluster, ranks, request)
    assert job.compared[placement] == job.exchange_s
