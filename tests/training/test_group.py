"""Groups of more than one worker: they reduce among themselves, and act as one towards servers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from psdist.errors import HyperparameterError
from psdist.job import Job
from tests.support.programs.training import group_cases
from tests.support.programs.training.cases import Case, Outcome, Result, Stage
from tests.support.programs.training.problems import Batch, flat, relative_distance, train
from tests.support.programs.training.sync_cases import OPTIMIZERS
from tests.support.programs.training.virtual_job import run_virtually

OVER_MPI = "group_cases"
PROBLEM = group_cases.PROBLEM
ITERATIONS = group_cases.ITERATIONS
SIZE = group_cases.SIZE
NUM_WORKERS = group_cases.NUM_WORKERS
GROUP_OF = [0, 1, 1, 1]

pytestmark = pytest.mark.mpi


def parameters(outcome: Outcome) -> torch.Tensor:
    first: torch.Tensor = outcome.results[0]["parameters"]
    for worker, result in enumerate(outcome.results):
        assert torch.equal(result["parameters"], first), f"worker {worker} has other parameters"
    return first


def joint_batches() -> list[Batch]:
    return list(PROBLEM.batches(size=SIZE * NUM_WORKERS, count=ITERATIONS))


def part_of(batch: Batch, worker: int) -> Batch:
    mine = slice(worker * SIZE, (worker + 1) * SIZE)
    return batch[0][mine], batch[1][mine]


def plain_parameters(optimizer: str) -> torch.Tensor:
    model = PROBLEM.model()
    train(model, OPTIMIZERS[optimizer](model), joint_batches())
    return flat(model)


def assert_close(ours: torch.Tensor, plain: torch.Tensor, limit: float = 1e-5) -> None:
    ratio = relative_distance(ours, plain)
    assert ratio <= limit, f"norm(a - b) / norm(b) = {ratio:.2e}"


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("trained-sgd", "sgd"),
        ("trained-adamw", "adamw"),
        ("three-and-one", "adamw"),
        ("one-chunk", "adamw"),
    ],
)
def test_groups_of_one_and_three_workers_train_as_one_process_on_the_joined_batch(
    outcomes: dict[str, Outcome], name: str, optimizer: str
) -> None:
    assert_close(parameters(outcomes[name]), plain_parameters(optimizer))
    assert {result["mean"] for result in outcomes[name].results} == {1.5}


@pytest.mark.parametrize("name", ["trained-again-adamw", "one-server-adamw"])
def test_groups_of_one_and_three_workers_give_the_same_bits_again_and_with_fewer_servers(
    outcomes: dict[str, Outcome], name: str
) -> None:
    first, again = parameters(outcomes["trained-adamw"]), parameters(outcomes[name])
    assert torch.equal(first, again), f"distance {relative_distance(first, again):.2e}"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("trained-adamw", "torch-adamw"),
        ("trained-adamw", "mpi-adamw"),
        ("bf16", "torch-bf16"),
        ("bf16", "mpi-bf16"),
    ],
)
def test_the_tier_of_a_group_changes_no_bit(
    outcomes: dict[str, Outcome], name: str, other: str
) -> None:
    assert torch.equal(parameters(outcomes[name]), parameters(outcomes[other]))
    assert "SharedMemoryChannel" in {
        result["channel"] for result in outcomes["in-the-group"].results
    }


@pytest.mark.parametrize("name", ["trained-adamw", "three-and-one", "one-chunk", "bf16", "scaled"])
def test_groups_give_the_same_bits_over_mpi_and_over_the_virtual_network(
    outcomes: dict[str, Outcome], name: str, tmp_path: Path
) -> None:
    (case,) = (case for case in group_cases.CASES if case.name == name)
    virtual = run_virtually(case, tmp_path / "run")
    assert torch.equal(parameters(virtual), parameters(outcomes[name]))
    assert virtual.checked().num_uses == outcomes[name].checked().num_uses


def test_every_recorded_run_of_groups_is_proved(outcomes: dict[str, Outcome]) -> None:
    for name, outcome in outcomes.items():
        report = outcome.checked()
        assert report.num_checksums == report.num_uses > 0
        if "async" not in name:
            assert report.max_staleness <= (2 if "ssp" in name else 0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gradient_that_some_workers_lack_counts_as_zero_there(
    outcomes: dict[str, Outcome], optimizer: str
) -> None:
    model = group_cases.heads_model()
    plain = OPTIMIZERS[optimizer](model)
    for step, batch in enumerate(joint_batches()):
        plain.zero_grad()
        for worker in range(NUM_WORKERS):
            x, y = part_of(batch, worker)
            logits = model(x, group_cases.head_of(worker, step))
            (nn.functional.cross_entropy(logits, y) / NUM_WORKERS).backward()
        plain.step()
    assert_close(parameters(outcomes[f"heads-{optimizer}"]), flat(model))


@pytest.mark.parametrize("mode", ["ssp-2", "async"])
def test_all_workers_of_a_group_use_the_same_version_of_every_chunk(
    outcomes: dict[str, Outcome], mode: str
) -> None:
    alone, *together = (result["seen"] for result in outcomes[f"skewed-{mode}"].results)
    assert torch.equal(together[0], together[1])
    assert torch.equal(together[0], together[2])
    assert not torch.equal(alone, together[0])
    outcome = outcomes[f"skewed-{mode}"]
    assert max(int(key) for key in outcome.summary["staleness_seen"]) > 0


def test_an_overflow_on_one_worker_is_a_skipped_iteration_of_its_group(
    outcomes: dict[str, Outcome],
) -> None:
    model = PROBLEM.model()
    plain = OPTIMIZERS["adamw"](model)
    for step, batch in enumerate(joint_batches()):
        # The other group, worker 0 alone, continues.
        train(model, plain, [part_of(batch, 0) if step in group_cases.OVERFLOWS else batch])
    outcome = outcomes["scaled"]
    assert_close(parameters(outcome), flat(model))
    assert [result["scale"] for result in outcome.results] == [1024.0, 512.0, 512.0, 1024.0]
    assert outcome.summary["clocks"] == [ITERATIONS, ITERATIONS]


def test_a_gradient_that_is_not_finite_is_told_to_every_worker_of_the_group(
    outcomes: dict[str, Outcome],
) -> None:
    results = outcomes["not-finite"].results
    assert results[0]["told"] == ""
    for worker in (1, 2):
        assert "iteration 3: the gradient of worker 3, in this worker's" in results[worker]["told"]
    assert "iteration 3: the gradient of 0.weight holds NaN or infinity" in results[3]["told"]
    assert parameters(outcomes["not-finite"]).isfinite().all()
    assert [result["clock"] for result in results] == [6, 6, 6, 6]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_groups_reduce_half_precision_gradients(outcomes: dict[str, Outcome], dtype: str) -> None:
    assert_close(parameters(outcomes[dtype]), plain_parameters("sgd"), limit=0.05)


def test_the_default_process_group_of_a_worker_is_its_group(outcomes: dict[str, Outcome]) -> None:
    results = outcomes["in-the-group"].results
    assert [result["rank"] for result in results] == [0, 0, 1, 2]
    assert [result["size"] for result in results] == [1, 3, 3, 3]
    assert [result["mesh"] for result in results] == [1, 3, 3, 3]
    assert [result["sum"] for result in results] == [0.0, 6.0, 6.0, 6.0]


def test_workers_of_a_group_that_call_different_things_are_told_so(
    outcomes: dict[str, Outcome],
) -> None:
    results = outcomes["in-the-group"].results
    assert results[0]["told"] == ""
    for result in results[1:]:
        assert "the worker at place 1 of the group called pull" in result["told"]
        assert "the worker at place 0 of the group called optimizer.step" in result["told"]


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
def test_hyperparameters_that_differ_inside_a_group_are_named_with_their_workers(
    mode: str, tmp_path: Path
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        # Each follows its own loss, and worker 3's has stopped falling.
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        told = ""
        for step, batch in enumerate(group_cases.batches_of(job, count=4)):
            try:
                train(model, optimizer, [batch])
            except HyperparameterError as error:
                told = str(error)
                optimizer.param_groups[0]["lr"] = 0.1
                train(model, optimizer, [batch])
            scheduler.step(1.0 if job.worker == 3 and step < 2 else 1.0 / (step + 1))
        return {"told": told, "clock": job.clock}

    case = Case(name="schedules", script=script, groups=((0,), (1, 2, 3)), settings={"mode": mode})
    alone, *group = run_virtually(case, tmp_path / "run").results
    assert alone == {"told": "", "clock": 4}
    assert {each["clock"] for each in group} == {4}
    assert {each["told"] for each in group} == {
        "iteration 2: workers 1 and 3 of one group disagree on hyperparameters: lr 0.1 against "
        "0.05 in optimizer group 0; nothing was pushed. Every worker must use the same schedule: "
        "one that follows a loss must follow job.mean(loss)"
    }
