"""Which replies to a worker are under way at a time, and which that wait leave next; pure.

All that are under way to a worker share its link, so that each comes about when the last one does.
So a reply to a push that is allowed leaves at once only while those under way to its worker are
few (:data:`psdist.protocol.flow.REPLY_WINDOW_BYTES`); else it waits, and of those that wait the one
leaves first that the next forward pass reads first. Replies to pulls never wait here.

    window = ReplyWindow(ReplyFlow(sizes=sizes, rank=rank, most_bytes=1 << 20))
    window.has_room(peer, chunk)          # False: window.add(chunk, pending)
    window.open(token)
    window.close(token)                 # it has left, or something proves that it has arrived
    window.take(peer)                   # a reply that may leave now, or None

A worker takes whatever is sent to it, so what is under way ends, and nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush
from itertools import count

from psdist.errors import InvariantError
from psdist.protocol.ids import describe_peer
from psdist.servers.protocol.actions import ReplyFlow, ReplyToken
from psdist.servers.protocol.chunks import ChunkState, PendingReply


class ReplyWindow:
    def __init__(self, flow: ReplyFlow) -> None:
        self._sizes, self._rank, self._most_bytes = flow
        self._under_way: dict[int, dict[ReplyToken, int]] = {}
        """By peer, their bytes."""
        self._waiting: dict[int, list[tuple[int, int, ChunkState, PendingReply]]] = {}
        """By peer, a heap: by rank; of one chunk two may wait, the earlier first."""
        self._turns = count()

    def has_room(self, peer: int, chunk: int) -> bool:
        """Whether a reply about the chunk may leave now."""
        under_way = self._under_way.get(peer)
        if not under_way:
            return True
        return sum(under_way.values()) + self._sizes[chunk] <= self._most_bytes

    def add(self, chunk: ChunkState, pending: PendingReply) -> None:
        """A reply waits."""
        place = self._rank[chunk.index], next(self._turns)
        heappush(self._waiting.setdefault(pending.peer, []), (*place, chunk, pending))

    def open(self, token: ReplyToken) -> None:
        """A reply leaves."""
        self._under_way.setdefault(token.peer, {})[token] = self._sizes[token.chunk]

    def close(self, token: ReplyToken) -> None:
        """It has left, or arrived. Nothing for one that was not opened here."""
        self._under_way.get(token.peer, {}).pop(token, None)

    def take(self, peer: int) -> tuple[ChunkState, PendingReply] | None:
        """Remove and return a waiting reply that may leave now."""
        waiting = self._waiting.get(peer)
        if not waiting or not self.has_room(peer, waiting[0][2].index):
            return None
        *_, chunk, pending = heappop(waiting)
        return chunk, pending

    def forget(self, peers: Collection[int]) -> None:
        """Drop the replies that wait for these peers."""
        for peer in peers:
            self._waiting.pop(peer, None)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. Linear in what waits."""
        for peer, under_way in self._under_way.items():
            if any(token.is_sent for token in under_way):
                raise InvariantError(f"a reply to {describe_peer(peer)} was sent and still counts")
            if len(under_way) > 1 and sum(under_way.values()) > self._most_bytes:
                raise InvariantError(
                    f"{sum(under_way.values())} bytes of replies are under way to "
                    f"{describe_peer(peer)}, {self._most_bytes} may be"
                )
        for peer, waiting in self._waiting.items():
            if waiting and self.has_room(peer, waiting[0][2].index):
                raise InvariantError(f"a reply to {describe_peer(peer)} waits that may leave")
