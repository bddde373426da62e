"""Jobs whose servers have buddies, and in which workers and servers fail, at seeded moments.

job = play_with_both_deaths(7)
prove_survival(job)
taken_over(job)                         # servers in whose places others have continued
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from psdist.protocol.ids import server_id, worker_id
from tests.support.virtual.job import VirtualJob
from tests.support.virtual.schedule import Schedule
from tests.support.virtual.surviving import crash_in_turn, schedule_with_deaths


def schedule_with_both(seed: int) -> Schedule:
    """As where workers fail; servers, at least two, have buddies."""
    schedule = schedule_with_deaths(seed)
    pick = random.Random(f"{seed} both, servers")
    servers = max(2, schedule.servers) + pick.choice([0, 0, 1, 2])
    return replace(schedule, servers=servers, later=(), has_buddies=True)


def play_with_both_deaths(
    seed: int, *, schedule: Schedule | None = None, **broken: Any
) -> VirtualJob:
    """Some workers fail, of all groups but one, and one or two servers that are not of one pair,
    once training may continue without them: half of them directly one after another."""
    schedule = schedule or schedule_with_both(seed)
    pick = random.Random(f"{seed} both deaths")
    job = VirtualJob(schedule, max_deaths=99, is_watched=False, **broken)
    safe = pick.randrange(len(job.groups))
    at_risk = [
        worker for group, members in enumerate(job.groups) if group != safe for worker in members
    ]
    num_workers = min(pick.choice([1, 1, 2, 3]), len(at_risk))
    victims = [worker_id(each) for each in pick.sample(at_risk, num_workers)]
    servers = [pick.randrange(1, schedule.servers)]
    apart = [each for each in range(1, schedule.servers) if abs(each - servers[0]) > 1]
    if apart and pick.random() < 0.5:
        servers.append(pick.choice(apart))
    victims += map(server_id, servers)
    pick.shuffle(victims)
    crash_in_turn(
        job,
        victims,
        pick,
        first=int(10 ** pick.uniform(0.0, 3.2)),
        wait=lambda: int(10 ** pick.choice([pick.uniform(0.0, 1.5), 2.5])),
    )
    return job


def taken_over(job: VirtualJob) -> list[int]:
    return sorted({each.transport.me for loop in job.servers for each in loop.hosted})
