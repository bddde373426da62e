"""Pushes, pulls and copies: which leave when, which replies are taken, in whatever order."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from psdist.errors import ProtocolError
from psdist.protocol.events import Arrived, Offered
from psdist.protocol.header import Flag, Header, Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import (
    AcceptReply,
    DiscardReply,
    SendPush,
    Warn,
)
from psdist.workers.protocol.core import WorkerCore
from tests.support.virtual.worker_machine import (
    BYTES,
    OWNERS,
    PARTITION,
    RULE,
    Network,
    make_core,
    offer,
    push,
    reply_to,
)


@pytest.mark.parametrize("seed", range(200))
def test_pushes_pulls_and_copies_end_whatever_the_order_and_the_duplicates(seed: int) -> None:
    pick = random.Random(seed)
    members = tuple(range(pick.randint(1, 3)))
    core = make_core(pick.choice(members), members=members, credits=pick.randint(1, 3))
    network = Network(core, seed)
    mine = set(core.mine)
    for _ in range(8):
        what = pick.choice(["push", "push", "pull", "copy"])
        network.is_copying = what == "copy"
        if what == "push":
            network.do(push(core, hyper=pick.choice([b"a", b"b"])))
            network.run()
            assert {core.versions[chunk].clock for chunk in mine} == {core.clock - 1}
            in_place = {chunk: network.landed[chunk] for chunk in mine}
            assert in_place == {chunk: network.version[chunk] for chunk in mine}
        elif what == "pull":
            network.do(
                core.transfers.begin_pull(
                    clock=core.clock, chunks=mine, is_fresh=pick.random() < 0.5
                )
            )
            network.run()
            assert {core.versions[chunk].clock for chunk in mine} == {core.clock}
        else:
            before = dict(core.versions)
            network.copied.clear()
            network.do(core.transfers.begin_copy(clock=core.clock, chunks=range(6)))
            network.run()
            assert core.versions == before
            assert set(network.copied) == set(range(6))
    while network.offers or network.transfers:
        network.step()
    assert core.is_idle
    assert network.num_unchanged


@pytest.mark.parametrize("credits", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_no_server_has_more_messages_than_credits_and_they_come_in_order(
    credits: int, seed: int
) -> None:
    core, pick = make_core(credits=credits), random.Random(seed)
    outstanding: dict[int, list[Header]] = {0: [], 1: []}
    sent: dict[int, list[int]] = {0: [], 1: []}
    actions = push(core)
    while not core.is_idle:
        for action in actions:
            if isinstance(action, SendPush):
                outstanding[action.peer].append(action.header)
                sent[action.peer].append(action.header.chunk)
                assert len(outstanding[action.peer]) <= credits
        server = pick.choice([server for server in (0, 1) if outstanding[server]])
        header = reply_to(outstanding[server].pop(pick.randrange(len(outstanding[server]))))
        core.handle(offer(header))
        actions = core.handle(Arrived(server, header, None))
        core.check_invariants()
    assert sent == {0: [0, 2, 4], 1: [1, 3, 5]}


def test_every_worker_starts_at_another_server() -> None:
    first = []
    for worker in (0, 1):
        seat = Seat(worker=worker, group=worker, members=(worker,), num_servers=2)
        core = WorkerCore(seat)
        core.take_slice(PARTITION, owners=OWNERS, credits=1, replies=RULE)
        sends = [action for action in push(core) if isinstance(action, SendPush)]
        first.append(sends[0].peer)
    assert first == [server_id(0), server_id(1)]


def test_workers_of_a_group_push_all_chunks_between_them_and_each_one_once() -> None:
    slices = [make_core(worker, members=(0, 1, 2)).mine for worker in (0, 1, 2)]
    assert sorted(itertools.chain(*slices)) == list(range(6))


def test_an_empty_chunk_is_pushed_without_bytes() -> None:
    sends = [each for each in push(make_core(credits=9), empty={2}) if isinstance(each, SendPush)]
    assert {each.header.chunk: each.header.length for each in sends} == {
        chunk: 0 if chunk == 2 else BYTES for chunk in range(6)
    }


def test_one_transfer_at_a_time_writes_a_chunks_memory() -> None:
    core = make_core(credits=9)
    push(core)
    header = reply_to(Header(kind=Kind.PUSH, sender=worker_id(0), chunk=0))
    assert core.handle(offer(header, "one")) == [AcceptReply("one", 0)]
    assert core.handle(offer(header, "two")) == [DiscardReply("two", BYTES)]
    assert core.handle(Arrived(0, header, None)) == []
    assert core.handle(offer(header, "three")) == [DiscardReply("three", BYTES)]
    assert core.counts().duplicates == 2


def test_a_reply_of_the_iteration_before_does_not_end_this_one() -> None:
    core = make_core()
    network = Network(core, seed=1, duplicate_rate=0.0)
    network.do(push(core))
    network.run()
    push(core)
    late = reply_to(Header(kind=Kind.PUSH, sender=worker_id(0), chunk=0, clock=0))
    assert core.handle(offer(late, "late")) == [DiscardReply("late", BYTES)]
    core.check_invariants()
    assert Warn("waiting for chunk 0 from server 0") in core.ask_who_is_missing()
    assert core.counts().duplicates == 1


WRONG_REPLIES: dict[str, dict[str, Any]] = {
    "a message of kind 1 about chunk 0; server 0 owes a reply": {"kind": Kind.PUSH},
    "a message of kind 1 about chunk 0, which no worker takes": {"kind": Kind.PUSH, "clock": 9},
    "about chunk 99, which no worker takes": {"chunk": 99},
    "reply to iteration 3 of chunk 0; this worker has pushed 1 iterations": {"clock": 3},
    "reply to pull 5; this worker has made 0": {"pull_number": 5, "flags": Flag.FOR_PULL},
    "sent 8 bytes of chunk 0 by codec 0, dtype 1; 256 bytes by codec 0": {"length": 8},
    r"sent 256 bytes of chunk 0 by codec 7, dtype 1; 256 bytes by codec 0 \(raw\), dtype 1 are": {
        "codec": 7
    },
    "by codec 0, dtype 2; 256 bytes": {"dtype": 2},
}


@pytest.mark.parametrize("words", WRONG_REPLIES)
def test_a_reply_that_cannot_be_is_an_error_that_names_the_peer(words: str) -> None:
    core = make_core()
    push(core)
    changed = WRONG_REPLIES[words]
    header = reply_to(Header(kind=Kind.PUSH, sender=worker_id(0), chunk=0), **changed)
    with pytest.raises(ProtocolError, match=rf"worker 0: .*{words}") as error:
        core.handle(Arrived(server_id(0), header, None))
    assert "server 0" in str(error.value)


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_reply_from_a_server_that_does_not_hold_the_chunk_is_an_error(is_awaited: bool) -> None:
    core = make_core(credits=9)
    push(core)
    header = reply_to(Header(kind=Kind.PUSH, sender=worker_id(0), chunk=0))
    if not is_awaited:
        core.handle(Arrived(server_id(0), header, None))
    with pytest.raises(ProtocolError, match=r"worker 0: server 1 sent .*chunk 0.*server 0"):
        core.handle(Arrived(server_id(1), header, None))


def test_an_offer_of_anything_but_a_reply_is_an_error_that_names_the_peer() -> None:
    core = make_core()
    for kind, chunk in ((Kind.PUSH, 0), (Kind.INIT, 0), (Kind.REPLY, 6)):
        with pytest.raises(ProtocolError, match=rf"worker 0: server 1 .*kind {kind:d} .*{chunk}"):
            core.handle(Offered(server_id(1), kind, chunk, BYTES, None, pull_number=1))


def test_parameters_before_there_is_a_model_are_an_error_that_names_the_peer() -> None:
    core = WorkerCore(Seat(worker=4, group=0, members=(4,), num_servers=1))
    with pytest.raises(ProtocolError, match="worker 4: server 0 sent parameters before"):
        core.handle(Offered(server_id(0), Kind.REPLY, 0, BYTES, None))


def missed(header: Header, *, joins_at: int, **changed: int) -> Arrived:
    """The round of that push has closed without the group."""
    told = Header(
        kind=Kind.MISSED,
        sender=server_id(OWNERS[header.chunk]),
        chunk=header.chunk,
        clock=header.clock,
        min_done=joins_at,
    )._replace(**changed)
    return Arrived(told.sender, told, None)


def test_a_push_is_missed_once_and_only_one_that_was_made() -> None:
    core = make_core(credits=6)
    first, *_ = [each.header for each in push(core) if isinstance(each, SendPush)]
    for clock in (-1, 1):
        with pytest.raises(ProtocolError, match=f"has missed round {clock} of chunk 0"):
            core.handle(missed(first, joins_at=2, clock=clock))
    with pytest.raises(ProtocolError, match="to continue with round 0"):
        core.handle(missed(first, joins_at=0))
    assert core.handle(missed(first, joins_at=1)) == []
    assert core.handle(missed(first, joins_at=1)) == [], "told twice"
