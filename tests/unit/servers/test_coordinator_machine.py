"""The coordinator as a machine: collectives, answers, metrics and the end, in any order."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from psdist.errors import ProtocolError
from psdist.protocol.control import (
    Absent,
    Collected,
    Control,
    Done,
    Enter,
    Failure,
    Finish,
    Finished,
    Metrics,
    Progress,
    Resume,
    Resumed,
    Stop,
    WhoIsAbsent,
)
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.collectives import Warn
from psdist.servers.protocol.coordinator import (
    Complete,
    Coordinator,
    CoordinatorAction,
    EndJob,
    WriteMetrics,
    is_plain,
)
from psdist.servers.protocol.coordinator_assembly import assemble


def sent(actions: list[CoordinatorAction]) -> list[tuple[int, Control]]:
    assert all(isinstance(action, SendControl) for action in actions), actions
    return [(each.peer, each.message) for each in actions if isinstance(each, SendControl)]


def tell(coordinator: Coordinator, *messages: Control) -> list[CoordinatorAction]:
    """Each as the peer whose message it is."""
    actions: list[CoordinatorAction] = []
    for message in messages:
        server, worker = getattr(message, "server", None), getattr(message, "worker", None)
        if isinstance(message, Metrics):
            worker = message.line["worker"]
        peer = COORDINATOR if server is None else server_id(server)
        actions += coordinator.handle(peer if worker is None else worker_id(worker), message)
    return actions


class Job(RuleBasedStateMachine):
    """Workers that make the same calls one after the other, servers that answer when they like.
    Everything that the coordinator sends is foreseen from who has come to what."""

    @initialize(num_workers=st.integers(1, 4), num_servers=st.integers(1, 3))
    def start(self, num_workers: int, num_servers: int) -> None:
        self.coordinator = assemble(num_workers=num_workers, num_servers=num_servers, mode="ssp")
        self.workers = range(num_workers)
        self.servers = range(num_servers)
        self.seq = 0
        self.is_alike = True
        """Whether all bring the same, and numbers with it."""
        """The collective that is under way, or was last."""
        self.inside: list[int] = []
        self.to_resume: list[int] = []
        self.done: list[int] = []
        self.to_finish: list[int] = []

    @property
    def is_resuming(self) -> bool:
        return bool(self.to_resume)

    @precondition(lambda self: not self.is_resuming and len(self.inside) < len(self.workers)
                  and not self.done)  # fmt: skip
    @rule(data=st.data(), is_alike=st.booleans())
    def enter(self, data: st.DataObject, is_alike: bool) -> None:
        if not self.inside:
            self.seq += 1
            self.is_alike = is_alike
        away = [worker for worker in self.workers if worker not in self.inside]
        worker = data.draw(st.sampled_from(away))
        self.inside.append(worker)
        payload, values = self.payload(worker), self.values(worker)
        message = Enter(worker=worker, seq=self.seq, name="mean", payload=payload, values=values)
        actions = sent(tell(self.coordinator, message))
        if len(self.inside) < len(self.workers):
            assert actions == []
        else:
            self.to_resume = list(self.servers)
            resume = Resume(seq=self.seq)
            assert actions == [(server_id(server), resume) for server in self.servers]

    def payload(self, worker: int) -> bytes:
        return f"{0 if self.is_alike else worker} in {self.seq}".encode()

    def values(self, worker: int) -> bytes:
        return struct.pack("<2d", worker + self.seq, -worker) if self.is_alike else b""

    @precondition(lambda self: self.is_resuming)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from(self.to_resume))
        self.to_resume.remove(server)
        actions = sent(tell(self.coordinator, Resumed(seq=self.seq, server=server)))
        if self.to_resume:
            assert actions == []
            return
        num, told = len(self.workers), range(1 if self.is_alike else len(self.workers))
        total = sum(self.workers)
        answer = Collected(
            seq=self.seq,
            payloads=[self.payload(worker) for worker in told],
            runs=[0, num] if self.is_alike else [each for worker in told for each in (worker, 1)],
            values=struct.pack("<2d", total + num * self.seq, -total) if self.is_alike else b"",
            error="",
        )
        assert actions == [(worker_id(worker), answer) for worker in self.workers]
        self.inside = []

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        actions = sent(tell(self.coordinator, WhoIsAbsent(worker=worker, seq=self.seq)))
        absent = [each for each in self.workers if each not in self.inside]
        expected = Absent(seq=self.seq, workers=absent, num_absent=len(absent))
        assert actions == ([(worker_id(worker), expected)] if self.inside else [])

    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        message = Progress(worker=worker, clock=0, samples=data.draw(st.integers(0, 9)))
        assert tell(self.coordinator, message) == []
        assert self.coordinator.progress[worker] == message

    @precondition(lambda self: not self.inside and len(self.done) < len(self.workers))
    @rule(data=st.data())
    def finish_a_script(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([w for w in self.workers if w not in self.done]))
        self.done.append(worker)
        statistics = {"clock": worker}
        actions = sent(tell(self.coordinator, Done(worker=worker, statistics=statistics)))
        assert self.coordinator.done[worker] == statistics
        if len(self.done) < len(self.workers):
            assert actions == []
        else:
            self.to_finish = list(self.servers)
            assert actions == [(server_id(server), Finish()) for server in self.servers]

    @precondition(lambda self: self.to_finish)
    @rule(data=st.data())
    def finish_a_server(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from(self.to_finish))
        self.to_finish.remove(server)
        actions = tell(self.coordinator, Finished(server=server, statistics={"steps": server}))
        assert self.coordinator.servers[server] == {"steps": server}
        if self.to_finish:
            assert actions == []
            return
        *stops, last = actions
        assert isinstance(last, Complete)
        assert sent(stops) == [(worker_id(worker), Stop()) for worker in self.workers]


TestJob = Job.TestCase


def enter(worker: int, name: str = "save", seq: int = 1) -> Enter:
    return Enter(worker=worker, seq=seq, name=name, payload=b"")


def errors(actions: list[CoordinatorAction]) -> dict[int, str]:
    return {
        peer: message.error
        for peer, message in sent(actions)
        if isinstance(message, Collected) and message.payloads == []
    }


def test_values_of_a_metrics_line_stand_beside_what_it_says_of_the_worker() -> None:
    coordinator = assemble(num_workers=2, num_servers=1)
    line = {"worker": 1, "clock": 7, "values": {"loss": 2.0, "epoch": 1}}
    assert tell(coordinator, Metrics(line=line)) == [
        WriteMetrics({"worker": 1, "clock": 7, "loss": 2.0, "epoch": 1})
    ]
    assert tell(coordinator, Metrics(line={"worker": 0})) == [WriteMetrics({"worker": 0})]


def test_the_chiefs_last_values_are_kept_and_nobody_elses() -> None:
    coordinator = assemble(num_workers=2, num_servers=1)
    for worker, values in ((0, {"loss": 3.0, "epoch": 1}), (0, {"loss": 1.0}), (1, {"loss": 9.0})):
        tell(coordinator, Metrics(line={"worker": worker, "values": values}))
    tell(coordinator, Metrics(line={"worker": 0}))
    assert coordinator.last == {"loss": 1.0, "epoch": 1}


def test_a_failure_ends_the_job() -> None:
    coordinator = assemble(num_workers=1, num_servers=1)
    failure = Failure(heading="worker 0", text="it broke", exit_status=1)
    assert tell(coordinator, failure) == [EndJob(failure)]


def test_nobody_gives_the_coordinator_what_is_not_its_own() -> None:
    coordinator = assemble(num_workers=1, num_servers=1)
    with pytest.raises(ProtocolError, match="worker 0 sent Stop, unasked: no part of this job"):
        coordinator.handle(worker_id(0), Stop())


def test_another_call_ends_the_collective_for_all_who_have_come_and_for_all_who_will() -> None:
    coordinator = assemble(num_workers=4, num_servers=1)
    assert tell(coordinator, enter(3)) == []
    assert tell(coordinator, enter(1)) == []
    first = errors(tell(coordinator, enter(2, "mean")))
    assert [*first] == [worker_id(1), worker_id(2), worker_id(3)]
    (error,) = set(first.values())
    assert error == (
        "workers made different calls: workers 1, 3 called save; worker 2 called mean; every "
        "worker must make the same calls in the same order"
    )
    assert errors(tell(coordinator, enter(0, "save"))) == {worker_id(0): error}
    assert tell(coordinator, Done(worker=0, statistics={})) == []


def test_finished_scripts_are_named_in_the_error_of_a_collective_that_they_miss() -> None:
    coordinator = assemble(num_workers=4, num_servers=1)
    tell(coordinator, enter(0))
    assert errors(tell(coordinator, Done(worker=2, statistics={}))) == {
        worker_id(0): "save was called by worker 0 only; absent: worker 2, whose script has "
        "finished; save must be called by every worker"
    }
    coordinator = assemble(num_workers=4, num_servers=1)
    tell(coordinator, Done(worker=3, statistics={}), Done(worker=2, statistics={}))
    (error,) = errors(tell(coordinator, enter(1, "mean"))).values()
    assert error == (
        "mean was called by worker 1 only; absent: workers 2, 3, whose scripts have finished; "
        "mean must be called by every worker"
    )


def test_calls_are_named_in_the_order_of_the_workers_that_made_them() -> None:
    coordinator = assemble(num_workers=5, num_servers=1)
    tell(coordinator, enter(4, "mean"))
    (error, _) = errors(tell(coordinator, enter(2, "save"))).values()
    assert "worker 2 called save; worker 4 called mean;" in error


def test_an_error_is_told_as_the_answer_to_the_collective_that_was_entered() -> None:
    coordinator = assemble(num_workers=4, num_servers=1)
    tell(coordinator, Done(worker=0, statistics={}))
    for seq in (1, 2):
        ((peer, answer),) = sent(tell(coordinator, enter(3, seq=seq)))
        assert isinstance(answer, Collected)
        assert (peer, answer.seq, answer.payloads, answer.runs) == (worker_id(3), seq, [], [])


def test_the_collective_after_one_that_has_failed_is_judged_by_itself() -> None:
    coordinator = assemble(num_workers=3, num_servers=1)
    tell(coordinator, enter(0), enter(1, "mean"), enter(2))
    assert tell(coordinator, enter(0, seq=2)) == []
    failed = errors(tell(coordinator, Done(worker=2, statistics={})))
    assert [*failed] == [worker_id(0)]
    assert failed[worker_id(0)].startswith("save was called by worker 0 only; absent: worker 2")


def test_workers_and_servers_are_told_apart_by_their_own_numbers_not_by_the_collectives() -> None:
    coordinator = assemble(num_workers=2, num_servers=2)
    for seq in (1, 2, 3):
        for worker in (1, 0):
            actions = tell(coordinator, enter(worker, seq=seq))
        assert len(sent(actions)) == 2
        assert tell(coordinator, Resumed(seq=seq, server=0)) == []
        assert [peer for peer, _ in sent(tell(coordinator, Resumed(seq=seq, server=1)))] == [
            *(worker_id(0), worker_id(1)),
        ]


def test_of_many_who_are_absent_the_first_are_named_and_all_are_counted() -> None:
    coordinator = assemble(num_workers=12, num_servers=1)
    tell(coordinator, enter(3))
    absent = [0, 1, 2, 4, 5, 6, 7, 8]
    assert sent(tell(coordinator, WhoIsAbsent(worker=3, seq=1))) == [
        (worker_id(3), Absent(seq=1, workers=absent, num_absent=11))
    ]


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: {"a": value}])
def test_plain_data_is_at_most_eight_deep(wrap: Callable[[Any], Any]) -> None:
    value: Any = 1
    for depth in range(12):
        assert is_plain(value) == (depth <= 8)
        value = wrap(value)


# -- who has passed whom -----------------------------------------------------------------------


def progress(worker: int, clock: int, *, batches: int = 0, until: int | None = None) -> Progress:
    """``until``: iterations from loaders of ``batches``; all of them where it is not given."""
    from_loaders = clock if until is None else until
    return Progress(
        worker=worker,
        clock=clock,
        samples=0,
        loader_batches=batches,
        loader_until=from_loaders if batches else 0,
    )


def warnings(actions: list[Any]) -> list[str]:
    return [action.text.partition(";")[0] for action in actions if isinstance(action, Warn)]


@pytest.mark.parametrize("clock", [4, 5, 6])
def test_only_whoever_has_finished_more_iterations_has_passed(clock: int) -> None:
    coordinator = assemble(num_workers=2, num_servers=1, mode="async")
    actions = tell(coordinator, progress(0, 5), enter(0), progress(1, clock))
    assert bool(warnings(actions)) == (clock == 6)


@pytest.mark.parametrize(("until", "is_error"), [(4, False), (5, False), (6, True)])
def test_in_sync_passing_within_loaders_of_one_length_is_an_error(
    until: int, is_error: bool
) -> None:
    coordinator = assemble(num_workers=2, num_servers=1)
    first = tell(coordinator, progress(0, 5, batches=12), enter(0))
    assert first == []
    actions = tell(coordinator, progress(1, 6, batches=12, until=until))
    assert bool(errors([each for each in actions if isinstance(each, SendControl)])) == is_error
    assert bool(warnings(actions)) == (not is_error)


def test_who_has_fewest_iterations_and_then_the_lowest_number_is_named() -> None:
    coordinator = assemble(num_workers=4, num_servers=1, mode="ssp")
    for worker, clock, batches in ((2, 3, 0), (1, 3, 5), (0, 4, 7)):
        tell(coordinator, progress(worker, clock, batches=batches))
    coordinator._missed_calls._warned_of.add("save")
    for worker in (2, 1, 0):
        assert tell(coordinator, enter(worker)) == []
    coordinator._missed_calls._warned_of.clear()
    assert warnings(tell(coordinator, progress(3, 9))) == [
        "worker 1 called save after 3 iterations, but worker 3 continued past iteration 3 without "
        "calling save"
    ]


def test_a_worker_that_enters_late_names_the_one_that_was_passed_first() -> None:
    coordinator = assemble(num_workers=3, num_servers=1, mode="ssp")
    tell(coordinator, progress(2, 9), progress(1, 8), progress(0, 5))
    assert warnings(tell(coordinator, enter(0))) == [
        "worker 0 called save after 5 iterations, but worker 1 continued past iteration 5 without "
        "calling save"
    ]


def test_iterations_of_another_kind_at_the_end_do_not_count_as_the_loaders() -> None:
    """Worker 0 entered after 5 iterations of which the last was not a loader's: nobody who made
    6 of a loader's has passed it within that loader."""
    coordinator = assemble(num_workers=2, num_servers=1)
    tell(coordinator, progress(0, 5, batches=12, until=4), enter(0))
    actions = tell(coordinator, progress(1, 6, batches=12))
    assert len(warnings(actions)) == len(actions) == 1


def failed(actions: list[CoordinatorAction]) -> list[tuple[int, int]]:
    """Who was told of an error, as the answer to which collective."""
    assert all(
        isinstance(message, Collected) and "although both" in message.error
        for _, message in sent(actions)
    )
    return [(peer - worker_id(0), getattr(message, "seq", 0)) for peer, message in sent(actions)]


def end_a_collective(coordinator: Coordinator, num_workers: int) -> None:
    tell(coordinator, *[enter(worker) for worker in range(num_workers)])
    tell(coordinator, Resumed(seq=1, server=0))


def test_whoever_enters_behind_others_ends_the_collective_and_nothing_is_resumed() -> None:
    coordinator = assemble(num_workers=2, num_servers=1)
    end_a_collective(coordinator, 2)
    tell(coordinator, progress(1, 6, batches=12), progress(0, 5, batches=12))
    assert tell(coordinator, enter(1, seq=2)) == []
    assert failed(tell(coordinator, enter(0, seq=2))) == [(0, 2), (1, 2)]


def test_whoever_enters_past_others_ends_the_collective_for_all_who_are_in_it() -> None:
    coordinator = assemble(num_workers=5, num_servers=1)
    end_a_collective(coordinator, 5)
    tell(coordinator, progress(4, 5, batches=12), enter(4, seq=2))
    coordinator.progress[3] = progress(3, 6, batches=12)
    assert failed(tell(coordinator, enter(3, seq=2))) == [(3, 2), (4, 2)]
    assert failed(tell(coordinator, enter(0, seq=2))) == [(0, 2)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_several_that_were_passed_the_lowest_is_named(order: tuple[int, int]) -> None:
    coordinator = assemble(num_workers=3, num_servers=1)
    for worker in order:
        tell(coordinator, progress(worker, 3, batches=12), enter(worker))
    actions = tell(coordinator, progress(2, 4, batches=12))
    assert failed(actions) == [(0, 1), (1, 1)]
    (error,) = {*errors(actions).values()}
    assert error.startswith("worker 0 called save after 3 iterations, but worker 2 continued")


def test_iterations_of_no_one_length_are_not_those_of_loaders_of_one_batch() -> None:
    coordinator = assemble(num_workers=2, num_servers=1)
    tell(coordinator, progress(0, 5, batches=3, until=2), enter(0))
    actions = tell(coordinator, progress(1, 6, batches=1))
    assert len(warnings(actions)) == len(actions) == 1


def test_nothing_is_judged_of_a_worker_that_has_said_nothing() -> None:
    coordinator = assemble(num_workers=2, num_servers=1)
    assert tell(coordinator, enter(0)) == []
    assert tell(coordinator, progress(1, 6, batches=12)) == []
