"""Updates whose lr falls with their staleness, and whose delay is compensated, under seeded
schedules in ssp and async.

Each run is proved as every other (``proof`` of tests/support/virtual): the check recomputes each
factor from the versions that workers report, and each value is computed again, lr, compensation and
all.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from psdist.commands.check import check
from psdist.history import EventKind, History
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.chunks import ChunkState
from psdist.servers.protocol.membership import Membership
from psdist.servers.shard.given import Given
from tests.support.virtual.job import Schedule, VirtualJob, play
from tests.support.virtual.proof import prove
from tests.support.virtual.reference import WrongValueError
from tests.support.virtual.schedule import Size, with_stale

SLOW_TIMES = 6
SCHEDULE = Schedule(
    seed=1,
    mode="async",
    stale_lr="inverse",
    group_sizes=(1, 2, 1, 1),
    iterations=(8 * SLOW_TIMES,) * 3 + (8,),
    collectives=((),) * 4,
    compute_s=(1e-3,) * 3 + (SLOW_TIMES * 1e-3,),
    num_chunks=4,
    servers=2,
    jitter_s=1e-6,
    latency_s=1e-6,
)


def prove_seed(seed: int, size: Size = "small") -> History:
    schedule = with_stale(seed, size=size)
    try:
        job = play(schedule)
        prove(job)
    except Exception as error:  # say which schedule, whatever went wrong
        raise AssertionError(f"{size} seed {seed}: {schedule}") from error
    return job.history()


def scaled_down(history: History) -> int:
    """Updates whose lr is less than their share."""
    found = 0
    for log in history.servers:
        applied = log.events[log.events["kind"] == EventKind.APPLY]
        workers = history.run.num_workers
        found += int(np.count_nonzero(applied["lr_scale"] < 0.9 * applied["weight"] / workers))
    return found


def test_schedules_in_which_updates_are_judged_by_their_staleness_are_proved() -> None:
    assert sum(scaled_down(prove_seed(seed)) for seed in (0, 4, 5, 13, 14)) > 40


@pytest.mark.slow
def test_larger_ones() -> None:
    for seed in range(10):
        prove_seed(seed, "large")


def factors_of(job: VirtualJob, group: int) -> list[float]:
    """lr_scale of a group's updates, in parts of its share, once all are at work."""
    found: list[float] = []
    for log in job.history().servers:
        events = log.events[log.events["kind"] == EventKind.APPLY]
        mine = events[(events["group"] == group) & (events["clock"] >= 2)]
        found += (mine["lr_scale"] / (mine["weight"] / job.history().run.num_workers)).tolist()
    return found


def test_a_slow_group_counts_by_as_much_less_as_it_is_slow() -> None:
    job = VirtualJob(SCHEDULE)
    job.run()
    prove(job)
    # While it makes one step each of the others makes six.
    slow = [factor for factor in factors_of(job, 3) if factor < 0.5]
    assert np.median(slow) == pytest.approx(1 / SLOW_TIMES, rel=0.15)
    # Equal groups count whole, except where the slow one came between.
    assert np.median(factors_of(job, 0)) > 0.9


def test_without_the_setting_it_counts_whole() -> None:
    job = play(replace(SCHEDULE, stale_lr="off"))
    prove(job)
    assert min(factors_of(job, 3)) == pytest.approx(1.0)


def test_compensation_moves_a_gradient_to_where_it_is_applied() -> None:
    plain, compensated = (
        play(replace(SCHEDULE, stale_lr="off", compensation=each)) for each in (0.0, 0.05)
    )
    prove(compensated)
    assert not torch.equal(plain.parameters(), compensated.parameters())
    given = [compensated.executor(server).statistics().copy_bytes for server in range(2)]
    assert sum(given) == 4 * plain.parameters().nbytes, "the parameters once for each group"


def test_alone_nobody_has_a_delay_to_compensate() -> None:
    alone = replace(
        SCHEDULE, group_sizes=(2,), iterations=(9,), collectives=((4,),), compute_s=(1e-3,)
    )
    plain, judged = play(replace(alone, stale_lr="off")), play(replace(alone, compensation=0.25))
    prove(judged)
    assert torch.equal(plain.parameters(), judged.parameters())


# -- servers that do it wrongly --------------------------------------------------------------------


def test_a_server_that_judges_by_what_it_sent_first_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Oldest(dict[int, int]):
        def __setitem__(self, peer: int, version: int) -> None:
            self.setdefault(peer, version)

    made = ChunkState.__init__

    def with_oldest(self: ChunkState, *given: object, **named: object) -> None:
        made(self, *given, **named)  # type: ignore[arg-type]
        self.given = Oldest()

    monkeypatch.setattr(ChunkState, "__init__", with_oldest)
    assert "learning rate" in " ".join(check(history_of()).violations_by_rule)


def test_a_server_that_counts_other_groups_than_there_are_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count_in = Membership._count_in

    def twice(self: Membership, group: int) -> None:
        count_in(self, group)
        self.num_active_groups += 1

    monkeypatch.setattr(Membership, "_count_in", twice)
    assert "learning rate" in " ".join(check(history_of()).violations_by_rule)


def test_a_server_that_compensates_for_another_worker_s_delay_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note = Given.note

    def for_all(self: Given, chunk: int, _peer: int, values: torch.Tensor) -> None:
        for worker in range(5):
            note(self, chunk, worker_id(worker), values)

    monkeypatch.setattr(Given, "note", for_all)
    job = VirtualJob(replace(SCHEDULE, stale_lr="off", compensation=0.05))
    job.run()
    with pytest.raises(WrongValueError):
        prove(job)


def test_a_run_that_promised_no_such_lr_is_refused_for_it() -> None:
    history = history_of()
    report = check(replace(history, run=history.run.model_copy(update={"stale_lr": "off"})))
    assert "learning rate" in " ".join(report.violations_by_rule)


def history_of() -> History:
    job = VirtualJob(SCHEDULE)
    job.run()
    return job.history()
