"""Mode sync trains as one process on the joined batches would, and to the same bits every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.programs.training import sync_cases
from tests.support.programs.training.cases import Outcome, cases_of
from tests.support.programs.training.problems import flat, relative_distance, train
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import LinkModel

OVER_MPI = "sync_cases"
OPTIMIZERS = list(sync_cases.OPTIMIZERS)
LAYOUTS = sync_cases.LAYOUTS


def plain_parameters(optimizer: str) -> torch.Tensor:
    model = sync_cases.PROBLEM.model(seed=0)
    batches = sync_cases.PROBLEM.batches(size=sync_cases.JOINT_BATCH, count=sync_cases.ITERATIONS)
    train(model, sync_cases.OPTIMIZERS[optimizer](model), batches)
    return flat(model)


def over_mpi(
    outcomes: dict[str, Outcome], optimizer: str, groups: int, servers: int, which: str = "first"
) -> Outcome:
    return outcomes[f"{optimizer}-{groups}-groups-{servers}-servers-{which}-run"]


def parameters(outcome: Outcome) -> torch.Tensor:
    first: torch.Tensor = outcome.results[0]["parameters"]
    for worker, result in enumerate(outcome.results):
        assert result["clock"] == sync_cases.ITERATIONS
        assert torch.equal(result["parameters"], first), f"worker {worker} has other parameters"
    return first


@pytest.mark.mpi
@pytest.mark.parametrize(("groups", "servers"), LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_groups_in_sync_train_as_one_process_on_the_joined_batches(
    outcomes: dict[str, Outcome], optimizer: str, groups: int, servers: int
) -> None:
    ours = parameters(over_mpi(outcomes, optimizer, groups, servers))
    ratio = relative_distance(ours, plain_parameters(optimizer))
    assert ratio <= 1e-5, f"norm(a - b) / norm(b) = {ratio:.2e}"


@pytest.mark.mpi
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_runs_give_the_same_bits(
    outcomes: dict[str, Outcome], optimizer: str, groups: int
) -> None:
    first = parameters(over_mpi(outcomes, optimizer, groups, 3))
    second = parameters(over_mpi(outcomes, optimizer, groups, 3, "second"))
    assert torch.equal(first, second), f"distance {relative_distance(first, second):.2e}"


@pytest.mark.mpi
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_server_and_three_give_the_same_bits(
    outcomes: dict[str, Outcome], optimizer: str, groups: int
) -> None:
    one = parameters(over_mpi(outcomes, optimizer, groups, 1))
    three = parameters(over_mpi(outcomes, optimizer, groups, 3))
    assert torch.equal(one, three), f"distance {relative_distance(one, three):.2e}"


@pytest.mark.mpi
@pytest.mark.parametrize(("groups", "servers"), LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_mpi_and_the_virtual_network_give_the_same_bits(
    outcomes: dict[str, Outcome], optimizer: str, groups: int, servers: int, tmp_path: Path
) -> None:
    real = over_mpi(outcomes, optimizer, groups, servers)
    (case,) = (case for case in cases_of("sync_cases") if case.name == real.path.name)
    virtual = parameters(run_virtually(case, tmp_path / "virtual", seed=groups))
    ratio = relative_distance(parameters(real), virtual)
    assert torch.equal(parameters(real), virtual), f"distance {ratio:.2e}"


@pytest.mark.mpi
def test_every_recorded_sync_run_is_proved_and_no_use_was_stale(
    outcomes: dict[str, Outcome],
) -> None:
    for outcome in outcomes.values():
        report = outcome.checked()
        assert report.max_staleness == 0
        assert report.num_checksums == report.num_uses > 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_order_in_which_messages_arrive_does_not_change_a_bit(
    optimizer: str, seed: int, tmp_path: Path
) -> None:
    case = sync_cases.case("virtual", optimizer, groups=3, servers=2)
    calm = LinkModel(latency_s=1e-5, jitter_s=0.0)
    wild = LinkModel(latency_s=1e-5, jitter_s=5e-3, duplicate_rate=0.05)
    reference = run_virtually(case, tmp_path / "calm", link=calm)
    shaken = run_virtually(case, tmp_path / "wild", seed=seed, link=wild)
    assert torch.equal(parameters(reference), parameters(shaken))
    assert shaken.checked().max_staleness == 0
