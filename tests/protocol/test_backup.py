"""Backup groups under seeded schedules: rounds that close without some groups, with collectives,
pulls, saves, checkpoints, values that are set, skipped iterations and groups that leave; and the
same sets of contributors once more, whatever the network does.

Each run is proved as every other (``proof`` of tests/support/virtual), each value computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from psdist.codecs.schemes.raw import RAW
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.wire import Wire
from psdist.commands.check import check
from psdist.history.records import EventKind, History
from psdist.servers.protocol.chunks import backed
from psdist.servers.protocol.chunks.closing import Closed, Closing, Rounds
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


def sets_of(history: History) -> list[Closed]:
    """Who has contributed to each round, in the order in which that was decided."""
    events, found = history.servers[history.run.owners[0]].events, []
    of_chunk = events[events["chunk"] == 0]
    contributors: dict[int, list[int]] = {}
    left: dict[int, list[int]] = {}
    for each in of_chunk:
        kind = {EventKind.APPLY: contributors, EventKind.MISSED: left}.get(EventKind(each["kind"]))
        if kind is not None:
            kind.setdefault(int(each["clock"]), []).append(int(each["group"]))
    for number, round_number in enumerate(sorted(contributors)):
        groups, away = contributors[round_number], left.get(round_number, [])
        found.append(Closed(number, round_number, tuple(groups), tuple(away)))
    return found


def replaying(sets: list[Closed]) -> type[Closing]:
    """Closes each round with the groups that these say, when all of them have come."""

    class Replayed(Closing):
        def __init__(self, rounds: Rounds, *, backup: int) -> None:
            super().__init__(rounds, backup=backup)

        def close(self, counting: Iterable[int]) -> Closed | None:
            number = self._rounds.num_closed
            if number == len(sets) or not set(sets[number].groups) <= set(counting):
                return None
            closed = sets[number]
            here = all(self._newest.get(group, -1) >= closed.round for group in closed.groups)
            return closed if here else None

        def sits_out(self, group: int, _round: int, counting: Iterable[int]) -> bool:
            coming = sets[self._rounds.num_closed :]
            is_open = bool(coming) and set(coming[0].groups) <= set(counting)
            is_out = is_open and group not in coming[0].groups
            (self._sitting.add if is_out else self._sitting.discard)(group)
            return is_out

    return Replayed


class LateIsLate(backed.Backed):
    """Who sits out may sit out several rounds."""

    def _tell_late(self, group: int) -> list[Any]:
        assert self._closing is not None
        if group in self._late and self._closing.sits_out(group, 0, self._counting):
            return []
        return super()._tell_late(group)


@pytest.mark.parametrize("make_worker", [Slow, NowAndThen])
def test_the_same_sets_give_the_same_bits_whatever_the_network_does(
    make_worker: type[VirtualWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = VirtualJob(SCHEDULE, make_worker=make_worker)
    first.run()
    sets = sets_of(first.history())
    assert sum(len(each.missed) for each in sets) > 10
    monkeypatch.setattr(backed, "Closing", replaying(sets))
    monkeypatch.setattr("psdist.servers.protocol.state.Backed", LateIsLate)
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
