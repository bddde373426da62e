"""Jobs whose servers have buddies, and in which servers fail, and workers whose groups continue.

job = play_with_groups_and_servers(7)
job = play_with_groups_and_servers(7, coordinator=True)       # it is one of those that fail
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from psdist.protocol.ids import server_id, worker_id
from tests.support.virtual.going_on import schedule_with_larger_groups
from tests.support.virtual.job import VirtualJob
from tests.support.virtual.schedule import Schedule
from tests.support.virtual.surviving import NOTICES_S, crash_in_turn


def schedule_with_buddies(seed: int) -> Schedule:
    """A group of several at least, and two servers or more, which have buddies."""
    schedule = schedule_with_larger_groups(seed)
    pick = random.Random(f"{seed} larger groups, servers")
    servers = max(2, schedule.servers) + pick.choice([0, 0, 1, 2])
    return replace(schedule, servers=servers, later=(), has_buddies=True)


def play_with_groups_and_servers(
    seed: int, *, coordinator: bool = False, schedule: Schedule | None = None, **broken: Any
) -> VirtualJob:
    """Workers fail, one at least of the first group, but one lives; and one or two servers that are
    not of one pair; mostly while what follows from the death before is under way."""
    schedule = schedule or schedule_with_buddies(seed)
    pick = random.Random(f"{seed} groups and servers")
    job = VirtualJob(schedule, max_deaths=99, reforms=True, is_watched=False, **broken)
    workers = [worker for members in job.groups for worker in members]
    dying = pick.sample(workers, min(pick.choice([1, 1, 2, 3]), len(workers) - 1))
    if not set(dying) & set(job.groups[0]):
        dying[0] = pick.choice(job.groups[0])
    servers = [0 if coordinator else pick.randrange(1, schedule.servers)]
    # Server 0's copy is with its buddy, the next one, and it keeps that of the one before.
    last = schedule.servers - coordinator
    apart = [each for each in range(1, last) if abs(each - servers[0]) > 1]
    if apart and pick.random() < 0.5:
        servers.append(pick.choice(apart))
    victims = [*map(worker_id, dying), *map(server_id, servers)]
    pick.shuffle(victims)
    crash_in_turn(
        job,
        victims,
        pick,
        first=int(10 ** pick.uniform(0.0, 2.7)),
        wait=lambda: int(10 ** pick.uniform(0.0, 2.3)),
    )
    return job


def play_with_a_server_that_loses_what_heirs_push(seed: int, **broken: Any) -> VirtualJob:
    """A worker fails; when an iteration of its group counts only the pushed part of its gradient,
    and other workers push its chunks, a server fails."""
    schedule = schedule_with_buddies(seed)
    pick = random.Random(f"{seed} heirs")
    job = VirtualJob(schedule, max_deaths=99, reforms=True, is_watched=False, **broken)
    dying = [worker_id(pick.choice(job.groups[0]))]
    servers = [server_id(pick.randrange(1, schedule.servers))]
    wait, behind = int(10 ** pick.uniform(0.0, 2.7)), pick.choice([0, 0, 1, 3, 10])
    while job.network.step():
        if not job.coordinator.is_ready:
            continue
        wait -= 1
        if wait < 0 and dying:
            job.network.crash(dying.pop(), notice_s=pick.choice(NOTICES_S))
        behind -= bool(job.given_up)
        if behind < 0 and servers and servers[0] in job.network.unfinished:
            job.network.crash(servers.pop(), notice_s=pick.choice(NOTICES_S))
    return job
