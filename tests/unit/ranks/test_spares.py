"""A rank that waits as a spare: what its role is, what it takes from others, what its death is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.config.settings import RunConfig, contradiction
from psdist.errors import LaunchError, PeerLostError, PlacementError
from psdist.protocol.control import Begun
from psdist.protocol.events import PeerLost
from psdist.protocol.ids import server_id, spare_id, worker_id
from psdist.protocol.roles import Place, Roles
from psdist.ranks.connecting import _core_share
from psdist.ranks.lobby import _begin, _control
from psdist.ranks.rank import Rank
from psdist.ranks.seats.placing import (
    _make_plan,
    hosts_of,
    pairs_of,
    racks_of,
    roles_of_plan,
    unexpected_workers,
)
from psdist.topology.network import Cluster, one_rack
from psdist.topology.plan import encode
from tests.support.ranks import make_rank
from tests.support.virtual.network import VirtualNetwork
from tests.topology.plan.test_seating import machine

HOSTS = ("n1", "n2", "n3", "n1")
ROLES = Roles(
    places=tuple(
        Place(rank=rank, host=host, pid=rank, cores=(0, 1), switches=(f"s.r{rank}.{host}", ""))
        for rank, host in enumerate(HOSTS)
    ),
    server_ranks=(0, 1),
    worker_ranks=(3,),
    groups=((0,),),
    spare_ranks=(2,),
)


def rank_of(peer: int, path: Path, **settings: Any) -> Rank:
    return make_rank(ROLES, VirtualNetwork().endpoint(peer), path, **settings)


def test_a_spare_never_spins_and_is_neither_server_nor_worker(tmp_path: Path) -> None:
    roles = {}
    for peer in (server_id(1), worker_id(0), spare_id(0)):
        rank = rank_of(peer, tmp_path, spin="on")
        roles[rank.role] = rank.waiting().is_spinning
    assert roles == {"server": True, "worker": True, "spare": False}


def test_who_waits_takes_no_share_of_a_core() -> None:
    places = [Place(rank=rank, host="n1", pid=rank, cores=(0, 1)) for rank in range(4)]
    roles = Roles(
        places=tuple(places),
        server_ranks=(0,),
        worker_ranks=(1,),
        groups=((0,),),
        spare_ranks=(2, 3),
    )
    assert [_core_share(roles, rank) for rank in range(4)] == [1.0, 1.0, 2 / 3, 2 / 3]


def test_hosts_and_racks_are_those_of_servers_then_of_spares() -> None:
    assert hosts_of(ROLES) == ["n1", "n2", "n3"]
    assert racks_of(ROLES) == ["s.r0", "s.r1", "s.r2"]


def test_spares_are_in_no_pair() -> None:
    config = RunConfig(replication="buddy", spares=1)
    pairs = pairs_of(config, ROLES, {"OMPI_MCA_mpi_ft_enable": "1"})
    assert pairs is not None
    assert pairs.buddies == (1, 0)


def test_the_number_of_workers_leaves_spares_out() -> None:
    assert unexpected_workers(2, num_servers=2, num_spares=1, num_ranks=5) is None
    error = unexpected_workers(3, num_servers=2, num_spares=1, num_ranks=5)
    assert isinstance(error, LaunchError)
    assert "2 of them would work besides 2 that serve and 1 spare; start" in str(error)


def five_ranks() -> tuple[Cluster, list[Place]]:
    here = machine(cores=4)
    hosts = ["n1", "n1", "n2", "n2", "n3"]
    places = [
        Place(rank=rank, host=host, pid=rank, cores=tuple(here.cpus))
        for rank, host in enumerate(hosts)
    ]
    return one_rack(["n1", "n2", "n3"], here), places


def test_the_plan_of_a_job_leaves_spares_out_and_its_roles_have_them() -> None:
    cluster, places = five_ranks()
    config = RunConfig(replication="buddy", servers=2, spares=1)
    plan = _make_plan(cluster, places, config)
    roles = roles_of_plan(places, plan)
    assert (roles.server_ranks, roles.worker_ranks, roles.spare_ranks) == ((0, 2), (1, 3), (4,))


def test_a_plan_of_a_file_has_as_many_spares_as_are_asked_for(tmp_path: Path) -> None:
    cluster, places = five_ranks()
    config = RunConfig(replication="buddy", servers=2, spares=1)
    path = tmp_path / "plan.json"
    path.write_bytes(encode(_make_plan(cluster, places, config)))
    again = config.model_copy(update={"hosts_placement": str(path)})
    assert _make_plan(cluster, places, again).spare_ranks == (4,)
    without = again.model_copy(update={"spares": 0})
    with pytest.raises(
        PlacementError,
        match=r"failures.spares = 0, but the plan .* has 1: ask for as many",
    ):
        _make_plan(cluster, places, without)


def test_between_jobs_the_death_of_a_spare_ends_nothing(tmp_path: Path) -> None:
    rank = rank_of(server_id(1), tmp_path)
    assert _control(rank, PeerLost(spare_id(0), "spare 0")) is None
    with pytest.raises(PeerLostError, match="server 0"):
        _control(rank, PeerLost(server_id(0), "server 0"))


def test_a_job_begins_without_a_dead_spare_but_not_without_a_dead_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = rank_of(server_id(1), tmp_path)
    begun: list[int] = []
    monkeypatch.setattr(rank, "begin_job", lambda job, _config: begun.append(job))
    monkeypatch.setattr("psdist.ranks.lobby._resolved", lambda *_: rank.bootstrap)
    rank.endpoint.lost[spare_id(0)] = "spare 0"  # type: ignore[index]
    _begin(rank, Begun(job=1, settings={}))
    assert begun == [1]
    rank.endpoint.lost[server_id(0)] = "server 0"  # type: ignore[index]
    with pytest.raises(PeerLostError, match="server 0"):
        _begin(rank, Begun(job=1, settings={}))


def test_an_error_is_no_consequence_of_a_spare_s_death(tmp_path: Path) -> None:
    rank = rank_of(worker_id(0), tmp_path)
    rank.endpoint.lost[spare_id(0)] = "spare 0"  # type: ignore[index]
    assert rank.exit.fatal_losses() == []
    rank.endpoint.lost[server_id(0)] = "server 0"  # type: ignore[index]
    assert rank.exit.fatal_losses() == ["server 0"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"spares": 1},
            "failures.spares = 1 with failures.max_deaths = 0 and with failures.replication = none",
        ),
        ({"spares": 2, "replication": "buddy"}, ""),
        ({"spares": 0}, ""),
    ],
)
def test_spares_need_places_to_take(settings: dict[str, Any], words: str) -> None:
    found = contradiction(RunConfig(**settings))
    assert words in found
    assert bool(words) == bool(found)
