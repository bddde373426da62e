"""Jobs whose servers have buddies, and one of these servers fails at a seeded moment.

job, undisturbed = play_with_server_death(with_buddies(7))
[loop.hosted for loop in job.servers]       # who has taken whose place
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from psdist.protocol.ids import COORDINATOR, is_worker
from tests.support.virtual.job import Schedule, VirtualJob


def with_buddies(seed: int) -> Schedule:
    """The seed's schedule, without what buddies refuse and what ends a job by itself."""
    schedule = Schedule.from_seed(seed)
    return replace(
        schedule,
        servers=max(2, schedule.servers),
        clipping=0.0,
        death=None,
        mistake="",
        has_model=True,
        later=(),
        has_buddies=True,
    )


def play_with_server_death(
    schedule: Schedule, *, num_deaths: int = 1, **more: Any
) -> tuple[VirtualJob, VirtualJob]:
    """The job, and the same one without a death. Where every server but the coordinator had ended
    by then no rank has failed."""
    undisturbed, steps = VirtualJob(schedule, is_watched=False, **more), 0
    while undisturbed.network.step():
        steps += 1
    pick = random.Random(f"{schedule.seed} server's death")
    job = VirtualJob(schedule, is_watched=False, **more)
    for _ in range(num_deaths):
        for _ in range(pick.randrange(steps) // num_deaths):
            job.network.step()
        unfinished = job.network.unfinished
        alive = [each for each in unfinished if not is_worker(each) and each != COORDINATOR]
        dead = pick.choice(alive) if alive else None
        if dead is not None:
            job.dead = dead  # errors of ranks are what may follow
            job.network.crash(dead, notice_s=pick.choice([0.0, 1e-4, 1e-2]))
    job.run()
    if not job.errors:
        job.dead = None
    return job, undisturbed
