"""Schedules in which workers fail and substitutes join in their places: played, and proved.

job = play_with_joins(seed)
prove_survival(job)
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from psdist.protocol.collected import JOIN, pack_join
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.joins import Joined
from tests.support.virtual.job import VirtualJob
from tests.support.virtual.schedule import Schedule
from tests.support.virtual.surviving import NOTICES_S, schedule_with_deaths
from tests.support.virtual.virtual_worker import VirtualWorker


class JoiningWorker(VirtualWorker):
    """Its script has a place for substitutes after each of its collectives, or (a seed says so)
    holds for them at any boundary of iterations; a substitute's continues where it joins."""

    job: JoiningJob

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.num_met = 0
        """Collectives of the script that have ended."""
        super().__init__(*arguments, **more)

    def script(self) -> Iterator[float | None]:
        if not self.seat.is_substitute:
            yield from super().script()
            return
        yield from self._until(
            lambda: self.core.membership.place is not None or self.core.membership.is_stopped
        )
        if self.core.membership.is_stopped:
            return
        yield 10 ** self.pick_more.uniform(-6, -2)  # it begins and prepares
        self.loop.begin_join()
        yield from self._until(
            lambda: self.core.membership.welcome is not None or self.core.membership.is_stopped
        )
        welcome = self.core.membership.welcome
        if welcome is None:
            return
        for each, clock in zip((self, *self.others), welcome.clocks, strict=True):
            each.take_slice(first_clock=clock)
            each.clock = clock
            each.draws = each.draws_of_nobody(clock)
            yield from each.bring()
        self.num_met, num_kept = self.job.met_by_seq[welcome.seq]
        self.kept = [[] for _ in range(num_kept)]
        yield from self.train(list(self.job.schedule.collectives[self.group])[self.num_met :])

    def draws_of_nobody(self, count: int) -> list[Any]:
        """For so many iterations before its first: nothing is made of them."""
        return [None] * count

    def meet(self, *, is_last: bool) -> Iterator[float | None]:
        yield from super().meet(is_last=is_last)
        self.num_met += 1
        if not self.job.holds:
            yield from self.join()

    def train_once(self) -> Iterator[float | None]:
        if self.first is None and self.job.holds and self.core.meetings.is_open:
            yield from self.hold()
        yield from super().train_once()

    def hold(self) -> Iterator[float | None]:
        """As psdist.script_checkpoints at a boundary."""
        meetings = self.core.meetings
        self.loop._do(meetings.hold(JOIN, clocks=[each.clock for each in (self, *self.others)]))
        yield from self._until(lambda: not meetings.is_held)
        if meetings.take() == JOIN:
            yield from self.join()

    def join(self) -> Iterator[float | None]:
        """All workers are here: substitutes may join."""
        if self.job.schedule.report_rate:
            self.report()
        clocks = [each.clock for each in (self, *self.others)]
        state = f"state-{self.clock}" if self.core.chief == self.worker else ""
        self.loop.begin_collective(JOIN, pack_join(clocks, state))
        self.job.met_by_seq[self.core.collectives.seq] = self.num_met, len(self.kept)
        yield from self._until(lambda: self.core.collectives.is_answered)
        self.core.collectives.take()


class JoiningJob(VirtualJob):
    workers: list[JoiningWorker]  # type: ignore[assignment]

    def __init__(self, schedule: Schedule, **more: Any) -> None:
        self.met_by_seq: dict[int, tuple[int, int]] = {}
        """Number of a collective in which substitutes may join -> collectives of the script that
        have ended then, and checkpoints that were made."""
        self.holds = random.Random(f"{schedule.seed} holds").random() < 0.5
        super().__init__(schedule, make_worker=JoiningWorker, **more)

    @property
    def joined(self) -> list[Joined]:
        return [each for each in self.reported if isinstance(each, Joined)]


def schedule_with_joins(
    seed: int, *, num_substitutes: int, base: Schedule | None = None
) -> Schedule:
    """Several groups with several collectives each, then the substitutes' groups.
    ``base``: a schedule with deaths; the rest comes from it."""
    pick = random.Random(f"{seed} joins")
    schedule = base or schedule_with_deaths(seed)
    num_groups, num_meetings = len(schedule.group_sizes), pick.randint(2, 5)
    most = pick.randint(3, 8)
    iterations = [most] * num_groups
    if pick.random() < 0.3:
        iterations = [pick.randint(most // 2, most) for _ in range(num_groups)]
    clocks = [pick.randint(0, min(iterations)) for _ in range(num_meetings)]
    collectives = [tuple(sorted(clocks))] * num_groups
    if pick.random() < 0.3:  # not all after the same iteration
        collectives = [
            tuple(sorted(pick.randint(0, count) for _ in range(num_meetings)))
            for count in iterations
        ]
    latest = max(map(max, collectives))
    return replace(
        schedule,
        group_sizes=(*schedule.group_sizes, *(1,) * num_substitutes),
        iterations=(*iterations, *(pick.randint(latest, most),) * num_substitutes),
        collectives=(*collectives, *(collectives[0],) * num_substitutes),
        compute_s=(*schedule.compute_s, *(10 ** pick.uniform(-6, -3),) * num_substitutes),
        middle_rate=0.0,
    )


def with_buddies(schedule: Schedule) -> Schedule:
    return replace(schedule, servers=max(3, schedule.servers), later=(), has_buddies=True)


def play_with_joins(
    seed: int,
    *,
    server: int | None = None,
    base: Schedule | None = None,
    proposals: Sequence[int] = (),
    **broken: Any,
) -> JoiningJob:
    """Some workers fail, each at a random event, except those of one group; some substitutes fail
    in turn, while they idle, before they join, or after that. ``server``: fails as well, at a
    random event; servers have buddies then. ``proposals``: after so many events the coordinator
    proposes other codecs."""
    pick = random.Random(f"{seed} substitutes")
    num_substitutes = pick.choice([1, 1, 2, 3])
    schedule = schedule_with_joins(seed, num_substitutes=num_substitutes, base=base)
    if server is not None:
        schedule = with_buddies(schedule)
    is_watched = server is None
    job = JoiningJob(
        schedule, max_deaths=99, num_substitutes=num_substitutes, is_watched=is_watched, **broken
    )
    first = len(job.workers) - num_substitutes
    safe = pick.randrange(len(job.groups) - num_substitutes)
    at_risk = [
        worker
        for group, members in enumerate(job.groups[:-num_substitutes])
        if group != safe
        for worker in members
    ]
    victims = pick.sample(at_risk, min(pick.choice([1, 1, 2]), len(at_risk)))
    wanted = sorted(int(10 ** pick.uniform(0.5, 2.8)) for _ in victims)
    substitutes = range(first, len(job.workers))
    doomed = {worker for worker in substitutes if pick.random() < 0.3}
    at = [] if server is None else [(int(10 ** pick.uniform(1.0, 3.2)), server_id(server))]
    """At which event who fails."""
    num_events = 0
    while job.network.step():
        if not job.coordinator.is_ready:
            continue
        num_events += 1
        if num_events in (schedule.proposals or proposals):
            job._propose(num_events)
        while wanted and num_events >= wanted[0]:
            wanted.pop(0)
            _crash(job, worker_id(victims.pop()), pick)
        for worker in sorted(doomed):
            if job.workers[worker].core.membership.place is not None or pick.random() < 1e-3:
                doomed.remove(worker)
                at.append((num_events + int(10 ** pick.uniform(0, 2.8)), worker_id(worker)))
        for each in [each for each in at if each[0] <= num_events]:
            at.remove(each)
            _crash(job, each[1], pick)
    for each in job.workers[first:]:
        if each.core.membership.welcome is None:
            for its in (each, *each.others):
                its.history.close()
    return job


def _crash(job: JoiningJob, peer: int, pick: random.Random) -> None:
    if peer in job.network.unfinished:
        job.network.crash(peer, notice_s=pick.choice(NOTICES_S))
