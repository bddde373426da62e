"""Jobs whose servers fail one after the other, each at a seeded moment: between and during fills of
other copies.

job = play_refills(7)
job.met                                 # what has happened, and how often
prove_refills(job)
play_refills(7, coordinator_dies=True)    # the coordinator, too, once
play_and_prove(play_refills, range(9))  # all that is to be proved, of many
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from psdist.errors import PsdistError, ServersLostError
from psdist.protocol.ids import COORDINATOR, is_spare, is_worker, server_id, spare_id, worker_id
from psdist.servers.protocol.replication.records import ChunkChange, Record
from psdist.servers.protocol.takeovers import Takeovers
from psdist.servers.replication.recording import RecordingSetLoop
from psdist.servers.set_loop import SetLoop
from tests.support.coordinators import part_of
from tests.support.virtual.job import VirtualJob
from tests.support.virtual.schedule import Schedule
from tests.support.virtual.surviving import NOTICES_S, prove_survival, schedule_with_deaths


class _CountingSetLoop(RecordingSetLoop):
    """Counts changes while a copy of its chunks is filled, of those that it has and has not."""

    met: Counter[str]

    def _append(self, record: Record, *carried: memoryview) -> None:
        if self._missing and isinstance(record, ChunkChange):
            self.met["left out" if record.chunk in self._missing else "told meanwhile"] += 1
        super()._append(record, *carried)


class RefillJob(VirtualJob):
    """With what has been met while it was played."""

    def __init__(self, schedule: Schedule, **more: Any) -> None:
        self.met: Counter[str] = Counter()
        super().__init__(schedule, is_watched=False, make_set=self._make_set, **more)
        self.may_end = False
        """True if a failed process may have had the only copy of a shard."""

    def _make_set(self, *arguments: Any, **more: Any) -> SetLoop:
        made = _CountingSetLoop(*arguments, **more)
        made.met = self.met
        return made

    @property
    def takeovers(self) -> Takeovers:
        return part_of(self.coordinator, Takeovers)


def schedule_with_refills(seed: int) -> Schedule:
    """Return a schedule with long enough runs; workers fail in every third of them."""
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


def play_refills(
    seed: int, *, schedule: Schedule | None = None, coordinator_dies: bool = False, **broken: Any
) -> RefillJob:
    """All servers but the coordinator may fail, one after the other: when every shard has two
    copies again, or while one is filled, or directly after the one before. ``coordinator_dies``: it
    does, too, before them, while a copy is filled, or when all are whole; its standby lives on,
    mostly."""
    schedule = schedule or schedule_with_refills(seed)
    pick = random.Random(f"{seed} who dies")
    job = RefillJob(schedule, max_deaths=99, **broken)
    workers = [each for members in job.groups[1:] for each in members]
    victims = pick.sample(workers, min(2, len(workers))) if pick.random() < 0.35 else []
    num_deaths = pick.randrange(1, schedule.servers)
    wait, num_since, wanted = int(10 ** pick.uniform(0.0, 2.4)), 0, "whole"
    coordinator_dies_when = _choose_when(seed) if coordinator_dies else None
    while job.network.step():
        if job.errors and not job.may_end:
            return job
        if not job.coordinator.is_ready:
            continue
        num_since += 1
        if num_since < wait:
            continue
        if victims and pick.random() < 0.02:
            job.network.crash(worker_id(victims.pop()), notice_s=pick.choice(NOTICES_S))
        if coordinator_dies_when == "first":
            _end_coordinator(job, "coordinator first", pick)
            coordinator_dies_when, num_since = None, 0
            continue
        if coordinator_dies_when and _is_time(job, coordinator_dies_when, pick):
            _end_coordinator(job, f"coordinator {coordinator_dies_when}", pick)
            coordinator_dies_when = None
            continue
        if num_deaths and _strike(job, wanted, pick, spares_standby=coordinator_dies):
            num_deaths -= 1
            num_since, wait, wanted = 0, int(10 ** pick.uniform(0.0, 2.0)), _choose(pick)
    return job


def _choose(pick: random.Random) -> str:
    return pick.choice(["whole"] * 5 + ["next keeper"] * 2 + ["source", "anybody"])


def _choose_when(seed: int) -> str:
    """When the coordinator fails: first, while another one's shard is filled or its own, or when
    all have a replica again."""
    moments = ["first", "filling", "filling", "whole", "source"]
    return random.Random(f"{seed} registrar").choice(moments)


def _is_time(job: RefillJob, when: str, pick: random.Random) -> bool:
    takeovers = job.takeovers
    if not job.met["deaths"] or pick.random() > 0.1:
        return False
    if when in ("filling", "source"):
        hosts = {each.host for each in takeovers.shards if each.next_keeper is not None}
        return bool(hosts) and (COORDINATOR in hosts) == (when == "source")
    return _dead_servers(job) <= takeovers.failed.keys() and not takeovers.alone


def _dead_servers(job: RefillJob) -> set[int]:
    return {each for each in range(job.schedule.servers) if server_id(each) in job.network.dead}


def _end_coordinator(job: RefillJob, moment: str, pick: random.Random) -> None:
    if COORDINATOR in job.network.unfinished:
        job.met[moment] += 1
        end(job, COORDINATOR, pick, gone=_dead_servers(job))


def _strike(job: RefillJob, wanted: str, pick: random.Random, *, spares_standby: bool) -> bool:
    """Somebody fails, if that is the moment for it."""
    takeovers = job.takeovers
    alive = [each for each in takeovers.alive if server_id(each) in job.network.unfinished]
    alive = [each for each in alive if each != COORDINATOR]
    if spares_standby and wanted != "anybody":
        alive = [each for each in alive if each not in (job.coordinator_at, job.standby)]
    filled = [each for each in takeovers.shards if each.next_keeper is not None]
    if wanted == "whole":
        is_noticed = _dead_servers(job) <= takeovers.failed.keys()
        candidates = alive if is_noticed and not takeovers.alone else []
    elif wanted == "next keeper":
        candidates = [each.next_keeper for each in filled if each.next_keeper in alive]
    elif wanted == "source":
        candidates = [each.host for each in filled if each.host in alive]
    else:
        candidates = alive
    if not candidates:
        return False
    job.met[wanted] += 1
    job.met["behind the coordinator"] += COORDINATOR in job.network.dead
    end(job, pick.choice(candidates), pick, gone=_dead_servers(job))
    return True


def end(job: RefillJob, victim: int, pick: random.Random, *, gone: set[int]) -> None:
    """``victim`` fails, when ``gone`` have failed that could have a shard; whether it may have had
    the only copy of something is noted."""
    gone = {*gone, victim}
    is_alone = any({each.host} | {each.keeper} - {None} <= gone for each in job.takeovers.shards)
    if is_alone or job.ends_without(gone):
        job.may_end, job.dead = True, victim  # errors of ranks are what may follow
        job.met["only copy"] += 1
    job.met["deaths"] += 1
    job.network.crash(victim, notice_s=pick.choice(NOTICES_S))


def dead_processes(job: RefillJob, spares: Iterable[int] | None = None) -> set[int]:
    """Servers, and of ``spares``, by number (None: all), that have failed."""
    numbers = range(job.schedule.spares) if spares is None else spares
    everybody = {*map(server_id, range(job.schedule.servers)), *map(spare_id, numbers)}
    return {each for each in everybody if each in job.network.dead}


def prove_refills(job: RefillJob) -> None:
    """Prove as where one server fails; where no process had a shard any more, the job has ended
    with one error that names it."""
    if job.errors:
        assert job.may_end, job.errors
        for error in _told_by(job):
            assert isinstance(error, ServersLostError), job.errors
            assert "both copies of" in str(error)
        job.met["ended"] += 1
        return
    prove_survival(job)
    job.met["survived"] += 1
    job.met["another beginning"] += bool(job.met["next keeper"])
    job.met[f"{job.met['deaths']} deaths"] += 1
    job.met[job.schedule.mode] += 1


def _told_by(job: RefillJob) -> list[Any]:
    """Errors of the coordinator; where no process can be the coordinator, of all other ranks."""
    assert job.coordinator_log is not None
    could_be = job.coordinator_at, job.standby, job.coordinator_log._nominee
    living = [peer for peer in could_be if peer not in {*job.network.dead, None}]
    if living:
        return [job.errors.get(living[0])]
    assert not job.network.unfinished, f"wait for ever: {job.network.unfinished}"
    return list(job.errors.values())


def prove_bits(job: RefillJob) -> None:
    """In sync without a failed worker, the bits are those of the run without deaths."""
    has_lost_worker = any(map(is_worker, job.network.dead))
    if job.errors or job.schedule.modes != ("sync",) or has_lost_worker or not job.met["deaths"]:
        return
    whole = VirtualJob(
        job.schedule,
        max_deaths=99,
        is_watched=False,
        num_substitutes=job.num_substitutes,
        wire=job.wire,
    )
    whole.run()
    for mine, other in zip(job.sets, whole.sets, strict=True):
        assert torch.equal(mine.parameters(), other.parameters())
    job.met["same bits"] += 1


def play_and_prove(
    play: Callable[..., RefillJob], seeds: Iterable[int], **broken: Any
) -> Counter[str]:
    """Play seeds; return the situations met, and how often."""
    met: Counter[str] = Counter()
    for seed in seeds:
        try:
            job = play(seed, **broken)
            prove_refills(job)
            prove_bits(job)
        except (AssertionError, PsdistError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        met += job.met
        met["served by a spare at the end"] += any(
            is_spare(each.host) and each.host not in job.network.dead
            for each in job.takeovers.shards
        )
    return met


def by_hand(play: Callable[..., RefillJob]) -> None:
    """``FIRST LAST [coordinator]``: these seeds, all of them, saying which are bad."""
    met: Counter[str] = Counter()
    num_bad = 0
    more = {"coordinator_dies": True} if sys.argv[3:] == ["registrar"] else {}
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            met += play_and_prove(play, [seed], **more)
        except Exception as error:
            num_bad += 1
            print(f"{seed}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{num_bad} bad", met)
