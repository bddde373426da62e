"""Modes that change within a run, under seeded schedules: at known rounds, by the script in a
collective, or by the registrar at any time while others train.

Each run is proved as every other (``proof`` of tests/support/virtual), the check judging each round
by its rule, and each value computed again.
"""

from __future__ import annotations

from collections import Counter

from tests.support.virtual.job import VirtualJob, play
from tests.support.virtual.proof import prove
from tests.support.virtual.schedule import Size, with_modes


def prove_seed(seed: int, size: Size = "small") -> VirtualJob:
    schedule = with_modes(seed, size=size)
    try:
        job = play(schedule)
        prove(job)
    except Exception as error:  # say which schedule, whatever went wrong
        raise AssertionError(f"{size} seed {seed}: {schedule}") from error
    return job


def test_schedules_whose_mode_changes_end_and_keep_the_rule_of_every_round() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        job = prove_seed(seed)
        seen[job.schedule.mode_by] += len(job.modes) - 1
    assert min(seen[by] for by in ("schedule", "script", "auto")) >= 10
