"""The machines of a worker's parameter sets: each by itself, the first one for the whole job."""

from __future__ import annotations

import pytest

from psdist.errors import InvariantError, ProtocolError, UsageError
from psdist.protocol.control import Collected, Done, Enter, Leave, Registered, Stop, Suspend
from psdist.protocol.events import ControlArrived
from psdist.protocol.header import MOST_SETS
from psdist.protocol.ids import COORDINATOR, server_id
from psdist.workers.protocol.actions import SendControl, SendInitial, SendPull, SendPush
from psdist.workers.protocol.core import WorkerCore
from tests.support.virtual.worker_machine import (
    OWNERS,
    PARTITION,
    RULE,
    SETUP,
    Network,
    make_core,
    push,
    register,
)


def two() -> tuple[WorkerCore, WorkerCore]:
    first = make_core()
    second = first.next_set()
    second.take_slice(PARTITION, owners=OWNERS, credits=2, replies=RULE)
    return first, second


def test_sets_are_counted_and_share_their_seat() -> None:
    first, second = two()
    third = second.next_set()
    assert [core.set_index for core in (first, second, third)] == [0, 1, 2]
    assert first.sets is third.sets
    assert third.seat is first.seat
    for _ in range(MOST_SETS - 3):
        first.next_set()
    with pytest.raises(UsageError, match=f"at most {MOST_SETS} parameter sets"):
        second.next_set()


def test_everything_that_a_set_sends_names_it() -> None:
    _, second = two()
    setup = second.begin_setup(SETUP)
    assert {each.header.set_index for each in setup if isinstance(each, SendInitial)} == {1}
    actions = [*setup, *second.begin_register(), *push(second), *second.ask_who_is_missing()]
    assert {each.set_index for each in actions if isinstance(each, SendControl)} == {1}
    assert {each.header.set_index for each in actions if isinstance(each, SendPush)} == {1}
    pulling = two()[1]
    pulls = pulling.transfers.begin_pull(clock=0, chunks=[0, 1], is_fresh=True)
    assert {each.header.set_index for each in pulls if isinstance(each, SendPull)} == {1}


def test_sets_push_and_pull_without_regard_to_one_another() -> None:
    first, second = two()
    networks = [Network(core, seed=3) for core in (first, second)]
    networks[0].do(push(first))
    networks[1].do(push(second))
    assert (first.clock, second.clock) == (1, 1)
    networks[1].run()
    networks[1].do(push(second))
    networks[1].run()
    assert not first.is_idle
    assert (first.clock, second.clock) == (1, 2)


def test_a_collective_suspends_the_group_in_every_set_where_it_is_registered() -> None:
    first, second = two()
    third = first.next_set()
    for core in (first, second):
        register(core)
    network = Network(second, seed=1)
    network.do(push(second))
    with pytest.raises(InvariantError, match="barrier began during a push or pull"):
        first.begin_collective("barrier")
    network.run()
    *suspends, enter = first.begin_collective("barrier")
    assert suspends == [
        SendControl(server_id(server), Suspend(group=7, clock=clock, seq=1), index)
        for index, clock in ((0, 0), (1, 1))
        for server in range(2)
    ]
    assert isinstance(enter, SendControl)
    assert isinstance(enter.message, Enter)
    assert (enter.peer, enter.set_index) == (COORDINATOR, 0)
    for core in (first, second):
        with pytest.raises(InvariantError, match="inside a collective"):
            push(core)
    assert third.clock == 0


def test_the_first_takes_leave_of_every_set_and_ends_for_all() -> None:
    first, second = two()
    for core in (first, second):
        register(core)
    network = Network(second, seed=1)
    network.do(push(second))
    with pytest.raises(InvariantError, match="is done and waits"):
        first.begin_done({})
    network.run()
    assert first.begin_leave() == [
        SendControl(server_id(server), Leave(group=7, clock=clock), index)
        for index, clock in ((0, 0), (1, 1))
        for server in range(2)
    ]
    assert first.begin_done({}) == [SendControl(COORDINATOR, Done(worker=0, statistics={}))]
    with pytest.raises(InvariantError, match="after its end"):
        push(second)


@pytest.mark.parametrize(
    "message", [Stop(), Collected(seq=1, payloads=[], runs=[], values=b"", error="")]
)
def test_what_concerns_the_job_does_not_come_to_another_set(message: Stop | Collected) -> None:
    _, second = two()
    with pytest.raises(ProtocolError, match="which no worker takes"):
        second.handle(ControlArrived(COORDINATOR, message))


def test_answers_that_came_twice_are_counted_once() -> None:
    first, second = two()
    register(first)
    first.begin_collective("barrier")
    answer = Collected(seq=1, payloads=[b""], runs=[0, 1], values=b"", error="")
    for _ in range(2):
        first.handle(ControlArrived(COORDINATOR, answer))
    second.begin_register()
    for _ in range(3):
        second.handle(ControlArrived(server_id(0), Registered(group=7, server=0)))
    assert (first.counts().duplicates, second.counts().duplicates) == (1, 2)
