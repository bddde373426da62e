"""Backup groups under seeded schedules: rounds that close without some groups, with collectives,
pulls, saves, checkpoints, values that are set, skipped iterations and groups that leave; and the
same sets of contributors once more, whatever the network does.

Each run is proved as every other (``proof`` of tests/support/virtual), each value computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from psdist.codecs import RAW
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.wire import Wire
from psdist.commands.check import check
from tests.support.backup_sets import replay, sets_of
from tests.support.history.summaries import summary_of
from tests.support.virtual.job import Schedule, VirtualJob, play
from tests.support.virtual.proof import prove
from tests.support.virtual.schedule import Size, with_backup
from tests.support.virtual.virtual_worker import VirtualWorker

ROUNDS = 60
SCHEDULE = Schedule(
    seed=1,
    backup=1,
    backup_every=10,
    group_sizes=(1, 2, 1, 1),
    iterations=(ROUNDS,) * 4,
    collectives=((30,),) * 4,
    compute_s=(1e-3,) * 4,
    momentum=0.5,
    settings_rate=1.0,
    num_chunks=4,
    servers=2,
    jitter_s=1e-5,
)


def prove_seed(seed: int, size: Size = "small") -> VirtualJob:
    schedule = with_backup(seed, size=size)
    try:
        job = play(schedule)
        prove(job)
    except Exception as error:  # say which schedule, whatever went wrong
        raise AssertionError(f"{size} seed {seed}: {schedule}") from error
    return job


def missed(job: VirtualJob) -> list[int]:
    """By group."""
    leaders = [job.workers[members[0]] for members in job.groups]
    return [each.trainer.statistics().rounds_missed for each in leaders]


def test_schedules_in_which_rounds_close_without_some_groups_are_proved() -> None:
    assert sum(sum(missed(prove_seed(seed))) for seed in range(16)) > 80


@pytest.mark.slow
def test_larger_ones() -> None:
    for seed in range(10):
        prove_seed(seed, "large")


class Slow(VirtualWorker):
    """Computes ten times as long where its test says so."""

    def is_slow(self) -> bool:
        return self.group == 3

    def train_once(self) -> Iterator[float | None]:
        self.record_use()
        yield 1e-3 * (10 if self.is_slow() else 1)
        yield from self.iterate()
        self.clock = self.trainer.clock
        self.draws += self.draws[-1:] * (self.clock - len(self.draws))


class Even(Slow):
    def is_slow(self) -> bool:
        return False


class NowAndThen(Slow):
    """In twelve rounds one group is slow, once."""

    block = -1

    def is_slow(self) -> bool:
        block, self.block = self.block, self.clock // 12
        turn = (self.job.schedule.seed + self.clock // 12) % len(self.job.groups)
        return block != self.block and turn == self.group


def took_s(make_worker: Any, backup: int) -> float:
    schedule = replace(SCHEDULE, backup=backup, backup_every=20, collectives=((),) * 4)
    job = VirtualJob(schedule, make_worker=make_worker)
    job.run()
    prove(job)
    return job.network.now_s


def test_one_slow_group_at_a_time_costs_next_to_nothing() -> None:
    even_s, backed_s, sync_s = (
        took_s(each, backup) for each, backup in ((Even, 0), (NowAndThen, 1), (NowAndThen, 0))
    )
    assert backed_s < 1.2 * even_s
    assert sync_s > 1.5 * even_s


def test_one_that_is_always_slow_is_waited_for_now_and_then() -> None:
    job = VirtualJob(SCHEDULE, make_worker=Slow)
    job.run()
    prove(job)
    *others, slow = missed(job)
    assert others == [0, 0, 0]
    assert ROUNDS * 0.8 <= slow <= ROUNDS * 0.9  # one in ten, and where a collective begins
    assert summary_of(job).rounds_missed == (0, 0, 0, slow)


# -- the sets again --------------------------------------------------------------------------------


@pytest.mark.parametrize("make_worker", [Slow, NowAndThen])
def test_the_same_sets_give_the_same_bits_whatever_the_network_does(
    make_worker: type[VirtualWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = VirtualJob(SCHEDULE, make_worker=make_worker)
    first.run()
    sets = sets_of(first.history())
    assert sum(len(each.missed) for each in sets) > 10
    replay(sets, monkeypatch)
    another = replace(SCHEDULE, compute_s=(2e-3, 1e-4, 1e-3, 5e-4), servers=3, jitter_s=1e-3)
    for schedule in (SCHEDULE, another):
        again = VirtualJob(schedule)
        again.run()
        assert sets_of(again.history()) == sets
        assert torch.equal(again.parameters(), first.parameters())
        report = check(again.history())
        assert report.proved, report.violations[:3]
    monkeypatch.undo()
    plain = play(replace(SCHEDULE, backup=0))
    assert not torch.equal(plain.parameters(), first.parameters())


def test_replies_of_a_codec_bring_everything_to_who_has_missed_a_round() -> None:
    wire = Wire(push=RAW, reply=Sign(), seed=5, is_relative=True, compare_every=3)
    job = VirtualJob(SCHEDULE, make_worker=NowAndThen, wire=wire)
    job.run()
    prove(job)
    assert sum(missed(job)) > 10
