"""Jobs whose servers have buddies, and whose coordinator fails at a seeded moment.

job, undisturbed = play_with_coordinator_death(7)
job.has_succeeded                       # whether its standby has become the coordinator
play_with_others(7)                     # workers and other servers fail, too
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from tests.support.virtual.both_deaths import schedule_with_both
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.server_deaths import with_buddies
from tests.support.virtual.surviving import NOTICES_S, crash_in_turn


def crash(job: VirtualJob, peer: int, *, notice_s: float = 0.0) -> None:
    """``peer`` fails, if it has not ended; errors of ranks are what may follow."""
    if peer in job.network.unfinished:
        job.dead = peer
        job.network.crash(peer, notice_s=notice_s)


def run_to_the_end(job: VirtualJob) -> VirtualJob:
    job.run()
    if not job.errors:
        job.dead = None
    return job


def play_with_coordinator_death(
    seed: int, *, schedule: Schedule | None = None
) -> tuple[VirtualJob, VirtualJob]:
    """The job, and the same one without the death."""
    schedule = schedule or with_buddies(seed)
    undisturbed, steps = VirtualJob(schedule, is_watched=False), 0
    while undisturbed.network.step():
        steps += 1
    pick = random.Random(f"{seed} registrar's death")
    job = VirtualJob(schedule, is_watched=False)
    # Half of them near the end, a small part of a schedule.
    last = 60 if pick.random() < 0.3 else steps
    for _ in range(steps - 1 - pick.randrange(min(last, steps))):
        job.network.step()
    crash(job, COORDINATOR, notice_s=pick.choice(NOTICES_S))
    return run_to_the_end(job), undisturbed


def play_until(
    seed: int, is_time: Callable[[VirtualJob], bool], *, schedule: Schedule | None = None
) -> VirtualJob | None:
    """The coordinator fails when ``is_time``; None where that never comes."""
    job = VirtualJob(schedule or with_buddies(seed), is_watched=False)
    job.network.run(until=lambda: is_time(job))
    if COORDINATOR not in job.network.unfinished:
        return None
    crash(job, COORDINATOR, notice_s=random.Random(f"{seed} notice").choice(NOTICES_S))
    return run_to_the_end(job)


def play_with_others(seed: int, **broken: Any) -> VirtualJob:
    """The coordinator fails once training may continue without workers, and so do some workers, of
    all groups but one, and perhaps a server that is neither its buddy nor keeps its copy."""
    schedule = schedule_with_both(seed)
    pick = random.Random(f"{seed} registrar and others")
    schedule = replace(schedule, servers=max(schedule.servers, pick.choice([2, 3, 4, 5])))
    job = VirtualJob(schedule, max_deaths=99, is_watched=False, **broken)
    safe = pick.randrange(len(job.groups))
    at_risk = [
        worker for group, members in enumerate(job.groups) if group != safe for worker in members
    ]
    num_workers = min(pick.choice([0, 1, 2]), len(at_risk))
    victims = [worker_id(each) for each in pick.sample(at_risk, num_workers)]
    apart = range(2, schedule.servers - 1)
    if apart and pick.random() < 0.7:
        victims.append(server_id(pick.choice(apart)))
    victims.append(COORDINATOR)
    pick.shuffle(victims)
    crash_in_turn(
        job,
        victims,
        pick,
        first=int(10 ** pick.uniform(0.0, 3.2)),
        wait=lambda: int(10 ** pick.choice([pick.uniform(0.0, 1.5), 2.5])),
    )
    return job
