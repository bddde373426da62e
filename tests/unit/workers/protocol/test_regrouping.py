"""What a worker's machine decides when another one of its group has failed and the group
continues."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from psdist.errors import BuriedError, InvariantError, ProtocolError
from psdist.protocol.control import (
    Leave,
    MembershipChanged,
    Registered,
    Regroup,
    Regrouped,
    Settings,
    Suspend,
)
from psdist.protocol.events import Arrived, ControlArrived
from psdist.protocol.header import Flag, Header
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import Action, SendControl, SendPush
from psdist.workers.protocol.core import WorkerCore
from psdist.workers.protocol.membership import Regrouping
from tests.support.virtual.worker_machine import OWNERS, PARTITION, RULE, offer, reply_to

HYPER = pack_hyperparameters([{"lr": 0.1}])
MEMBERS = (0, 1, 2)


def made(worker: int, *, credits: int = 8, reforms: bool = True) -> WorkerCore:
    seat = Seat(worker=worker, group=0, members=MEMBERS, num_servers=2, group_reforms=reforms)
    core = WorkerCore(seat, describe_group=str, survives_workers=True)
    core.take_slice(PARTITION, owners=OWNERS, credits=credits, replies=RULE)
    if seat.is_leader:
        core.begin_register()
        for server in range(2):
            registered = Registered(group=0, server=server)
            core.handle(ControlArrived(server_id(server), registered))
    return core


def hear(core: WorkerCore, *dead: int, generation: int = 1) -> list[Action]:
    chief = min(set(MEMBERS) - set(dead), default=3)
    survive = MembershipChanged(generation=generation, dead=list(dead), chief=chief)
    return core.handle(ControlArrived(COORDINATOR, survive))


def pushed(actions: Sequence[Action]) -> list[Header]:
    return [each.header for each in actions if isinstance(each, SendPush)]


def begin(core: WorkerCore, clock: int = 0) -> list[Header]:
    core.begin_iteration(clock=clock, hyper=HYPER, absent=(), weight=1.0)
    return pushed(core.finish_push(empty=()))


def answer(core: WorkerCore, header: Header) -> list[Header]:
    reply = reply_to(header)
    core.handle(offer(reply))
    return pushed(core.handle(Arrived(reply.sender, reply, None)))


# -- telling and hearing ---------------------------------------------------------------------------


def test_a_worker_tells_once_for_each_number_of_dead_and_hears_what_all_have_told() -> None:
    seat = Seat(worker=2, group=0, members=(0, 2), num_servers=1, group_reforms=True)
    regrouping = Regrouping(seat)
    assert not regrouping.is_due
    regrouping.num_lost = 1
    assert regrouping.is_due
    assert regrouping.tell(b"here") == [
        SendControl(COORDINATOR, Regroup(worker=2, num_lost=1, standing=b"here"))
    ]
    assert not regrouping.is_due
    assert regrouping.answer is None
    regrouping.on_regrouped(COORDINATOR, Regrouped(num_lost=1, standings=[b"a", b"b"]))
    assert regrouping.answer == [b"a", b"b"]
    regrouping.num_lost = 2
    assert regrouping.answer is None
    regrouping.tell(b"there")
    regrouping.on_regrouped(COORDINATOR, Regrouped(num_lost=1, standings=[b"a", b"b"]))  # late
    assert regrouping.answer is None


@pytest.mark.parametrize(
    ("peer", "num_lost", "standings", "match"),
    [
        (server_id(1), 1, [b"", b""], "server 1 sent Regrouped of a group that has lost 1"),
        (COORDINATOR, 2, [b"", b""], "has lost 2; this worker has reported 1"),
        (COORDINATOR, 0, [b"", b""], "has lost 0"),
        (COORDINATOR, 1, [b""], "of 1 workers; 2 are left"),
    ],
)
def test_what_nobody_answers_is_refused(
    peer: int, num_lost: int, standings: list[bytes], match: str
) -> None:
    seat = Seat(worker=2, group=0, members=(0, 2), num_servers=1, group_reforms=True)
    regrouping = Regrouping(seat)
    regrouping.num_lost = 1
    regrouping.tell(b"")
    with pytest.raises(ProtocolError, match=match):
        regrouping.on_regrouped(peer, Regrouped(num_lost=num_lost, standings=standings))


def test_a_death_in_the_group_is_one_only_where_the_group_goes_on() -> None:
    core = made(2)
    hear(core, 1)
    assert (core.seat.members, core.seat.place) == ((0, 2), 1)
    assert core.regrouping.num_lost == 1
    hear(core, 1, 9, generation=2)
    assert core.regrouping.num_lost == 1, "of another group"
    with pytest.raises(BuriedError):
        hear(made(2, reforms=False), 1)
    with pytest.raises(BuriedError):
        hear(made(2), 2)


# -- who speaks for the group ----------------------------------------------------------------------


def test_the_next_leader_says_what_the_dead_one_may_not_have_said() -> None:
    waiting = made(1)
    waiting.begin_collective("barrier")
    suspend = Suspend(group=0, clock=0, seq=1)
    assert hear(waiting, 0) == [SendControl(server_id(each), suspend) for each in range(2)]
    assert hear(waiting, 0, 2, generation=2) == []

    training = made(1)
    assert hear(training, 0) == []
    (first, *_) = training.begin_collective("barrier")
    assert isinstance(first, SendControl)
    assert first.message == suspend

    done = made(1)
    done.begin_leave()
    done.begin_done({})
    leave = Leave(group=0, clock=0)
    assert hear(done, 0) == [SendControl(server_id(each), leave) for each in range(2)]


def test_others_than_the_next_leader_say_nothing() -> None:
    core = made(2)
    core.begin_collective("barrier")
    assert hear(core, 0) == []
    leader = made(0)
    leader.begin_collective("barrier")
    assert hear(leader, 1) == [], "it has said so"


# -- what becomes its own --------------------------------------------------------------------------


def test_the_first_push_of_what_the_dead_had_says_that_it_comes_again() -> None:
    core = made(0)
    (first, second) = (begin(core), core.mine)
    for header in first:
        answer(core, header)
    mine = sorted({*second, 3, 4})
    hear(core, 1)
    core.take_over_chunks(mine)
    assert list(core.mine) == mine
    flags = {header.chunk: header.flags for header in begin(core, 1)}
    assert flags == {chunk: Flag.RETRANSMIT if chunk in (3, 4) else Flag.NONE for chunk in mine}


def test_it_is_said_again_once() -> None:
    core = made(0)
    for header in begin(core):
        answer(core, header)
    core.take_over_chunks(sorted({*core.mine, 3}))
    for header in begin(core, 1):
        answer(core, header)
    assert not any(header.flags for header in begin(core, 2))


def test_behind_a_push_what_the_dead_had_is_pushed_with_no_gradient_and_no_weight() -> None:
    core = made(0, credits=1)
    sent = begin(core)
    mine = sorted({*core.mine, 3, 4})
    core.take_over_chunks(mine)
    for_dead = pushed(core.push_for_the_dead())
    assert sorted(each.chunk for each in for_dead) == [3, 4]
    for header in for_dead:
        assert (header.clock, header.length, header.weight, header.flags) == (
            0,
            0,
            0.0,
            Flag.RETRANSMIT,
        )
        assert header.sender == worker_id(0)
    core.check_invariants()
    assert not core.is_idle
    for header in for_dead:
        assert answer(core, header) == [], "it held no credit"
    while sent:
        sent += answer(core, sent.pop(0))
    assert core.is_idle
    assert pushed(core.push_for_the_dead()) == [], "once"
    assert not any(header.flags & Flag.RETRANSMIT for header in begin(core, 1))


def test_servers_that_are_new_to_it_hear_its_settings_first() -> None:
    core = made(0)
    only_first = [chunk for chunk in core.mine if OWNERS[chunk] == 0]
    transfers = core.transfers
    transfers.take_over(only_first)
    core.begin_iteration(clock=0, hyper=HYPER, absent=(), weight=1.0)
    transfers.finish_push(empty=())
    mine = sorted({*only_first, *(chunk for chunk in range(6) if OWNERS[chunk] == 1)})
    told = core.take_over_chunks(mine)
    assert told == [SendControl(server_id(1), Settings(version=1, hyper=HYPER, absent=[]))]
    assert core.take_over_chunks(mine) == []


def test_nothing_is_pushed_for_the_dead_in_the_middle_of_a_push() -> None:
    core = made(0)
    core.begin_iteration(clock=0, hyper=HYPER, absent=(), weight=1.0)
    with pytest.raises(InvariantError, match="pushes for failed workers"):
        core.push_for_the_dead()
