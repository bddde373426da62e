"""Chunks that leave one by one, in the order that all groups share, and are awaited one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Settings, Setup, Suspend
from psdist.protocol.events import Arrived
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import COORDINATOR, server_id
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import Action, SendControl, SendPush, SendValues
from psdist.workers.protocol.core import ANY_TIME, WorkerCore
from psdist.workers.protocol.transfers import Transfers
from tests.support.virtual.worker_machine import (
    OWNERS,
    PARTITION,
    RULE,
    SETUP,
    Network,
    collect,
    make_core,
    messages,
    push,
    register,
    reply_to,
)
from tests.unit.workers.protocol.test_transfer_limits import rule

ORDER = (3, 4, 1, 0, 5, 2)


def begin(core: WorkerCore, **changed: Any) -> list[Action]:
    arguments: dict[str, Any] = {
        "clock": core.clock, "hyper": b"hyper", "absent": (), "weight": 1.0, **changed,
    }  # fmt: skip
    return core.begin_iteration(**arguments)


def headers(actions: list[Action]) -> list[Header]:
    pushes = [each for each in actions if isinstance(each, SendPush)]
    assert all(each.peer == server_id(OWNERS[each.header.chunk]) for each in pushes)
    return [each.header for each in pushes]


def chunks(actions: list[Action]) -> list[int]:
    return [each.chunk for each in headers(actions)]


def answer(core: WorkerCore, header: Header) -> list[Action]:
    actions = core.handle(Arrived(server_id(OWNERS[header.chunk]), reply_to(header), None))
    core.check_invariants()
    return actions


# -- one by one ------------------------------------------------------------------------------------


def test_chunks_leave_one_by_one_and_the_rest_together() -> None:
    core = make_core(credits=9, order=ORDER)
    (settings,) = {str(message) for _, message in messages(begin(core, weight=0.5))}
    assert settings == str(Settings(version=1, hyper=b"hyper", absent=[]))
    assert (core.clock, core.is_pushing, core.is_idle) == (1, True, False)
    first = headers(core.transfers.push_chunk(3, is_empty=False))
    second = headers(core.transfers.push_chunk(4, is_empty=True))
    rest = headers(core.finish_push(empty=[5, 3]))
    assert [each.chunk for each in first + second] == [3, 4]
    # By server, from this worker's own on, each in the order.
    assert [each.chunk for each in rest] == [0, 2, 1, 5]
    sent = first + second + rest
    assert {(each.clock, each.settings, each.weight) for each in sent} == {(0, 1, 0.5)}
    assert {each.chunk for each in sent if not each.length} == {4, 5}
    assert not core.is_pushing
    core.check_invariants()


def test_a_whole_slice_at_once_is_nothing_but_its_chunks_one_by_one() -> None:
    together, one_by_one = make_core(credits=9), make_core(credits=9)
    whole = headers(push(together, empty=[2]))
    begin(one_by_one)
    pushed = [
        header
        for chunk in range(6)
        for header in headers(one_by_one.transfers.push_chunk(chunk, is_empty=chunk == 2))
    ]
    assert one_by_one.finish_push(empty=()) == []
    assert sorted(whole, key=lambda each: each.chunk) == pushed


@pytest.mark.parametrize("order", [(), ORDER])
@pytest.mark.parametrize("credits", [1, 2, 3])
def test_credits_let_each_servers_chunks_go_in_the_order(
    credits: int, order: tuple[int, ...]
) -> None:
    core = make_core(credits=credits, order=order)
    begin(core)
    waiting: list[Header] = []
    sent: list[int] = []
    for chunk in order or range(6):
        waiting += headers(core.transfers.push_chunk(chunk, is_empty=False))
        core.check_invariants()
    core.finish_push(empty=())
    while waiting:
        header = waiting.pop(0)
        sent.append(header.chunk)
        waiting += headers(answer(core, header))
    for server in (0, 1):
        mine = [chunk for chunk in order or range(6) if OWNERS[chunk] == server]
        assert [chunk for chunk in sent if OWNERS[chunk] == server] == mine
    assert core.is_idle


def test_pulls_and_values_that_are_set_follow_the_order_too() -> None:
    core = make_core(credits=9, order=ORDER)
    sent = [each for each in core.begin_load(clock=0) if isinstance(each, SendValues)]
    assert [each.header.chunk for each in sent] == [4, 0, 2, 3, 1, 5]
    core = make_core(credits=9, order=ORDER)
    pulls: list[Any] = core.transfers.begin_pull(clock=0, chunks=(1, 2, 3, 4), is_fresh=True)
    assert [each.header.chunk for each in pulls] == [4, 2, 3, 1]


def test_the_chief_tells_servers_the_order_unless_it_is_the_ascending_one() -> None:
    for order, told in ((ORDER, [*ORDER]), ((), []), (tuple(range(6)), [])):
        setups = [
            message
            for _, message in messages(make_core(order=order).begin_setup(SETUP))
            if isinstance(message, Setup)
        ]
        assert [setup.order for setup in setups] == [told, told]


def test_an_order_that_is_no_permutation_is_none() -> None:
    seat = Seat(worker=2, group=0, members=(2,), num_servers=1)
    with pytest.raises(InvariantError, match="worker 2: an order to send in names chunk 0 twice"):
        Transfers(
            seat, owners=(0, 0), mine=(0,), chunk_bytes=(4, 4), credits=1, replies=rule(0),
            order=(0, 0),
        )  # fmt: skip


# -- what may not be -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [4, 2, 3])
def test_chunks_leave_in_the_order_only_and_once(chunk: int) -> None:
    core = make_core(credits=9, order=ORDER)
    begin(core)
    if chunk == 3:
        core.transfers.push_chunk(3, is_empty=False)
    with pytest.raises(
        InvariantError,
        match=f"worker 0 pushes chunk {chunk} of iteration 0; to be pushed, in the order that all",
    ):
        core.transfers.push_chunk(chunk, is_empty=False)


def test_nothing_is_pushed_before_an_iteration_begins_or_after_it_is_finished() -> None:
    finished = make_core(credits=9)
    push(finished)
    for core in (make_core(), finished):
        with pytest.raises(InvariantError, match="worker 0 pushes chunk 0 of iteration"):
            core.transfers.push_chunk(0, is_empty=False)
        with pytest.raises(InvariantError, match="finishes a push that has not begun"):
            core.finish_push(empty=())


@pytest.mark.parametrize("num_pushed", [0, 1, 6])
@pytest.mark.parametrize(
    "do",
    [
        lambda core: core.transfers.begin_pull(clock=1, chunks=(0,), is_fresh=False),
        lambda core: core.transfers.begin_copy(clock=1, chunks=(0,)),
        lambda core: core.begin_load(clock=1),
        lambda core: core.begin_collective("save"),
        lambda core: core.begin_leave(),
        lambda core: core.begin_done({}),
        begin,
    ],
    ids=["pull", "copy", "load", "collective", "leave", "done", "begin"],
)
def test_nothing_else_begins_while_an_iteration_is_half_pushed(
    do: Callable[[WorkerCore], object], num_pushed: int
) -> None:
    core = make_core(credits=9, order=ORDER)
    register(core)
    begin(core)
    for chunk in ORDER[:num_pushed]:
        (header,) = headers(core.transfers.push_chunk(chunk, is_empty=False))
        answer(core, header)
    with pytest.raises(InvariantError, match="worker 0"):
        do(core)


@pytest.mark.parametrize("name", sorted(ANY_TIME))
@pytest.mark.parametrize("num_pushed", [0, 1, 6])
def test_a_set_that_is_half_pushed_is_not_suspended_and_goes_on_in_the_collective(
    name: str, num_pushed: int
) -> None:
    first = make_core(credits=9, order=ORDER)
    second = first.next_set()
    register(first)
    second.take_slice(PARTITION, owners=OWNERS, credits=9, replies=RULE)
    register(second)
    begin(first)
    sent = [header for chunk in ORDER[:num_pushed] for header in push_of(first, chunk)]
    assert first.is_half_pushed
    assert second.is_half_pushed
    actions = first.begin_collective(name)
    suspends = [each for each in actions if isinstance(each, SendControl) and each.set_index == 0]
    assert [each.peer for each in suspends] == [COORDINATOR], "its Enter, and no Suspend"
    suspends = [each for each in actions if isinstance(each, SendControl) and each.set_index == 1]
    assert [each.message for each in suspends] == [Suspend(group=7, clock=0, seq=1)] * 2
    for header in sent:
        answer(first, header)
    collect(first, 1)
    first.collectives.take()
    for chunk in ORDER[num_pushed:]:
        for header in push_of(first, chunk):
            answer(first, header)
    first.finish_push(empty=())
    assert first.is_idle
    assert not first.is_half_pushed
    assert Suspend(group=7, clock=1, seq=2) in [
        each for _, each in messages(first.begin_collective("save"))
    ]


def push_of(core: WorkerCore, chunk: int) -> list[Header]:
    return headers(core.transfers.push_chunk(chunk, is_empty=False))


def test_a_set_that_waits_for_replies_keeps_the_worker_out_of_every_collective() -> None:
    core = make_core(credits=9)
    register(core)
    push(core)
    for name in sorted(ANY_TIME):
        with pytest.raises(InvariantError, match=f"{name} began during a push or pull"):
            core.begin_collective(name)


def test_no_iteration_begins_in_a_set_that_is_suspended() -> None:
    core = make_core(credits=9)
    register(core)
    core.begin_collective("mean")
    with pytest.raises(InvariantError, match="pushes iteration 0 inside a collective"):
        begin(core)


def test_an_iteration_that_is_expected_keeps_its_set_from_being_suspended_and_may_begin() -> None:
    core = make_core(credits=9)
    register(core)
    core.expect_iteration()
    assert (core.is_open, core.is_idle, core.is_half_pushed) == (True, True, False)
    assert [peer for peer, _ in messages(core.begin_collective("mean"))] == [COORDINATOR]
    begin(core)
    sent = push_of(core, 0)
    collect(core, 1)
    core.collectives.take()
    sent += headers(core.finish_push(empty=()))
    assert not core.is_open
    for header in sent:
        answer(core, header)
    suspends = [each for _, each in messages(core.begin_collective("mean"))]
    assert suspends[:2] == [Suspend(group=7, clock=1, seq=2)] * 2


def test_what_moves_parameters_suspends_a_set_whose_iteration_is_only_expected() -> None:
    core = make_core(credits=9)
    register(core)
    core.expect_iteration()
    assert len(messages(core.begin_collective("save"))) == 3
    with pytest.raises(InvariantError, match="pushes iteration 0 inside a collective"):
        begin(core)
    collect(core, 1)
    core.collectives.take()
    begin(core)


def test_replies_may_be_awaited_in_a_set_that_goes_on() -> None:
    core = make_core(credits=9)
    register(core)
    sent = headers(push(core))
    core.expect_iteration()
    assert [peer for peer, _ in messages(core.begin_collective("mean"))] == [COORDINATOR]
    for header in sent:
        answer(core, header)


# -- settings of late chunks -----------------------------------------------------------------------


def test_the_rest_of_an_iteration_may_lack_other_gradients_than_what_has_left() -> None:
    core = make_core(credits=9, order=ORDER)
    begin(core, absent=(3,))
    early = headers(core.transfers.push_chunk(3, is_empty=False))
    actions = core.finish_push(empty=(), absent=(3, 5))
    told = [(peer, message) for peer, message in messages(actions)]
    settings = Settings(version=2, hyper=b"hyper", absent=[3, 5])
    assert told == [(server_id(0), settings), (server_id(1), settings)]
    assert [type(each) for each in actions[:2]] == [SendControl] * 2, "ahead of the pushes"
    late = headers(actions)
    assert {each.settings for each in early} == {1}
    assert {each.settings for each in late} == {2}
    core.check_invariants()


def test_what_is_still_so_is_not_told_again_and_the_next_iteration_goes_on_from_the_last() -> None:
    core = make_core(credits=9)
    begin(core, absent=(3,))
    actions = core.finish_push(empty=(), absent=[3])
    assert not messages(actions)
    for header in headers(actions):
        answer(core, header)
    begin(core, absent=(3,))
    sent = headers(core.transfers.push_chunk(0, is_empty=False))
    sent += headers(core.finish_push(empty=(), absent=[]))
    assert [each.settings for each in sent] == [1, 2, 2, 2, 2, 2]
    for header in sent:
        answer(core, header)
    assert not messages(begin(core, absent=()))
    core.check_invariants()


def test_where_nothing_is_left_nothing_is_told_of_the_rest() -> None:
    core = make_core(credits=9)
    begin(core)
    for chunk in range(6):
        core.transfers.push_chunk(chunk, is_empty=False)
    assert core.finish_push(empty=(), absent=[1]) == []


def test_more_versions_than_two_an_iteration_are_noticed() -> None:
    core = make_core(credits=9)
    begin(core)
    for absent in ([1], [2]):
        core.settings.update_absent(absent)
    with pytest.raises(InvariantError, match="3 versions of settings in 1 iterations"):
        core.check_invariants()
    with pytest.raises(InvariantError, match="absent pieces of an iteration that has no"):
        make_core().settings.update_absent([1])


def test_what_is_half_pushed_in_one_set_keeps_the_worker_out_of_collectives_in_all() -> None:
    first = make_core()
    second = first.next_set()
    register(first)
    second.take_slice(PARTITION, owners=OWNERS, credits=9, replies=RULE)
    begin(second)
    for what in (lambda: first.begin_collective("save"), first.begin_leave):
        with pytest.raises(InvariantError):
            what()
    assert len(headers(push(first))) == 4, "the sets do not wait for one another"


def test_a_collective_suspends_from_the_iteration_behind_the_one_that_was_pushed() -> None:
    core = make_core(credits=9)
    register(core)
    begin(core)
    sent = headers(core.transfers.push_chunk(0, is_empty=False))
    assert core.clock == 1
    sent += headers(core.finish_push(empty=()))
    for header in sent:
        answer(core, header)
    suspends = [each for _, each in messages(core.begin_collective("save"))]
    assert suspends[:2] == [Suspend(group=7, clock=1, seq=1)] * 2
    assert messages(make_core().begin_collective("save"))[0][0] == COORDINATOR


# -- single replies --------------------------------------------------------------------------------


def test_single_chunks_are_done_as_their_replies_come() -> None:
    core = make_core(credits=9, order=ORDER)
    sent = headers(push(core))
    for place, header in enumerate(sent):
        assert [core.transfers.is_done(each.chunk) for each in sent] == [
            other < place for other in range(len(sent))
        ]
        answer(core, header)
    assert core.is_idle


def test_a_chunk_is_pushed_again_when_its_own_reply_has_come() -> None:
    core = make_core(credits=9, order=ORDER)
    first = {each.chunk: each for each in headers(push(core))}
    answer(core, first[3])
    begin(core)
    (again,) = headers(core.transfers.push_chunk(3, is_empty=False))
    assert again.clock == 1
    told = "worker 0 pushes chunk 4 of iteration 1 before the reply to iteration 0 has come"
    with pytest.raises(InvariantError, match=told):
        core.transfers.push_chunk(4, is_empty=False)
    with pytest.raises(InvariantError, match=told):
        core.finish_push(empty=())
    answer(core, first[4])
    core.transfers.push_chunk(4, is_empty=False)
    for chunk in (0, 1, 2, 5):
        answer(core, first[chunk])
    assert not core.transfers.is_done(3)
    assert sorted(chunks(core.finish_push(empty=()))) == [0, 1, 2, 5]


def test_the_next_iterations_chunks_stand_behind_those_that_wait_for_a_credit() -> None:
    """Server 0 holds 0, 2 and 4; the settings of both iterations are known there."""
    core = make_core(credits=1, order=ORDER)
    sent = {each.chunk: each for each in headers(push(core))}
    assert sent.keys() == {4, 3}
    sent |= {each.chunk: each for each in headers(answer(core, sent[3]))}
    assert messages(begin(core, hyper=b"new")), "new settings"
    assert core.transfers.push_chunk(3, is_empty=False) == [], (
        "behind chunks 1 and 5 of iteration 0"
    )
    one = headers(answer(core, sent[1]))
    assert [(each.chunk, each.clock, each.settings) for each in one] == [(5, 0, 1)]
    five = headers(answer(core, one[0]))
    assert [(each.chunk, each.clock, each.settings) for each in five] == [(3, 1, 2)]


def test_nobody_waits_for_a_reply_to_an_iteration_that_is_half_pushed() -> None:
    core = make_core(credits=9, order=ORDER)
    first = {each.chunk: each for each in headers(push(core))}
    core.transfers.require_handed_over()
    core.transfers.require_handed_over(3)
    answer(core, first[3])
    begin(core)
    (again,) = headers(core.transfers.push_chunk(3, is_empty=False))
    core.transfers.require_handed_over(4)  # of the iteration before
    told = "waits for the reply about chunk 3 in the middle of iteration 1, 5 chunks of it still"
    with pytest.raises(InvariantError, match=told):
        core.transfers.require_handed_over(3)
    with pytest.raises(InvariantError, match="waits for replies in the middle of iteration 1, 5"):
        core.transfers.require_handed_over()
    answer(core, again)
    core.transfers.require_handed_over(3)


def test_in_the_middle_of_an_iteration_there_is_somebody_to_wait_for_or_nobody() -> None:
    core = make_core(credits=9)
    begin(core)
    assert core.awaits() == "the rest of iteration 0 to be pushed"
    assert core.ask_who_is_missing() == []
    core.transfers.push_chunk(0, is_empty=False)
    assert core.awaits() == "the replies to iteration 0"


@pytest.mark.parametrize("kind", [Kind.REPLY, Kind.RECEIPT])
@pytest.mark.parametrize("chunk", [0, 4])
def test_an_answer_to_a_chunk_that_is_still_to_be_pushed_names_the_server(
    chunk: int, kind: Kind
) -> None:
    """Chunk 4 is the next one, chunk 0 has been pushed in the iteration before only."""
    core = make_core(credits=2, order=ORDER)
    network = Network(core, seed=1, duplicate_rate=0.0)
    network.do(push(core))
    network.run()
    begin(core)
    core.transfers.push_chunk(3, is_empty=False)
    header = Header(kind=kind, sender=server_id(OWNERS[chunk]), chunk=chunk, clock=1)
    with pytest.raises(ProtocolError, match=f"server 0 sent a re.* iteration 1 of chunk {chunk}"):
        core.handle(Arrived(header.sender, header, None))
    late = header._replace(clock=0)
    assert core.handle(Arrived(late.sender, late, None)) == [], "a second delivery"
