"""How many ranks N workers need: never another number of workers than was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from psdist.commands.run import SERVERS_ON_ONE_HOST, num_ranks_for
from psdist.config.settings import RunConfig
from psdist.errors import LaunchError, PlacementError
from psdist.topology import plan as codec
from psdist.topology.network import one_rack
from tests.support.hand_made_plans import hyperthreaded, machine_of, planned
from tests.unit.protocol.test_roles import roles_of


@pytest.mark.parametrize("num_workers", [1, 2, 7, 64])
def test_on_one_host_the_mapper_leaves_the_workers_that_were_asked_for(num_workers: int) -> None:
    num_ranks = num_ranks_for(num_workers, RunConfig(), {})
    roles = roles_of(*["n1"] * num_ranks, servers="auto")
    assert roles.num_workers == num_workers


def test_servers_that_are_set_come_in_addition() -> None:
    assert num_ranks_for(4, RunConfig(servers=3), {}) == 7
    assert num_ranks_for(4, RunConfig(servers=3), {"SLURM_JOB_NUM_NODES": "2"}) == 7


def test_on_several_hosts_the_number_of_servers_must_be_given() -> None:
    with pytest.raises(LaunchError, match=r"--workers 8 with servers = auto on several hosts: "):
        num_ranks_for(8, RunConfig(), {"SLURM_JOB_NUM_NODES": "4"})


def test_a_plan_says_how_many_ranks_and_must_have_the_workers(tmp_path: Path) -> None:
    cluster = one_rack(["n1"], machine_of(hyperthreaded(4)))
    places = [("n1", "server", [0]), ("n1", "worker", [1]), ("n1", "server", [2])]
    plan = planned(cluster, [*places, ("n1", "worker", [3])])
    path = tmp_path / "plan.json"
    path.write_bytes(codec.encode(plan))
    config = RunConfig(placement=str(path))
    assert num_ranks_for(2, config, {}) == 4
    with pytest.raises(LaunchError, match=r"--workers 3, but the plan .*plan.json has 2; leave"):
        num_ranks_for(3, config, {})
    with pytest.raises(PlacementError, match=r"none.json: cannot be read"):
        num_ranks_for(2, RunConfig(placement=str(tmp_path / "none.json")), {})


def test_spares_come_in_addition() -> None:
    wanted = {"replication": "buddy", "spares": 2}
    assert num_ranks_for(4, RunConfig.model_validate({"servers": 3} | wanted), {}) == 9
    assert num_ranks_for(4, RunConfig.model_validate(wanted), {}) == 4 + SERVERS_ON_ONE_HOST + 2
