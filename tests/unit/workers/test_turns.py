"""What a turn of the worker's loop takes from the network, and what it leaves there."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from psdist.errors import ProtocolError, WaitTimeoutError
from psdist.protocol.control import Missing
from psdist.protocol.events import Arrived, ControlArrived, Event, Frame, Sent
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.transport.waiting import Waiting
from psdist.workers.assembly import make_loop
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.protocol import Seat


def loop_with(events: deque[Event], **options: Any) -> WorkerLoop:
    transport: Any = SimpleNamespace(
        me=worker_id(0), poll=lambda: events.popleft() if events else None
    )
    seat = Seat(worker=0, group=0, members=(0,), num_servers=1)
    return make_loop(transport, seat, waiting=Waiting(is_spinning=True), **options)


def three() -> deque[Event]:
    return deque(Sent(Frame()) for _ in range(3))


def test_a_turn_takes_everything_that_is_here() -> None:
    events = three()
    loop = loop_with(events)
    assert loop.turn()
    assert not events
    assert not loop.turn()


def test_a_wait_is_over_with_the_event_that_ends_it_and_leaves_what_comes_behind() -> None:
    events = three()
    loop = loop_with(events)
    loop.carry_on(Wait(lambda: len(events) < 3, lambda: "the first event"))
    assert len(events) == 2
    loop.carry_on(Wait(lambda: True, lambda: "nothing"))
    assert len(events) == 2


def test_who_is_told_again_and_again_who_is_missing_waits_no_longer_for_that() -> None:
    """As a worker asks whenever it warns, which by the settings is sooner than it gives up."""
    now_s, events, asked = [0.0], deque[Event](), []
    answer = Missing(chunk=0, groups=[1], clocks=[4])

    def ask() -> None:
        asked.append(now_s[0])
        events.append(ControlArrived(server_id(0), answer))

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    waiting = Waiting(
        is_spinning=False, warn_s=1.0, timeout_s=30.0, clock=lambda: now_s[0], sleep=sleep
    )
    loop = loop_with(events)
    with pytest.raises(
        WaitTimeoutError, match=r"waited 30 s for a reply, longer than failures.wait_timeout"
    ):
        loop.carry_on(Wait(lambda: False, lambda: "a reply", ask), waiting)
    assert [round(each) for each in asked] == [1, 2, 4, 8, 16]
    now_s[0], limit_s = 0.0, 45.0

    def ask_and_receive() -> None:
        events.append(Sent(Frame()))  # something has happened

    wait = Wait(lambda: now_s[0] > limit_s, lambda: "a reply", ask_and_receive)
    loop.carry_on(wait, waiting)


def test_a_message_about_a_set_that_there_is_not_is_refused_by_name() -> None:
    header = Header(kind=Kind.RECEIPT, sender=server_id(0), set_index=1)
    loop = loop_with(deque([Arrived(server_id(0), header, None)]))
    with pytest.raises(ProtocolError, match="server 0 sent a message about parameter set 1; this"):
        loop.turn()


@pytest.mark.parametrize("tracer", [None, Mock()])
def test_the_loops_of_all_sets_measure_by_the_job_s_clock(tracer: Mock | None) -> None:
    loop = loop_with(deque(), now_s=lambda: 7.0, tracer=tracer)
    second = loop.next_set()
    assert type(second) is type(loop)
    assert (loop.now_s(), second.now_s(), second.next_set().now_s()) == (7.0, 7.0, 7.0)
