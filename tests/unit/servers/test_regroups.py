"""Who of a group that has lost workers has told where it stands; what the coordinator and the
servers make of a worker's death where its group continues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psdist.controller.mode import ModeControl
from psdist.controller.observed import GroupCame, GroupGone, ModeObserved
from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.control import (
    Evict,
    EvictAck,
    Leave,
    Progress,
    Register,
    Regroup,
    Regrouped,
    Settings,
    Setup,
    Suspend,
)
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered
from psdist.protocol.header import Dtype, Flag, Header, Kind
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.servers.protocol.actions import (
    Accept,
    Fail,
    Inherit,
    MembershipEvent,
    Receipt,
    Reply,
    SendControl,
    Step,
)
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.membership import GroupState, Membership
from psdist.servers.protocol.regroups import Regroups
from psdist.servers.protocol.round_control import RoundControl
from psdist.servers.protocol.settings import SettingsOfWorkers
from psdist.servers.protocol.state import ServerCore
from psdist.servers.protocol.views import Death, Views
from tests.support.coordinators import assemble
from tests.unit.servers.test_state import HYPER, built, only

GROUPS = ((0, 1, 2), (3,))


def told(worker: int, num_lost: int = 1) -> Regroup:
    return Regroup(worker=worker, num_lost=num_lost, standing=b"of %d" % worker)


# -- the coordinator's count
# -------------------------------------------------------------------------


def test_all_who_are_left_are_answered_what_each_has_told_by_place() -> None:
    regroups = Regroups(GROUPS)
    regroups.on_settled({1})
    assert regroups.on_told(told(2)) == []
    answer = Regrouped(num_lost=1, standings=[b"of 0", b"of 2"])
    assert regroups.on_told(told(0)) == [
        SendControl(worker_id(0), answer),
        SendControl(worker_id(2), answer),
    ]


def test_what_was_told_for_fewer_dead_is_forgotten() -> None:
    regroups = Regroups(GROUPS)
    regroups.on_settled({1})
    assert regroups.on_told(told(2)) == []
    regroups.on_settled({1, 2})
    assert regroups.on_told(told(0)) == []  # it has not heard of the second death
    (answer,) = regroups.on_told(told(0, num_lost=2))
    assert answer == SendControl(worker_id(0), Regrouped(num_lost=2, standings=[b"of 0"]))


def test_nobody_is_answered_with_what_another_has_told_for_fewer_dead() -> None:
    regroups = Regroups([(0, 1, 2, 3)])
    regroups.on_settled({1})
    regroups.on_told(told(2))
    regroups.on_settled({1, 3})
    assert regroups.on_told(told(0, num_lost=2)) == []
    assert len(regroups.on_told(told(2, num_lost=2))) == 2


def test_a_death_of_another_group_changes_nothing() -> None:
    regroups = Regroups([(0, 1, 2), (3, 4)])
    regroups.on_settled({1})
    regroups.on_told(told(2))
    regroups.on_settled({1, 4})
    assert len(regroups.on_told(told(0))) == 2


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (told(0, num_lost=2), "has lost 2; it has lost 1 and continues"),
        (told(0, num_lost=0), "has lost 0"),
        (told(3), "has lost 1; it has lost 0"),
        (told(9), "it has lost none"),
        (told(2), "worker 2 sent Regroup twice"),
    ],
)
def test_what_no_worker_says_is_refused(message: Regroup, match: str) -> None:
    regroups = Regroups(GROUPS)
    regroups.on_settled({1})
    regroups.on_told(told(2))
    with pytest.raises(ProtocolError, match=match):
        regroups.on_told(message)


def took(worker: int, first_round: int) -> Progress:
    return Progress(
        worker=worker, clock=9, samples=0, first_round=first_round, own_us=[5], waits_us=[3]
    )


def test_another_worker_tells_of_rounds_where_the_one_that_did_has_died() -> None:
    control = ModeControl(num_groups=2, staleness=2)
    rounds = RoundControl(control, groups=GROUPS)
    rounds.observe(took(0, 2), may_change=False)
    assert rounds.lose(2, {2}) == []
    rounds.go_on((0, 1))
    (observed,), _ = rounds.observe(took(0, 3), may_change=False)
    assert isinstance(observed, ModeObserved)
    assert rounds.lose(0, {0, 2}) == []
    rounds.go_on((1,))
    (came, _), _ = rounds.observe(took(1, 6), may_change=False)
    assert came == GroupCame(0, 5)
    assert len(rounds.observe(took(1, 7), may_change=False)[0]) == 1
    with pytest.raises(ProtocolError, match="told what rounds took, unasked"):
        rounds.observe(took(0, 6), may_change=False)
    rounds.observe(took(3, 6), may_change=False)
    assert rounds.lose(3, {0, 2, 3}) == [GroupGone(1)]
    assert control.groups == {0}


def test_the_coordinator_says_who_tells_when_all_are_answered() -> None:
    control = ModeControl(num_groups=2, staleness=2)
    coordinator = assemble(
        num_workers=4, num_servers=1, groups=GROUPS, max_deaths=2, reforms=True, control=control
    )
    coordinator.is_ready = True
    coordinator.on_lost(worker_id(0), "worker 0")
    coordinator.handle(server_id(0), EvictAck(generation=1, server=0, reached=[3]))
    assert control.groups == {0, 1}
    for worker in (1, 2):
        coordinator.handle(worker_id(worker), told(worker))
    actions = coordinator.handle(worker_id(1), took(1, 9))
    assert [type(each) for each in actions] == [GroupCame, ModeObserved]


def test_rounds_are_judged_again_however_many_iterations_were_skipped() -> None:
    control = ModeControl(num_groups=2, staleness=2)
    rounds = RoundControl(control, groups=GROUPS)
    control.go_on(None, 0)
    rounds.go_on((1, 2))
    decisions = []
    for round_number in range(20, 20 + 80):
        for place, worker in enumerate((1, 3)):
            own_us = [1000, 9000][(round_number + place) % 2]  # each is slow in every other round
            message = replace(took(worker, round_number), own_us=[own_us])
            decisions.append(rounds.observe(message, may_change=True)[1])
    assert any(decisions)


# -- what is declared ------------------------------------------------------------------------------


def declared(deaths: Views, worker: int) -> Death:
    return next(
        each
        for each in deaths.on_lost(worker, f"worker {worker}", is_ready=True)
        if isinstance(each, Death)
    )


def test_the_others_of_the_group_stay_until_the_last_one_dies() -> None:
    deaths = Views(groups=GROUPS, num_servers=1, max_deaths=9, is_out=all)
    first = declared(deaths, 0)
    assert (first.left, first.group, first.stay, first.chief) == ((), 0, (1, 2), 1)
    assert (deaths.out, deaths.live) == ({0}, [1, 2, 3])
    assert declared(deaths, 2).stay == (1,)
    last = declared(deaths, 1)
    assert (last.left, last.group, last.stay, last.chief) == ((), -1, (), 3)
    assert deaths.live == [3]


def test_a_group_counts_while_one_of_it_lives() -> None:
    deaths = Views(groups=GROUPS, num_servers=1, max_deaths=9, is_out=all)
    for worker in (3, 0, 1):
        declared(deaths, worker)
    with pytest.raises(PeerLostError, match="which leaves no group: restart the job"):
        declared(deaths, 2)


def test_the_coordinator_takes_what_a_group_tells_when_all_servers_know() -> None:
    coordinator = assemble(num_workers=4, num_servers=1, groups=GROUPS, max_deaths=2, reforms=True)
    coordinator.is_ready = True
    coordinator.on_lost(worker_id(1), "worker 1")
    with pytest.raises(ProtocolError, match="it has lost 0"):
        coordinator.handle(worker_id(0), told(0))
    coordinator.handle(server_id(0), EvictAck(generation=1, server=0, reached=[3]))
    assert coordinator.handle(worker_id(1), told(1)) == []  # a late word of the dead
    assert coordinator.handle(worker_id(0), told(0)) == []
    assert len(coordinator.handle(worker_id(2), told(2))) == 2
    with pytest.raises(ProtocolError, match="sent Regroup of worker 0"):
        coordinator.handle(worker_id(2), told(0))


def test_without_the_setting_nobody_tells() -> None:
    coordinator = assemble(num_workers=4, num_servers=1, groups=GROUPS, max_deaths=2)
    with pytest.raises(ProtocolError, match="sent Regroup, unasked"):
        coordinator.handle(worker_id(0), told(0))


# -- who counts on a server ------------------------------------------------------------------------


def membership() -> Membership:
    made = Membership(server=0, groups=GROUPS, is_out=all)
    for members in GROUPS:
        group = GROUPS.index(members)
        made.join(worker_id(members[0]), Register(group=group, workers=list(members), clock=0))
        made.limits.count(group)
    return made


def bury(made: Membership, *dead: int, generation: int = 1) -> Any:
    return made.evict(COORDINATOR, Evict(generation=generation, dead=list(dead)))


def test_a_group_goes_on_with_those_who_are_left() -> None:
    made = membership()
    assert bury(made, 0) == {}
    assert made.take_lost() == {0: [0]}
    assert made.take_lost() == {}
    assert made.dead == {worker_id(0)}
    assert made.num_workers_of(0) == 2
    assert (made.num_active_workers, made.num_active_groups) == (3, 2)
    assert made.pushing == {worker_id(1), worker_id(2), worker_id(3)}
    assert made.chief == worker_id(1)
    assert not made.is_dead(0)
    made.check_invariants()
    with pytest.raises(ProtocolError, match="worker 1 speaks"):
        made.suspend(worker_id(2), Suspend(group=0, clock=0, seq=1), num_chunks=1)
    assert made.suspend(worker_id(1), Suspend(group=0, clock=0, seq=1), num_chunks=1)


def test_it_dies_with_the_last_of_them() -> None:
    made = membership()
    bury(made, 0)
    bury(made, 0, 2, generation=2)
    assert made.take_lost() == {0: [0, 2]}
    assert bury(made, 0, 1, 2, generation=3) == {0: True}
    assert made.take_lost() == {}
    assert made.is_dead(0)
    assert (made.num_active_workers, made.num_active_groups) == (1, 1)


def test_all_of_it_at_once_is_a_death_of_the_group() -> None:
    made = membership()
    assert bury(made, 0, 1, 2) == {0: True}
    assert made.take_lost() == {}
    assert made.num_workers_of(0) == 3


def test_who_speaks_for_the_group_next_may_say_what_the_dead_had_said() -> None:
    made = membership()
    said = Suspend(group=0, clock=0, seq=1)
    assert made.suspend(worker_id(0), said, num_chunks=1)
    bury(made, 0)
    assert made.num_active_workers == 3
    assert not made.suspend(worker_id(1), said, num_chunks=1)
    made.resume(1)
    leave = Leave(group=0, clock=0)
    assert made.leave(worker_id(1), leave, num_chunks=1)
    bury(made, 0, 1, generation=2)
    assert made.take_lost() == {0: [0]}, "behind its leave a group loses nobody"
    assert made.num_active_workers == 1
    assert not made.leave(worker_id(2), leave, num_chunks=1)
    assert not made.suspend(worker_id(2), Suspend(group=0, clock=0, seq=2), num_chunks=1)
    assert made.standings[0] is GroupState.LEFT


# -- what a server makes of it ---------------------------------------------------------------------


def server(mode: str = "sync", *, chunks: int = 1) -> ServerCore:
    """Two groups, of workers 0 and 1, and of worker 2; all have told their settings."""
    core = assemble_core(
        server=0,
        make_rule=rule_for(mode, staleness=3),
        groups=[(0, 1), (2,)],
        survives_workers=True,
        is_out=all,
    )
    core.handle(ControlArrived(worker_id(0), Setup(partition=b"", optimizer="", hyper=b"")))
    core.handle(built(chunks, [Frame(capacity=4) for _ in range(4)]))
    for group, members in enumerate(([0, 1], [2])):
        register = Register(group=group, workers=members, clock=0)
        core.handle(ControlArrived(worker_id(members[0]), register))
        for worker in members:
            settings = Settings(version=1, hyper=HYPER, absent=[])
            core.handle(ControlArrived(worker_id(worker), settings))
    return core


def push(core: ServerCore, worker: int, *, clock: int, chunk: int = 0, **more: Any) -> list[Any]:
    """A push with a gradient has arrived, or (with flags) one without."""
    is_empty = "flags" in more
    header = Header(
        kind=Kind.PUSH, sender=worker_id(worker), group=worker // 2, chunk=chunk, clock=clock,
        length=0 if is_empty else 4, settings=1, weight=0.0 if is_empty else 1.0,
        dtype=Dtype.FLOAT32, **more,
    )  # fmt: skip
    if is_empty:
        return core.handle(Arrived(worker_id(worker), header, None))
    offer = Offered(worker_id(worker), Kind.PUSH, chunk, 4, header, clock=clock)
    accepted = core.handle(offer)
    (accept,) = only(accepted, Accept)
    return core.handle(Arrived(worker_id(worker), header, accept.slot))


def lose(core: ServerCore, *dead: int, generation: int = 1) -> list[Any]:
    return core.handle(ControlArrived(COORDINATOR, Evict(generation=generation, dead=list(dead))))


def again(
    core: ServerCore, worker: int, *, flags: int = Flag.RETRANSMIT, clock: int = 0, chunk: int = 0
) -> list[Any]:
    """``worker`` pushes instead of a dead one, without a gradient."""
    return push(core, worker, clock=clock, chunk=chunk, flags=flags)


def test_what_the_dead_had_pushed_is_the_groups_and_others_get_its_reply() -> None:
    core = server()
    push(core, 1, clock=0)
    actions = lose(core, 1)
    assert only(actions, Inherit) == [Inherit(0, 0, 0)]
    assert only(actions, MembershipEvent) == [MembershipEvent("reform", 0, 0, 1)]
    assert again(core, 0) == []
    replies = only(push(core, 2, clock=0), Reply)
    assert sorted(each.token.peer for each in replies) == [worker_id(0), worker_id(2)]


def test_what_it_had_not_pushed_others_push_with_no_weight() -> None:
    core = server()
    actions = lose(core, 1)
    assert only(actions, Inherit) == []
    assert not only(again(core, 0), Fail)
    (step,) = only(push(core, 2, clock=0), Step)
    assert [each.weight for each in step.contributions] == [0.0, 1.0]


def test_who_asks_for_a_receipt_of_what_the_dead_had_pushed_gets_one() -> None:
    core = server()
    push(core, 1, clock=0)
    lose(core, 1)
    asked = again(core, 0, flags=Flag.RETRANSMIT | Flag.RECEIPT)
    assert only(asked, Receipt) == [Receipt(worker_id(0), 0, 0)]


def test_a_reply_that_was_parked_for_the_dead_goes_to_who_asks_again() -> None:
    core = server("ssp")
    for clock in range(4):
        push(core, 1, clock=clock)
    lose(core, 1)  # the reply to its last push waits for the other group
    assert only(again(core, 0, clock=3), Reply) == []
    replies = only(push(core, 2, clock=0), Reply)
    assert sorted(each.token.peer for each in replies) == [worker_id(0), worker_id(2)]


def test_what_comes_again_need_not_come_in_order_and_all_else_must() -> None:
    core = server(chunks=2)
    lose(core, 1)
    push(core, 0, clock=0, chunk=1)
    assert not only(again(core, 0, chunk=0), Fail)
    (failed,) = only(push(server(chunks=2), 0, clock=1, chunk=0, flags=0), Fail)
    assert "pushed iteration 1 of chunk 0 after -1" in str(failed.error)
    core = server("async", chunks=2)
    push(core, 0, clock=0, chunk=1)
    (failed,) = only(push(core, 0, clock=0, chunk=0, flags=0), Fail)
    assert "all groups push in the chief's order" in str(failed.error)


def test_settings_may_be_told_from_any_version_on_by_who_goes_on_for_others() -> None:
    core = server()
    late = SettingsOfWorkers(server=0, pipeline=0)
    late.describe_model(num_pieces=1, num_optimizer_groups=1)
    late.learn(worker_id(7), Settings(version=5, hyper=HYPER, absent=[]))
    assert late.of(worker_id(7), 5).hyper == HYPER
    (failed,) = only(
        core.handle(ControlArrived(worker_id(0), Settings(version=9, hyper=HYPER, absent=[]))), Fail
    )
    assert "sent version 9 of its settings after version 1" in str(failed.error)
