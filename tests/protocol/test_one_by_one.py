"""Chunks that leave one by one, each as soon as its own last reply has come, in a shared order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from psdist.commands.check import check_sets_of
from psdist.errors import InvariantError, ProtocolError
from psdist.history import EventFlag
from psdist.servers.protocol.actions import Receipt
from psdist.servers.protocol.chunks.frontier import Frontier
from psdist.servers.set_loop import SetLoop
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.one_by_one import OneByOne
from tests.support.virtual.proof import prove_the_end
from tests.support.virtual.schedule import AnotherSet
from tests.support.virtual.sizes import CostModel, SizeShard

FREE = CostModel(fold_s_per_byte=0.0, step_s_per_byte=0.0, copy_s_per_byte=0.0)
BLOCK = 25


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first_seed" in metafunc.fixturenames:
        num_schedules: int = metafunc.config.getoption("--schedules")
        metafunc.parametrize("first_seed", range(0, num_schedules // 4, BLOCK))


def play(schedule: Schedule, **broken: Any) -> VirtualJob:
    job = VirtualJob(
        schedule,
        make_executor=partial(SizeShard, model=FREE),
        **{"make_worker": OneByOne, **broken},
    )
    job.run()
    return job


def prove(job: VirtualJob) -> None:
    report = check_sets_of([each.history() for each in job.sets], None)
    assert report.proved, report.violations[:5]
    prove_the_end(job)


def schedule_of(seed: int) -> Schedule:
    """Return a schedule for workers of sizes alone: no groups, failures or errors."""
    drawn = Schedule.from_seed(seed)
    return replace(
        drawn,
        group_sizes=(1,) * len(drawn.group_sizes),
        has_model=True,
        is_shuffled=True,
        single_rate=0.0,
        push_rate=0.0,
        report_rate=0.0,
        mistake="",
        death=None,
    )


def test_every_schedule_of_single_chunks_ends_and_keeps_its_modes_rules(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + BLOCK):
        schedule = schedule_of(seed)
        try:
            prove(play(schedule))
        except Exception as error:  # say which schedule, whatever went wrong
            raise AssertionError(f"seed {seed}: {schedule}") from error


SYNC = Schedule(
    seed=2,
    group_sizes=(1, 1, 1),
    num_chunks=8,
    iterations=(5, 5, 5),
    collectives=((), (), ()),
    compute_s=(1e-4, 1e-4, 1e-5),
    servers=2,
    receive_buffers=2,
    is_shuffled=True,
)


class Ahead(OneByOne):
    """Counts the chunks that are pushed while replies to the iteration before are awaited."""

    num_ahead = 0

    def push_next(self) -> Any:
        yield from super().push_next()
        clocks = {clock for clock, _ in self.core.transfers.awaited.values()}
        type(self).num_ahead += len(clocks) == 2


MEETING = replace(
    SYNC,
    collectives=((2, 2, 3),) * 3,
    more_sets=(AnotherSet(4, 1, 1), AnotherSet(3, 1, 1)),
    middle_rate=1.0,
    absent_rate=0.5,
)


@pytest.mark.parametrize(
    "changes",
    [{}, {"clipping": 0.1}, {"mode": "ssp", "staleness": 1}, {"mode": "async"}],
    ids=["sync", "clipping", "ssp", "async"],
)
def test_workers_meet_while_they_have_pushed_half_an_iteration_of_several_sets(
    changes: dict[str, Any],
) -> None:
    job = play(replace(MEETING, **changes))
    prove(job)
    assert job.num_half_pushed > 3 * 3, "of three workers in three collectives several sets at once"


class SuspendsBehindIt(OneByOne):
    """Reports in the middle of an iteration that no worker waits for the next one."""

    def meet_in_the_middle(self) -> Any:
        for each in (self, *self.others):
            if each.core.is_pushing:
                seq = self.core.collectives.seq + 1
                each.loop._do(each.core.membership.suspend(clock=each.core.clock, seq=seq))
        yield from super().meet_in_the_middle()


def test_a_set_that_is_half_pushed_cannot_be_suspended() -> None:
    with pytest.raises(ProtocolError, match=r"suspended group . after . iterations; the . chunks"):
        play(MEETING, make_worker=SuspendsBehindIt)


class IsLate(OneByOne):
    """Worker 0 has nothing to push yet when the others are in the middle of an iteration."""

    expects = True

    def train_once(self) -> Any:
        if self.num_meetings:
            if self.worker:
                self.begin_iteration()
                for _ in range(4):
                    yield from self.push_next()
            elif self.expects:
                self.core.expect_iteration()
            else:
                yield from self.settle()
            while self.num_meetings:
                yield from self.meet_in_the_middle()
        yield from super().train_once()

    def begin_iteration(self) -> None:
        if not self.core.is_pushing:
            super().begin_iteration()


class IsLateAndExpectsNothing(IsLate):
    expects = False


def num_applied(job: VirtualJob) -> int:
    """Optimizer steps, and updates without any gradient."""
    logs = [log.events for each in job.sets for log in each.history().servers]
    return sum(int((log["flags"] & EventFlag.LAST > 0).sum()) for log in logs)


def test_who_expects_an_iteration_is_not_left_out_of_what_others_have_pushed_of_it() -> None:
    few = replace(MEETING, more_sets=(), collectives=((2,),) * 3)
    many = replace(few, receive_buffers=6)
    for schedule in (few, many):
        late = play(schedule, make_worker=IsLate)
        prove(late)
        assert num_applied(late) == few.num_chunks * few.iterations[0]
    left_out = play(many, make_worker=IsLateAndExpectsNothing)
    assert num_applied(left_out) > num_applied(late), "chunks were stepped without its gradient"
    with pytest.raises(AssertionError, match="still waiting"):
        play(few, make_worker=IsLateAndExpectsNothing)


@pytest.mark.parametrize("clipping", [0.0, 0.1])
def test_chunks_of_two_iterations_are_under_way_at_a_time(clipping: float) -> None:
    Ahead.num_ahead = 0
    prove(play(replace(SYNC, clipping=clipping), make_worker=Ahead))
    assert Ahead.num_ahead > 10


# -- broken on purpose -----------------------------------------------------------------------------


def test_slots_that_are_kept_for_another_order_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Frontier.__init__

    def of_ascending(self: Frontier, chunks: Any) -> None:
        search(self, sorted(chunks, key=lambda chunk: chunk.index))

    monkeypatch.setattr(Frontier, "__init__", of_ascending)
    with pytest.raises(AssertionError, match="still waiting"):
        play(SYNC)


class WaitsInTheMiddle(OneByOne):
    """Waits for a reply to an iteration before it has pushed all of its chunks."""

    is_guarded = True

    def push_next(self) -> Any:
        chunk = self.left[0]
        yield from super().push_next()
        if self.is_guarded:
            self.loop.wait_for_chunk(chunk)
        yield from self._until(lambda: self.core.transfers.is_done(chunk))


class WaitsAnyway(WaitsInTheMiddle):
    is_guarded = False


def test_a_wait_in_the_middle_of_an_iteration_is_refused_because_held_steps_wait_for_the_rest() -> (
    None
):
    prove(play(SYNC, make_worker=WaitsAnyway))
    with pytest.raises(AssertionError, match="still waiting"):
        play(replace(SYNC, clipping=0.1), make_worker=WaitsAnyway)
    with pytest.raises(InvariantError, match=r"waits for the reply about chunk . in the middle"):
        play(SYNC, make_worker=WaitsInTheMiddle)


class SendsNoReceipts(SetLoop):
    def _receipt(self, action: Receipt) -> None:
        pass


def test_without_receipts_held_steps_wait_for_ever() -> None:
    with pytest.raises(AssertionError, match="still waiting"):
        play(replace(SYNC, clipping=0.1), make_set=SendsNoReceipts)
