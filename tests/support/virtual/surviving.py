"""Schedules in which workers fail and the others continue: played, and proved.

job = play_with_deaths(seed)
prove_survival(job)
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from psdist.codecs.wire import RAW_WIRE
from psdist.commands.check import check_sets_of
from psdist.history import EventKind
from psdist.protocol.ids import is_worker, worker_id, worker_of
from psdist.servers.protocol.coordinator import Complete, Coordinator, WriteMetrics
from psdist.servers.protocol.joins import Joins
from psdist.servers.protocol.views import Death, Survived
from tests.support.virtual.job import VirtualJob
from tests.support.virtual.proof import prove_values
from tests.support.virtual.schedule import Schedule

NOTICES_S = (0.0, 1e-4, 1e-2)
"""How much later than a message the others notice a death, at most."""


def schedule_with_deaths(seed: int) -> Schedule:
    """Return a schedule of several groups. Not all of them fail; the chief may."""
    schedule = replace(Schedule.from_seed(seed), mistake="", death=None, has_model=True)
    return with_several_groups(schedule)


def with_several_groups(schedule: Schedule) -> Schedule:
    """Exclude settings without an oracle for failures; at least two groups."""
    pick = random.Random(f"{schedule.seed} survivors")
    if len(schedule.group_sizes) < 2:
        sizes = (*schedule.group_sizes, *(1,) * pick.choice([1, 2]))
        num = len(sizes)
        schedule = replace(
            schedule,
            group_sizes=sizes,
            iterations=(schedule.iterations[0],) * num,
            collectives=(schedule.collectives[0],) * num if schedule.collectives else (),
            compute_s=tuple(schedule.compute_s[:1]) * num,
        )
    # The chief's values, and the norm for clipping, have an oracle for whole runs only.
    return replace(schedule, push_rate=0.0, clipping=0.0)


def play_with_deaths(seed: int, *, schedule: Schedule | None = None, **broken: Any) -> VirtualJob:
    """Some workers fail, each at a random event, but none of one group."""
    schedule = schedule or schedule_with_deaths(seed)
    pick = random.Random(f"{seed} deaths")
    job = VirtualJob(schedule, max_deaths=99, **broken)
    safe = pick.randrange(len(job.groups))
    at_risk = [
        worker for group, members in enumerate(job.groups) if group != safe for worker in members
    ]
    num_deaths = pick.choice([1, 1, 1, 2, min(3, len(at_risk))])
    victims = pick.sample(at_risk, min(num_deaths, len(at_risk)))
    wanted = sorted(int(10 ** pick.uniform(0.5, 3.2)) for _ in victims)
    num_events = 0
    while job.network.step():
        num_events += 1
        while wanted and num_events >= wanted[0] and job.coordinator.is_ready:
            wanted.pop(0)
            victim = worker_id(victims.pop())
            if victim in job.network.unfinished:
                job.network.crash(victim, notice_s=pick.choice(NOTICES_S))
    return job


def crash_in_turn(
    job: VirtualJob,
    victims: list[int],
    pick: random.Random,
    *,
    first: int,
    wait: Callable[[], int],
) -> None:
    """The job to its end; the last of ``victims`` fails after ``first`` events of those at which
    training may continue without the one before, and each other one after ``wait()`` more."""
    num_since = 0
    while job.network.step():
        if not victims or not job.coordinator.is_ready:
            continue
        num_since += 1
        if num_since >= first:
            victim = victims.pop()
            if victim in job.network.unfinished:
                job.network.crash(victim, notice_s=pick.choice(NOTICES_S))
            num_since, first = 0, wait()


def prove_survival(job: VirtualJob) -> None:
    """Every surviving rank has finished its work; the history keeps the mode's rules; every
    acknowledged update, also of failed workers, is in the final parameters once; and every value is
    what arithmetic says."""
    out = job.out_of_the_job
    dead = {worker_of(peer) for peer in job.network.dead if is_worker(peer)}
    assert not job.errors, job.errors
    assert not job.network.unfinished, f"wait for ever: {job.network.unfinished}"
    assert any(isinstance(each, Complete) for each in job.reported)
    for server in range(len(job.servers)):
        for each in job.loop_of(server).sets:
            each.core.check_invariants()
            assert not each.has_open_replies
    declared = {each.worker for each in job.reported if isinstance(each, Death)}
    assert declared <= dead
    assert not declared or any(isinstance(each, Survived) for each in job.reported)
    for worker in job.workers:
        number = worker.worker
        if number in out and (worker.core.membership.is_stopped or worker_id(number) in job.buried):
            continue
        if number in job.never_asked:
            continue
        assert number in dead or worker.core.membership.is_stopped, f"worker {number}"
    lived = [worker for worker in job.workers if worker.worker not in out]
    assert lived
    for worker in lived:
        welcome = worker.core.membership.welcome
        begun_at = 0 if welcome is None else welcome.clocks[0]
        assert worker.clock == max(begun_at, job.schedule.iterations[worker.group])
        assert worker.core.dead <= dead
    lines = [each.line for each in job.reported if isinstance(each, WriteMetrics)]
    for worker in lived:
        mine = sum(line["worker"] == worker.worker for line in lines)
        assert mine == worker.num_lines, f"lines of worker {worker.worker}"
    _prove_reached(job)
    histories = [each.history() for each in job.sets]
    report = check_sets_of(histories, None)
    assert not report.violations, report.violations[:5]
    # A group that had left when one of its workers failed is not declared failed.
    has_left = out & {
        worker
        for each in job.workers
        if each.core.membership.has_left
        for worker in job.groups[each.group]
    }
    assert report.proved or has_left or not report.num_uses, report.notes
    for each, history in zip(job.sets, histories, strict=True):
        _prove_acknowledged(each, history)
        # No record has the values that decide the lr of a failed worker's update.
        if job.wire is RAW_WIRE and not job.schedule.is_stale_aware:
            prove_values(each, history)


def _prove_reached(job: VirtualJob) -> None:
    """By set, the coordinator stores the most updates of a failed group that a chunk contains. A
    group whose leave had reached some servers before its failure may count or not."""
    assert job.seat is not None
    coordinator = job.seat.coordinator
    joins = coordinator.part(Joins) if isinstance(coordinator, Coordinator) else None
    if joins is None:
        return
    servers = [job.loop_of(server).sets for server in range(len(job.servers))]
    for set_index, sets in enumerate(zip(*servers, strict=True)):
        cores = [each.core for each in sets]
        of_all, of_some = [0], [0]
        for group in range(len(job.groups)):
            dead = [core for core in cores if core._membership.is_dead(group)]
            done = [
                chunk.clock.done[group] for core in dead for chunk in core.chunk_states.values()
            ]
            of_some += done
            of_all += done if len(dead) == len(cores) else []
        told = joins.reached[set_index : set_index + 1] or (0,)
        assert max(of_all) <= told[0] <= max(of_some), f"set {set_index}: {told}, {of_all}"


def _prove_acknowledged(job: Any, history: Any) -> None:
    applied: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for log in history.servers:
        events = log.events[log.events["kind"] == EventKind.APPLY]
        for chunk, group, clock in events[["chunk", "group", "clock"]].tolist():
            applied[chunk, group].append(clock)
    for key, clocks in applied.items():
        start = int(history.first[key[1]])
        expected = list(range(start, start + len(clocks)))
        assert clocks == expected, f"chunk and group {key}: {clocks}"
    for worker in job.workers:
        if not worker.core.transfers.owners:
            continue
        for chunk in worker.mine:
            version = worker.core.versions.get(chunk)
            # The clock of a reply to a pull is that of the next iteration.
            acknowledged = (
                0
                if version is None
                else worker.core.clock
                - (
                    chunk in worker.core.transfers.awaited
                    or chunk in worker.core.transfers.unpushed
                )
            )
            contained = int(history.first[worker.group]) + len(applied[chunk, worker.group])
            assert contained >= acknowledged, (
                f"worker {worker.worker}, chunk {chunk}: {acknowledged} were acknowledged"
            )


def deaths_of(job: VirtualJob) -> list[int]:
    """Workers whose death was declared."""
    return [each.worker for each in job.reported if isinstance(each, Death)]
