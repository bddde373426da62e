"""Jobs with buddies whose network is cut for a while, again and again; ranks fail on both sides.

Nobody hears of a cut: messages come late, all that have passed between two sides at once, and words
of deaths with them. (What a cut that lasts means is psdist.reach's.)

job = play_with_cuts(7)
job.met                                 # what has happened, and how often
"""

from __future__ import annotations

import random
from dataclasses import replace

from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from tests.support.virtual.both_deaths import schedule_with_both
from tests.support.virtual.refills import RefillJob
from tests.support.virtual.schedule import Schedule
from tests.support.virtual.surviving import NOTICES_S


def schedule_with_cuts(seed: int) -> Schedule:
    """With messages that come twice in every second one."""
    pick = random.Random(f"{seed} cuts")
    rate = pick.choice([0.0, 0.3])
    return replace(
        schedule_with_both(seed),
        servers=pick.choice([2, 3, 4, 5]),
        duplicate_rate=rate,
        repeat_rate=rate,
    )


def play_with_cuts(seed: int) -> RefillJob:
    """At most one of coordinator and standby fails, and at most one server of a pair; and some
    workers, of all groups but one."""
    schedule = schedule_with_cuts(seed)
    pick = random.Random(f"{seed} who is cut off")
    job = RefillJob(schedule, max_deaths=99)
    everybody = [*map(server_id, range(schedule.servers))]
    everybody += [worker_id(each) for members in job.groups for each in members]
    workers = [each for members in job.groups[1:] for each in members]
    victims = [worker_id(each) for each in pick.sample(workers, min(2, len(workers)))]
    victims = victims[: pick.randrange(3)]
    if pick.random() < 0.7:
        victims.append(server_id(pick.choice([COORDINATOR, *range(schedule.servers)])))
    pick.shuffle(victims)
    num_cuts, wait, num_since = pick.choice([1, 3, 10]), int(10 ** pick.uniform(0.5, 2.5)), 0
    while job.network.step():
        if not job.coordinator.is_ready:
            continue
        num_since += 1
        if num_since < wait:
            continue
        num_since, wait = 0, int(10 ** pick.uniform(0.0, 2.0))
        if num_cuts and (not victims or pick.random() < 0.6):
            num_cuts -= 1
            side = pick.sample(everybody, pick.randrange(1, len(everybody)))
            job.network.cut(side, 10 ** pick.uniform(-4, -1))
            job.met["cuts"] += 1
        elif victims:
            victim = victims.pop()
            if victim in job.network.unfinished:
                what = "worker" if victim >= worker_id(0) else "server"
                job.met["registrar" if victim == COORDINATOR else what] += 1
                job.met["behind a cut"] += any(
                    until_s > job.network.now_s for _, until_s in job.network._cuts
                )
                job.network.crash(victim, notice_s=pick.choice(NOTICES_S))
    return job
