"""A plan's roles: everybody has one, and stable ids know servers from workers."""

from __future__ import annotations

from typing import Literal

import pytest

from psdist.protocol.ids import (
    COORDINATOR,
    describe_peer,
    is_spare,
    is_worker,
    server_id,
    spare_id,
    spare_of,
    worker_id,
    worker_of,
)
from psdist.protocol.roles import Place, Roles
from psdist.ranks.seats.placing import roles_of_plan
from psdist.topology.network import one_rack
from psdist.topology.plan.planning import Grouping, PlanRequest, RankFacts, plan_job
from tests.topology.plan.test_seating import machine


def roles_of(*hosts: str, servers: int | Literal["auto"], group: Grouping = "node") -> Roles:
    """Roles for a rank per name."""
    here = machine(cores=len(hosts))
    ranks = [RankFacts(rank=rank, host=host, cpus=here.cpus) for rank, host in enumerate(hosts)]
    cluster = one_rack(list(dict.fromkeys(hosts)), here)
    plan = plan_job(cluster, ranks, PlanRequest(servers=servers, group=group))
    places = [
        Place(rank=rank, host=host, pid=1000 + rank, cores=(rank,))
        for rank, host in enumerate(hosts)
    ]
    return roles_of_plan(places, plan)


def test_the_first_rank_of_each_host_serves() -> None:
    roles = roles_of("n1", "n1", "n1", "n2", "n2", "n2", servers=2)
    assert roles.server_ranks == (0, 3)
    assert roles.worker_ranks == (1, 2, 4, 5)
    assert roles.groups == ((0, 1), (2, 3))
    assert roles.weights == pytest.approx((0.5, 0.5))


def test_ranks_that_go_round_the_hosts_are_grouped_by_host_all_the_same() -> None:
    roles = roles_of("n1", "n2", "n1", "n2", "n1", "n2", servers=2)
    assert roles.server_ranks == (0, 1)
    assert roles.groups == ((0, 2), (1, 3))


def test_a_worker_has_an_index_among_the_workers_of_its_host() -> None:
    block = roles_of("n1", "n1", "n1", "n2", "n2", "n2", servers=2)
    assert [block.local_index(worker) for worker in range(4)] == [0, 1, 0, 1]
    cyclic = roles_of("n1", "n2", "n1", "n2", "n1", "n2", servers=2)
    assert [cyclic.local_index(worker) for worker in range(4)] == [0, 0, 1, 1]


def test_groups_by_rank_have_one_worker_each() -> None:
    roles = roles_of("n1", "n1", "n1", "n2", "n2", "n2", servers=2, group="rank")
    assert roles.groups == ((0,), (1,), (2,), (3,))
    assert roles.group_of_worker == (0, 1, 2, 3)


def test_groups_by_socket_do_not_cross_sockets() -> None:
    roles = roles_of(*["n1"] * 4, servers=1, group="socket")
    assert sorted(map(len, roles.groups)) == [1, 2]


def test_rank_and_peer_are_inverse() -> None:
    roles = roles_of("n1", "n1", "n2", "n2", "n2", servers=2)
    for rank in range(5):
        assert roles.rank_of_peer[roles.peer_of_rank[rank]] == rank
    assert roles.peer_of_rank[roles.server_ranks[0]] == COORDINATOR


def test_without_weights_every_server_holds_an_equal_part() -> None:
    alone = Roles(places=(), server_ranks=(0, 1), worker_ranks=(2,), groups=((0,),))
    assert alone.shard_weights == (1.0, 1.0)


@pytest.mark.parametrize("number", [0, 1, 4095])
def test_stable_ids_tell_servers_from_workers(number: int) -> None:
    assert not is_worker(server_id(number))
    assert is_worker(worker_id(number))
    assert worker_of(worker_id(number)) == number
    assert describe_peer(server_id(number)) == f"server {number}"
    assert describe_peer(worker_id(number)) == f"worker {number}"


def test_people_are_told_hosts_and_ranks() -> None:
    roles = roles_of("n1", "n1", "n2", "n2", "n2", servers=2)
    assert roles.describe_rank(3) == "worker 1 (rank 3 on n2)"
    assert roles.describe_group(1) == "group 1 (workers 1, 2 on n2)"
    assert roles.describe_group(0) == "group 0 (worker 0 on n1)"
    for group in (-1, 2):
        assert roles.describe_group(group) == f"group {group} (which is not one of this run)"


def test_spares_have_ids_and_names_of_their_own() -> None:
    places = tuple(Place(rank=rank, host=f"n{rank}", pid=1, cores=(0,)) for rank in range(5))
    roles = Roles(
        places=places,
        server_ranks=(0, 1),
        worker_ranks=(3,),
        groups=((0,),),
        spare_ranks=(2, 4),
    )
    assert roles.num_spares == 2
    assert [roles.peer_of_rank[rank] for rank in (2, 4)] == [spare_id(0), spare_id(1)]
    assert roles.describe_rank(4) == "spare 1 (rank 4 on n4)"
    for each in (server_id(1 << 16), spare_id(0), spare_id((1 << 19) - 1), worker_id(0)):
        assert is_spare(each) == describe_peer(each).startswith("spare")
        assert is_spare(each) <= (not is_worker(each))
    assert spare_of(spare_id(7)) == 7
    assert not is_worker(spare_id(1 << 16))
