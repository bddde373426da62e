"""Servers die one after the other, and shards that have one copy left get another: under seeded
schedules, on the virtual network, with real tensors. Whoever lives finishes, every update that was
acknowledged is in the final parameters once, and in sync the parameters are those of the run
without deaths. Where nobody has a shard any more the job ends with the one error that says so.

More by hand: ``python -m tests.protocol.test_refills FIRST LAST [registrar]``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from psdist.errors import PsdistError
from psdist.protocol.control import FillCopy, KeepCopy
from psdist.protocol.ids import REGISTRAR, is_worker, server_id
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.refills import play_refills, prove_refills
from tests.support.virtual.surviving import prove_survival

SEEDS = (3, 10, 18, 36, 69, 75, 83, 88, 92, 96)
"""Of the first hundred those that are quick and have met all that can be met."""
SEEDS_WITH_REGISTRAR = (1, 5, 6, 10, 15, 19, 34, 42, 49, 58, 60, 73, 74, 81, 83, 88)
"""As these."""
MANY = range(1000, 1300)
FOUND = (2111,)
"""What waited to be sent again, when who was to get it died as well (2111)."""
FOUND_WITH_REGISTRAR = (48, 91)
"""A shard that was asked again whether a collective is over, when the next copy of it knew that
(48); a registrar that had a place taken before its own shard knew that its copy was lost (91)."""


def play_and_prove(seeds: Iterable[int], **broken: Any) -> Counter[str]:
    """What was met, and how often."""
    met: Counter[str] = Counter()
    for seed in seeds:
        try:
            job = play_refills(seed, **broken)
            prove_refills(job)
            prove_bits(job, met)
        except (AssertionError, PsdistError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        met += job.met
    return met


def prove_bits(job: Any, met: Counter[str]) -> None:
    """Of a run in sync in which no worker has died."""
    has_lost_worker = any(map(is_worker, job.network._dead))
    if job.errors or job.schedule.mode != "sync" or has_lost_worker or not job.met["deaths"]:
        return
    whole = VirtualJob(job.schedule, max_deaths=99, is_watched=False)
    whole.run()
    for mine, other in zip(job.sets, whole.sets, strict=True):
        assert torch.equal(mine.parameters(), other.parameters())
    met["same bits"] += 1


def test_server_after_server_dies_and_the_others_go_on() -> None:
    met = play_and_prove(SEEDS)
    for what in (
        *("survived", "ended", "another beginning", "2 deaths", "3 deaths", "4 deaths"),
        *("sync", "ssp", "async", "same bits", "told meanwhile", "left out"),
    ):
        assert met[what], met


def test_the_registrar_dies_before_and_in_and_behind_a_fill() -> None:
    """And another server behind it."""
    met = play_and_prove(SEEDS_WITH_REGISTRAR, registrar_dies=True)
    for what in (
        *("registrar first", "registrar filling", "registrar source", "registrar whole"),
        *("behind the registrar", "told meanwhile", "left out"),
        *("survived", "ended", "sync", "ssp", "async", "same bits"),
    ):
        assert met[what], met


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found(seed: int) -> None:
    play_and_prove([seed])


@pytest.mark.parametrize("seed", FOUND_WITH_REGISTRAR)
def test_what_was_found_with_the_registrar(seed: int) -> None:
    play_and_prove([seed], registrar_dies=True)


@pytest.mark.parametrize("kind", [KeepCopy, FillCopy])
def test_what_the_registrar_has_not_come_to_say_of_a_copy_its_deputy_says(kind: type) -> None:
    """Its deputy has noted what it follows from: else the shard would stay alone, and nobody be
    told."""
    schedule = Schedule(
        seed=3, servers=4, iterations=(40, 40), num_chunks=8, mode="ssp", has_buddies=True
    )
    job = VirtualJob(schedule, is_watched=False, max_deaths=9)
    office = job.office
    assert office is not None

    def is_about_to() -> bool:
        actions = (each for _, actions in office._pending for each in actions)
        return any(isinstance(getattr(each, "message", None), kind) for each in actions)

    job.network.run(until=lambda: min(job.clocks_once_ready(), default=0) > 2)
    job.network.crash(server_id(2))
    job.network.run(until=is_about_to)
    job.network.crash(REGISTRAR)
    job.run()
    assert job.has_succeeded
    prove_survival(job)
    assert not job.registrar.alone


@pytest.mark.slow
def test_many_more() -> None:
    play_and_prove(MANY)
    play_and_prove(MANY, registrar_dies=True)


if __name__ == "__main__":
    total: Counter[str] = Counter()
    num_bad = 0
    for each in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            total += play_and_prove([each], registrar_dies=sys.argv[3:] == ["registrar"])
        except Exception as error:
            num_bad += 1
            print(f"{each}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{num_bad} bad", total)
