"""Jobs whose servers die one after the other, each at a seeded moment: between and during fills of
other copies.

job = play_refills(7)
job.num_died, job.met                   # what has happened
prove_refills(job)
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from psdist.errors import ServersLostError
from psdist.protocol.ids import REGISTRAR, server_id, worker_id
from psdist.servers.protocol.replication.records import Record
from psdist.servers.protocol.replication.takeovers import Takeovers
from psdist.servers.replication.recording import RecordingSetLoop
from psdist.servers.set_loop import SetLoop
from tests.support.virtual.job import VirtualJob
from tests.support.virtual.schedule import Schedule
from tests.support.virtual.surviving import NOTICES_S, prove_survival, schedule_with_deaths


class _CountingSetLoop(RecordingSetLoop):
    """Counts changes while a copy of its chunks is filled, of those that it has and has not."""

    met: Counter[str]

    def _tell_of(self, chunk: int, record: Record, *carried: memoryview) -> None:
        if self._untold:
            self.met["left out" if chunk in self._untold else "told meanwhile"] += 1
        super()._tell_of(chunk, record, *carried)


class RefillJob(VirtualJob):
    """With what has been met while it was played."""

    def __init__(self, schedule: Schedule, **more: Any) -> None:
        self.met: Counter[str] = Counter()
        super().__init__(schedule, is_watched=False, make_set=self._make_set, **more)
        self.may_end = False
        """Whether somebody has died who may have had the only copy of a shard."""

    def _make_set(self, *arguments: Any, **more: Any) -> SetLoop:
        made = _CountingSetLoop(*arguments, **more)
        made.met = self.met
        return made

    @property
    def takeovers(self) -> Takeovers:
        return self.registrar._takeovers


def schedule_with_refills(seed: int) -> Schedule:
    """Of long enough runs; workers die in every third of them."""
    schedule = schedule_with_deaths(seed)
    pick = random.Random(f"{seed} refills")
    iterations = tuple(each + pick.choice([8, 20]) for each in schedule.iterations)
    return replace(
        schedule,
        servers=pick.choice([3, 3, 4, 5]),
        iterations=iterations,
        num_chunks=schedule.num_chunks + pick.choice([6, 12]),
        later=(),
        has_buddies=True,
    )


def play_refills(seed: int, *, schedule: Schedule | None = None, **broken: Any) -> RefillJob:
    """All servers but the registrar may die, one after the other: when every shard has two copies
    again, or while one is filled, or right behind the one before."""
    schedule = schedule or schedule_with_refills(seed)
    pick = random.Random(f"{seed} who dies")
    job = RefillJob(schedule, max_deaths=99, **broken)
    workers = [each for members in job.groups[1:] for each in members]
    victims = pick.sample(workers, min(2, len(workers))) if pick.random() < 0.35 else []
    num_deaths = pick.randrange(1, schedule.servers)
    wait, num_since, wanted = int(10 ** pick.uniform(0.0, 2.4)), 0, "whole"
    while job.network.step():
        if job.errors and not job.may_end:
            return job
        if not job.registrar._is_ready:
            continue
        num_since += 1
        if num_since < wait:
            continue
        if victims and pick.random() < 0.02:
            job.network.crash(worker_id(victims.pop()), notice_s=pick.choice(NOTICES_S))
        if num_deaths and _strike(job, wanted, pick):
            num_deaths -= 1
            num_since, wait, wanted = 0, int(10 ** pick.uniform(0.0, 2.0)), _choose(pick)
    return job


def _choose(pick: random.Random) -> str:
    return pick.choice(["whole"] * 5 + ["next keeper"] * 2 + ["source", "anybody"])


def _strike(job: RefillJob, wanted: str, pick: random.Random) -> bool:
    """Somebody dies, if that is the moment for it."""
    takeovers = job.takeovers
    alive = [each for each in takeovers._alive if server_id(each) in job.network._actors]
    alive = [each for each in alive if each != REGISTRAR]
    filled = [each for each in takeovers._shards if each.next_keeper is not None]
    shards = takeovers._shards
    is_dead = {each for each in range(len(shards)) if server_id(each) in job.network._dead}
    if wanted == "whole":
        is_noticed = is_dead <= takeovers._names.keys()
        candidates = alive if is_noticed and not takeovers.alone else []
    elif wanted == "next keeper":
        candidates = [each.next_keeper for each in filled if each.next_keeper in alive]
    elif wanted == "source":
        candidates = [each.host for each in filled if each.host in alive]
    else:
        candidates = alive
    if not candidates:
        return False
    victim = pick.choice(candidates)
    gone = {*is_dead, victim}
    if any({each.host} | {each.keeper} - {None} <= gone for each in shards):
        job.may_end, job.dead = True, victim  # errors of ranks are what may follow
        job.met["only copy"] += 1
    job.met[wanted] += 1
    job.met["deaths"] += 1
    job.network.crash(server_id(victim), notice_s=pick.choice(NOTICES_S))
    return True


def prove_refills(job: RefillJob) -> None:
    """As where one server dies; where nobody had a shard any more, the job has ended with the one
    error that says so."""
    if job.errors:
        assert job.may_end, job.errors
        error = job.errors[REGISTRAR]
        assert isinstance(error, ServersLostError), error
        assert "both copies of a part of the model" in str(error)
        job.met["ended"] += 1
        return
    prove_survival(job)
    job.met["survived"] += 1
    job.met["another beginning"] += bool(job.met["next keeper"])
    job.met[f"{job.met['deaths']} deaths"] += 1
    job.met[job.schedule.mode] += 1
