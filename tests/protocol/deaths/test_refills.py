"""Servers fail one after the other, and shards that have one copy left get another: under seeded
schedules, on the virtual network, with real tensors. Every surviving rank finishes, every update
that was acknowledged is in the final parameters once, and in sync the parameters are those of the
run without deaths. Where no process has a shard any more the job ends with one error that names it.

More by hand: ``python -m tests.protocol.deaths.test_refills FIRST LAST [coordinator]``.
"""

from __future__ import annotations

import pytest

from psdist.protocol.control import FillCopy, KeepCopy
from psdist.protocol.ids import COORDINATOR, server_id
from psdist.servers.protocol.takeovers import Takeovers
from tests.support.coordinators import part_of
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.refills import by_hand, play_and_prove, play_refills
from tests.support.virtual.surviving import prove_survival

SEEDS = (3, 10, 18, 36, 69, 75, 83, 88, 92, 96)
"""Seeds among the first hundred that are quick and together meet all situations."""
SEEDS_WITH_COORDINATOR = (1, 5, 6, 10, 15, 19, 34, 42, 49, 58, 60, 73, 74, 81, 83, 88)
"""As these."""
MANY = range(1000, 1300)
FOUND = (2111,)
"""Fault found: messages waiting to be repeated to a process that failed as well (2111)."""
FOUND_WITH_COORDINATOR = (48, 91, 31007)
"""A shard that was asked again whether a collective has ended, when the next copy of it knew that
(48); a coordinator that had a place taken before its own shard knew that its copy was lost (91); a
standby that had not heard of its own buddy's death when it became the coordinator (31007)."""


def test_server_after_server_dies_and_the_others_go_on() -> None:
    met = play_and_prove(play_refills, SEEDS)
    for what in (
        *("survived", "ended", "another beginning", "2 deaths", "3 deaths", "4 deaths"),
        *("sync", "ssp", "async", "same bits", "told meanwhile", "left out"),
    ):
        assert met[what], met


def test_the_coordinator_dies_before_and_in_and_behind_a_fill() -> None:
    """And another server after it."""
    met = play_and_prove(play_refills, SEEDS_WITH_COORDINATOR, coordinator_dies=True)
    for what in (
        *("coordinator first", "coordinator filling", "coordinator source", "coordinator whole"),
        *("behind the coordinator", "told meanwhile", "left out"),
        *("survived", "ended", "sync", "ssp", "async", "same bits"),
    ):
        assert met[what], met


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found(seed: int) -> None:
    play_and_prove(play_refills, [seed])


@pytest.mark.parametrize("seed", FOUND_WITH_COORDINATOR)
def test_what_was_found_with_the_coordinator(seed: int) -> None:
    play_and_prove(play_refills, [seed], coordinator_dies=True)


@pytest.mark.parametrize("kind", [KeepCopy, FillCopy])
def test_what_the_coordinator_has_not_come_to_say_of_a_copy_its_standby_says(kind: type) -> None:
    """Its standby has stored the reason: else the shard would stay without a replica, and no rank
    be informed."""
    schedule = Schedule(
        seed=3, servers=4, iterations=(40, 40), num_chunks=8, mode="ssp", has_buddies=True
    )
    job = VirtualJob(schedule, is_watched=False, max_deaths=9)
    coordinator_log = job.coordinator_log
    assert coordinator_log is not None

    def is_about_to() -> bool:
        actions = (each for _, actions in coordinator_log._pending for each in actions)
        return any(isinstance(getattr(each, "message", None), kind) for each in actions)

    job.network.run(until=lambda: min(job.clocks_once_ready(), default=0) > 2)
    job.network.crash(server_id(2))
    job.network.run(until=is_about_to)
    job.network.crash(COORDINATOR)
    job.run()
    assert job.has_succeeded
    prove_survival(job)
    assert not part_of(job.coordinator, Takeovers).alone


@pytest.mark.slow
def test_many_more() -> None:
    play_and_prove(play_refills, MANY)
    play_and_prove(play_refills, MANY, coordinator_dies=True)


if __name__ == "__main__":
    by_hand(play_refills)
