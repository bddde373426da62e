"""Schedules in which the mode changes, or psdist's codecs do, and workers fail.

job = play_with_mode_deaths(seed)
prove_survival(job)
job.met                                     # what had fallen together
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from psdist.protocol.ids import worker_id
from psdist.servers.protocol.modes import ModeChanges
from tests.support.coordinators import part_of
from tests.support.virtual.job import VirtualJob
from tests.support.virtual.schedule import Schedule, with_modes
from tests.support.virtual.surviving import NOTICES_S, with_several_groups


def schedule_with_mode_deaths(seed: int) -> Schedule:
    return with_several_groups(with_modes(seed))


class ModeDeathsJob(VirtualJob):
    """Some workers fail, of all groups but one: at a random event, or while a change of the mode is
    proposed and servers have not all answered. The coordinator proposes where its schedule says so,
    and (a seed says so) directly after a death, of which servers are being informed."""

    def __init__(self, schedule: Schedule, **broken: Any) -> None:
        self.met: Counter[str] = Counter()
        super().__init__(schedule, max_deaths=99, **broken)
        pick = self._pick = random.Random(f"{schedule.seed} mode deaths")
        safe = pick.randrange(len(self.groups))
        at_risk = [
            worker
            for group, members in enumerate(self.groups)
            if group != safe
            for worker in members
        ]
        num = pick.choice([1, 1, 1, 2, min(3, len(at_risk))])
        victims = pick.sample(at_risk, min(num, len(at_risk)))
        self._between = [each for each in victims if pick.random() < 0.5]
        """That fail between the two phases of a change, as far as there is one."""
        self._at = sorted(
            (int(10 ** pick.uniform(0.5, 3.2)), each)
            for each in victims
            if each not in self._between
        )
        is_by_psdist = schedule.mode_by == "auto" or self.wire.is_ladder
        self._proposes_behind = is_by_psdist and pick.random() < 0.5

    def run(self) -> None:
        num_events = 0
        while self.network.step():
            num_events += 1
            coordinator = self.coordinator
            if num_events in (self.schedule.proposals or self.proposals):
                self._propose(num_events)
            if not coordinator.is_ready:
                continue
            while self._at and num_events >= self._at[0][0]:
                self._strike(self._at.pop(0)[1])
            if (
                self._between
                and part_of(coordinator, ModeChanges).is_settling
                and self._pick.random() < 0.1
            ):
                self._strike(self._between.pop())
                self.met["between the phases"] += 1
            if self._proposes_behind and coordinator.membership.is_settling:
                self.met["proposed while a death was told"] += part_of(
                    coordinator, ModeChanges
                ).may_change(coordinator)
                self._propose(num_events)
                self._proposes_behind = False

    def _strike(self, worker: int) -> None:
        if worker_id(worker) in self.network.unfinished:
            self.network.crash(worker_id(worker), notice_s=self._pick.choice(NOTICES_S))


def play_with_mode_deaths(
    seed: int, *, schedule: Schedule | None = None, **broken: Any
) -> ModeDeathsJob:
    job = ModeDeathsJob(schedule or schedule_with_mode_deaths(seed), **broken)
    job.run()
    return job
