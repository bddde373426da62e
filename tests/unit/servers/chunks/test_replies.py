"""Replies of one chunk: which leave at once, which are parked, and in what order they leave."""

from __future__ import annotations

import pytest

from psdist.errors import ProtocolError
from psdist.protocol.header import Flag, Header, Kind
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.actions import Action, Reply, Unchanged
from psdist.servers.protocol.assembly import rule_for
from psdist.servers.protocol.chunk_clock import ChunkClock, Limits
from psdist.servers.protocol.chunks import ChunkState, Push
from psdist.servers.protocol.chunks.replies import Replies
from psdist.servers.protocol.rules import MakeRule
from psdist.servers.protocol.settings import PushSettings
from tests.support.rules import made, switching


def chunk_of(groups: int = 2, *, is_loaded: bool = True, index: int = 0) -> ChunkState:
    limits = Limits([0] * groups)
    for group in range(groups):
        limits.count(group)
    return ChunkState(index, ChunkClock(limits), is_loaded=is_loaded)


SYNC = rule_for("sync")


def ssp(staleness: int) -> MakeRule:
    return rule_for("ssp", staleness=staleness)


def replies_of(rule: MakeRule, *, pipeline: int = 0) -> Replies:
    required = made(rule).required_min_done
    return Replies(server=0, required_min_done=required, pipeline=pipeline)


def pull(clock: int, *, number: int = 1, flags: int = Flag.NONE, version: int = 0) -> Header:
    return Header(
        kind=Kind.PULL,
        sender=worker_id(0),
        clock=clock,
        pull_number=number,
        flags=flags,
        chunk_version=version,
    )


def pushed(group: int, clock: int, version: int = 0) -> tuple[Push, ...]:
    settings = PushSettings(b"", frozenset())
    return (Push(worker_id(group), group, clock, 1.0, settings, None, version),)


def brief(actions: list[Action]) -> list[tuple[int, int, int]]:
    """(worker, clock, min_done) of each reply."""
    replies = [action for action in actions if isinstance(action, Reply)]
    assert len(replies) == len(actions)
    return [(each.token.peer - worker_id(0), each.clock, each.min_done) for each in replies]


def test_a_late_pull_is_parked_and_leaves_with_the_update_that_it_needs() -> None:
    chunk, replies = chunk_of(), replies_of(ssp(1))
    assert replies.answer_pull(chunk, worker_id(0), pull(2)) == []
    assert list(chunk.parked) == [1]
    assert brief(replies.advance(chunk, pushed(0, 0))) == [(0, 0, 0)]  # to the push alone
    assert brief(replies.advance(chunk, pushed(1, 0))) == [(1, 0, 1), (0, 2, 1)]
    assert not chunk.parked
    assert replies.num_made == 3


def test_a_fresh_pull_is_answered_whatever_the_other_groups_have_done() -> None:
    chunk, replies = chunk_of(), replies_of(SYNC)
    assert brief(replies.answer_pull(chunk, worker_id(0), pull(9, flags=Flag.FRESH))) == [(0, 9, 0)]


def test_no_pull_is_answered_before_the_initial_values_are_there() -> None:
    chunk, replies = chunk_of(is_loaded=False), replies_of(ssp(1))
    for worker, flags in ((0, Flag.FRESH), (1, Flag.NONE)):
        peer, header = worker_id(worker), pull(0, number=7 + worker, flags=flags)
        for _ in range(2):  # a second delivery gets no second answer
            assert replies.answer_pull(chunk, peer, header) == []
    answers = replies.answer_unloaded_pulls(chunk)
    assert [each.pull_number for each in answers if isinstance(each, Reply)] == [7, 8]
    assert replies.answer_unloaded_pulls(chunk) == []
    assert chunk.pulls == {}


@pytest.mark.parametrize("is_loaded", [False, True])
def test_one_pull_of_each_worker_waits_at_most(is_loaded: bool) -> None:
    chunk, replies = chunk_of(is_loaded=is_loaded), replies_of(SYNC)
    assert replies.answer_pull(chunk, worker_id(0), pull(1, number=3)) == []
    assert replies.answer_pull(chunk, worker_id(0), pull(1, number=3)) == []
    assert replies.answer_pull(chunk, worker_id(1), pull(1, number=4)) == []
    with pytest.raises(ProtocolError, match="server 0: worker 0 sent pull 4 of chunk 0 before its"):
        replies.answer_pull(chunk, worker_id(0), pull(1, number=4))
    waiting = [
        *chunk.unloaded_pulls,
        *(each for parked in chunk.parked.values() for each in parked),
    ]
    assert [each.pull_number for each in waiting] == [3, 4]


def test_a_pull_of_several_chunks_is_answered_once_for_each() -> None:
    replies = replies_of(SYNC)
    chunks = [chunk_of(index=index) for index in range(3)]
    answers = [
        len(replies.answer_pull(chunk, worker_id(0), pull(0, number=number)))
        for number, chunk in [(2, each) for each in (*chunks, *chunks)] + [(1, chunks[0])]
    ]
    assert answers == [1, 1, 1, 0, 0, 0, 0]


def test_parked_replies_leave_in_the_order_of_what_they_need() -> None:
    chunk, replies = chunk_of(2), replies_of(SYNC)
    for worker, clock in enumerate((3, 1, 2)):
        assert replies.answer_pull(chunk, worker_id(worker), pull(clock)) == []
    chunk.clock.limits.stop(1, 0)  # group 1 is not waited for any more
    chunk.clock.catch_up()
    chunk.clock.advance(0)
    chunk.clock.advance(0)
    assert [clock for _, clock, _ in brief(replies.release(chunk))] == [1, 2]
    assert list(chunk.parked) == [3]


@pytest.mark.parametrize("pipeline", [0, 1, 2])
def test_outstanding_replies_are_held_to_the_round_that_uses_them(pipeline: int) -> None:
    chunk, replies = chunk_of(), replies_of(ssp(0), pipeline=pipeline)
    assert replies.advance(chunk, pushed(0, 0)) == []
    assert list(chunk.parked) == [1 + pipeline]


@pytest.mark.parametrize(
    ("rule", "needed"),
    [
        (ssp(3), [-2, -1, 0, 1]),
        (switching((0, "ssp", 3), (3, "ssp", 0)), [-2, -1, 3, 4]),
        (switching((0, "sync", 0)), [1, 2, 3, 4]),
    ],
)
def test_a_reply_obeys_the_rule_of_the_round_that_uses_it(
    rule: MakeRule, needed: list[int]
) -> None:
    """The reply to push c is used in round c + 1."""
    seen = []
    for clock in range(4):
        chunk, replies = chunk_of(), replies_of(rule)
        replies.advance(chunk, pushed(0, clock))
        seen.append(next(iter(chunk.parked), None))
    assert seen == [need if need > 0 else None for need in needed]


def in_version(version: int, **options: bool) -> ChunkState:
    """A chunk with the second buffer current."""
    chunk = chunk_of(**options)
    chunk.version, chunk.current = version, 1
    return chunk


def test_whoever_holds_the_newest_version_gets_a_header_and_no_buffer_stays_open() -> None:
    chunk, replies = in_version(4), replies_of(ssp(1))
    peer = worker_id(0)
    assert replies.advance(chunk, pushed(0, 0, version=4)) == [
        Unchanged(
            peer=peer, chunk=0, buffer=1, clock=0, min_done=0, flags=Flag.NONE, pull_number=0,
            version=4,
        )
    ]  # fmt: skip
    assert replies.answer_pull(chunk, peer, pull(1, number=3, version=4)) == [
        Unchanged(
            peer=peer, chunk=0, buffer=1, clock=1, min_done=0, flags=Flag.FOR_PULL, pull_number=3,
            version=4,
        )
    ]  # fmt: skip
    assert chunk.open_replies == [0, 0]
    assert replies.num_made == 2


@pytest.mark.parametrize("held", [0, 1, 3])
def test_whoever_holds_another_version_or_none_gets_the_parameters(held: int) -> None:
    chunk, replies = in_version(4), replies_of(ssp(1))
    (to_push,) = replies.advance(chunk, pushed(0, 0, version=held))
    (to_pull,) = replies.answer_pull(chunk, worker_id(1), pull(0, version=held))
    for reply in (to_push, to_pull):
        assert isinstance(reply, Reply)
        assert reply.version == 4
    assert chunk.open_replies == [0, 2]


@pytest.mark.parametrize("is_changed", [False, True])
def test_of_a_parked_reply_the_version_counts_when_it_leaves(is_changed: bool) -> None:
    chunk, replies = in_version(4), replies_of(SYNC)
    assert replies.advance(chunk, pushed(0, 0, version=4)) == []
    assert replies.answer_pull(chunk, worker_id(2), pull(1, version=4)) == []
    chunk.version += is_changed
    answers = replies.advance(chunk, pushed(1, 0, version=4))
    assert [isinstance(each, Reply) for each in answers] == [is_changed] * 3
    assert {each.version for each in answers if isinstance(each, Reply | Unchanged)} == {
        chunk.version
    }
    assert chunk.pulls == {}


def test_of_a_pull_that_waits_for_the_initial_values_the_version_counts_as_well() -> None:
    chunk, replies = chunk_of(is_loaded=False), replies_of(SYNC)
    assert replies.answer_pull(chunk, worker_id(0), pull(0, version=1)) == []
    (answer,) = replies.answer_unloaded_pulls(chunk)
    assert isinstance(answer, Unchanged)


def test_a_push_or_pull_that_is_answered_by_a_header_proves_as_much_as_any_other() -> None:
    """That what its sender has was received."""
    chunk, replies = in_version(4), replies_of(ssp(1))
    (reply,) = replies.answer_pull(chunk, worker_id(0), pull(0, number=1))
    assert isinstance(reply, Reply)
    assert chunk.open_replies == [0, 1]
    replies.answer_pull(chunk, worker_id(0), pull(0, number=2, version=4))
    assert chunk.open_replies == [0, 0]
    assert reply.token.is_sent
