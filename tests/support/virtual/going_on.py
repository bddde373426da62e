"""Schedules in which workers fail and their groups continue without them.

job = play_with_groups_that_go_on(seed)
prove_survival(job)
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from psdist.protocol.ids import worker_id
from psdist.workers.group.shrinking import ShrinkingChannel
from tests.support.virtual.job import VirtualJob
from tests.support.virtual.schedule import Schedule
from tests.support.virtual.surviving import NOTICES_S


def schedule_with_larger_groups(seed: int, base: Schedule | None = None) -> Schedule:
    """A group of several at least; nothing that does not go with groups that continue. ``base``: of
    which all else is; the seed's own."""
    schedule = base or Schedule.from_seed(seed)
    pick = random.Random(f"{seed} larger groups")
    first = pick.choice([2, 2, 3, 4])
    sizes = (first, *schedule.group_sizes[1:])
    return replace(
        schedule,
        group_sizes=sizes,
        mistake="",
        death=None,
        has_model=True,
        push_rate=0.0,
        clipping=0.0,
        pull_rate=0.0,
        single_rate=0.0,
        middle_rate=0.0,
    )


def play_with_groups_that_go_on(
    seed: int, *, schedule: Schedule | None = None, **broken: Any
) -> VirtualJob:
    """Workers fail, each at a random event, one after the other or at once, but one lives."""
    schedule = schedule or schedule_with_larger_groups(seed)
    pick = random.Random(f"{seed} deaths")
    job = VirtualJob(schedule, max_deaths=99, reforms=True, **broken)
    workers = [worker for members in job.groups for worker in members]
    num_deaths = min(pick.choice([1, 1, 1, 2, 2, 3]), len(workers) - 1)
    of_first = list(job.groups[0])
    victims = pick.sample(workers, num_deaths)
    if not set(victims) & set(of_first):
        victims[0] = pick.choice(of_first)
    wanted = sorted(int(10 ** pick.uniform(0.5, 3.2)) for _ in victims)
    if pick.random() < 0.3:  # one while the others of its group still learn of another
        wanted = [wanted[0] + index * pick.randrange(60) for index in range(len(wanted))]
    num_events = 0
    while job.network.step():
        num_events += 1
        while wanted and num_events >= wanted[0] and job.coordinator.is_ready:
            wanted.pop(0)
            victim = worker_id(victims.pop())
            if victim in job.network.unfinished:
                job.network.crash(victim, notice_s=pick.choice(NOTICES_S))
    return job


APART_S = 0.05


def play_with_a_death_between_two_ends(seed: int, **broken: Any) -> VirtualJob:
    """Somebody fails when workers of its group have not come equally far in the group's operations:
    some have ended an agreement, or an iteration, that others have not."""
    job = VirtualJob(
        schedule_with_larger_groups(seed), max_deaths=99, reforms=True, apart_s=APART_S, **broken
    )
    pick = random.Random(f"{seed} between")
    num_left = pick.choice([1, 5, 20, 60])
    while job.network.step():
        if not num_left or not job.coordinator.is_ready:
            continue
        apart = next((each for each in job.groups if len(_places_of(job, each)) > 1), None)
        num_left -= apart is not None
        if apart is not None and not num_left:
            job.network.crash(worker_id(pick.choice(apart)), notice_s=pick.choice(NOTICES_S))
    return job


def _places_of(job: VirtualJob, members: tuple[int, ...]) -> set[tuple[int, bool]]:
    """Where they are in their group's operations: agreements, and whether in an iteration."""
    found = set()
    for worker in (job.workers[each] for each in members):
        channel = job.channels[worker.group][members.index(worker.worker)]
        assert isinstance(channel, ShrinkingChannel)
        is_open = any(each.trainer.is_open for each in (worker, *worker.others))
        found.add((channel.agreed.number, is_open))
    return found
