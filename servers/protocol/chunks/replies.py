"""When a chunk's parameters may leave, and which replies are parked until then; pure.

The reply to a push is the pull: it carries the parameters for the sender's next round. A worker may
also pull by itself (at the start, to evaluate, to save). In both cases the round rule says how many
updates of every group the parameters must contain. A reply that may not leave yet is *parked* in
its chunk, under the ``min_done`` that it needs, and leaves when the chunk gets there. No pull is
refused and no pull is repeated. An allowed reply may still wait for other replies that are under
way to its worker (psdist.servers.protocol.chunks.reply_window).

    replies = Replies(server=0, required_min_done=rule.required_min_done, pipeline=0)
    replies.build(ReplyFlow(...))
    replies.answer_pull(chunk, peer, header)      # [Reply(...)], or [] and parked
    replies.advance(chunk, pushes)                # clocks advance; what is allowed now goes out
    replies.close(token)                          # the network has sent it
    replies.leave(peer)                           # what has waited for that
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

from psdist.errors import ProtocolError
from psdist.protocol.header import NEVER, Flag, Header
from psdist.protocol.ids import describe_peer
from psdist.servers.protocol.actions import Action, Reply, ReplyFlow, ReplyToken, Unchanged
from psdist.servers.protocol.chunks import ChunkState, PendingReply, Push
from psdist.servers.protocol.chunks.reply_window import ReplyWindow

BARRED = NEVER + 1
"""A ``min_done`` that no chunk reaches."""
NoteSent: TypeAlias = Callable[[ChunkState, int, int], None]
"""Called with the chunk, the peer and the version that is sent to it."""


class Replies:
    def __init__(
        self,
        *,
        server: int,
        required_min_done: Callable[[int], int],
        pipeline: int,
        note_sent: NoteSent | None = None,
    ) -> None:
        """``required_min_done(round)``: the least ``min_done`` of parameters that are used in the
        round; ``pipeline``: rounds whose replies a worker may leave outstanding; ``note_sent``:
        called for each reply that a worker computes on."""
        self._note_sent = note_sent
        self._server = server
        self._required_by_rule = required_min_done
        self.required_min_done = required_min_done
        """As the rule says; :data:`BARRED` for rounds above ``held_above``."""
        self.held_above: int | None = None
        """While a change is proposed: the highest round for which parameters may be sent."""
        self._ahead = 1 + pipeline
        """Rounds between a push and the round that uses its reply."""
        self.num_made = 0
        self.highest_sent = -1
        """The highest round for which parameters were sent."""
        self.window: ReplyWindow | None = None
        """None where all replies that may leave do."""
        self._asked: dict[int, tuple[int, set[int]]] = {}
        """Peer -> number of its newest pull, and the chunks in it."""
        self.dead: set[int] = set()
        """Peers that get no reply any more."""
        self._answered: set[tuple[int, int]] | None = None
        """Peers and chunks that were answered from here (:meth:`begin_anew`); None: all were."""
        self.blocked: dict[int, ChunkState] = {}
        """By number: every chunk on which an offer, a push or a reply waits for groups to come or
        go, and some on which nothing waits any more."""

    def build(self, flow: ReplyFlow) -> None:
        """In what portions replies leave from now on."""
        self.window = ReplyWindow(flow)

    def begin_anew(self) -> None:
        """Peers hold replies of a failed server. The first reply to each peer about a chunk carries
        all values."""
        self._answered = set()

    def _knows(self, peer: int, chunk: ChunkState) -> bool:
        """Whether what ``peer`` holds was sent from here, where that matters."""
        return self._answered is None or (peer, chunk.index) in self._answered

    def answer_pull(self, chunk: ChunkState, peer: int, header: Header) -> list[Action]:
        """Reply, or park the reply: a pull waits as a push's reply does. A fresh one takes what is
        newest; none is answered before the chunk has its initial values."""
        number = header.pull_number
        if self._is_repeated(peer, number, chunk.index):
            return []
        self.close_implied(chunk, peer, NEVER)  # who pulls waits for nothing
        flags = Flag.FOR_PULL | (header.flags & Flag.FRESH)
        pending = PendingReply(peer, header.clock, flags, number, header.chunk_version)
        if not chunk.is_loaded:
            self._note_waiting(chunk, pending)
            chunk.unloaded_pulls.append(pending)
            return []
        if not header.flags & Flag.FRESH:
            needed = self.required_min_done(header.clock)
            if chunk.clock.min_done < needed:
                self._note_waiting(chunk, pending)
                self._park(chunk, needed, pending)
                return []
        return [self._reply(chunk, pending)]

    def answer_again(self, chunk: ChunkState, pending: PendingReply) -> list[Action]:
        """The chunk contains a push that is retransmitted after a failure: reply, or park the
        reply."""
        needed = self.required_min_done(pending.clock + self._ahead)
        if chunk.clock.min_done < needed:
            self._park(chunk, needed, pending)
            return []
        if self.window is None or self._may_leave(chunk, pending, self.window):
            return [self._reply(chunk, pending)]
        return []

    def _is_repeated(self, peer: int, number: int, chunk: int) -> bool:
        """Whether a pull of this number has asked for the chunk before: a second answer would be
        one whose arrival nothing proves."""
        asked = self._asked.get(peer)
        if asked is None or number > asked[0]:
            self._asked[peer] = (number, {chunk})
            return False
        newest, chunks = asked
        is_repeated = number < newest or chunk in chunks
        chunks.add(chunk)
        return is_repeated

    def _note_waiting(self, chunk: ChunkState, pending: PendingReply) -> None:
        """At most one pull of each worker waits: a worker pulls again only after its answer."""
        number = chunk.pulls.setdefault(pending.peer, pending.pull_number)
        if number != pending.pull_number:
            raise ProtocolError(
                f"server {self._server}: {describe_peer(pending.peer)} sent pull "
                f"{pending.pull_number} of chunk {chunk.index} before its pull {number} was "
                "answered"
            )

    def _park(self, chunk: ChunkState, needed: int, pending: PendingReply) -> None:
        chunk.parked.setdefault(needed, []).append(pending)
        self.blocked[chunk.index] = chunk

    def answer_unloaded_pulls(self, chunk: ChunkState) -> list[Action]:
        """The chunk has its initial values."""
        waiting, chunk.unloaded_pulls = chunk.unloaded_pulls, []
        return [self._reply(chunk, pending) for pending in waiting]

    def advance(self, chunk: ChunkState, pushes: tuple[Push, ...]) -> list[Action]:
        """The chunk now contains these pushes: advance its clock, and return their replies and the
        parked replies that are allowed now."""
        actions: list[Action] = []
        clock = chunk.clock
        for push in pushes:
            clock.advance(push.group)
        for push in pushes:
            if push.peer in self.dead:
                continue
            pending = PendingReply(push.peer, push.clock, Flag.NONE, version=push.version)
            needed = self.required_min_done(push.clock + self._ahead)
            if clock.min_done < needed:
                self._park(chunk, needed, pending)
            elif self.window is None or self._may_leave(chunk, pending, self.window):
                actions.append(self._reply(chunk, pending))
        return actions + self.release(chunk) if chunk.parked else actions

    def release(self, chunk: ChunkState) -> list[Action]:
        """Let the parked replies go that are allowed now: those that need least first."""
        allowed = {needed for needed in chunk.parked if needed <= chunk.clock.min_done}
        return [
            self._reply(chunk, pending)
            for needed in sorted(allowed)
            for pending in chunk.parked.pop(needed)
            if self.window is None or self._may_leave(chunk, pending, self.window)
        ]

    def _needed(self, pending: PendingReply) -> int:
        """``min_done`` of what answers a push."""
        return self.required_min_done(pending.clock + self._ahead)

    def follow(self, required_min_done: Callable[[int], int]) -> None:
        """Another rule decides, before anything was sent."""
        self._required_by_rule = self.required_min_done = required_min_done

    def hold_above(self, highest: int, chunks: Iterable[ChunkState]) -> None:
        """Park replies for rounds above ``highest`` until :meth:`release_rounds`."""
        self.held_above = highest
        self.required_min_done = self._required_or_barred
        for chunk in chunks:
            self._park_again(chunk)

    def _required_or_barred(self, round_number: int) -> int:
        is_barred = self.held_above is not None and round_number > self.held_above
        return BARRED if is_barred else self._required_by_rule(round_number)

    def release_rounds(self) -> None:
        """The rule alone decides again; :meth:`let_go` sends what is parked."""
        self.held_above = None
        self.required_min_done = self._required_by_rule

    def _park_again(self, chunk: ChunkState) -> None:
        """Park the replies under their new requirement."""
        parked, chunk.parked = chunk.parked, {}
        for pending in (each for needed in sorted(parked) for each in parked[needed]):
            if pending.flags & Flag.FOR_PULL:
                needed = self.required_min_done(pending.clock)
            else:
                needed = self._needed(pending)
            self._park(chunk, needed, pending)

    def let_go(self, chunk: ChunkState) -> list[Action]:
        """The requirement has changed: return the parked replies that may leave now."""
        self._park_again(chunk)
        chunk.clock.catch_up()
        return self.release(chunk)

    # -- what is under way -----------------------------------------------------------------------

    def _may_leave(self, chunk: ChunkState, pending: PendingReply, window: ReplyWindow) -> bool:
        """Whether what is allowed may leave now; else it waits in the window."""
        if (
            pending.flags & Flag.FOR_PULL
            or (pending.version == chunk.version and self._knows(pending.peer, chunk))
            or window.has_room(pending.peer, chunk.index)
        ):
            return True
        window.add(chunk, pending)
        return False

    def close(self, chunk: ChunkState, token: ReplyToken) -> None:
        """The network has sent it."""
        chunk.close_reply(token)
        if self.window is not None:
            self.window.close(token)

    def close_implied(self, chunk: ChunkState, peer: int, clock: int) -> None:
        """See :meth:`ChunkState.implied_replies`."""
        for token in chunk.implied_replies(peer, clock):
            self.close(chunk, token)

    def evict(self, peers: Collection[int]) -> None:
        """Nothing is owed to these any more."""
        self.dead.update(peers)
        if self.window is not None:
            self.window.forget(peers)

    def leave(self, peer: int) -> list[Action]:
        """Replies to ``peer`` that have waited for others to be sent."""
        actions: list[Action] = []
        window = self.window
        if window is None:
            return actions
        while (first := window.take(peer)) is not None:
            chunk, pending = first
            # Meanwhile groups may have come back that count again.
            chunk.clock.catch_up()
            needed = self._needed(pending)
            if chunk.clock.min_done < needed:
                self._park(chunk, needed, pending)
            else:
                actions.append(self._reply(chunk, pending))
        return actions

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. Linear in what waits."""
        if self.window is not None:
            self.window.check_invariants()

    def _reply(self, chunk: ChunkState, pending: PendingReply) -> Reply | Unchanged:
        peer, clock, flags, pull_number, held = pending
        if flags & Flag.FOR_PULL:
            implied_by = clock
            chunk.pulls.pop(peer, None)
        else:
            implied_by = clock + self._ahead
        if implied_by > self.highest_sent and not flags & Flag.FRESH:
            self.highest_sent = implied_by
        self.num_made += 1
        min_done, version = chunk.clock.min_done, chunk.version
        if self._note_sent is not None and not flags & Flag.FRESH:  # a fresh one is a copy
            self._note_sent(chunk, peer, version)
        if self._answered is not None and (peer, chunk.index) not in self._answered:
            held = 0
            if not flags & Flag.FRESH:
                self._answered.add((peer, chunk.index))
        if held == version:
            place = peer, chunk.index, chunk.current
            return Unchanged(*place, clock, min_done, flags, pull_number, version)
        token = chunk.open_reply(peer, implied_by=implied_by)
        if self.window is not None and not flags & Flag.FOR_PULL:
            self.window.open(token)
        return Reply(token, clock, min_done, flags, pull_number, version, held)
