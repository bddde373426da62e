"""A script with a new dataset in every epoch trains as one process on those batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from psdist.job import Job
from tests.support.programs.training.cases import Case, Result, Stage
from tests.support.programs.training.problems import Problem, flat, relative_distance, train
from tests.support.programs.training.virtual_job import run_virtually

NUM_SAMPLES, BATCH, EPOCHS = 45, 4, 4
PROBLEM = Problem(num_samples=NUM_SAMPLES)
GROUPS = [((0, 1),), ((0,), (1,))]


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(NUM_SAMPLES), *PROBLEM.data())


def by_loader(job: Job) -> Iterable[Any]:
    return job.loader(dataset(), batch_size=BATCH, shuffle=True)


def by_sampler(job: Job) -> Iterable[Any]:
    return DataLoader(made := dataset(), batch_size=BATCH, sampler=job.sampler(made))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("has_epochs", [False, True])
@pytest.mark.parametrize("load", [by_loader, by_sampler], ids=lambda load: load.__name__)
def test_a_new_dataset_in_every_epoch_trains_as_one_process_on_all_samples_in_another_order(
    load: Callable[[Job], Iterable[Any]],
    has_epochs: bool,
    groups: tuple[tuple[int, ...], ...],
    tmp_path: Path,
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        seen = []
        for _ in job.epochs(EPOCHS) if has_epochs else range(EPOCHS):
            seen.append([])
            for indices, x, y in load(job):
                seen[-1].append(indices.tolist())
                train(model, optimizer, [(x, y)])
            with torch.no_grad():
                if job.is_chief:
                    list(load(job))
        return {"parameters": flat(model), "seen": seen}

    first, second = run_virtually(
        Case(name="new", script=script, groups=groups), tmp_path / "run"
    ).results
    joint = [
        [one + other for one, other in zip(*epoch, strict=True)]
        for epoch in zip(first["seen"], second["seen"], strict=True)
    ]
    orders = [[each for batch in epoch for each in batch] for epoch in joint]
    assert all(set(order) == set(range(NUM_SAMPLES)) for order in orders)
    assert len({tuple(order) for order in orders}) == EPOCHS
    model, (x, y) = PROBLEM.model(), PROBLEM.data()
    batches = [(x[chosen], y[chosen]) for epoch in joint for chosen in epoch]
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    for result in (first, second):
        assert relative_distance(result["parameters"], flat(model)) < 1e-6
