"""Which GPU a worker takes: the plan's, found by its PCI bus id; torch's answers are made up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from psdist.errors import ConfigError
from psdist.protocol.roles import Place
from psdist.ranks.seats.device import device_of, shard_device_of
from psdist.ranks.seats.placing import roles_of_plan
from psdist.ranks.session import JobSession
from psdist.topology.network import one_rack
from psdist.topology.plan import Plan
from psdist.topology.plan.planning import PlanRequest, RankFacts, plan_job
from tests.topology.plan.test_seating import machine


def plan_with(gpus: tuple[str, ...]) -> Plan:
    """A server and a worker for each entry on one host, with these GPUs."""
    here = machine(cores=8)
    ranks = [RankFacts(rank=rank, host="n1", cpus=here.cpus) for rank in range(len(gpus) + 1)]
    plan = plan_job(one_rack(["n1"], here), ranks, PlanRequest(servers=1))
    given = ("", *gpus)
    return replace(
        plan,
        ranks=tuple(replace(each, gpu=gpu) for each, gpu in zip(plan.ranks, given, strict=True)),
    )


def world_of(rank: int, plan: Plan | None, num_ranks: int) -> JobSession:
    places = [Place(rank=at, host="n1", pid=at, cores=(at,)) for at in range(num_ranks)]
    roles = roles_of_plan(places, plan or plan_with(("",) * (num_ranks - 1)))
    its = SimpleNamespace(number=rank, bootstrap=SimpleNamespace(plan=plan))
    return cast(JobSession, SimpleNamespace(rank=its, roles=roles))


@pytest.fixture
def buses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bus numbers of the GPUs that torch sees, in torch's order; empty at first."""
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(pci_domain_id=0, pci_bus_id=seen[index], pci_device_id=0),
    )
    return seen


BUS_1, BUS_2 = "0000:01:00.0", "0000:02:00.0"


@pytest.mark.parametrize(
    ("gpus", "seen", "expected"),
    [
        pytest.param((BUS_1, BUS_2), [2, 1], ["cuda:1", "cuda:0"], id="torch counts otherwise"),
        pytest.param((BUS_1, BUS_1), [1, 2], ["cpu", "cpu"], id="one GPU for two workers"),
        pytest.param(("", ""), [1, 2], ["cuda:0", "cuda:1"], id="the plan knows of none: by order"),
        pytest.param(("", ""), [1], ["cpu", "cpu"], id="too few, and the plan knows of none"),
        pytest.param((BUS_1, BUS_2), [7, 8], ["cuda:0", "cuda:1"], id="other GPUs than planned"),
        pytest.param((BUS_1, BUS_2), [], ["cpu", "cpu"], id="no GPU at all"),
    ],
)
def test_a_worker_takes_the_gpu_of_the_plan_whatever_torch_calls_it(
    buses: list[int], gpus: tuple[str, ...], seen: list[int], expected: list[str]
) -> None:
    buses += seen
    plan = plan_with(gpus)
    assert [str(device_of(world_of(rank, plan, 3))) for rank in (1, 2)] == expected


@pytest.mark.parametrize(
    ("gpus", "seen", "why"),
    [
        ((BUS_1, BUS_1), [1, 2], "the plan has 2 workers on n1, and some share a GPU"),
        (("", ""), [1], "2 workers are on n1, and torch sees 1"),
        ((BUS_1, BUS_2), [2, 3], f"torch does not see {BUS_1}, the one that the plan gives this"),
        (("", ""), [1, 2], ""),
        (("", ""), [], ""),
    ],
)
def test_the_log_says_why_a_worker_computes_on_the_cpu_where_there_are_gpus(
    buses: list[int],
    gpus: tuple[str, ...],
    seen: list[int],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    buses += seen
    device_of(world_of(1, plan_with(gpus), 3))
    assert [why in each for each in caplog.messages] == [True] * bool(why)


def test_a_worker_that_sees_its_own_gpu_only_takes_it(buses: list[int]) -> None:
    """Slurm's --gpus-per-task: each rank has another device 0."""
    buses += [2]
    plan = plan_with((BUS_1, BUS_2))
    assert str(device_of(world_of(2, plan, 3))) == "cuda:0"


def test_a_worker_never_takes_the_gpu_that_the_plan_gives_to_another(buses: list[int]) -> None:
    buses += [2, 3]
    plan = plan_with((BUS_1, BUS_2))
    assert str(device_of(world_of(1, plan, 3))) == "cpu"


def test_without_a_plan_workers_take_gpus_in_order(buses: list[int]) -> None:
    buses += [1, 2]
    assert str(device_of(world_of(2, None, 3))) == "cuda:1"


def server_of(
    rank: int,
    wanted: str,
    plan: Plan | None,
    *,
    servers: tuple[int, ...] = (0,),
    num_ranks: int = 3,
) -> str:
    """Where the shard of the server at ``rank`` is; the other ranks work."""
    context = world_of(rank, plan, num_ranks)
    workers = tuple(each for each in range(num_ranks) if each not in servers)
    roles = SimpleNamespace(places=context.roles.places, server_ranks=servers, worker_ranks=workers)
    config = SimpleNamespace(server_device=wanted)
    found = SimpleNamespace(rank=context.rank, roles=roles, config=config)
    return str(shard_device_of(cast(JobSession, found)))


def test_shards_are_on_the_cpu_unless_it_is_asked_for(buses: list[int]) -> None:
    buses += [1, 2, 3]
    assert server_of(0, "cpu", None) == "cpu"


@pytest.mark.parametrize(
    ("wanted", "seen", "expected"),
    [
        ("cuda", [1, 2], ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1", [1, 2], ["cuda:1"] * 3),
        ("auto", [1, 2, 3, 4], ["cuda:1", "cuda:2", "cuda:3"]),
        ("auto", [1, 2, 3], ["cuda:1", "cuda:2", "cuda:1"]),
        ("auto", [1], ["cpu"] * 3),
        ("auto", [], ["cpu"] * 3),
    ],
)
def test_servers_of_a_host_take_turns_at_its_gpus(
    buses: list[int], wanted: str, seen: list[int], expected: list[str]
) -> None:
    buses += seen
    servers = (0, 1, 2)
    found = [server_of(rank, wanted, None, servers=servers, num_ranks=4) for rank in servers]
    assert found == expected


@pytest.mark.parametrize(
    ("gpus", "expected"), [((BUS_1, BUS_2), "cuda:0"), ((BUS_1, "0000:03:00.0"), "cuda:1")]
)
def test_auto_leaves_alone_the_gpus_that_the_plan_gives_to_workers(
    buses: list[int], gpus: tuple[str, ...], expected: str
) -> None:
    buses += [3, 2, 1]
    assert server_of(0, "auto", plan_with(gpus)) == expected


@pytest.mark.parametrize(
    ("wanted", "seen", "said"),
    [
        (
            "cuda",
            [],
            "hosts.server_device = cuda: torch sees no GPU on n1, where rank 0 serves; set",
        ),
        (
            "cuda:2",
            [1, 2],
            "hosts.server_device = cuda:2: torch sees no GPU but cuda:0 to cuda:1 on n1",
        ),
        (
            "cuda:1",
            [1],
            "hosts.server_device = cuda:1: torch sees no GPU but cuda:0 to cuda:0 on n1",
        ),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(
    buses: list[int], wanted: str, seen: list[int], said: str
) -> None:
    buses += seen
    with pytest.raises(ConfigError, match=said):
        server_of(0, wanted, None)
