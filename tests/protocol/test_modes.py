"""Modes that change within a run, under seeded schedules: at known rounds, by the script in a
collective, or by the coordinator at any time while others train.

Each run is proved as every other (``proof`` of tests/support/virtual), the check judging each round
by its rule, and each value computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from psdist.commands.check import check
from psdist.history.rules.log.modes import changes_of
from psdist.history.rules.log.replay import ServerReplay
from psdist.protocol.collected import PREPARED, SET_MODE, pack_mode
from tests.support.virtual.job import VirtualJob, play
from tests.support.virtual.proof import prove
from tests.support.virtual.schedule import AnotherSet, Schedule, Size, with_modes
from tests.support.virtual.virtual_worker import VirtualWorker


def prove_seed(seed: int, size: Size = "small") -> VirtualJob:
    schedule = with_modes(seed, size=size)
    try:
        job = play(schedule)
        prove(job)
    except Exception as error:  # say which schedule, whatever went wrong
        raise AssertionError(f"{size} seed {seed}: {schedule}") from error
    return job


def test_schedules_whose_mode_changes_end_and_keep_the_rule_of_every_round() -> None:
    seen: Counter[str] = Counter()
    for seed in range(15):
        job = prove_seed(seed)
        seen[job.schedule.mode_by] += len(job.modes) - 1
    assert min(seen[by] for by in ("schedule", "script", "auto")) >= 2


class PreparesLater(VirtualWorker):
    """Sets the mode, and prepares another optimizer after that."""

    def script(self) -> Iterator[float | None]:  # type: ignore[override,return]
        (other,) = self.others
        yield from self.enter()
        yield from self._collective("prepare", PREPARED)
        for _ in range(3):
            yield from self.train_once()
        yield from self._collective(SET_MODE, pack_mode("ssp", 1))
        yield from other.enter()
        yield from self._collective("prepare", PREPARED)
        for _ in range(4):
            yield from self.train_once()
            yield from other.train_once()
        for each in (self, other):
            each.history.close()
        self.loop.finish({})
        yield from self._until(lambda: self.core.membership.is_stopped)


def test_a_set_that_is_prepared_later_begins_with_the_mode_of_then() -> None:
    schedule = Schedule(
        seed=1, servers=2, mode_rate=1.0, more_sets=(AnotherSet(2, 1, 1),), iterations=(7, 7)
    )
    job = VirtualJob(schedule, make_worker=PreparesLater)
    job.run()
    first, later = (check(each.history()) for each in job.sets)
    assert first.proved, first.violations
    assert later.proved, later.violations
    assert first.changes == ((4, "ssp:1"),)
    history = job.sets[1].history()
    for log in history.servers:
        assert changes_of(ServerReplay(history.run, log)) == ((0, 1),)  # ssp, with a bound of 1
