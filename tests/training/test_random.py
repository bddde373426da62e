"""Random scripts in any mode and on any network: each ends, and `psdist check` proves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.programs.training.cases import Outcome
from tests.support.programs.training.random_scripts import CASES, RandomJob

OVER_MPI = "random_scripts"
NUM_JOBS = 90
NUM_LARGE_JOBS = 40
BLOCK = 10
# Among them are 21 and 27 (a pull after a collective brought what the bound forbids) and 83 (the
# reply to a pull, delivered twice, was taken for the next pull's).


def prove(seed: int, path: Path, *, has_large_groups: bool = False) -> None:
    job = RandomJob.of(seed, has_large_groups=has_large_groups)
    try:
        outcome = job.run(path / str(seed))
        outcome.checked()
        assert outcome.summary["clocks"] == job.clocks
        for result in outcome.results:
            assert result["parameters"].isfinite().all()
        for members in job.groups:
            results = [outcome.results[worker]["parameters"] for worker in members]
            assert all(torch.equal(result, results[0]) for result in results)
    except Exception as error:  # say which one, whatever went wrong
        raise AssertionError(f"seed {seed}: {job}") from error


@pytest.mark.parametrize("first", range(0, NUM_JOBS, BLOCK))
def test_a_random_job_ends_and_keeps_its_modes_rules(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + BLOCK):
        prove(seed, tmp_path)


@pytest.mark.parametrize("first", range(3000, 3000 + NUM_LARGE_JOBS, BLOCK))
def test_a_random_job_with_large_groups_ends_and_keeps_its_modes_rules(
    first: int, tmp_path: Path
) -> None:
    for seed in range(first, first + BLOCK):
        prove(seed, tmp_path, has_large_groups=True)


@pytest.mark.mpi
def test_random_jobs_with_large_groups_over_mpi_end_and_keep_their_modes_rules(
    outcomes: dict[str, Outcome],
) -> None:
    assert len(outcomes) == len(CASES)
    for name, outcome in outcomes.items():
        outcome.checked()
        job = RandomJob.of(int(name.removeprefix("random-")), has_large_groups=True)
        assert outcome.summary["clocks"] == job.clocks, name
        for members in job.groups:
            results = [outcome.results[worker]["parameters"] for worker in members]
            assert all(torch.equal(result, results[0]) for result in results), name
            assert results[0].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(NUM_JOBS, 20 * NUM_JOBS, 10 * BLOCK))
def test_many_more_random_jobs_end_and_keep_their_modes_rules(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 10 * BLOCK):
        prove(seed, tmp_path)
