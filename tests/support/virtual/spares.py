"""Jobs with spares whose servers and spares fail one after the other, each at a seeded moment:
before, while and after a spare's copy is filled, and once it has taken a place.

job = play_with_spares(7)
job.met                                 # what has happened, and how often
prove_refills(job)                      # tests.support.virtual.refills
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from psdist.protocol.ids import COORDINATOR, is_spare, worker_id
from tests.support.virtual.refills import RefillJob, dead_processes, end, schedule_with_refills
from tests.support.virtual.schedule import Schedule
from tests.support.virtual.surviving import NOTICES_S

MOMENTS = (
    *("server", "server", "server", "server of a spare's source"),
    *("idle spare", "filled spare", "keeping spare", "serving spare", "source", "anybody"),
)


def schedule_with_spares(seed: int) -> Schedule:
    """As where shards are filled again."""
    pick = random.Random(f"{seed} spares")
    schedule = schedule_with_refills(seed)
    return replace(schedule, servers=pick.choice([2, 2, 3, 4]), spares=pick.choice([1, 1, 2, 3]))


def play_with_spares(
    seed: int, *, schedule: Schedule | None = None, coordinator_dies: bool = False, **broken: Any
) -> RefillJob:
    """Servers and spares fail; ``coordinator_dies``: it does, too, once, at any moment."""
    schedule = schedule or schedule_with_spares(seed)
    pick = random.Random(f"{seed} who dies of them")
    job = RefillJob(schedule, max_deaths=99, **broken)
    workers = [each for members in job.groups[1:] for each in members]
    victims = pick.sample(workers, min(2, len(workers))) if pick.random() < 0.25 else []
    num_deaths = pick.randrange(1, schedule.servers + schedule.spares)
    coordinator_wait = int(10 ** pick.uniform(0.5, 2.8)) if coordinator_dies else -1
    wait, num_since, num_ready = int(10 ** pick.uniform(0.0, 2.4)), 0, 0
    wanted = pick.choice(MOMENTS)
    while job.network.step():
        if job.errors and not job.may_end:
            return job
        if not job.coordinator.is_ready:
            continue
        num_ready += 1
        num_since += 1
        if num_ready == coordinator_wait and COORDINATOR in job.network.unfinished:
            job.met["coordinator while filling"] += any(
                each.next_keeper is not None for each in job.takeovers.shards
            )
            _end(job, COORDINATOR, "registrar", pick)
            continue
        if num_since < wait:
            continue
        if victims and pick.random() < 0.02:
            job.network.crash(worker_id(victims.pop()), notice_s=pick.choice(NOTICES_S))
        if not num_deaths:
            continue
        if num_since > 40 * wait + 400:  # what it waits for may never come
            wanted = "server"
        candidates = _candidates(job, wanted, spares_standby=coordinator_dies)
        if candidates:
            _end(job, pick.choice(candidates), wanted, pick)
            num_deaths -= 1
            num_since, wait, wanted = 0, int(10 ** pick.uniform(0.0, 2.2)), pick.choice(MOMENTS)
    return job


def _candidates(job: RefillJob, wanted: str, *, spares_standby: bool) -> list[int]:
    """Return the ranks that may fail now, if this is the moment."""
    takeovers = job.takeovers
    living = {each for each in takeovers.alive if each in job.network.unfinished} - {COORDINATOR}
    if spares_standby:
        living -= {job.coordinator_at, job.standby}
    servers = sorted(each for each in living if not is_spare(each))
    spares = sorted(each for each in living if is_spare(each))
    shards = takeovers.shards
    gone = dead_processes(job)
    is_at_rest = gone <= takeovers.failed.keys() and not takeovers.alone
    if wanted == "server":
        return servers if is_at_rest else []
    if wanted == "server of a spare's source":  # a place that a spare is to take
        kept = {each.host for each in shards if each.keeper is not None and is_spare(each.keeper)}
        return sorted(kept & living) if is_at_rest else []
    if wanted == "idle spare":
        load = takeovers._load()
        return [each for each in spares if not load[each]]
    if wanted == "filled spare":
        return sorted({each.next_keeper for each in shards} & set(spares))
    if wanted == "keeping spare":
        return sorted({each.keeper for each in shards} & set(spares)) if is_at_rest else []
    if wanted == "serving spare":
        return sorted({each.host for each in shards} & set(spares)) if is_at_rest else []
    if wanted == "source":
        return sorted({each.host for each in shards if each.next_keeper is not None} & living)
    return sorted(living)


def _end(job: RefillJob, victim: int, why: str, pick: random.Random) -> None:
    """``victim`` fails; what it was is noted."""
    shards = job.takeovers.shards
    job.met[why] += 1
    if is_spare(victim):
        job.met["a spare that serves"] += any(each.host == victim for each in shards)
        job.met["a spare that keeps"] += any(each.keeper == victim for each in shards)
        job.met["a spare that is filled"] += any(each.next_keeper == victim for each in shards)
    end(job, victim, pick, gone=dead_processes(job))
