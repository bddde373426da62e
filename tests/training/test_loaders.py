"""Loaders of the script's own in whole jobs: shared out, of unequal length, stopped together."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from psdist.errors import CollectiveError, UsageError
from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.problems import Problem, flat, relative_distance, train
from tests.support.programs.training.virtual_job import run_virtually

PROBLEM = Problem(num_samples=44)
Groups = tuple[tuple[int, ...], ...]
TOGETHER: Groups = ((0, 1, 2),)
APART: Groups = ((0,), (1,), (2,))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def run(script: Script, tmp_path: Path, *, groups: Groups, mode: str = "sync") -> Outcome:
    """Proved, too."""
    settings = {"mode": mode, "record": True, "checksum_every": 1}
    case = Case(name="loaders", script=script, groups=groups, servers=2, settings=settings)
    outcome = run_virtually(case, tmp_path / "run")
    outcome.checked()
    return outcome


def refused(error: type[Exception], told: str, script: Script, tmp_path: Path) -> None:
    case = Case(name="refused", script=script, groups=TOGETHER)
    with pytest.raises(error, match=told):
        run_virtually(case, tmp_path / "run")


def one_process(batches: list[list[int]]) -> Tensor:
    """Trained on these samples, a batch a step."""
    model = PROBLEM.model()
    x, y = PROBLEM.data()
    train(model, sgd(model), [(x[chosen], y[chosen]) for chosen in batches])
    return flat(model)


def trained(make: Callable[[], DataLoader[Any]], *, passes: int = 1) -> Script:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer, loader = job.prepare(model, sgd(model), make())
        for _ in range(passes):
            train(model, optimizer, loader)
        return {"parameters": flat(model), "clock": job.clock}

    return script


def all_equal(outcome: Outcome, expected: Tensor, *, clock: int) -> None:
    for result in outcome.results:
        assert result["clock"] == clock
        assert relative_distance(result["parameters"], expected) < 1e-5


@pytest.mark.parametrize("groups", [TOGETHER, APART])
def test_a_prepared_loader_trains_as_one_process_with_the_joint_batch(
    groups: Groups, tmp_path: Path
) -> None:
    script = trained(lambda: DataLoader(TensorDataset(*PROBLEM.data()), batch_size=4), passes=2)
    one_pass = [list(range(at, min(at + 12, 44))) for at in range(0, 44, 12)]
    all_equal(run(script, tmp_path, groups=groups), one_process(one_pass * 2), clock=8)


class Uneven(Sampler[list[int]]):
    """Batches of 4, 2, 6, 3, 5, 4 samples and so on."""

    SIZES = (4, 2, 6, 3, 5, 4, 7, 1, 4, 8)

    def __iter__(self) -> Iterator[list[int]]:
        at = 0
        for size in self.SIZES:
            yield list(range(at, at + size))
            at += size

    def __len__(self) -> int:
        return len(self.SIZES)


@pytest.mark.parametrize("groups", [TOGETHER, APART])
def test_batches_of_different_sizes_weigh_by_their_samples(groups: Groups, tmp_path: Path) -> None:
    script = trained(lambda: DataLoader(TensorDataset(*PROBLEM.data()), batch_sampler=Uneven()))
    bounds = (0, 12, 24, 36, 44)
    joint = [list(range(first, last)) for first, last in itertools.pairwise(bounds)]
    all_equal(run(script, tmp_path, groups=groups), one_process(joint), clock=4)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = PROBLEM.data()
        return zip(x[: self._num_samples], y[: self._num_samples], strict=True)


def test_workers_of_a_group_whose_streams_end_early_take_part_until_all_have_ended(
    tmp_path: Path,
) -> None:
    """Worker 0 gets 3 of 7 samples, the others 2: it makes its third step for the group."""
    script = trained(lambda: DataLoader(Stream(7), batch_size=1), passes=2)
    outcome = run(script, tmp_path, groups=TOGETHER)
    all_equal(outcome, one_process([[0, 1, 2], [3, 4, 5], [6]] * 2), clock=6)
    assert outcome.summary["samples"] == 14


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
def test_groups_whose_streams_end_early_leave_and_that_is_said_at_the_end(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "psdist"):
        outcome = run(
            trained(lambda: DataLoader(Stream(7), batch_size=1)), tmp_path, groups=APART, mode=mode
        )
    assert [result["clock"] for result in outcome.results] == [3, 2, 2]
    assert outcome.summary["clocks"] == [3, 2, 2]
    assert caplog.messages == [
        "groups 1, 2 made fewer iterations (from 2) than others (3): the last updates are of fewer "
        "samples"
    ]


def test_a_worker_that_has_ended_takes_the_others_learning_rate(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer, loader = job.prepare(model, sgd(model), DataLoader(Stream(4)))
        for number, batch in enumerate(loader):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            train(model, optimizer, [batch])
        return {"parameters": flat(model), "clock": job.clock}

    model = PROBLEM.model()
    optimizer = sgd(model)
    x, y = PROBLEM.data()
    for number, chosen in enumerate([[0, 1, 2], [3]]):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        train(model, optimizer, [(x[chosen], y[chosen])])
    all_equal(run(script, tmp_path, groups=TOGETHER), flat(model), clock=2)


def test_a_validation_stream_is_no_iteration(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model, _, loader = job.prepare(model := PROBLEM.model(), sgd(model), DataLoader(Stream(7)))
        with torch.no_grad():
            seen = sum(len(x) for x, _ in loader)
        return {"seen": seen, "clock": job.clock}

    outcome = run(script, tmp_path, groups=TOGETHER)
    assert [result["seen"] for result in outcome.results] == [3, 2, 2]
    assert [result["clock"] for result in outcome.results] == [0, 0, 0]


class OwnOrder(Sampler[int]):
    """Depends on the worker, as a sampler must not."""

    def __init__(self, worker: int) -> None:
        self._worker = worker

    def __iter__(self) -> Iterator[int]:
        return iter([(number + self._worker) % 8 for number in range(8)])

    def __len__(self) -> int:
        return 8


def test_a_sampler_that_differs_between_workers_is_refused(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        loader = DataLoader(TensorDataset(*PROBLEM.data()), sampler=OwnOrder(job.worker))
        model, optimizer, loader = job.prepare(model := PROBLEM.model(), sgd(model), loader)
        train(model, optimizer, loader)
        return {}

    refused(CollectiveError, "worker 0 and worker 1 have drawn different samples", script, tmp_path)


def test_something_else_than_a_loader_is_refused(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        job.prepare(model := PROBLEM.model(), sgd(model), nn.MSELoss())  # type: ignore[arg-type]
        return {}

    refused(UsageError, "takes DataLoaders after the optimizer, not a MSELoss", script, tmp_path)


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
def test_all_workers_stop_in_the_same_iteration(mode: str, tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model, optimizer = job.prepare(model := PROBLEM.model(), sgd(model))
        for batch in PROBLEM.batches(size=4, count=20):
            train(model, optimizer, [batch])
            if job.any(job.worker == 1 and job.clock >= 3):
                break
        return {"clock": job.clock, "all": [job.all(True), job.all(torch.tensor(job.worker))]}

    outcome = run(script, tmp_path, groups=((0, 2), (1,)), mode=mode)
    for result in outcome.results:
        assert result == {"clock": 3, "all": [True, False]}


def test_samples_of_a_loader_of_the_scripts_own_are_counted(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model, optimizer = job.prepare(model := PROBLEM.model(), sgd(model))
        dataset = TensorDataset(*PROBLEM.data())
        loader = DataLoader(dataset, batch_size=8, sampler=job.sampler(dataset))
        train(model, optimizer, loader)
        return {"clock": job.clock}

    outcome = run(script, tmp_path, groups=TOGETHER)
    assert [result["clock"] for result in outcome.results] == [2, 2, 2]
    assert outcome.summary["samples"] == 45
