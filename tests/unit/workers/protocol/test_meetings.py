"""A worker's side of a pause: what it answers, and what it refuses."""

from __future__ import annotations

import pytest

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Blocked, PauseAborted, Paused, PauseRequest, Proceed
from psdist.protocol.ids import COORDINATOR, server_id
from psdist.workers.protocol.actions import SendControl
from psdist.workers.protocol.meetings import Meetings


def holding() -> Meetings:
    meetings = Meetings(3)
    meetings.hold("checkpoint", clocks=[7])
    return meetings


def test_a_worker_that_holds_proceeds_when_it_is_told_so_and_once() -> None:
    meetings = holding()
    with pytest.raises(InvariantError, match="worker 3 holds already"):
        meetings.hold("end", clocks=[7])
    for num_duplicates in (0, 1):
        assert meetings.on_release(COORDINATOR, Proceed(number=1, hold=1)) == []
        assert (meetings.is_held, meetings.duplicates) == (False, num_duplicates)
    meetings.hold("checkpoint", clocks=[8])
    assert meetings.on_release(COORDINATOR, Proceed(number=1, hold=1)) == []
    assert meetings.is_held, "the answer was to the hold before"


def test_a_worker_that_holds_learns_what_all_hold_for() -> None:
    meetings = holding()
    meetings.on_commit(COORDINATOR, Paused(number=1, what="end"))
    assert not meetings.is_open
    assert [meetings.take(), meetings.take()] == ["end", None]
    assert meetings.on_commit(COORDINATOR, Paused(number=1, what="end")) == []
    assert meetings.duplicates == 1


def test_a_worker_in_a_step_reports_what_it_waits_in_while_a_pause_is_open() -> None:
    meetings = Meetings(3)
    assert meetings.begin(1, 7) == []
    message = Blocked(worker=3, number=1, set_index=1, clock=7)
    request = PauseRequest(number=1)
    assert meetings.on_propose(COORDINATOR, request) == [SendControl(COORDINATOR, message)]
    assert meetings.on_propose(COORDINATOR, request) == []
    meetings.on_cancel(COORDINATOR, PauseAborted(number=1))
    assert meetings.begin(1, 8) == []


def test_messages_about_no_meeting_of_this_worker_are_refused() -> None:
    words = r"worker 3: .* sent \w+ about what is no meeting of this worker's"
    with pytest.raises(ProtocolError, match=words):
        holding().on_release(COORDINATOR, Proceed(number=1, hold=2))
    with pytest.raises(ProtocolError, match=words):
        holding().on_commit(COORDINATOR, Paused(number=2, what="end"))
    with pytest.raises(ProtocolError, match=words):
        Meetings(3).on_commit(COORDINATOR, Paused(number=1, what="end"))
    with pytest.raises(ProtocolError, match=words):
        holding().on_propose(server_id(1), PauseRequest(number=1))
