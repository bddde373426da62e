"""Workers whose group continues without one that has failed, by the trainer that really trains: a
few schedules of each case (tests/protocol/deaths has many)."""

from __future__ import annotations

import pytest

from tests.support.virtual.going_on import (
    play_with_a_death_between_two_ends,
    play_with_groups_that_go_on,
)
from tests.support.virtual.surviving import prove_survival


@pytest.mark.parametrize("seed", [20, 103, 167])
def test_an_iteration_that_the_death_finds_counts_in_part(seed: int) -> None:
    job = play_with_groups_that_go_on(seed)
    assert job.given_up
    prove_survival(job)


@pytest.mark.parametrize("seed", range(3))
def test_workers_that_are_not_equally_far_go_on_as_one(seed: int) -> None:
    job = play_with_a_death_between_two_ends(seed)
    prove_survival(job)
    living = [each for each in job.workers if each.worker not in job.out_of_the_job]
    assert living
    assert not any(each.trainer.is_open for each in living), "every iteration has ended"
