"""Which network card a rank is confined to before MPI starts, on made-up trees of /sys."""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from psdist.config.settings import RunConfig
from psdist.config.sources import Resolved
from psdist.errors import ConfigError, LaunchError
from psdist.install import Launcher, detect
from psdist.protocol.roles import Place
from psdist.ranks import connecting
from psdist.ranks.agreement import AgreedExit
from psdist.ranks.seats.cards import (
    card_notes,
    choose_card,
    described_link,
    ranks_here,
    tasks_of_nodes,
)
from psdist.topology import plan as plan_codec
from psdist.topology.machine import Machine, sysfs
from psdist.topology.network import catalogue, one_rack
from psdist.topology.network.catalogue import Network, Speed
from psdist.topology.plan import Plan
from psdist.topology.plan.planning import PlanRequest, RankFacts, plan_job
from tests.support.sys_files import Root, hca, two_sockets

EVERYTHING = frozenset(range(16))


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Two sockets of four cores, PU n and n + 8 one core; two cards on each socket."""
    found = two_sockets(Root(tmp_path))
    for index, bus in enumerate(("3b", "5e", "af", "d8")):
        hca(found, f"0000:{bus}:00.0", f"mlx5_{index}", node=index // 2)
    return found


def chosen(
    root: Root,
    local_rank: int,
    local_size: int,
    *,
    usable: frozenset[int] = EVERYTHING,
    environment: dict[str, str] | None = None,
    **settings: str,
) -> str:
    launcher = Launcher(
        name="openmpi",
        rank=local_rank,
        size=2 * local_size,
        local_rank=local_rank,
        local_size=local_size,
    )
    config = RunConfig.model_validate({"group": "rank"} | settings)
    resolved = Resolved(config=config, sources={})
    variables = {} if environment is None else environment
    return choose_card(resolved, launcher, environment=variables, root=root.path, usable=usable)


def core(*cores: int) -> frozenset[int]:
    return frozenset(cpu for each in cores for cpu in (each, each + 8))


def test_ranks_bound_to_a_core_each_divide_their_sockets_cards(root: Root) -> None:
    found = [chosen(root, rank, 8, usable=core(rank)) for rank in range(8)]
    assert found == ["mlx5_0"] * 2 + ["mlx5_1"] * 2 + ["mlx5_2"] * 2 + ["mlx5_3"] * 2


def test_ranks_bound_round_the_sockets_divide_them_as_evenly(root: Root) -> None:
    cores = [socket * 4 + index for index in range(4) for socket in range(2)]
    found = [chosen(root, rank, 8, usable=core(each)) for rank, each in enumerate(cores)]
    assert Counter(found) == {f"mlx5_{index}": 2 for index in range(4)}
    assert all((name in ("mlx5_0", "mlx5_1")) == (rank % 2 == 0) for rank, name in enumerate(found))


@pytest.mark.parametrize("local_size", [4, 8, 12])
def test_ranks_that_nobody_has_bound_take_the_cards_that_the_plan_will_give(
    root: Root, local_size: int
) -> None:
    found = [chosen(root, rank, local_size) for rank in range(local_size)]
    counts = Counter(found)
    assert len(counts) == 4
    assert max(counts.values()) - min(counts.values()) <= 1
    if local_size > 8:
        return  # more ranks than cores are not seated
    plan = job(sysfs.read_machine(root.path), num_hosts=2, local_size=local_size, nics=found)
    workers = [each for each in plan.ranks if each.role == "worker"]
    right = sum(each.nic == found[each.rank % local_size] for each in workers)
    assert right >= len(workers) - 2  # servers take a seat each


def job(machine: Machine, *, num_hosts: int, local_size: int, nics: list[str]) -> Plan:
    names = [f"n{index}" for index in range(num_hosts)]
    ranks = [
        RankFacts(
            rank=host * local_size + local,
            host=name,
            cpus=machine.cpus,
            nic=nics[local],
        )
        for host, name in enumerate(names)
        for local in range(local_size)
    ]
    return plan_job(one_rack(names, machine), ranks, PlanRequest())


def test_of_equally_near_cards_the_plan_names_the_one_that_a_rank_has(root: Root) -> None:
    machine = sysfs.read_machine(root.path)
    backwards = ["mlx5_1", "mlx5_0", "mlx5_3", "mlx5_2"]
    plan = job(machine, num_hosts=2, local_size=4, nics=backwards)
    cards = {card.name: card.package for card in machine.nics}
    for each in plan.ranks:
        if cards[backwards[each.rank % 4]] == each.package:
            assert each.nic == backwards[each.rank % 4]


def test_the_choice_is_in_the_variables_of_mpi_and_nccl(root: Root) -> None:
    environment: dict[str, str] = {"PATH": "/bin"}
    assert chosen(root, 5, 8, usable=core(5), environment=environment) == "mlx5_2"
    assert environment["UCX_NET_DEVICES"] == "mlx5_2:1"
    assert environment["NCCL_IB_HCA"] == "=mlx5_2:1"
    assert environment["PATH"] == "/bin"


@pytest.mark.parametrize("name", ["UCX_NET_DEVICES", "NCCL_IB_HCA", "FI_CXI_DEVICE_NAME"])
def test_what_the_user_has_set_stays_and_nothing_is_added(root: Root, name: str) -> None:
    environment = {name: "all"}
    assert chosen(root, 5, 8, usable=core(5), environment=environment) == ""
    assert environment == {name: "all"}


def test_nics_off_leaves_all_to_mpi(root: Root) -> None:
    environment: dict[str, str] = {}
    assert chosen(root, 5, 8, environment=environment, nics="off") == ""
    assert environment == {}


def test_a_mistake_in_the_configuration_chooses_nothing(root: Root) -> None:
    launcher = Launcher(name="openmpi", rank=0, size=16, local_rank=0, local_size=8)
    environment: dict[str, str] = {}
    error = ConfigError("mode = x")
    assert choose_card(error, launcher, environment=environment, root=root.path) == ""
    assert environment == {}


def test_fewer_ranks_than_cards_may_use_several_each(root: Root) -> None:
    assert chosen(root, 0, 4) in ("mlx5_0", "mlx5_1")
    environment: dict[str, str] = {}
    assert chosen(root, 0, 3, environment=environment) == "mlx5_0,mlx5_1"
    assert environment["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:1"
    assert "FI_VERBS_DEVICE_NAME" not in environment


@pytest.mark.parametrize("group", ["node", "socket"])
def test_where_few_leaders_send_they_have_all_cards_near_them(root: Root, group: str) -> None:
    found = [chosen(root, rank, 8, usable=core(rank), group=group) for rank in (0, 3, 4, 7)]
    assert found == ["mlx5_0,mlx5_1", "mlx5_1,mlx5_0", "mlx5_2,mlx5_3", "mlx5_3,mlx5_2"]


def test_a_leader_with_one_card_on_its_socket_is_not_confined_to_it(tmp_path: Path) -> None:
    root = two_sockets(Root(tmp_path))
    for index, bus in enumerate(("3b", "af")):
        hca(root, f"0000:{bus}:00.0", f"mlx5_{index}", node=index)
    environment: dict[str, str] = {}
    assert chosen(root, 0, 8, usable=core(0), environment=environment, group="node") == ""
    assert environment == {}
    assert chosen(root, 0, 8, usable=core(0), group="socket") == "mlx5_0"


def test_a_job_on_one_host_needs_no_card(root: Root) -> None:
    launcher = Launcher(name="openmpi", rank=1, size=8, local_rank=1, local_size=8)
    resolved = Resolved(config=RunConfig(), sources={})
    environment: dict[str, str] = {}
    assert choose_card(resolved, launcher, environment=environment, root=root.path) == ""


def test_a_rank_with_half_of_a_socket_takes_that_halfs_card(root: Root) -> None:
    assert chosen(root, 1, 4, usable=core(2, 3)) == "mlx5_1"
    assert chosen(root, 2, 4, usable=core(4, 5)) == "mlx5_2"


def test_a_plans_file_says_which_card_a_rank_takes(root: Root, tmp_path: Path) -> None:
    machine = sysfs.read_machine(root.path)
    plan = job(machine, num_hosts=2, local_size=4, nics=[""] * 4)
    here = replace(
        plan,
        ranks=tuple(
            replace(each, host=socket.gethostname() if each.host == "n0" else each.host, nic=nic)
            for each, nic in zip(
                plan.ranks, ["mlx5_3", "mlx5_2", "mlx5_1", "mlx5_0"] * 2, strict=True
            )
        ),
        links=(),
    )
    file = tmp_path / "plan.json"
    file.write_bytes(plan_codec.encode(here))
    found = [chosen(root, rank, 4, placement=str(file)) for rank in range(4)]
    assert found == ["mlx5_3", "mlx5_2", "mlx5_1", "mlx5_0"]
    file.write_text("{}")
    assert chosen(root, 0, 4, placement=str(file)) == chosen(root, 0, 4)


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("2(x3),1", [2, 2, 2, 1]), ("8", [8]), ("", []), ("2(x", []), ("2,-1", [])],
)
def test_slurms_tasks_per_node_are_read(text: str, tasks: list[int]) -> None:
    assert tasks_of_nodes(text) == tasks


def test_srun_tells_how_many_ranks_a_host_has() -> None:
    step = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    }
    assert ranks_here(detect(step), step) == (1, 2)
    assert ranks_here(detect(step), {**step, "SLURM_NODEID": "9"}) is None
    assert ranks_here(detect({"PMIX_RANK": "1"}), {"PMIX_RANK": "1"}) is None


def places(nics: list[str]) -> list[Place]:
    return [
        Place(rank=rank, host=f"n{rank // 4}", pid=1, cores=tuple(EVERYTHING), nic=nic)
        for rank, nic in enumerate(nics)
    ]


def test_a_rank_on_another_card_than_planned_is_named(root: Root) -> None:
    machine = sysfs.read_machine(root.path)
    cluster = one_rack(["n0", "n1"], machine)
    plan = job(machine, num_hosts=2, local_size=4, nics=[""] * 4)
    planned = [each.nic for each in plan.ranks]
    assert card_notes(plan, cluster, places(planned), RunConfig()) == []
    other = next(card.name for card in machine.nics if card.name != planned[6])
    planned[6] = other
    (note,) = card_notes(plan, cluster, places(planned), RunConfig())
    assert "rank 6 not on the one that the plan names" in note


def test_a_rank_on_several_cards_is_right_if_the_planned_one_is_among_them(root: Root) -> None:
    machine = sysfs.read_machine(root.path)
    cluster = one_rack(["n0", "n1"], machine)
    plan = job(machine, num_hosts=2, local_size=4, nics=["mlx5_2,mlx5_3"] * 4)
    assert {each.nic for each in plan.ranks if each.package == 1} <= {"mlx5_2", "mlx5_3"}
    notes = card_notes(plan, cluster, places(["mlx5_2,mlx5_3"] * 8), RunConfig())
    wrong = [each.rank for each in plan.ranks if each.package == 0]
    assert len(notes) == bool(wrong)
    near = ["mlx5_0,mlx5_1" if each.package == 0 else "mlx5_2,mlx5_3" for each in plan.ranks]
    assert card_notes(plan, cluster, places(near), RunConfig()) == []


def test_where_mpi_chooses_the_plan_says_what_to_set(root: Root) -> None:
    machine = sysfs.read_machine(root.path)
    cluster = one_rack(["n0", "n1"], machine)
    plan = job(machine, num_hosts=2, local_size=4, nics=[""] * 4)
    (note,) = card_notes(plan, cluster, places([""] * 8), RunConfig())
    assert "MPI chooses" in note
    assert "UCX_NET_DEVICES" in note
    assert "mlx5_0, mlx5_1, mlx5_2, mlx5_3" in note
    (note,) = card_notes(plan, cluster, places([""] * 8), RunConfig(nics="off"))
    assert "hosts.affinity = cores" in note
    alone = one_rack(["n0"], machine)
    assert card_notes(plan, alone, places([""] * 4), RunConfig()) == []


def test_the_card_is_chosen_before_mpi_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def choose(*_: object) -> str:
        calls.append("card")
        return "mlx5_1"

    def start(**_: float) -> None:
        calls.append("MPI")
        raise LaunchError("no MPI in this test")

    monkeypatch.setattr(connecting, "choose_card", choose)
    monkeypatch.setattr(connecting, "start_mpi", start)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(AgreedExit):
        connecting.connect(Resolved(config=RunConfig(), sources={}))
    assert calls == ["card", "MPI"]


def link_of(host: str, **files: Path) -> float:
    config = RunConfig.model_validate({key: str(file) for key, file in files.items()})
    return described_link(Resolved(config=config, sources={}), host=host)


def test_the_speed_of_a_link_is_what_the_racks_say(tmp_path: Path) -> None:
    racks = tmp_path / "racks.toml"
    racks.write_text('[[switch]]\nname = "spine"\nnodes = "h[1-4]"\nlink = "256Mbit"\n')
    assert link_of("h2.example.org", racks=racks) == 32e6
    assert link_of("h5", racks=racks) == 0.0
    assert link_of("h2") == link_of("h2", racks=tmp_path / "absent") == 0.0
    assert described_link(ConfigError("no settings")) == 0.0


@pytest.mark.parametrize(("latency_s", "expected"), [(1e-4, 1e8), (2e-2, 0.0)])
def test_a_measured_link_counts_unless_messages_take_long(
    tmp_path: Path, latency_s: float, expected: float
) -> None:
    speed = Speed(latency_s=latency_s, bytes_per_s=1e8, is_lower_bound=False)
    measured = Network(
        date="2026-11-28",
        hosts=("h1",),
        mpi="",
        components=(),
        versions={},
        classes={"node": speed},
        node_links={"h1": speed},
        switch_uplinks={},
        pairs=(),
    )
    file = tmp_path / "network.json"
    file.write_bytes(catalogue.encode(measured))
    assert link_of("h1", network=file) == expected
