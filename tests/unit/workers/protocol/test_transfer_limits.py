"""Pushes, pulls and copies at their limits: slices, encoded replies, queues of duplicates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Missing
from psdist.protocol.events import Arrived, ControlArrived, Offered
from psdist.protocol.header import Dtype, Flag, Header, Kind
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.protocol.payloads import PayloadRule
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import (
    AcceptReply,
    Action,
    DecodeReply,
    DiscardReply,
    RestoreHeld,
    SendControl,
    SendPull,
    SendPush,
)
from psdist.workers.protocol.core import TransferCounts, WorkerCore
from psdist.workers.protocol.transfers import Transfers
from tests.support.virtual.worker_machine import make_core, offer, register

OWNERS = (0, 2, 0, 2)


def rule(codec: int) -> PayloadRule:
    return PayloadRule(
        codec=codec, name="c", dtypes=(Dtype.FLOAT32,) * 4, smallest=(4,) * 4, largest=(4,) * 4
    )


def make(
    *,
    worker: int = 0,
    mine: tuple[int, ...] = (0, 1, 2, 3),
    credits: int = 1,
    codec: int = 0,
    keeps_versions: bool = True,
) -> Transfers:
    replies = replace(rule(codec), keeps_versions=keeps_versions)
    seat = Seat(worker=worker, group=5, members=(worker,), num_servers=3)
    return Transfers(
        seat, owners=OWNERS, mine=mine, chunk_bytes=(4,) * 4, credits=credits, replies=replies
    )


def begin(transfers: Transfers, clock: int = 0, **changed: Any) -> list[Action]:
    arguments: dict[str, Any] = {"settings": 1, "weight": 1.0, "empty": (), **changed}
    empty = arguments.pop("empty")
    transfers.begin_iteration(clock=clock, **arguments)
    return transfers.finish_push(empty=empty)


def reply(chunk: int, *, clock: int = 0, pull: int = 0, codec: int = 0, length: int = 4) -> Header:
    return Header(
        kind=Kind.REPLY, sender=server_id(OWNERS[chunk]), chunk=chunk, clock=clock, length=length,
        pull_number=pull, codec=codec, dtype=Dtype.FLOAT32,
    )  # fmt: skip


def arrive(transfers: Transfers, header: Header) -> list[Action]:
    actions = transfers.on_arrived(Arrived(header.sender, header, None))
    transfers.check_invariants()
    return actions


def sends(actions: list[Action]) -> list[tuple[int, int]]:
    """(server, chunk) of each push or pull."""
    assert all(isinstance(each, SendPush | SendPull) for each in actions)
    return [(each.peer, each.header.chunk) for each in actions]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("mine", "num_sizes", "is_right"),
    [((0, 3), 4, True), ((), 4, True), ((0,), 3, False), ((0,), 5, False)],
)
def test_a_slice_is_of_chunks_that_have_owners_and_sizes(
    mine: tuple[int, ...], num_sizes: int, is_right: bool
) -> None:
    seat = Seat(worker=0, group=5, members=(0,), num_servers=3)

    def take() -> Transfers:
        sizes = (4,) * num_sizes
        return Transfers(
            seat, owners=OWNERS, mine=mine, chunk_bytes=sizes, credits=1, replies=rule(0)
        )

    if is_right:
        assert take().mine == list(mine)
    else:
        with pytest.raises(InvariantError, match=f"4 owners and {num_sizes} sizes of chunks do"):
            take()


def test_a_worker_begins_at_a_server_of_its_own_and_goes_round() -> None:
    assert [sends(begin(make(worker=worker)))[0] for worker in range(4)] == [
        *((0, 0), (2, 1), (0, 0), (2, 1)),
    ]
    assert sends(begin(make(worker=1, mine=(2, 0, 1), credits=9))) == [(2, 1), (0, 0), (0, 2)]
    assert make(mine=(3, 0)).servers == [0, 2]
    assert begin(make(mine=())) == []


def test_a_pull_asks_each_server_in_turn_from_the_workers_own_on() -> None:
    transfers = make(worker=1, credits=9)
    actions = transfers.begin_pull(clock=0, chunks=(3, 0, 1), is_fresh=False)
    assert sends(actions) == [(2, 1), (2, 3), (0, 0)]


@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_pull_says_whether_it_wants_the_newest_and_a_copy_always_does(is_fresh: bool) -> None:
    transfers = make(credits=9)
    pulls = transfers.begin_pull(clock=3, chunks=(2,), is_fresh=is_fresh)
    copies = make(worker=7, credits=9).begin_copy(clock=3, chunks=(2,))
    for actions, flags in ((pulls, Flag.FRESH if is_fresh else Flag.NONE), (copies, Flag.FRESH)):
        (sent,) = actions
        assert isinstance(sent, SendPull)
        header = sent.header
        assert (header.flags, header.clock, header.pull_number) == (flags, 3, 1)
        assert (header.group, header.chunk, header.length) == (5, 2, 0)


def test_a_second_push_or_pull_waits_until_the_first_is_answered() -> None:
    for begin_it in (
        lambda each: begin(each, clock=1),
        lambda each: each.begin_pull(clock=1, chunks=(0,), is_fresh=False),
        lambda each: each.begin_copy(clock=1, chunks=(0,)),
        lambda each: each.begin_load(clock=1),
    ):
        transfers = make()
        begin(transfers)
        with pytest.raises(InvariantError, match=r"worker 0.* before the"):
            begin_it(transfers)
    transfers = make()
    transfers.begin_pull(clock=0, chunks=(0, 1), is_fresh=False)
    with pytest.raises(
        InvariantError,
        match="pushes iteration 0 after 0 iterations, 0 chunks of the last one still to be pushed, "
        "2 replies outstanding",
    ):
        transfers.require_next(0)
    with pytest.raises(InvariantError, match="pushes iteration 1 after 0 iterations"):
        make().require_next(1)
    make().require_next(0)


def test_servers_are_asked_in_the_order_of_their_numbers() -> None:
    seat = Seat(worker=0, group=5, members=(0,), num_servers=9)
    transfers = Transfers(
        seat, owners=(8, 1), mine=(0, 1), chunk_bytes=(4, 4), credits=1, replies=rule(0)
    )
    assert transfers.servers == [1, 8]
    assert sends(transfers.begin_pull(clock=0, chunks=(0, 1), is_fresh=False)) == [(1, 1), (8, 0)]


@pytest.mark.parametrize("is_copying", [False, True])
def test_an_encoded_reply_is_decoded_once_it_is_known_to_be_the_awaited_one(
    is_copying: bool,
) -> None:
    transfers = make(codec=3, credits=1)
    if is_copying:
        transfers.begin_copy(clock=0, chunks=(0, 2))
    else:
        transfers.begin_pull(clock=0, chunks=(0, 2), is_fresh=True)
    assert transfers.on_offered(offer(reply(0, pull=1, codec=3))) == [AcceptReply("ticket", 0)]
    first, then = arrive(transfers, reply(0, pull=1, codec=3))
    assert first == DecodeReply(0, 0)
    assert sends([then]) == [(0, 2)]
    assert arrive(transfers, reply(0, pull=1, codec=3)) == []
    assert (0 in transfers.versions) is not is_copying


def test_a_raw_reply_lies_where_it_belongs_already() -> None:
    transfers = make(mine=(0,))
    begin(transfers)
    assert arrive(transfers, reply(0)) == []


def test_all_duplicates_that_wait_behind_a_reply_are_discarded() -> None:
    transfers = make(mine=(0,))
    begin(transfers)
    offers = [offer(reply(0, length=4 + number), number) for number in range(4)]
    assert transfers.on_offered(offers[0]) == [AcceptReply(0, 0)]
    assert [transfers.on_offered(each) for each in offers[1:]] == [
        [DiscardReply(number, 4 + number)] for number in (1, 2, 3)
    ]
    assert transfers.duplicates == 3
    assert arrive(transfers, reply(0)) == []
    assert transfers.on_offered(offer(reply(0, length=8))) == [DiscardReply("ticket", 8)]
    assert transfers.duplicates == 4


def test_an_old_reply_never_lands_where_the_next_one_belongs() -> None:
    transfers = make(mine=(0,), credits=1)
    begin(transfers)
    arrive(transfers, reply(0))
    transfers.begin_pull(clock=1, chunks=(0,), is_fresh=False)
    assert transfers.on_offered(offer(reply(0), "old")) == [DiscardReply("old", 4)]
    wanted = reply(0, clock=1, pull=1)
    assert transfers.on_offered(offer(wanted, "new")) == [AcceptReply("new", 0)]
    assert transfers.on_offered(offer(reply(0), "older")) == [DiscardReply("older", 4)]
    assert transfers.on_offered(offer(wanted, "again")) == [DiscardReply("again", 4)]
    assert (transfers.duplicates, transfers.bytes_pulled) == (3, 4)
    assert arrive(transfers, wanted) == []
    assert transfers.bytes_pulled == 8
    assert transfers.missing() == []
    begin(transfers, clock=1)
    assert transfers.on_offered(offer(wanted, "late")) == [DiscardReply("late", 4)]
    assert transfers.on_offered(offer(reply(0, clock=1), "new")) == [AcceptReply("new", 0)]


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (reply(0)._replace(chunk=4), "a message of kind 2 about chunk 4, which no worker takes"),
        (reply(0)._replace(kind=1, clock=9), "a message of kind 1 about chunk 0, which no worker"),
        (reply(0, clock=1), "a reply to iteration 1 of chunk 0; this worker has pushed 1"),
        (reply(0, pull=1), "a reply to pull 1; this worker has made 0"),
        (reply(0)._replace(sender=2, clock=-1), "a reply about chunk 0 of server 0"),
    ],
)
def test_a_reply_that_nobody_waits_for_must_be_one_that_was_waited_for(
    header: Header, words: str
) -> None:
    transfers = make()
    begin(transfers)
    for event in (Arrived(header.sender, header, None), offer(header)):
        take: Any = transfers.on_arrived if isinstance(event, Arrived) else transfers.on_offered
        with pytest.raises(ProtocolError, match=f"worker 0: server {header.sender} sent {words}"):
            take(event)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (reply(0)._replace(sender=2), "kind 2 about chunk 0; server 0 owes a reply"),
        (reply(0)._replace(kind=4), "kind 4 about chunk 0; server 0 owes a reply"),
    ],
)
def test_what_is_awaited_is_received_from_the_server_that_owes_it_only(
    header: Header, words: str
) -> None:
    transfers = make()
    begin(transfers)
    with pytest.raises(ProtocolError, match=f"server {header.sender} sent a message of {words}"):
        transfers.on_offered(offer(header))


def versions_said(actions: list[Action]) -> dict[int, int]:
    """By chunk what a push or pull says that the worker holds."""
    assert all(isinstance(each, SendPush | SendPull) for each in actions)
    return {each.header.chunk: each.header.chunk_version for each in actions}  # type: ignore[union-attr]


def holding(number: int, *, codec: int = 0, keeps_versions: bool = True) -> Transfers:
    """Chunks 0 and 1 are its slice, both in this version."""
    transfers = make(mine=(0, 1), credits=9, codec=codec, keeps_versions=keeps_versions)
    begin(transfers)
    for chunk in (0, 1):
        arrive(transfers, reply(chunk, codec=codec)._replace(chunk_version=number))
    return transfers


def same(chunk: int, number: int, **changed: int) -> Header:
    """A reply to iteration 1 without payload."""
    header = reply(chunk, clock=1, length=0)
    flags, position = Flag.UNCHANGED | Flag.RECORDED, 30
    return header._replace(flags=flags, chunk_version=number, position=position)._replace(**changed)


def test_pushes_and_pulls_say_which_version_is_in_place_and_copies_want_all() -> None:
    assert versions_said(begin(make(credits=9))) == dict.fromkeys(range(4), 0)
    for begin_it, said in (
        (lambda each: begin(each, clock=1), {0: 5, 1: 5}),
        (lambda each: begin(each, clock=1, empty=(0, 1)), {0: 5, 1: 5}),
        (lambda each: each.begin_pull(clock=1, chunks=(0, 3), is_fresh=True), {0: 5, 3: 0}),
        (lambda each: each.begin_pull(clock=1, chunks=(0, 3), is_fresh=False), {0: 5, 3: 0}),
        (lambda each: each.begin_copy(clock=1, chunks=(0, 3)), {0: 0, 3: 0}),
    ):
        assert versions_said(begin_it(holding(5))) == said


def test_memory_that_others_have_written_to_is_no_version() -> None:
    transfers = holding(5)
    transfers.held.forget([1, 3])
    assert versions_said(begin(transfers, clock=1)) == {0: 5, 1: 0}
    assert transfers.versions[1].position == 0


def test_what_was_decoded_is_no_version_of_a_server() -> None:
    lossy = holding(5, codec=3, keeps_versions=False)
    assert versions_said(begin(lossy, clock=1)) == {0: 0, 1: 0}


def test_what_a_relative_reply_has_made_is_a_version_and_nothing_is_decoded_of_no_payload() -> None:
    relative = holding(5, codec=3)
    assert versions_said(begin(relative, clock=1)) == {0: 5, 1: 5}
    assert arrive(relative, same(0, 5)) == []
    changed = reply(1, clock=1, codec=3)._replace(chunk_version=6)
    assert arrive(relative, changed) == [DecodeReply(1, changed.clock)]


def test_relative_replies_go_on_where_others_have_written_and_none_is_brought_back_once() -> None:
    relative = holding(5, codec=3)
    relative.held.forget((0, 1))
    assert versions_said(begin(relative, clock=1)) == {0: 5, 1: 5}
    assert arrive(relative, same(0, 5)) == [RestoreHeld(0)]
    changed = reply(1, clock=1, codec=3)._replace(chunk_version=6)
    assert arrive(relative, changed) == [DecodeReply(1, changed.clock)]
    begin(relative, clock=2)
    for chunk, version in ((0, 5), (1, 6)):
        assert arrive(relative, same(chunk, version)._replace(clock=2)) == []
    relative.held.drop((1,))
    assert versions_said(begin(relative, clock=3)) == {0: 5, 1: 0}


def test_a_reply_without_payload_renews_what_is_known_of_the_values_in_place() -> None:
    transfers = holding(5)
    begin(transfers, clock=1)
    assert arrive(transfers, same(0, 5, min_done=2)) == []
    expected = same(0, 5, min_done=2)
    assert transfers.versions[0] == expected
    assert (expected.position, expected.flags & Flag.RECORDED) == (30, Flag.RECORDED)
    assert transfers.missing() == [(1, 2)]
    assert transfers.bytes_pulled == 8
    assert arrive(transfers, same(0, 5)) == []
    assert transfers.duplicates == 1
    arrive(transfers, reply(1, clock=1)._replace(chunk_version=6))
    assert versions_said(begin(transfers, clock=2)) == {0: 5, 1: 6}


def test_a_reply_without_payload_lets_the_next_message_go() -> None:
    transfers = make(mine=(0, 2))
    begin(transfers)
    for chunk in (0, 2):
        arrive(transfers, reply(chunk)._replace(chunk_version=5))
    begin(transfers, clock=1)
    assert sends(arrive(transfers, same(0, 5))) == [(0, 2)]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("another version", "calls unchanged since version 4; this worker holds version 5"),
        ("no version", "calls unchanged since version 0; this worker holds none that"),
        ("a payload", "sent 4 bytes of chunk 0, which it calls unchanged since version 5"),
        ("on its way", "sent 0 bytes of chunk 0, which it calls unchanged since version 5"),
        ("a copy", "unchanged since version 5; this worker holds none that it has requested"),
        (
            "written to",
            "calls unchanged since version 5; this worker holds none that it has requested",
        ),
        ("no flag", "sent 0 bytes of chunk 0 by codec 0, dtype 1; 4 bytes by codec 0"),
    ],
)
def test_a_reply_without_payload_is_taken_for_what_lies_in_place_only(
    what: str, words: str
) -> None:
    transfers = holding(5)
    header = same(0, {"another version": 4, "no version": 0}.get(what, 5))
    if what == "written to" or what == "no version":
        transfers.held.forget([0])
    if what == "a copy":
        transfers.begin_copy(clock=1, chunks=(0,))
        header = header._replace(pull_number=1)
    else:
        begin(transfers, clock=1)
    if what == "a payload":
        header = header._replace(length=4)
    if what == "no flag":
        header = header._replace(flags=Flag.NONE)
    if what == "on its way":
        transfers.on_offered(offer(reply(0, clock=1)))
    with pytest.raises(ProtocolError, match=f"worker 0: server 0 .*{words}"):
        transfers.on_arrived(Arrived(0, header, None))


def test_a_late_reply_to_a_pull_or_an_iteration_of_before_is_a_duplicate() -> None:
    transfers = make(mine=(0,))
    begin(transfers)
    arrive(transfers, reply(0))
    transfers.begin_pull(clock=1, chunks=(0,), is_fresh=False)
    assert transfers.describe() == "parameters"
    arrive(transfers, reply(0, clock=1, pull=1))
    begin(transfers, clock=1)
    assert transfers.describe() == "the replies to iteration 1"
    for late in (reply(0), reply(0, clock=1, pull=1)):
        assert arrive(transfers, late) == []
    assert transfers.duplicates == 2
    assert transfers.missing() == [(0, 0)]


def test_offers_of_a_chunk_beyond_the_last_are_refused() -> None:
    with pytest.raises(ProtocolError, match="kind 2 about chunk 4, which no worker takes"):
        make().on_offered(Offered(0, Kind.REPLY, 4, 4, None))
    transfers = make()
    begin(transfers)
    assert transfers.on_offered(Offered(2, Kind.REPLY, 3, 4, "t")) == [AcceptReply("t", 3)]


def test_what_a_reply_says_is_what_the_chunk_contains() -> None:
    transfers = make(mine=(1,))
    assert transfers.versions == {}
    begin(transfers)
    header = reply(1)._replace(position=8, min_done=3, flags=Flag.RECORDED | Flag.FOR_PULL)
    arrive(transfers, header)
    assert transfers.versions == {1: header}
    transfers.begin_pull(clock=1, chunks=(1,), is_fresh=False)
    header = reply(1, clock=1, pull=1)._replace(flags=Flag.FOR_PULL)
    arrive(transfers, header)
    assert transfers.versions == {1: header}


def test_a_worker_without_a_model_has_moved_nothing() -> None:
    core = WorkerCore(Seat(worker=3, group=1, members=(2, 3), num_servers=1))
    assert (core.clock, core.is_idle, core.awaits()) == (0, True, "nothing")
    late = Missing(chunk=0, groups=[], clocks=[])
    assert core.handle(ControlArrived(server_id(0), late)) == []
    core.check_invariants()
    nothing = TransferCounts(bytes_pushed=0, bytes_pulled=0, duplicates=0)
    assert make_core().counts() == nothing


def test_a_seat_says_who_speaks_for_the_group() -> None:
    seats = [Seat(worker=each, group=1, members=(2, 0, 5), num_servers=1) for each in (2, 0, 5)]
    assert [seat.place for seat in seats] == [0, 1, 2]
    assert [seat.is_leader for seat in seats] == [True, False, False]
    assert [seat.is_chief for seat in seats] == [False, True, False]


def await_a_pull_that_was_not_made(transfers: Transfers) -> None:
    transfers.awaited[0] = (0, 1)


def await_the_next_iteration(transfers: Transfers) -> None:
    transfers.awaited[0] = (1, 0)


def await_an_earlier_iteration(transfers: Transfers) -> None:
    transfers.awaited[0] = (-1, 0)


def await_a_chunk_of_another_slice(transfers: Transfers) -> None:
    transfers.mine.remove(2)


def have_more_outstanding_than_credits(transfers: Transfers) -> None:
    transfers.credits = 0


def have_fewer_than_none_outstanding(transfers: Transfers) -> None:
    transfers.outstanding[0] = -1
    transfers.queues[0].clear()
    del transfers.awaited[0], transfers.awaited[2]


def leave_a_credit_unused(transfers: Transfers) -> None:
    transfers.credits = 2


def send_a_chunk_twice(transfers: Transfers) -> None:
    queue = transfers.queues[0]
    queue.append(queue[0])
    transfers.outstanding[0] = 0


def send_what_is_not_awaited(transfers: Transfers) -> None:
    transfers.queues[0][0] = transfers.queues[0][0]._replace(chunk=3)
    del transfers.awaited[3]
    transfers.outstanding[2] = 0
    transfers.queues[2].clear()


@pytest.mark.parametrize(
    "break_it",
    [
        *(await_a_pull_that_was_not_made, await_the_next_iteration, await_an_earlier_iteration),
        *(await_a_chunk_of_another_slice, have_more_outstanding_than_credits),
        *(have_fewer_than_none_outstanding, leave_a_credit_unused, send_a_chunk_twice),
        send_what_is_not_awaited,
    ],
    ids=lambda each: each.__name__,
)
def test_transfers_that_contradict_themselves_are_caught(
    break_it: Callable[[Transfers], None],
) -> None:
    transfers = make(credits=1)
    begin(transfers)
    transfers.check_invariants()
    break_it(transfers)
    with pytest.raises(InvariantError):
        transfers.check_invariants()


def test_chunks_wait_for_a_server_in_ascending_order_if_there_is_no_other() -> None:
    seat = Seat(worker=0, group=5, members=(0,), num_servers=1)
    everything = PayloadRule(
        codec=0, name="c", dtypes=(Dtype.FLOAT32,) * 9, smallest=(4,) * 9, largest=(4,) * 9
    )
    transfers = Transfers(
        seat, owners=(0,) * 9, mine=(0, 1, 8), chunk_bytes=(4,) * 9, credits=1, replies=everything
    )
    begin(transfers)
    transfers.check_invariants()
    assert transfers.missing() == [(0, 0), (1, 0), (8, 0)]


def test_all_chunks_may_be_received_at_once() -> None:
    transfers = make(credits=2)
    begin(transfers)
    for chunk, owner in enumerate(OWNERS):
        assert reply(chunk).sender == server_id(owner)
        assert transfers.on_offered(offer(reply(chunk), chunk)) == [AcceptReply(chunk, chunk)]
    transfers.check_invariants()


def test_a_push_says_whose_it_is_and_what_it_was_made_under() -> None:
    (first, *_) = begin(make(worker=4, credits=2), weight=0.5, settings=7, empty=(0, 1))
    assert isinstance(first, SendPush)
    assert first.header == Header(
        kind=Kind.PUSH, sender=worker_id(4), group=5, chunk=0, clock=0, settings=7, weight=0.5,
        length=0, dtype=Dtype.FLOAT32,
    )  # fmt: skip


def test_a_group_that_has_left_says_nothing_more_for_itself() -> None:
    core = make_core()
    register(core)
    assert len(core.begin_leave()) == 2
    core.check_invariants()
    assert core.begin_leave() == []
    (enter,) = core.begin_collective("mean")
    assert isinstance(enter, SendControl)
    assert enter.peer == COORDINATOR
