"""The watch and the proof find each broken rule, broken on purpose in a machine or in a loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from psdist.errors import InvariantError
from psdist.protocol.events import Frame, PeerLost
from psdist.protocol.header import Flag
from psdist.servers.protocol.actions import (
    Action,
    Fold,
    Hold,
    Receipt,
    Reply,
    ReplyToken,
    Step,
)
from psdist.servers.protocol.chunks.receive_pool import ReceivePool
from psdist.servers.protocol.coordinator import Complete
from psdist.servers.set_loop import SetLoop
from psdist.workers.protocol.core import WorkerCore
from psdist.workers.protocol.transfers import Transfers
from tests.support.virtual.job import Schedule, VirtualJob, play
from tests.support.virtual.proof import prove
from tests.support.virtual.schedule import Death
from tests.support.virtual.virtual_worker import VirtualWorker

SYNC = Schedule(
    seed=4,
    group_sizes=(1, 2, 1),
    num_chunks=6,
    iterations=(5, 5, 5),
    collectives=((), (), ()),
    compute_s=(1e-5, 1e-5, 1e-5),
    servers=2,
)
CLIPPED = replace(SYNC, clipping=0.1)
ASYNC = replace(SYNC, mode="async", jitter_s=1e-3)


@pytest.mark.parametrize("schedule", [SYNC, ASYNC], ids=["sync", "async"])
def test_the_runs_that_are_broken_below_are_right_before(schedule: Schedule) -> None:
    job = play(schedule)
    prove(job)
    assert job.watch is not None
    assert job.watch.most_outstanding == schedule.credits


# -- credits ---------------------------------------------------------------------------------------


class HasACreditTooMany(VirtualWorker):
    def take_slice(self) -> None:
        super().take_slice()
        self.core.transfers.credits += self.worker == 2


class SendsTheLastChunkFirst(VirtualWorker):
    def take_slice(self) -> None:
        super().take_slice()
        transfers: Transfers = self.core.transfers
        send_next = transfers._send_next

        def send_in_reverse(server: int) -> list[Any]:
            queue = transfers.queues[server]
            transfers.queues[server] = deque(sorted(queue, reverse=True))
            return send_next(server)

        if self.worker == 2:
            transfers._send_next = send_in_reverse  # type: ignore[method-assign]
            self.core.check_invariants = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (HasACreditTooMany, "worker 2 at server . has 3 messages outstanding, 2 credits"),
        (SendsTheLastChunkFirst, "worker 2 at server . has sent chunk . after chunk"),
    ],
)
def test_a_worker_that_sends_more_or_otherwise_than_it_may_is_caught(
    worker: type[VirtualWorker], words: str
) -> None:
    schedule = replace(SYNC, group_sizes=(1, 1, 1), num_chunks=8)
    with pytest.raises(AssertionError, match=words):
        play(schedule, make_worker=worker)


class AcknowledgesEverything(SetLoop):
    def _reply(self, action: Reply) -> None:
        if not action.flags & Flag.FOR_PULL:
            self._receipt(Receipt(action.token.peer, action.token.chunk, action.clock))
        super()._reply(action)


def test_a_receipt_that_nobody_has_asked_for_is_caught() -> None:
    with pytest.raises(AssertionError, match="without a request"):
        play(SYNC, make_set=AcknowledgesEverything)


class AcknowledgesNothing(SetLoop):
    def _receipt(self, action: Receipt) -> None:
        pass


def test_without_receipts_held_steps_wait_for_ever() -> None:
    prove(play(CLIPPED))
    prove(play(SYNC, make_set=AcknowledgesNothing))
    with pytest.raises(AssertionError, match="still waiting"):
        play(CLIPPED, make_set=AcknowledgesNothing)


class HoldsTwice(SetLoop):
    def _hold(self, action: Hold) -> None:
        super()._hold(action)
        if action.chunk == 2:
            super()._hold(action)


def test_a_chunk_that_is_held_twice_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"used as a sum|held before"):
        play(CLIPPED, make_set=HoldsTwice)


# -- slots -----------------------------------------------------------------------------------------


class UsesASlotTwice(ReceivePool):
    """The fifth slot that it gives is not taken from those that are free."""

    num_used = 0

    def _use_slot(self, peer: int) -> Frame:
        slot = super()._use_slot(peer)
        self.num_used += 1
        if self.num_used == 5:
            self._free.append(slot)
        return slot


class FreesAPushUnused(ReceivePool):
    """Frees a second push in addition to the one that it was given."""

    def release(self, slot: Frame) -> list[Action]:
        busy = [each for each in self.all_slots if each not in (*self._free, slot)]
        if busy and self.num_slots == len(self.all_slots):
            self._free.append(busy[0])
            self.num_slots += 1  # so that the pool does not see it
        return super().release(slot)


class HasPool(SetLoop):
    pool: type[ReceivePool]

    def _build(self, action: Any) -> None:
        super()._build(action)
        pool: Any = self.core.rule.pool
        pool.__class__ = self.pool
        pool.all_slots = list(pool._free)


@pytest.mark.parametrize("pool", [UsesASlotTwice, FreesAPushUnused])
def test_a_pool_that_gives_a_slot_twice_is_caught(pool: type[ReceivePool]) -> None:
    loop = type("Loop", (HasPool,), {"pool": pool})
    job = VirtualJob(SYNC, make_set=loop)
    for server in job.servers:
        server.sets[0].core.check_invariants = lambda _chunk=None: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=r"receives into a slot that|arrived into a slot"):
        job.run()


class FoldsWithAnotherWeight(SetLoop):
    def _fold(self, action: Fold) -> None:
        super()._fold(replace(action, weight=action.weight + 1))


class FoldsIntoAnotherSum(SetLoop):
    before: Fold | None = None

    def _fold(self, action: Fold) -> None:
        before, self.before = self.before, action
        other = action if before is None else before
        super()._fold(replace(action, accumulator=other.accumulator))


class ForgetsAFold(SetLoop):
    num_folds = 0

    def _fold(self, action: Fold) -> None:
        self.num_folds += 1
        if self.num_folds != 4:
            super()._fold(action)


class StepsWhatItHasStepped(SetLoop):
    before: Step | None = None

    def _step(self, action: Step) -> None:
        before, self.before = self.before, action
        other = action if before is None else before
        super()._step(replace(action, gradient=other.gradient, chunk=other.chunk))


@pytest.mark.parametrize(
    ("loop", "schedule", "words"),
    [
        (FoldsWithAnotherWeight, SYNC, "a push of weight .* is applied with"),
        (
            FoldsIntoAnotherSum,
            replace(SYNC, receive_buffers=8, credits=4),
            "used as a sum|used for chunk",
        ),
        (ForgetsAFold, SYNC, "was summed, stepped"),
        (StepsWhatItHasStepped, SYNC, "used as a sum|used for chunk|was summed, stepped"),
        (StepsWhatItHasStepped, ASYNC, "used as a message|used for chunk|stepped as"),
    ],
)
def test_a_slot_that_is_used_as_what_it_is_not_is_caught(
    loop: type[SetLoop], schedule: Schedule, words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        play(schedule, make_set=loop)


# -- open replies ----------------------------------------------------------------------------------


class StepsInPlace(SetLoop):
    """Steps any open chunk; its bytes may even stay the same."""

    def _step(self, action: Step) -> None:
        super()._step(replace(action, target=action.source))


def test_a_step_into_an_open_reply_is_caught_even_where_it_changes_no_byte() -> None:
    schedule = replace(ASYNC, lr=1e-30)
    with pytest.raises(AssertionError, match="steps in memory that an open reply to worker"):
        play(schedule, make_set=StepsInPlace)


def test_a_reply_that_is_forgotten_is_caught() -> None:
    class Forgets(SetLoop):
        def _reply(self, action: Any) -> None:
            token: ReplyToken = action.token
            if (token.chunk, action.clock) != (3, 2) or action.flags & Flag.FOR_PULL:
                super()._reply(action)

    with pytest.raises(AssertionError, match="still waiting"):
        play(SYNC, make_set=Forgets)


# -- the end ---------------------------------------------------------------------------------------

DEATH = replace(SYNC, death=Death("server", 150, 1e-4))


def test_after_a_death_everybody_ends_with_the_name_of_the_dead() -> None:
    job = play(DEATH)
    prove(job)
    assert len(job.errors) == sum(SYNC.group_sizes) + SYNC.servers - 1


class HearsOfNoDeath(VirtualWorker):
    def take_slice(self) -> None:
        super().take_slice()
        if self.worker == 1:
            self.core.handlers[PeerLost] = lambda _event: []


def test_a_worker_that_does_not_end_after_a_death_is_caught() -> None:
    job = play(DEATH, make_worker=HearsOfNoDeath)
    with pytest.raises(AssertionError, match="wait for ever"):
        prove(job)


class NamesAnother(VirtualWorker):
    def take_slice(self) -> None:
        super().take_slice()
        core: WorkerCore = self.core
        lost = core.handlers[PeerLost]
        core.handlers[PeerLost] = lambda event: lost(replace(event, who="server 7"))


def test_a_worker_that_names_another_than_the_dead_is_caught() -> None:
    job = play(DEATH, make_worker=NamesAnother)
    with pytest.raises(AssertionError):
        prove(job)


def test_a_job_that_is_complete_twice_is_caught() -> None:
    job = play(SYNC)
    job.reported.append(Complete())
    with pytest.raises(AssertionError):
        prove(job)


class LosesALine(VirtualWorker):
    def iterate(self) -> Iterator[float | None]:
        yield from super().iterate()
        self.num_lines += 1


def test_a_line_of_metrics_that_is_lost_is_caught() -> None:
    with pytest.raises(AssertionError):
        prove(play(SYNC, make_worker=LosesALine))


def test_a_machine_that_contradicts_itself_is_caught_when_it_happens() -> None:
    """Also where only the chunk of an event is looked at."""

    class Miscounts(SetLoop):
        def _reply(self, action: Any) -> None:
            super()._reply(action)
            if action.clock == 1:
                self.core.chunk_states[action.token.chunk].open_replies[0] += 1

    large = replace(
        SYNC,
        group_sizes=(1,) * 10,
        num_chunks=16,
        iterations=(3,) * 10,
        collectives=((),) * 10,
        compute_s=(1e-5,) * 10,
    )
    assert large.is_large
    for schedule in (SYNC, large):
        with pytest.raises(InvariantError, match="open replies are miscounted"):
            play(schedule, make_set=Miscounts)
