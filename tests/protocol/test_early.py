"""Seeded schedules in which gradients leave during backward, in groups of one and of several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from psdist.errors import UsageError
from tests.support.virtual.early_worker import ChangingWorker, EarlyWorker, early_schedule
from tests.support.virtual.job import VirtualJob
from tests.support.virtual.proof import prove
from tests.support.virtual.schedule import Schedule

BLOCK = 10
SENT = "changed after it had been sent during backward; set transfer.overlap = off"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def watches_one_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most schedules are a few iterations long."""
    for module in ("overlap", "group_overlap"):
        monkeypatch.setattr(f"psdist.workers.early.{module}.WATCHED", 1)


@pytest.fixture(autouse=True)
def leaves_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short backward passes are."""
    monkeypatch.setattr("psdist.workers.early.overlap.BACKWARD_S", 0.0)
    monkeypatch.setattr("psdist.workers.early.group_overlap.BUCKET_S", 0.0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first_seed" in metafunc.fixturenames:
        num_schedules: int = metafunc.config.getoption("--schedules")
        metafunc.parametrize("first_seed", range(0, num_schedules // 10, BLOCK))


def play(schedule: Schedule) -> VirtualJob:
    job = VirtualJob(schedule, make_worker=EarlyWorker)
    job.run()
    return job


def test_what_leaves_early_keeps_the_modes_rules_and_every_value(first_seed: int) -> None:
    alone = together = 0
    for seed in range(first_seed, first_seed + BLOCK):
        schedule = early_schedule(seed)
        try:
            job = play(schedule)
            prove(job)
        except Exception as error:  # say which schedule, whatever went wrong
            raise AssertionError(f"seed {seed}: {schedule}") from error
        for worker in job.workers:
            statistics = worker.trainer.statistics()
            if len(job.groups[worker.group]) > 1:
                together += statistics.early_pushes
            else:
                alone += statistics.early_pushes
    assert alone > 10
    assert together > 10


def test_a_gradient_that_changes_later_is_pushed_as_it_is_in_step_or_is_an_error(
    first_seed: int,
) -> None:
    """A run that ends well has the values of a run without overlap, with any timing."""
    num_errors = num_replaced = 0
    for seed in range(first_seed, first_seed + BLOCK):
        schedule = early_schedule(seed)
        job = VirtualJob(schedule, make_worker=ChangingWorker)
        try:
            job.run()
            prove(job)
        except UsageError as error:
            if SENT not in str(error):
                raise
            num_errors += 1
        except Exception as error:  # say which schedule, whatever went wrong
            raise AssertionError(f"seed {seed}: {schedule}") from error
        num_replaced += sum(worker.num_replaced for worker in job.workers)
    assert num_errors
    assert num_replaced
