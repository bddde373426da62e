"""Jobs whose coordinator fails, and who has its place, and who has that one's, each at a seeded
moment: when there is a standby again, and before; and so do standbys.

job = play_successions(7)
job.num_successions                     # how many have become the coordinator
prove_refills(job)                      # tests.support.virtual.refills
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from psdist.protocol.ids import COORDINATOR, is_spare, is_worker, worker_id
from tests.support.virtual.refills import RefillJob, dead_processes, end, schedule_with_refills
from tests.support.virtual.schedule import Schedule
from tests.support.virtual.surviving import NOTICES_S

MOMENTS = (
    *("registrar", "registrar", "registrar", "registrar"),
    *("deputy", "deputy", "appointed", "entrusted", "coordinator at once", "server"),
)


def schedule_with_successions(seed: int) -> Schedule:
    """As where shards are filled again, and longer; in half of them there are spares."""
    pick = random.Random(f"{seed} successions")
    schedule = schedule_with_refills(seed)
    spares = pick.choice([0, 1, 2, 3])
    more = pick.choice([10, 20])
    return replace(
        schedule,
        servers=pick.choice([2, 2, 3, 4] if spares else [3, 4, 5]),
        spares=spares,
        iterations=tuple(each + more for each in schedule.iterations),
    )


def play_successions(seed: int, *, schedule: Schedule | None = None, **broken: Any) -> RefillJob:
    """Coordinators and standbys fail, and now and then another server or spare."""
    schedule = schedule or schedule_with_successions(seed)
    pick = random.Random(f"{seed} who dies of those that register")
    job = RefillJob(schedule, max_deaths=99, **broken)
    workers = [each for members in job.groups[1:] for each in members]
    victims = pick.sample(workers, min(2, len(workers))) if pick.random() < 0.25 else []
    num_deaths = schedule.servers + schedule.spares - pick.choice([1, 1, 2])
    wait, num_since = int(10 ** pick.uniform(0.0, 2.0)), 0
    wanted = pick.choice(MOMENTS)
    while job.network.step():
        if job.errors and not job.may_end:
            return job
        if not job.coordinator.is_ready or not num_deaths:
            continue
        num_since += 1
        if num_since < wait:
            continue
        if victims and pick.random() < 0.02:
            job.network.crash(worker_id(victims.pop()), notice_s=pick.choice(NOTICES_S))
        if num_since > 40 * wait + 400:  # what it waits for may never come
            wanted = "registrar"
        victim = _victim(job, wanted, pick)
        if victim is None or victim not in job.network.unfinished:
            continue
        _end(job, victim, wanted, pick)
        num_deaths -= 1
        num_since, wait, wanted = 0, int(10 ** pick.uniform(0.0, 2.0)), pick.choice(MOMENTS)
    job.met[f"{job.num_successions} successions"] += not job.errors
    job.met["coordinator in a spare"] += is_spare(job.coordinator_at)
    return job


def _victim(job: RefillJob, wanted: str, pick: random.Random) -> int | None:
    """Return the rank that may fail now, if this is the moment."""
    coordinator_log, takeovers = job.coordinator_log, job.takeovers
    assert coordinator_log is not None
    is_whole = job.standby in job.network.unfinished and not takeovers.alone
    is_at_rest = is_whole and dead_processes(job) <= takeovers.failed.keys()
    if wanted == "registrar":
        return job.coordinator_at if is_at_rest else None
    if wanted == "deputy":
        return job.standby if is_at_rest else None
    if wanted == "appointed":
        return coordinator_log._nominee
    if wanted == "entrusted":  # one of the two, while that is under way
        either = job.coordinator_at, coordinator_log.standby
        return pick.choice(either) if coordinator_log.standby not in (None, job.standby) else None
    if wanted == "coordinator at once":  # whether or not there is a copy of its shard by then
        return job.coordinator_at if is_whole or pick.random() < 0.002 else None
    others = set(takeovers.alive) - {job.coordinator_at, job.standby}
    return pick.choice(sorted(others)) if others and is_at_rest else None


def _end(job: RefillJob, victim: int, why: str, pick: random.Random) -> None:
    """``victim`` fails; what it was is noted."""
    job.met[why] += 1
    job.met["the first coordinator"] += victim == COORDINATOR
    job.met["another coordinator"] += victim == job.coordinator_at != COORDINATOR
    job.met["behind workers"] += any(map(is_worker, job.network.dead))
    end(job, victim, pick, gone=dead_processes(job))
