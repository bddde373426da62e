"""The mode changes, by a schedule, by the script or by what psdist observes, or psdist's codecs do,
and servers fail that have buddies, or the coordinator: at any moment, and between the two phases of
a change. Rules hold, every rank finishes, and every value is what arithmetic says.

More by hand: ``python -m tests.protocol.deaths.test_mode_buddies FIRST LAST``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from psdist.config.modes import ModeFrom
from psdist.protocol.ids import server_id
from psdist.servers.protocol.takeovers import Takeovers
from tests.protocol.codecs.test_auto_codec import LADDER
from tests.protocol.deaths.test_buddies import assert_copies_are_the_shards
from tests.support.coordinators import part_of
from tests.support.virtual.job import Schedule, VirtualJob, play, replication_of
from tests.support.virtual.mode_buddies import (
    Telling,
    play_mode_refills,
    play_with_mode_buddies,
    schedule_with_ladder_buddies,
    schedule_with_mode_buddies,
)
from tests.support.virtual.proof import prove
from tests.support.virtual.refills import play_and_prove
from tests.support.virtual.surviving import prove_survival

SEEDS = (1, 6, 7, 8, 9, 10, 13)
SEEDS_OF_COORDINATOR = (0, 1, 7, 9)
BEHIND_A_CHANGE = (7, 9)
WITH_REFILLS = (8, 15)
LADDERS = (3, 4)
"""Seeds among the first that are quick and together meet all situations."""
MORE = range(24)
MANY = range(1000, 1200)


def play_deaths(seeds: Iterable[int], **more: Any) -> Counter[str]:
    """Play the seeds; return the situations that occurred, with counts."""
    met: Counter[str] = Counter()
    for seed in seeds:
        job = play_with_mode_buddies(seed, **more)
        try:
            prove_survival(job)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        met += job.met
        changes = [each.mode for each in job.modes]
        met["survived"] += job.has_moved
        met[f"by {job.schedule.mode_by}"] += bool(job.has_moved and changes[1:])
        met["to sync"] += bool(job.has_moved and "sync" in changes[1:])
        met["from sync"] += bool(job.has_moved and "sync" in changes[:-1])
        met["several sets"] += bool(job.has_moved and changes[1:] and job.schedule.more_sets)
    return met


def test_a_buddy_has_the_modes_in_its_log() -> None:
    for seed in SEEDS[2:5]:
        job = play(schedule_with_mode_buddies(seed), make_worker=Telling, is_watched=False)
        prove(job)
        assert_copies_are_the_shards(job)


def test_the_death_of_a_server_is_survived_at_any_moment_of_a_change() -> None:
    met = play_deaths(SEEDS)
    for what in (
        *("survived", "between the phases", "a change before"),
        *("by schedule", "by script", "by auto", "to sync", "from sync", "several sets"),
    ):
        assert met[what], met


def test_so_is_the_death_of_the_coordinator() -> None:
    met = play_deaths(SEEDS_OF_COORDINATOR, coordinator_dies=True)
    for what in ("survived", "between the phases", "by schedule", "by script", "by auto"):
        assert met[what], met


@pytest.mark.parametrize("coordinator_dies", [False, True])
def test_who_dies_behind_a_change_that_was_told_is_survived(coordinator_dies: bool) -> None:
    met = play_deaths(BEHIND_A_CHANGE, coordinator_dies=coordinator_dies, is_behind=True)
    assert met["a change before"] == len(BEHIND_A_CHANGE), met
    for what in ("by script", "by auto", "to sync", "from sync"):
        assert met[what], met


def test_server_after_server_dies_and_the_next_copy_knows_the_mode() -> None:
    met = play_and_prove(play_mode_refills, WITH_REFILLS)
    for what in ("survived", "modes", "told meanwhile", "left out"):
        assert met[what], met


@pytest.mark.parametrize("mode_by", ["schedule", "script"])
def test_a_copy_that_was_filled_knows_the_modes_of_before(mode_by: str) -> None:
    later = (ModeFrom(2, "ssp", 2), ModeFrom(3, "sync", 0))
    schedule = Schedule(
        seed=3, servers=3, iterations=(24, 24), num_chunks=6, has_buddies=True,
        later=later if mode_by == "schedule" else (),
        mode_rate=float(mode_by == "script"),
        collectives=((2, 3), (2, 3)) if mode_by == "script" else ((), ()),
    )  # fmt: skip
    job = VirtualJob(schedule, is_watched=False)
    job.network.run(until=lambda: min(job.clocks_once_ready(), default=0) > 4)
    job.network.crash(server_id(2))
    job.run()
    prove(job)
    assert not part_of(job.coordinator, Takeovers).alone, "nothing was filled"
    for server in range(3):
        shard = job.loop_of(server)
        keeper = part_of(job.coordinator, Takeovers).shards[server].keeper
        assert keeper is not None
        replication = replication_of(job.servers[keeper])
        assert replication is not None
        (copy,) = replication.kept[server].replicas
        assert copy.state.modes == shard.sets[0].core.changes.modes
        assert len(copy.state.modes) > 1


def play_ladders(seeds: Iterable[int], **more: Any) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in seeds:
        schedule = schedule_with_ladder_buddies(seed)
        job = play_with_mode_buddies(seed, schedule=schedule, wire=LADDER, **more)
        try:
            prove_survival(job)
            for worker in job.workers:
                assert not worker.loop.replies.num_differing
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        met += job.met
        met["survived"] += job.has_moved
        met["changed"] += bool(job.has_moved and job.codecs[1:])
    return met


def test_so_it_is_where_psdist_chooses_the_codecs() -> None:
    met = play_ladders(LADDERS) + play_ladders(LADDERS[1:], coordinator_dies=True)
    for what in ("survived", "changed", "between the phases"):
        assert met[what], met


def test_what_is_sent_in_full_behind_a_death_is_in_the_window_of_replies() -> None:
    """Also if the worker reports that it holds that version: 552 bytes were under way, of 512."""
    schedule = replace(schedule_with_ladder_buddies(7), mode="async")
    wire = replace(LADDER, has_copies=True)
    prove_survival(play_with_mode_buddies(7, schedule=schedule, wire=wire))


@pytest.mark.slow
def test_more() -> None:
    met = play_deaths(MORE) + play_deaths(MORE, coordinator_dies=True)
    met += play_deaths(MORE, is_behind=True) + play_deaths(
        MORE, coordinator_dies=True, is_behind=True
    )
    for what in ("by schedule", "by script", "by auto", "to sync", "from sync", "several sets"):
        assert met[what], met
    play_and_prove(play_mode_refills, MORE)
    play_and_prove(play_mode_refills, MORE, coordinator_dies=True)


@pytest.mark.slow
def test_many_more() -> None:
    play_ladders(MANY)
    play_ladders(MANY, coordinator_dies=True)
    play_deaths(MANY)
    play_deaths(MANY, coordinator_dies=True)
    play_and_prove(play_mode_refills, MANY)
    play_and_prove(play_mode_refills, MANY, coordinator_dies=True)


if __name__ == "__main__":
    many = range(int(sys.argv[1]), int(sys.argv[2]))
    print(play_deaths(many), play_deaths(many, coordinator_dies=True))
    print(play_ladders(many), play_ladders(many, coordinator_dies=True))
    print(play_and_prove(play_mode_refills, many))
    print(play_and_prove(play_mode_refills, many, coordinator_dies=True))
