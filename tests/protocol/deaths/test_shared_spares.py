"""Spares that take the places of servers and of workers, in either order: under seeded schedules,
on the virtual network. Every surviving rank finishes, every update that was acknowledged is in the
final parameters once, and the joined histories prove it.

More by hand: ``python -m tests.protocol.deaths.test_shared_spares FIRST LAST [coordinator]``.
"""

from __future__ import annotations

import pytest

from tests.support.virtual.refills import by_hand, play_and_prove
from tests.support.virtual.shared_spares import play_with_shared_spares

SEEDS = (7, 9, 31, 32, 36, 37, 44, 46, 47, 57, 58)
"""Seeds among the first sixty that are quick and together meet all situations."""
SEEDS_WITH_COORDINATOR = (1, 4, 6, 7, 10, 19, 20, 21, 122, 153)
"""As these, and of the hundreds two that have met what was missing."""
MANY = range(1000, 1200)


def test_whoever_dies_first_is_followed_by_a_spare() -> None:
    met = play_and_prove(play_with_shared_spares, SEEDS)
    for what in (
        *("sync", "ssp", "async", "several sets", "same bits", "survived"),
        *("joined", "joined, and a spare has a shard", "joined behind a move"),
        *("idle spare", "asked spare", "ready spare", "keeping spare", "server while asked"),
    ):
        assert met[what], met


def test_the_coordinator_dies_among_them() -> None:
    met = play_and_prove(play_with_shared_spares, SEEDS_WITH_COORDINATOR, coordinator_dies=True)
    for what in (
        *("coordinator while a spare is asked", "same bits", "survived", "ended"),
        *("joined", "joined, and a spare has a shard", "joined behind a move"),
    ):
        assert met[what], met


@pytest.mark.slow
def test_many_more() -> None:
    play_and_prove(play_with_shared_spares, MANY)
    play_and_prove(play_with_shared_spares, MANY, coordinator_dies=True)


if __name__ == "__main__":
    by_hand(play_with_shared_spares)
