"""The first chunk of the lowest iteration in progress on a server (sync); pure.

First in the order in which all groups send them. So every group has this chunk on its way or will
send it next. Serving it therefore ends: ``receive_pool`` keeps a slot for it, and that is
why no order of arrival can block a server.

    frontier = Frontier(chunks)       # in the send order
    frontier.move()                   # a chunk's clock has advanced, or a group has stopped
    frontier.admit(3)                 # a group that had stopped after 3 iterations counts again
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from psdist.servers.protocol.chunks import ChunkState


class Frontier:
    def __init__(self, chunks: Sequence[ChunkState]) -> None:
        self._chunks = chunks
        self._places = {chunk.index: place for place, chunk in enumerate(chunks)}
        self._at = 0
        self._clock = 0
        if chunks:
            self._search()

    @staticmethod
    def stands_at(chunk: ChunkState) -> int:
        """Iterations that the chunk is through."""
        chunk.clock.catch_up()
        return chunk.clock.min_done

    @property
    def chunk(self) -> ChunkState | None:
        """None on a server that holds nothing."""
        return self._chunks[self._at] if self._chunks else None

    def is_within(self, reach: int, chunk: ChunkState) -> bool:
        """Whether it is one of the next ``reach`` chunks, the frontier's own the first of them."""
        return (self._places[chunk.index] - self._at) % len(self._chunks) < reach

    def next_chunks(self, reach: int) -> Iterator[ChunkState]:
        """The chunks that are within reach."""
        chunks = self._chunks
        return (chunks[(self._at + n) % len(chunks)] for n in range(min(reach, len(chunks))))

    def move(self) -> ChunkState | None:
        """Pass chunks that have finished the iteration; the new frontier, which has caught up, or
        None if it is the old one. One pass over all chunks per iteration, however many groups
        there are."""
        chunks, now = self._chunks, self._clock
        before = at = self._at
        while at < len(chunks):
            if self.stands_at(chunks[at]) <= now:
                break
            at += 1
        if at == before:
            return None
        self._at = at
        if at == len(chunks):
            self._search()
        return chunks[self._at]

    def admit(self, clock: int) -> ChunkState | None:
        """Groups count again; every chunk contains at least ``clock`` updates of them. As move."""
        if (clock, 0) >= (self._clock, self._at):
            return None
        self._at, self._clock = 0, clock
        self._chunks[0].clock.catch_up()
        return self._chunks[0]

    def _search(self) -> None:
        clocks = [self.stands_at(chunk) for chunk in self._chunks]
        self._clock = min(clocks)
        self._at = clocks.index(self._clock)


class PassingHeld(Frontier):
    """Where chunks are held before they are stepped (clipping): held ones are passed, too."""

    def move(self) -> ChunkState | None:
        has_moved = super().move() is not None
        last = len(self._chunks) - 1
        while self._at < last and self._chunks[self._at].is_held:
            self._at += 1
            super().move()
            has_moved = True
        return self.chunk if has_moved else None
