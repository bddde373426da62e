"""A substitute's machine: it joins a running job, and continues where that is."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import (
    Collected,
    Control,
    JoinAccepted,
    JoinReady,
    Paused,
    PauseRequest,
    Stop,
    TakePlace,
)
from psdist.protocol.events import ControlArrived
from psdist.protocol.ids import COORDINATOR, server_id
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import SendPush
from psdist.workers.protocol.core import WorkerCore
from tests.support.virtual.worker_machine import OWNERS, PARTITION, RULE, Network, messages, push

WELCOME = JoinAccepted(
    worker=3, clocks=[8, 2], state="state-8-1", seq=5, generation=2, dead=[0, 1], chief=2, meeting=4
)


def substitute() -> WorkerCore:
    """Of two parameter sets."""
    seat = Seat(worker=3, group=3, members=(3,), num_servers=2, is_substitute=True)
    core = WorkerCore(seat, survives_workers=True)
    core.next_set()
    return core


def hear(core: WorkerCore, message: Control, peer: int = COORDINATOR) -> list[Any]:
    actions = core.handle(ControlArrived(peer, message))
    core.check_invariants()
    return actions


def asked() -> WorkerCore:
    core = substitute()
    hear(core, TakePlace(worker=1))
    core.membership.begin_join(num_sets=len(core.sets))
    return core


def joined() -> WorkerCore:
    core = asked()
    hear(core, WELCOME)
    for each, clock in zip(core.sets, WELCOME.clocks, strict=True):
        each.take_slice(PARTITION, owners=OWNERS, credits=2, replies=RULE, first_clock=clock)
    return core


def test_it_says_that_it_is_ready_with_all_its_sets_and_waits() -> None:
    core = substitute()
    assert core.membership.place is None
    assert hear(core, TakePlace(worker=1)) == []
    assert core.membership.place == 1
    assert messages(core.membership.begin_join(num_sets=len(core.sets))) == [
        (COORDINATOR, JoinReady(worker=3, num_sets=2))
    ]
    assert core.membership.is_joining
    assert core.membership.welcome is None
    assert "come to where a substitute can join" in core.awaits()
    (warning,) = core.ask_who_is_missing()
    assert "have not come to where a substitute can join" in warning.text  # type: ignore[union-attr]


def test_what_the_coordinator_says_holds_for_all_sets() -> None:
    core = joined()
    assert core.membership.welcome == WELCOME
    assert (core.chief, core.dead) == (2, frozenset({0, 1}))
    for each, clock in zip(core.sets, WELCOME.clocks, strict=True):
        assert not each.membership.is_joining
        assert each.clock == clock
        pushes = [action for action in push(each, clock=clock) if isinstance(action, SendPush)]
        header = pushes[0].header
        assert (header.clock, header.generation) == (clock, 2)


def test_its_collectives_are_counted_on_from_those_that_are_over() -> None:
    core = joined()
    (*suspends, (_, enter)) = messages(core.begin_collective("barrier"))
    assert {message.clock for _, message in suspends} == {8, 2}  # type: ignore[attr-defined]
    assert enter.seq == 6  # type: ignore[attr-defined]
    answer = Collected(seq=6, payloads=[b""], runs=[0, 3], values=b"", error="")
    hear(core, answer)
    assert core.collectives.is_answered
    core.collectives.take()
    assert [message.clock for _, message in messages(core.begin_leave())] == [8, 8, 2, 2]  # type: ignore[attr-defined]


def test_its_meetings_are_counted_on_too() -> None:
    core = joined()
    hear(core, PauseRequest(number=5))
    (held,) = core.meetings.hold("join", clocks=[8, 2])
    assert held.message.number == 5  # type: ignore[union-attr]
    hear(core, Paused(number=5, what="join"))
    assert core.meetings.take() == "join"


def test_it_trains_from_its_clock_on() -> None:
    core = joined()
    network = Network(core, seed=3, duplicate_rate=0.0)
    network.do(core.transfers.begin_pull(clock=8, chunks=range(6), is_fresh=False))
    network.run()
    for clock in (8, 9):
        network.do(push(core, clock=clock))
        network.run()
    assert core.clock == 10
    core.check_invariants()


def test_a_second_welcome_changes_nothing() -> None:
    core = joined()
    core.begin_collective("barrier")
    hear(core, WELCOME)
    assert core.collectives.seq == 6
    assert core.membership.duplicates == 1


@pytest.mark.parametrize(
    ("peer", "worker"), [(server_id(1), 3), (COORDINATOR, 4)], ids=["another server", "another's"]
)
def test_none_but_the_coordinator_welcomes_it(peer: int, worker: int) -> None:
    core = asked()
    welcome = JoinAccepted(
        worker=worker, clocks=[1], state="s", seq=1, generation=1, dead=[0], chief=1, meeting=0
    )
    with pytest.raises(ProtocolError, match="sent JoinAccepted of worker"):
        hear(core, welcome, peer)


@pytest.mark.parametrize("peer", [server_id(1), COORDINATOR], ids=["another server", "twice"])
def test_a_substitute_is_asked_by_the_coordinator_once(peer: int) -> None:
    core = substitute()
    if peer == COORDINATOR:
        hear(core, TakePlace(worker=1))
    with pytest.raises(
        ProtocolError, match=r"sent TakePlace of worker 0; server 0 asks substitutes"
    ):
        hear(core, TakePlace(worker=0), peer)
    with pytest.raises(ProtocolError, match="sent TakePlace"):
        hear(WorkerCore(Seat(worker=3, group=3, members=(3,), num_servers=2)), TakePlace(worker=1))


def test_nobody_is_welcome_who_has_not_asked() -> None:
    with pytest.raises(ProtocolError, match="welcomes substitutes that have asked"):
        hear(substitute(), WELCOME)
    plain = WorkerCore(Seat(worker=3, group=3, members=(3,), num_servers=2))
    assert plain.membership.place == 3
    with pytest.raises(ProtocolError, match="welcomes substitutes that have asked"):
        hear(plain, WELCOME)
    for core in (plain, substitute()):
        with pytest.raises(InvariantError, match="substitutes that are asked do, once"):
            core.membership.begin_join(num_sets=len(core.sets))


def test_it_does_nothing_in_the_job_before_it_has_joined() -> None:
    core = substitute()
    for do in (
        lambda: core.begin_collective("barrier"),
        lambda: core.begin_done({}),
        lambda: core.begin_iteration(clock=0, hyper=b"", absent=(), weight=1.0),
    ):
        with pytest.raises(InvariantError, match="is a substitute and has not joined"):
            do()
    with pytest.raises(InvariantError, match="registered group 3 at 0; a substitute joins"):
        core.begin_register()
    core = asked()
    with pytest.raises(InvariantError, match="substitutes that are asked do, once"):
        core.membership.begin_join(num_sets=len(core.sets))


def test_the_job_may_be_over_before_it_has_joined() -> None:
    for core in (substitute(), asked()):
        assert not core.membership.is_stopped
        hear(core, Stop())
        assert core.membership.is_stopped
    with pytest.raises(ProtocolError, match="sent Stop before this worker's script had finished"):
        hear(joined(), Stop())
