"""Networks that are cut for a while, with deaths on both sides: every surviving rank finishes,
nothing is lost and nothing taken twice.

More by hand: ``python -m tests.benchmarks.deaths.schedules``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.support.virtual.cuts import play_with_cuts
from tests.support.virtual.surviving import prove_survival

SEEDS = range(8)
MANY = range(1000, 1200)


def play_and_prove(seeds: Iterable[int]) -> Counter[str]:
    """Play the seeds; return the situations that occurred, with counts."""
    met: Counter[str] = Counter()
    for seed in seeds:
        job = play_with_cuts(seed)
        try:
            prove_survival(job)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        met += job.met
        met[job.schedule.mode] += 1
        met["duplicates"] += job.schedule.repeat_rate > 0
    return met


def test_a_cut_that_ends_changes_nothing() -> None:
    met = play_and_prove(SEEDS)
    for what in (
        *("cuts", "worker", "server", "registrar", "behind a cut", "duplicates"),
        *("sync", "ssp", "async"),
    ):
        assert met[what], met


@pytest.mark.slow
def test_many_more() -> None:
    play_and_prove(MANY)
