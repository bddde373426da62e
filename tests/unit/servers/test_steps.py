"""The registrar's local steps by speed: fixed by whoever asks first, the same for all."""

from __future__ import annotations

import pytest

from psdist.controller.steps import StepControl, Term
from psdist.errors import ProtocolError
from psdist.protocol.control import AskSteps, Control, Progress, RoundTook, StepsFixed
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.registrar import Registrar, RegistrarAction
from psdist.servers.protocol.steps import StepsChosen, StepsObserved


def registrar(*, is_by_speed: bool = True) -> Registrar:
    """Groups of one and of two workers."""
    steps = StepControl(sizes=[1, 2], local_steps=8) if is_by_speed else None
    return Registrar(num_workers=3, num_servers=1, groups=((0,), (1, 2)), steps=steps)


def tell(machine: Registrar, message: RoundTook | AskSteps) -> list[RegistrarAction]:
    return machine.handle(worker_id(message.worker), message)


def ask(worker: int, block: int) -> AskSteps:
    return AskSteps(worker=worker, loader=1, number=0, block=block)


def answer(worker: int, block: int, *steps: int) -> SendControl:
    fixed = StepsFixed(loader=1, number=0, block=block, steps=list(steps))
    return SendControl(worker_id(worker), fixed)


def test_the_first_one_that_asks_fixes_it_for_all() -> None:
    machine = registrar()
    assert tell(machine, RoundTook(worker=0, round=0, step_us=900)) == [StepsObserved(0, 0, 900)]
    assert tell(machine, ask(0, 1)) == [
        StepsChosen(Term(1, 0, 1), (8, 8), ""),
        answer(0, 1, 8, 8),
    ]
    assert tell(machine, RoundTook(worker=1, round=0, step_us=300)) == [StepsObserved(1, 0, 300)]
    assert tell(machine, ask(2, 1)) == [answer(2, 1, 8, 8)], "it is fixed, whatever is known now"
    why = "a step takes 0.39 ms in the mean, not 0.90 ms"
    assert tell(machine, ask(2, 2)) == [
        StepsChosen(Term(1, 0, 2), (3, 9), why),
        answer(2, 2, 3, 9),
    ]
    assert tell(machine, ask(0, 2)) == [answer(0, 2, 3, 9)]
    assert tell(machine, ask(1, 1)) == [answer(1, 1, 8, 8)], "it comes late"
    assert tell(machine, ask(1, 2)) == [answer(1, 2, 3, 9)]


def test_a_pass_more_over_the_same_loader_is_another_term() -> None:
    machine = registrar()
    tell(machine, ask(0, 0))
    again = AskSteps(worker=0, loader=1, number=1, block=0)
    assert isinstance(tell(machine, again)[0], StepsChosen)


@pytest.mark.parametrize(
    "message",
    [
        RoundTook(worker=2, round=0, step_us=900),  # leads no group
        RoundTook(worker=0, round=-1, step_us=900),
        RoundTook(worker=0, round=1, step_us=-1),
        AskSteps(worker=0, loader=-1, number=0, block=0),
        AskSteps(worker=0, loader=1, number=-1, block=0),
        AskSteps(worker=0, loader=1, number=0, block=-1),
    ],
)
def test_what_cannot_be_is_refused(message: RoundTook | AskSteps) -> None:
    with pytest.raises(ProtocolError, match=f"worker {message.worker} sent .*damaged"):
        tell(registrar(), message)


def test_a_worker_asks_once_and_for_itself() -> None:
    machine = registrar()
    tell(machine, ask(0, 0))
    with pytest.raises(ProtocolError, match="twice or damaged"):
        tell(machine, ask(0, 0))
    with pytest.raises(ProtocolError, match="sent AskSteps of worker 1"):
        machine.handle(worker_id(0), ask(1, 0))


def test_nobody_asks_where_all_make_as_many() -> None:
    machine = registrar(is_by_speed=False)
    messages: list[Control] = [ask(0, 0), RoundTook(worker=0, round=0, step_us=1)]
    for message in messages:
        with pytest.raises(ProtocolError, match="unasked"):
            machine.handle(worker_id(0), message)
    assert machine.handle(worker_id(0), Progress(worker=0, clock=0, samples=0)) == []
