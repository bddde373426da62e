"""Control messages of one job never reach the next, and those of the next wait for it."""

from __future__ import annotations

import pytest

from psdist.errors import JobEndedError, ProtocolError
from psdist.protocol.control import Control, Ended, Failure, Resume, Stop
from psdist.protocol.events import Arrived, ControlArrived, Offered
from psdist.protocol.header import MOST_CREDITS, Header, Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.transport.job_epochs import JobEpochs

WORKER, OTHER = worker_id(0), worker_id(1)


def control(peer: int, message: Control | None = None) -> ControlArrived:
    return ControlArrived(peer, message or Stop())


def test_what_is_of_now_is_handed_out() -> None:
    epochs = JobEpochs()
    assert epochs.admits(control(WORKER), epoch=0)
    assert epochs.advance() == []
    assert epochs.admits(control(WORKER), epoch=1)


def test_what_is_late_is_dropped() -> None:
    epochs = JobEpochs()
    epochs.advance()
    assert not epochs.admits(control(WORKER), epoch=0)
    assert epochs.advance() == []


def test_what_is_early_waits_in_its_order_for_its_own_generation() -> None:
    epochs = JobEpochs()
    first, second, third = (control(WORKER, Resume(seq=seq)) for seq in range(3))
    assert not epochs.admits(first, epoch=1)
    assert not epochs.admits(second, epoch=1)
    assert not epochs.admits(third, epoch=2)
    assert epochs.advance() == [first, second]
    assert epochs.advance() == [third]
    assert epochs.advance() == []


def test_a_failure_is_told_whenever_it_comes() -> None:
    failure = control(WORKER, Failure(heading="", text="", exit_status=1))
    epochs = JobEpochs()
    epochs.advance()
    for generation in range(4):
        assert epochs.admits(failure, epoch=generation)


def test_the_end_of_the_job_is_told_again_and_again_of_whichever_generation() -> None:
    """A script may have caught it once."""
    for now in range(3):
        epochs = JobEpochs()
        for _ in range(now):
            epochs.advance()
        epochs.require_not_ended()
        with pytest.raises(JobEndedError, match="another rank has reported the cause") as caught:
            epochs.admits(control(WORKER, Ended(exit_status=3)), epoch=1)
        assert caught.value.exit_status == 3
        for _ in range(2):
            with pytest.raises(JobEndedError) as caught:
                epochs.require_not_ended()
            assert caught.value.exit_status == 3


def test_data_behind_a_message_that_waits_keeps_its_place() -> None:
    epochs = JobEpochs()
    first, last = control(WORKER), control(WORKER)
    offered = Offered(WORKER, Kind.PUSH, 0, 4, None)
    pull = Arrived(WORKER, Header(kind=Kind.PULL, sender=WORKER), None)
    assert epochs.admits_data(offered)  # nothing waits
    assert not epochs.admits(first, epoch=1)
    assert not epochs.admits_data(offered)
    assert not epochs.admits_data(pull)
    assert not epochs.admits(last, epoch=1)
    assert epochs.admits_data(Offered(OTHER, Kind.PUSH, 0, 4, None))
    assert epochs.advance() == [first, offered, pull, last]
    assert epochs.admits_data(offered)


def test_what_waits_of_a_peer_is_bounded() -> None:
    epochs = JobEpochs()
    for _ in range(MOST_CREDITS):
        assert not epochs.admits(control(server_id(1)), epoch=1)
    with pytest.raises(ProtocolError, match="server 1 sent 4096 messages of a job that has not"):
        epochs.admits(control(server_id(1)), epoch=1)
    assert not epochs.admits(control(WORKER), epoch=1)
