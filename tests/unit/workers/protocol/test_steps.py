"""Local steps of each group, as a worker asks the coordinator for them."""

from __future__ import annotations

import pytest

from psdist.controller.steps import Term
from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import AskSteps, StepsFixed
from psdist.protocol.ids import COORDINATOR, server_id
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import SendControl
from psdist.workers.protocol.core import WorkerCore
from tests.support.virtual.worker_machine import control

TERM = Term(1, 2, 3)
SEAT = Seat(worker=4, group=1, members=(3, 4), num_servers=2)


def fixed(*steps: int, block: int = 3) -> StepsFixed:
    return StepsFixed(loader=1, number=2, block=block, steps=list(steps))


def test_an_answer_is_known_until_it_is_taken() -> None:
    core = WorkerCore(SEAT)
    assert core.steps.ask(TERM) == SendControl(
        COORDINATOR, AskSteps(worker=4, loader=1, number=2, block=3)
    )
    assert not core.steps.is_known(TERM)
    assert control(core, COORDINATOR, fixed(4, 12)) == []
    assert core.steps.is_known(TERM)
    assert core.steps.take(TERM) == (4, 12)
    assert not core.steps.is_known(TERM)
    assert core.next_set().steps is core.steps


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (server_id(1), fixed(4, 12)),
        (COORDINATOR, fixed(4, 12, block=4)),
        (COORDINATOR, fixed(4)),
        (COORDINATOR, fixed()),
        (COORDINATOR, fixed(0, 12)),
    ],
)
def test_what_nobody_has_asked_for_is_refused(peer: int, message: StepsFixed) -> None:
    core = WorkerCore(SEAT)
    core.steps.ask(TERM)
    with pytest.raises(ProtocolError, match=r"worker 4: .* sent StepsFixed .*unasked or damaged"):
        control(core, peer, message)


def test_it_comes_once_and_is_asked_for_once() -> None:
    core = WorkerCore(SEAT)
    with pytest.raises(InvariantError, match="taken before its answer"):
        core.steps.take(TERM)
    core.steps.ask(TERM)
    with pytest.raises(InvariantError, match=r"asked for .* twice"):
        core.steps.ask(TERM)
    with pytest.raises(InvariantError, match="taken before its answer"):
        core.steps.take(TERM)
    core.steps.ask(Term(0, 0, 0))
    control(core, COORDINATOR, fixed(4, 12))
    with pytest.raises(ProtocolError, match="unasked"):
        control(core, COORDINATOR, fixed(4, 12))
