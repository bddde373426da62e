"""Schedules in which the mode changes, of servers with buddies, and servers or the coordinator
fail: at any moment, or between the two phases of a change.

    job = play_with_mode_buddies(7)
    job.met                                 # what had fallen together
    play_mode_refills(7)                    # server after server, as psdist.support.virtual.refills

Where the coordinator changes the mode it decides by reports of groups, here of made-up times and
by a few rounds at a time: so its standby decides the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from psdist.protocol.control import Progress
from psdist.protocol.ids import COORDINATOR, server_id
from psdist.servers.protocol.modes import ModeChanged, ModeChanges
from tests.support.coordinators import part_of
from tests.support.virtual.refills import RefillJob, play_refills
from tests.support.virtual.schedule import Schedule, with_modes
from tests.support.virtual.surviving import NOTICES_S, with_several_groups
from tests.support.virtual.virtual_worker import VirtualWorker

ROUNDS_IN_WINDOW = 2


def schedule_with_mode_buddies(seed: int) -> Schedule:
    schedule = with_modes(seed)
    pick = random.Random(f"{seed} mode buddies")
    longer = pick.choice([0, 6, 12])
    return replace(
        schedule,
        is_auto=bool(schedule.proposals),
        proposals=(),
        mode="sync" if schedule.proposals else schedule.mode,
        servers=max(pick.choice([2, 2, 3]), schedule.servers),
        iterations=tuple(each + longer for each in schedule.iterations),
        has_buddies=True,
    )


def schedule_with_ladder_buddies(seed: int) -> Schedule:
    """In sync, of runs in which psdist chooses the codecs."""
    schedule = schedule_with_mode_buddies(seed)
    return replace(
        schedule,
        mode="sync",
        later=(),
        more_sets=(),
        is_auto=False,
        mode_rate=0.0,
        iterations=tuple(each + 12 for each in schedule.iterations),
    )


class Telling(VirtualWorker):
    """Tells the coordinator, where that decides, what each round has taken; of the times so much is
    true that groups are slow by turns, or all alike."""

    def train_once(self) -> Iterator[float | None]:
        before = self.clock
        yield from super().train_once()
        schedule = self.job.schedule
        is_told = schedule.is_auto or self.job.wire.is_ladder
        if not is_told or self.seat.place or self.set_index or self.clock != before + 1:
            return
        is_even = random.Random(f"{schedule.seed} even {before // 5}").random() < 0.4
        is_slow = random.Random(f"{schedule.seed} slow {before}").randrange(len(self.job.groups))
        own_us = 100_000 if is_slow == self.group and not is_even else 1_000
        is_slow_link = random.Random(f"{schedule.seed} link {before // 6}").random() < 0.5
        is_ladder = self.job.wire.is_ladder
        progress = Progress(
            worker=self.worker,
            clock=self.clock,
            samples=0,
            first_round=before,
            own_us=[1_000 if is_ladder else own_us],
            waits_us=[100_000 if is_ladder and is_slow_link else 10],
            errors_ppm=[round(1e6 * self.trainer.coding_error)] * is_ladder,
        )
        self.loop.transport.send_control(COORDINATOR, progress)


class ModeBuddiesJob(RefillJob):
    """One server fails, or the coordinator; half of them between the phases of a change, as far as
    there is one, and the others at a random event; ``is_behind``: all a few events after the first
    change that was not known from the start."""

    def __init__(
        self, schedule: Schedule, *, victims: tuple[int, ...], is_behind: bool, **more: Any
    ) -> None:
        super().__init__(schedule, make_worker=Telling, **more)
        pick = self._pick = random.Random(f"{schedule.seed} mode buddies die")
        self._victim: int | None = pick.choice(victims)
        self._is_between = pick.random() < 0.6
        self._at = int(10 ** pick.uniform(1.5, 3.3))
        self._is_behind = is_behind
        self._behind = int(10 ** pick.uniform(0.0, 2.0))

    def run(self) -> None:
        num_events = 0
        while self.network.step():
            num_events += 1
            if self._victim is None or not self.coordinator.is_ready:
                continue
            is_settling = part_of(self.coordinator, ModeChanges).is_settling
            is_time = num_events >= self._at
            is_changing = self.schedule.mode_by in ("auto", "script") or self.wire.is_ladder
            if self._is_between and is_changing:
                is_time = is_settling and self._pick.random() < 0.1
            if self._is_behind:
                self._behind -= any(isinstance(each, ModeChanged) for each in self.reported)
                is_time = self._behind < 0
            if is_time and self._victim in self.network.unfinished:
                self.met["between the phases"] += is_settling
                self.met["of the coordinator"] += self._victim == COORDINATOR
                self.met["a change before"] += len(self.modes) > 1 or len(self.codecs) > 1
                self.network.crash(self._victim, notice_s=self._pick.choice(NOTICES_S))
                self._victim = None

    @property
    def has_moved(self) -> bool:
        """Whether somebody has failed, and another one has continued."""
        return any(loop.hosted for loop in self.servers)


def play_with_mode_buddies(
    seed: int,
    *,
    coordinator_dies: bool = False,
    is_behind: bool = False,
    schedule: Schedule | None = None,
    **more: Any,
) -> ModeBuddiesJob:
    schedule = schedule or schedule_with_mode_buddies(seed)
    victims = (
        (COORDINATOR,) if coordinator_dies else tuple(map(server_id, range(1, schedule.servers)))
    )
    with mock.patch("psdist.controller.WINDOW", ROUNDS_IN_WINDOW):
        job = ModeBuddiesJob(schedule, victims=victims, is_behind=is_behind, **more)
        job.run()
    return job


def play_mode_refills(seed: int, **more: Any) -> RefillJob:
    """Server after server, workers, and perhaps the coordinator."""
    schedule = with_several_groups(schedule_with_mode_buddies(seed))
    pick = random.Random(f"{seed} mode refills")
    schedule = replace(
        schedule,
        servers=pick.choice([3, 4]),
        iterations=tuple(each + pick.choice([8, 16]) for each in schedule.iterations),
        num_chunks=schedule.num_chunks + 6,
    )
    with mock.patch("psdist.controller.WINDOW", ROUNDS_IN_WINDOW):
        job = play_refills(seed, schedule=schedule, make_worker=Telling, **more)
    job.met["modes"] += len(job.modes)
    return job
