"""Servers without buddies under seeded schedules, whose shards are made anew when one dies.

At a random moment a server dies: another one makes its shard of what workers hold. No update is
applied twice, what is lost is at most one of each group and chunk, and said (``prove``); in sync,
where workers hold all of a round or nothing, and no optimizer state was lost, the parameters are
those of the run without the death.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from psdist.errors import PeerLostError
from psdist.history.records import EventKind
from psdist.servers.protocol.rebuilding.rebuilds import ServerRebuilt
from tests.support.virtual.job import play
from tests.support.virtual.proof import prove
from tests.support.virtual.server_deaths import play_with_server_death, with_rebuilding

BLOCK = 8
NOT_READY = "before training had begun"
SETTING_UP = "while a model was being set up"
IN_PUSH = "in the middle of a job.push"
BEING_MADE = "while the shard of a server that had died was being made anew"


@pytest.mark.parametrize(
    ("first", "num_deaths"),
    [
        (0, 1),
        *(
            pytest.param(first, 1, marks=pytest.mark.slow)
            for first in range(BLOCK, 20 * BLOCK, BLOCK)
        ),
        *(pytest.param(first, 2, marks=pytest.mark.slow) for first in range(0, 20 * BLOCK, BLOCK)),
    ],
)
def test_the_death_of_a_server_is_survived_at_any_moment(first: int, num_deaths: int) -> None:
    seen = Counter[str]()
    for seed in range(first, first + BLOCK):
        job, undisturbed = play_with_server_death(with_rebuilding(seed), num_deaths=num_deaths)
        if job.errors:
            assert all(isinstance(error, PeerLostError) for error in job.errors.values())
            words = " ".join(map(str, job.errors.values()))
            assert any(each in words for each in (NOT_READY, SETTING_UP, IN_PUSH, BEING_MADE)), (
                words
            )
            seen["ended"] += 1
            continue
        assert not job.network.unfinished, f"seed {seed}: wait for ever: {job.network.unfinished}"
        made = [each for each in job.reported if isinstance(each, ServerRebuilt)]
        if not made:
            continue  # it had died behind the end
        prove(job)
        seen["survived"] += 1
        kinds = [log.events["kind"] for each in job.sets for log in each.history().servers]
        num_lost = sum(int((kind == EventKind.LOST).sum()) for kind in kinds)
        assert num_lost == sum(each.num_lost for each in made)
        seen["lost"] += num_lost > 0
        if job.schedule.mode == "sync" and not job.schedule.momentum and not num_lost:
            for mine, other in zip(job.sets, undisturbed.sets, strict=True):
                assert torch.equal(mine.parameters(), other.parameters()), f"seed {seed}"
    assert seen["survived"] + seen["ended"] > BLOCK // 2, seen
    assert seen["survived"] or num_deaths > 1


def test_settings_that_the_leave_of_the_group_has_overtaken_are_no_mistake() -> None:
    """Without a death: found among the runs that deaths are compared with."""
    prove(play(with_rebuilding(1893)))
