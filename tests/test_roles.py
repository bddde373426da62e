"""Ranks -> servers, workers and groups: everybody has one role, the same on every rank."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import LaunchError
from psdist.roles import (
    REGISTRAR,
    Place,
    assign,
    describe_peer,
    is_worker,
    server_id,
    worker_id,
    worker_of,
)

GROUPS: tuple[Literal["node", "socket", "rank"], ...] = ("node", "socket", "rank")


def places(*hosts: str) -> list[Place]:
    """A rank per name, "n1" or "n1:0" with its socket."""
    return [
        Place(
            rank=rank,
            host=host.split(":")[0],
            pid=1000 + rank,
            socket=int(host.split(":")[1]) if ":" in host else -1,
            cores=(rank,),
        )
        for rank, host in enumerate(hosts)
    ]


PLACES = st.lists(
    st.tuples(st.sampled_from(["n1", "n2", "n3", "n4"]), st.integers(0, 1)),
    min_size=2,
    max_size=16,
).map(lambda found: places(*(f"{host}:{socket}" for host, socket in found)))


@given(PLACES, st.data(), st.sampled_from(GROUPS))
def test_every_rank_has_one_role_and_every_worker_one_group(
    table: list[Place], data: st.DataObject, group: Literal["node", "socket", "rank"]
) -> None:
    servers = data.draw(st.integers(1, len(table) - 1))
    roles = assign(table, servers=servers, group=group)
    assert roles.num_servers == servers
    assert sorted(roles.server_ranks + roles.worker_ranks) == list(range(len(table)))
    members = [worker for workers in roles.groups for worker in workers]
    assert sorted(members) == list(range(roles.num_workers))
    for index, workers in enumerate(roles.groups):
        assert list(workers) == sorted(workers)
        assert all(roles.group_of_worker[worker] == index for worker in workers)
    # Stable ids and ranks are each other's inverse.
    assert {roles.peer_of_rank[rank]: rank for rank in range(len(table))} == roles.rank_of_peer
    for rank in range(len(table)):
        assert is_worker(roles.peer_of_rank[rank]) == (rank in roles.worker_ranks)


@given(PLACES, st.data(), st.sampled_from(GROUPS))
def test_workers_of_a_group_share_what_the_group_is_named_after(
    table: list[Place], data: st.DataObject, group: Literal["node", "socket", "rank"]
) -> None:
    servers = data.draw(st.integers(1, len(table) - 1))
    roles = assign(table, servers=servers, group=group)

    def shared(worker: int) -> tuple[object, ...]:
        place = table[roles.worker_ranks[worker]]
        return {
            "node": (place.host,),
            "socket": (place.host, place.socket),
            "rank": (place.rank,),
        }[group]

    keys = [{shared(worker) for worker in workers} for workers in roles.groups]
    assert all(len(each) == 1 for each in keys)
    assert len(set.union(*keys)) == len(keys)  # and nobody outside shares it


@given(PLACES, st.data())
def test_servers_are_spread_evenly_over_the_nodes(table: list[Place], data: st.DataObject) -> None:
    servers = data.draw(st.integers(1, len(table) - 1))
    roles = assign(table, servers=servers, group="rank")
    taken = Counter(table[rank].host for rank in roles.server_ranks)
    room = Counter(place.host for place in table)
    most = max(taken.values())
    for host in room:
        # A node has one server fewer than the fullest only if there was none left or no room.
        assert taken[host] >= most - 1 or taken[host] == room[host]
        ranks = [place.rank for place in table if place.host == host]
        assert set(ranks[: taken[host]]) == {r for r in roles.server_ranks if r in ranks}


@given(PLACES, st.sampled_from(GROUPS))
def test_auto_leaves_at_least_half_of_the_ranks_to_the_workers(
    table: list[Place], group: Literal["node", "socket", "rank"]
) -> None:
    roles = assign(table, servers="auto", group=group)
    nodes = len({place.host for place in table})
    assert roles.num_servers == min(nodes, len(table) // 2)
    assert roles.num_workers >= roles.num_servers


def test_auto_is_one_server_per_node() -> None:
    roles = assign(places("n1", "n1", "n1", "n2", "n2", "n2"), servers="auto", group="node")
    assert roles.server_ranks == (0, 3)
    assert roles.worker_ranks == (1, 2, 4, 5)
    assert roles.groups == ((0, 1), (2, 3))


def test_rank_0_is_server_0_the_registrar_where_its_node_has_a_server() -> None:
    roles = assign(places("n1", "n2", "n1", "n2"), servers=2, group="rank")
    assert roles.rank_of_peer[REGISTRAR] == 0
    assert roles.peer_of_rank[0] == server_id(0) == REGISTRAR


def test_fewer_servers_than_nodes_do_not_crowd_the_first_nodes() -> None:
    table = places(*(f"n{node}" for node in range(8) for _ in range(2)))
    roles = assign(table, servers=2, group="node")
    assert [table[rank].host for rank in roles.server_ranks] == ["n0", "n4"]


def test_sockets_of_one_node_are_groups_of_their_own() -> None:
    table = places("n1:0", "n1:0", "n1:1", "n1:1", "n2:0")
    roles = assign(table, servers=1, group="socket")
    assert roles.groups == ((0,), (1, 2), (3,))


def test_ranks_of_a_node_need_not_be_neighbours() -> None:
    roles = assign(places("n1", "n2", "n1", "n2", "n1", "n2"), servers=2, group="node")
    assert roles.server_ranks == (0, 1)
    assert roles.groups == ((0, 2), (1, 3))


@pytest.mark.parametrize("servers", [2, 3, 100])
def test_more_servers_than_ranks_allow_are_refused_with_the_most_possible(servers: int) -> None:
    with pytest.raises(LaunchError) as caught:
        assign(places("n1", "n1"), servers=servers, group="node")
    assert str(caught.value) == (
        f"servers = {servers} with 2 ranks: at least one rank must be a worker, so at most 1 can "
        "be servers; start more ranks or ask for fewer servers"
    )


def test_ids_say_who_is_a_worker_and_read_well() -> None:
    assert not is_worker(server_id(0))
    assert is_worker(worker_id(0))
    assert worker_of(worker_id(41)) == 41
    assert describe_peer(server_id(3)) == "server 3"
    assert describe_peer(worker_id(3)) == "worker 3"


def test_ranks_and_groups_are_described_with_role_and_host() -> None:
    roles = assign(places("n1", "n1", "n2", "n2", "n2"), servers=2, group="node")
    assert roles.describe_rank(0) == "server 0 (rank 0 on n1)"
    assert roles.describe_rank(4) == "worker 2 (rank 4 on n2)"
    assert roles.describe_group(0) == "group 0 (worker 0 on n1)"
    assert roles.describe_group(1) == "group 1 (workers 1, 2 on n2)"
