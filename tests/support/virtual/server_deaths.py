"""Jobs whose servers have buddies, or whose shards are made anew, and one of these servers dies at
a seeded moment.

job, undisturbed = play_with_server_death(with_buddies(7))
[loop.hosted for loop in job.servers]       # who has taken whose place
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from psdist.protocol.ids import REGISTRAR, is_worker, server_id
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


def with_rebuilding(seed: int) -> Schedule:
    """The same without buddies."""
    return replace(with_buddies(seed), has_buddies=False, is_rebuilt=True)


def play_with_server_death(
    schedule: Schedule, *, num_deaths: int = 1, **more: Any
) -> tuple[VirtualJob, VirtualJob]:
    """The job, and the same one without a death. Where every server but the registrar had ended by
    then nobody has died."""
    undisturbed, steps = VirtualJob(schedule, is_watched=False, **more), 0
    while undisturbed.network.step():
        steps += 1
    pick = random.Random(f"{schedule.seed} server's death")
    job = VirtualJob(schedule, is_watched=False, **more)
    for _ in range(num_deaths):
        for _ in range(pick.randrange(steps) // num_deaths):
            job.network.step()
        unfinished = job.network.unfinished
        alive = [each for each in unfinished if not is_worker(each) and each != REGISTRAR]
        dead = pick.choice(alive) if alive else None
        if dead is not None:
            job.dead = dead  # errors of ranks are what may follow
            job.network.crash(dead, notice_s=pick.choice([0.0, 1e-4, 1e-2]))
    job.run()
    if not job.errors:
        job.dead = None
    return job, undisturbed


def play_until(num_events: int, *, mode: str) -> VirtualJob:
    """A job of three groups, one set and four chunks, whose second server dies behind so many
    events of the network, in the middle of training."""
    schedule = Schedule(
        seed=3,
        mode=mode,
        servers=2,
        group_sizes=(1, 1, 1),
        iterations=(6, 6, 6),
        collectives=((),) * 3,
        compute_s=(1e-3,) * 3,
        num_chunks=4,
        is_rebuilt=True,
    )
    job = VirtualJob(schedule, is_watched=False)
    for _ in range(num_events):
        job.network.step()
    job.dead = server_id(1)
    job.network.crash(job.dead)
    job.run()
    job.dead = None
    return job
