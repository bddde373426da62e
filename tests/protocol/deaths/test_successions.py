"""The coordinator fails, then its successor, then the next one, while there is another whole copy
of the shard of server 0 in between: under seeded schedules, on the virtual network, with real
tensors. Every surviving rank finishes, every update that was acknowledged is in the final
parameters once, and in sync the parameters are those of the run without deaths.

More by hand: ``python -m tests.protocol.deaths.test_successions FIRST LAST``.
"""

from __future__ import annotations

import pytest

from tests.support.virtual.refills import by_hand, play_and_prove
from tests.support.virtual.successions import play_successions

SEEDS = (3, 6, 7, 10, 12, 13, 24, 27, 36, 43, 46)
"""Seeds among the first fifty that are quick and together meet all situations."""
MANY = range(1000, 1200)


def test_one_coordinator_after_the_other_dies() -> None:
    met = play_and_prove(play_successions, SEEDS)
    for what in (
        *("2 successions", "3 successions", "4 successions", "coordinator in a spare"),
        *("deputy", "appointed", "entrusted", "coordinator at once", "behind workers"),
        *("survived", "ended", "sync", "ssp", "async", "same bits"),
    ):
        assert met[what], met


@pytest.mark.slow
def test_many_more() -> None:
    play_and_prove(play_successions, MANY)


if __name__ == "__main__":
    by_hand(play_successions)
