"""Replies leave in portions, those that a forward pass reads first before others."""

from __future__ import annotations

import pytest

from psdist.errors import InvariantError
from psdist.protocol.header import Flag, Header, Kind
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.actions import Action, Reply, ReplyFlow, ReplyToken, Unchanged
from psdist.servers.protocol.assembly import rule_for
from psdist.servers.protocol.chunk_clock import ChunkClock, Limits
from psdist.servers.protocol.chunks import ChunkState, PendingReply, Push
from psdist.servers.protocol.chunks.reply_window import ReplyWindow
from psdist.servers.protocol.rules import MakeRule
from psdist.servers.protocol.settings import PushSettings
from tests.support.rules import made

ME, OTHER = worker_id(0), worker_id(1)


class Server:
    """Chunks of 10 bytes, at most 20 bytes under way to a worker; the last one is read first."""

    def __init__(self, rule: MakeRule, *, chunks: int = 5, groups: int = 1) -> None:
        self.limits = Limits([0] * groups)
        for group in range(groups):
            self.limits.count(group)
        self.chunks = [
            ChunkState(index, ChunkClock(self.limits), is_loaded=True) for index in range(chunks)
        ]
        self.replies = made(rule).replies
        rank = list(reversed(range(chunks)))
        self.replies.build(ReplyFlow(sizes=[10] * chunks, rank=rank, most_bytes=20))
        self.open: dict[tuple[int, int], ReplyToken] = {}

    def see(self, actions: list[Action]) -> list[int]:
        """The chunks of these replies, which are under way now."""
        for action in actions:
            assert isinstance(action, Reply)
            self.open[action.token.peer, action.token.chunk] = action.token
        self.replies.check_invariants()
        return [each.token.chunk for each in actions if isinstance(each, Reply)]

    def push(self, chunk: int, *, worker: int = 0, clock: int = 0) -> list[int]:
        state = self.chunks[chunk]
        state.version += 1
        settings = PushSettings(b"", frozenset())
        push = Push(worker_id(worker), worker, clock, 1.0, settings, None, state.version - 1)
        return self.see(self.replies.advance(state, (push,)))

    def sent(self, chunk: int, *, worker: int = 0) -> list[int]:
        token = self.open.pop((worker_id(worker), chunk))
        self.replies.close(self.chunks[chunk], token)
        return self.see(self.replies.leave(worker_id(worker)))


def test_two_are_under_way_and_the_rest_leaves_in_the_order_of_the_forward_pass() -> None:
    server = Server(rule_for("sync"))
    assert [server.push(chunk) for chunk in range(5)] == [[0], [1], [], [], []]
    assert server.sent(1) == [4]
    assert server.sent(0) == [3]
    assert server.sent(4) == [2]
    assert server.sent(3) == server.sent(2) == []
    assert server.replies.num_made == 5


def test_each_worker_has_a_window_of_its_own() -> None:
    server = Server(rule_for("ssp", staleness=3), groups=2)
    assert [server.push(chunk) for chunk in range(3)] == [[0], [1], []]
    assert [server.push(chunk, worker=1) for chunk in range(3)] == [[0], [1], []]
    assert server.sent(0, worker=1) == [2]
    assert server.sent(1) == [2]


def test_one_that_is_larger_than_the_window_leaves_alone() -> None:
    window = ReplyWindow(ReplyFlow(sizes=[50, 1], rank=[0, 1], most_bytes=20))
    assert window.has_room(ME, 0)
    window.open(ReplyToken(ME, 0, 0, 1))
    assert not window.has_room(ME, 1)
    assert window.has_room(OTHER, 1)


def test_a_push_that_proves_what_has_arrived_lets_others_leave() -> None:
    server = Server(rule_for("sync"))
    for chunk in range(4):
        server.push(chunk)
    token = server.open[ME, 0]
    server.replies.close_implied(server.chunks[0], ME, 0)
    assert server.see(server.replies.leave(ME)) == []
    server.replies.close_implied(server.chunks[0], ME, 1)
    assert token.is_sent
    assert server.see(server.replies.leave(ME)) == [3]


def test_what_has_not_changed_and_what_is_pulled_never_waits() -> None:
    server = Server(rule_for("sync"))
    server.push(0)
    server.push(1)
    chunk = server.chunks[2]
    settings = PushSettings(b"", frozenset())
    same = Push(ME, 0, 0, 1.0, settings, None, chunk.version)
    (unchanged,) = server.replies.advance(chunk, (same,))
    assert isinstance(unchanged, Unchanged)
    pull = Header(kind=Kind.PULL, sender=ME, clock=1, pull_number=1, flags=Flag.FRESH)
    assert len(server.replies.answer_pull(server.chunks[3], ME, pull)) == 1
    assert server.push(4) == []
    token = server.open[ME, 0]
    server.replies.close(server.chunks[0], token)
    assert server.see(server.replies.leave(ME)) == [4]


def test_a_parked_pull_leaves_as_soon_as_it_is_allowed() -> None:
    server = Server(rule_for("ssp"), groups=2)
    for chunk in range(2):
        server.push(chunk)
        server.push(chunk, worker=1)
    pull = Header(kind=Kind.PULL, sender=ME, clock=1, pull_number=1)
    assert server.replies.answer_pull(server.chunks[2], ME, pull) == []
    server.push(2, worker=1)
    assert server.push(2) == [2]  # to the pull; the push's own reply waits


def test_a_parked_reply_that_is_allowed_waits_as_well() -> None:
    server = Server(rule_for("ssp"), groups=2)
    for chunk in range(3):
        assert server.push(chunk) == []
    assert server.push(0, worker=1) == [0, 0]
    assert server.push(1, worker=1) == [1, 1]
    assert server.push(2, worker=1) == []
    assert server.sent(1) == [2]
    assert server.sent(0, worker=1) == [2]


def test_what_a_group_that_counts_again_forbids_meanwhile_is_parked() -> None:
    """Group 1 stops, group 0 continues without it, and its reply waits when group 1 comes back."""
    server = Server(rule_for("ssp"), groups=2)
    for chunk in range(3):
        server.push(chunk, worker=1)
    for chunk in range(3):
        server.push(chunk)
    for worker in range(2):
        for chunk in (0, 1, 2):
            server.sent(chunk, worker=worker)
    server.limits.stop(1, 1)
    for chunk in range(3):
        server.chunks[chunk].clock.catch_up()
    assert [server.push(chunk, clock=1) for chunk in range(3)] == [[0], [1], []]
    server.limits.count(1)
    assert server.sent(0) == []
    assert list(server.chunks[2].parked) == [2]
    assert server.chunks[2] is server.replies.blocked[2]
    assert server.push(2, worker=1, clock=1) == [2, 2]


def test_what_waits_for_the_dead_is_forgotten_and_others_keep_theirs() -> None:
    server = Server(rule_for("ssp", staleness=3), groups=2)
    for worker in range(2):
        for chunk in range(4):
            server.push(chunk, worker=worker)
    server.replies.evict({ME})
    assert server.sent(0) == server.sent(1) == []
    assert server.sent(0, worker=1) == [3]
    assert server.replies.dead == {ME}


def test_two_replies_about_one_chunk_leave_in_their_order() -> None:
    window = ReplyWindow(ReplyFlow(sizes=[10], rank=[0], most_bytes=10))
    chunk = ChunkState(0, ChunkClock(Limits([0])))
    first, second = PendingReply(ME, 0, 0), PendingReply(ME, 1, 0)
    window.add(chunk, first)
    window.add(chunk, second)
    assert window.take(ME) == (chunk, first)
    assert window.take(OTHER) is None


def test_it_notices_a_window_that_is_overfull_and_one_that_is_not_used() -> None:
    flow = ReplyFlow(sizes=[10, 10], rank=[0, 1], most_bytes=10)
    window = ReplyWindow(flow)
    tokens = [ReplyToken(ME, chunk, 0, 1) for chunk in range(2)]
    for token in tokens:
        window.open(token)
    with pytest.raises(InvariantError, match="20 bytes of replies are under way to worker 0"):
        window.check_invariants()
    window.close(tokens[0])
    tokens[1].is_sent = True
    with pytest.raises(InvariantError, match="was sent and still counts"):
        window.check_invariants()
    window = ReplyWindow(flow)
    window.add(ChunkState(0, ChunkClock(Limits([0]))), PendingReply(ME, 0, 0))
    with pytest.raises(InvariantError, match="waits that may leave"):
        window.check_invariants()
