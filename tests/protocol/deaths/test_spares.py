"""Spares hold replicas and take the places of failed servers: under seeded schedules, on the
virtual network, with real tensors. Every surviving rank finishes, every update that was
acknowledged is in the final parameters once, and in sync the parameters are those of the run
without deaths.

More by hand: ``python -m tests.protocol.deaths.test_spares FIRST LAST [coordinator]``.
"""

from __future__ import annotations

import pytest

from psdist.protocol.control import CopyLost
from psdist.protocol.ids import COORDINATOR, server_id, spare_id
from psdist.servers.protocol.takeovers import Takeovers
from tests.support.coordinators import part_of
from tests.support.virtual.job import Schedule, VirtualJob, replication_of, spare_seat
from tests.support.virtual.refills import by_hand, play_and_prove
from tests.support.virtual.spares import play_with_spares
from tests.support.virtual.surviving import prove_survival

SEEDS = (6, 14, 20, 38, 39, 42, 48, 50, 55)
"""Seeds among the first seventy that are quick and together meet all situations."""
SEEDS_WITH_COORDINATOR = (10, 19, 26, 33, 38, 42, 48, 67)
"""As these."""
MANY = range(1000, 1200)


def test_servers_and_spares_die_and_the_others_go_on() -> None:
    met = play_and_prove(play_with_spares, SEEDS)
    for what in (
        *("survived", "served by a spare at the end", "2 deaths", "same bits"),
        *("idle spare", "a spare that keeps", "a spare that is filled", "a spare that serves"),
    ):
        assert met[what], met


def test_the_coordinator_dies_among_them() -> None:
    met = play_and_prove(play_with_spares, SEEDS_WITH_COORDINATOR, coordinator_dies=True)
    for what in (
        *("registrar", "coordinator while filling", "survived", "ended", "same bits"),
        *("a spare that keeps", "a spare that is filled", "a spare that serves"),
    ):
        assert met[what], met


def test_who_is_out_hears_so_before_the_standby_ends() -> None:
    """A worker of one of two groups, and the coordinator, fail: the job of the other has ended
    before the last worker of the first has heard who the coordinator is, and that its group is
    out."""
    met = play_and_prove(play_with_spares, [20429], coordinator_dies=True)
    assert met["registrar"], met


@pytest.mark.slow
def test_many_more() -> None:
    play_and_prove(play_with_spares, MANY)
    play_and_prove(play_with_spares, MANY, coordinator_dies=True)


def with_one_spare() -> VirtualJob:
    schedule = Schedule(
        seed=3,
        servers=5,
        spares=1,
        iterations=(60, 60),
        num_chunks=10,
        mode="ssp",
        has_buddies=True,
    )
    return VirtualJob(schedule, is_watched=False, max_deaths=9)


def until_whole(job: VirtualJob) -> None:
    """Server 3 fails: the shards of 2 and 3 have their second copies in the spare then."""
    job.network.run(until=lambda: min(job.clocks_once_ready(), default=0) > 2)
    job.network.crash(server_id(3))
    takeovers = part_of(job.coordinator, Takeovers)
    job.network.run(until=lambda: 3 in takeovers.failed and not takeovers.alone)
    assert [takeovers.shards[each].keeper for each in (2, 3)] == [spare_id(0), spare_id(0)]


def test_that_a_spare_s_copy_is_lost_is_said_by_the_standby_where_the_coordinator_dies_first() -> (
    None
):
    """Else who serves the shard would let nothing go any more."""
    job = with_one_spare()
    until_whole(job)
    job.network.crash(spare_id(0))
    coordinator_log = job.coordinator_log
    assert coordinator_log is not None

    def is_about_to() -> bool:
        actions = (each for _, actions in coordinator_log._pending for each in actions)
        return any(isinstance(getattr(each, "message", None), CopyLost) for each in actions)

    job.network.run(until=is_about_to)
    job.network.crash(COORDINATOR)
    job.run()
    assert job.has_succeeded
    prove_survival(job)
    assert not part_of(job.coordinator, Takeovers).alone


def test_a_spare_hears_of_a_set_that_is_described_once_it_keeps_a_copy() -> None:
    job = with_one_spare()
    until_whole(job)
    replication = replication_of(job.servers[2])
    built = replication._built[0]
    replication.on_built(built._replace(set_index=1))
    spare = job.spares[0]
    job.network.run(until=lambda: spare_seat(spare).num_described == 2)
    kept = replication_of(spare)
    assert [len(each.owners) for each in kept._built] == [len(built.owners)] * 2


if __name__ == "__main__":
    by_hand(play_with_spares)
