"""Jobs whose servers have buddies, and one of these servers dies at a seeded moment.

job, undisturbed = play_with_server_death(7)
[loop.hosted for loop in job.servers]       # who has taken whose place
"""

from __future__ import annotations

import random
from dataclasses import replace

from psdist.protocol.ids import REGISTRAR, is_worker
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


def play_with_server_death(seed: int) -> tuple[VirtualJob, VirtualJob]:
    """The job, and the same one without the death. Where every server but the registrar had ended
    by then nobody has died."""
    schedule = with_buddies(seed)
    undisturbed, steps = VirtualJob(schedule, is_watched=False), 0
    while undisturbed.network.step():
        steps += 1
    pick = random.Random(f"{seed} server's death")
    job = VirtualJob(schedule, is_watched=False)
    for _ in range(pick.randrange(steps)):
        job.network.step()
    alive = [peer for peer in job.network.unfinished if not is_worker(peer) and peer != REGISTRAR]
    dead = pick.choice(alive) if alive else None
    if dead is not None:
        job.dead = dead  # errors of ranks are what may follow
        job.network.crash(dead, notice_s=pick.choice([0.0, 1e-4, 1e-2]))
    job.run()
    if not job.errors:
        job.dead = None
    return job, undisturbed
