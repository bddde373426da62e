"""Jobs whose spares take the places of servers and of workers, in either order: workers,
servers and spares fail, each at a seeded moment.

job = play_with_shared_spares(7)
prove_refills(job)                      # tests.support.virtual.refills
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from psdist.protocol.ids import COORDINATOR, is_spare, spare_id, worker_id
from psdist.servers.protocol.joins import Joins
from tests.support.coordinators import part_of
from tests.support.virtual.job import spare_seat
from tests.support.virtual.joining import JoiningJob, schedule_with_joins, with_buddies
from tests.support.virtual.refills import RefillJob, dead_processes, end
from tests.support.virtual.schedule import Schedule

MOMENTS = (
    *("server", "server", "worker", "worker", "idle spare", "keeping spare", "serving spare"),
    *("asked spare", "ready spare", "joined spare", "server while asked", "anybody"),
)


class SharedSparesJob(JoiningJob, RefillJob):
    """Both in one."""

    @property
    def of_workers(self) -> list[int]:
        """Spares that live and were asked to be workers."""
        asked = [number for number, each in enumerate(self.spares) if spare_seat(each).replace]
        return [each for each in asked if spare_id(each) not in self.network.dead]


def schedule_with_shared_spares(seed: int) -> Schedule:
    pick = random.Random(f"{seed} shared spares")
    num_spares = pick.choice([1, 2, 2, 3, 4])
    schedule = with_buddies(schedule_with_joins(seed, num_substitutes=num_spares))
    more = pick.choice([4, 10])
    return replace(
        schedule,
        spares=num_spares,
        servers=pick.choice([2, 3, 3, 4]),
        iterations=tuple(each + more for each in schedule.iterations),
    )


def play_with_shared_spares(
    seed: int, *, coordinator_dies: bool = False, **broken: Any
) -> SharedSparesJob:
    """``coordinator_dies``: it does, too, once, at any moment; its standby lives on."""
    pick = random.Random(f"{seed} who dies of those with spares")
    schedule = schedule_with_shared_spares(seed)
    num_spares = schedule.spares
    job = SharedSparesJob(schedule, max_deaths=99, num_substitutes=num_spares, **broken)
    at_risk = _at_risk(job, pick)
    num_deaths = pick.randrange(1, 3 + num_spares)
    coordinator_wait = int(10 ** pick.uniform(0.5, 2.8)) if coordinator_dies else -1
    wait, num_since, num_ready = int(10 ** pick.uniform(0.0, 2.2)), 0, 0
    wanted = pick.choice(["server", "worker"])
    while job.network.step():
        if job.errors and not job.may_end:
            return job
        if not job.coordinator.is_ready:
            continue
        num_ready += 1
        num_since += 1
        if num_ready == coordinator_wait and COORDINATOR in job.network.unfinished:
            job.met["coordinator while a spare is asked"] += bool(
                part_of(job.coordinator, Joins).asked
            )
            _end(job, COORDINATOR, "registrar", pick)
        if num_since < wait or not num_deaths:
            continue
        if num_since > 20 * wait + 200:  # what it waits for may never come
            wanted = "worker"
        candidates = _candidates(job, wanted, at_risk, spares_standby=coordinator_dies)
        if candidates:
            _end(job, pick.choice(candidates), wanted, pick)
            num_deaths -= 1
            num_since, wait, wanted = 0, int(10 ** pick.uniform(0.0, 2.0)), pick.choice(MOMENTS)
        elif num_since > 40 * wait + 400:
            num_deaths = 0
    for each in job.workers[-num_spares:]:
        if each.core.membership.welcome is None:
            for its in (each, *each.others):
                its.history.close()
    _note_met(job)
    return job


def _at_risk(job: SharedSparesJob, pick: random.Random) -> list[int]:
    """Spare one group: none of its workers fails."""
    groups = job.groups[: -job.schedule.spares]
    safe = pick.randrange(len(groups))
    return [
        worker_id(worker)
        for group, members in enumerate(groups)
        if group != safe
        for worker in members
    ]


def _candidates(
    job: SharedSparesJob, wanted: str, at_risk: list[int], *, spares_standby: bool
) -> list[int]:
    """Return the ranks that may fail now, if this is the moment."""
    actors, takeovers = {*job.network.unfinished}, job.takeovers
    joins = part_of(job.coordinator, Joins)
    workers = [each for each in at_risk if each in actors]
    processes = {each for each in takeovers.alive if each in actors} - {COORDINATOR}
    if spares_standby:
        processes -= {job.coordinator_at, job.standby}
    servers = sorted(each for each in processes if not is_spare(each))
    spares = sorted(each for each in processes if is_spare(each))
    shards = takeovers.shards
    is_at_rest = _dead_processes(job) <= takeovers.failed.keys() and not takeovers.alone
    first = len(job.workers) - job.schedule.spares
    asked = [spare_id(each - first) for each in sorted(joins.asked)]
    if wanted == "worker":
        return workers
    if wanted == "server":
        return servers if is_at_rest else []
    if wanted == "server while asked":
        return servers if is_at_rest and asked else []
    if wanted == "idle spare":
        return [each for each in spares if each in takeovers.idle_spares]
    if wanted == "keeping spare":
        return sorted({each.keeper for each in shards} & set(spares)) if is_at_rest else []
    if wanted == "serving spare":
        return sorted({each.host for each in shards} & set(spares)) if is_at_rest else []
    if wanted == "asked spare":
        return [each for each in asked if each in actors]
    if wanted == "ready spare":
        ready = [spare_id(each - first) for each in joins.ready]
        return [each for each in ready if each in actors]
    if wanted == "joined spare":
        joined = {spare_id(each.worker - first) for each in job.joined}
        return sorted(joined & actors)
    return sorted({*workers, *servers, *spares} & actors)


def _dead_processes(job: SharedSparesJob) -> set[int]:
    """Servers, and spares that were for them."""
    return dead_processes(
        job, [at for at, each in enumerate(job.spares) if not spare_seat(each).replace]
    )


def _end(job: SharedSparesJob, victim: int, why: str, pick: random.Random) -> None:
    job.met[why] += 1
    end(job, victim, pick, gone=_dead_processes(job))


def _note_met(job: SharedSparesJob) -> None:
    keeps = {each.keeper for each in job.takeovers.shards}
    serves = {each.host for each in job.takeovers.shards}
    joined = bool(job.joined)
    job.met["joined"] += joined
    job.met["joined, and a spare has a shard"] += joined and any(
        is_spare(each) for each in keeps | serves if each is not None
    )
    job.met["joined behind a move"] += any(
        each.replace is not None and bool(each.heard) for each in map(spare_seat, job.spares)
    )
    job.met["several sets"] += joined and bool(job.others)
