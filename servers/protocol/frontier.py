"""The lowest chunk of the lowest iteration in progress on a server (sync); pure.

Every group has this chunk on its way or will send it next, because workers send a server's chunks
in ascending order. Whatever serves it therefore ends: psdist.servers.protocol.receive_pool keeps a
slot for it, and that is why no order of arrival can block a server.

    frontier = Frontier(chunks)       # in ascending order
    frontier.move()                   # a chunk's clock has advanced, or a group has stopped
    frontier.admit(3)                 # a group that had stopped after 3 iterations counts again
"""

from __future__ import annotations

from collections.abc import Sequence

from psdist.servers.protocol.chunk_state import ChunkState


class Frontier:
    def __init__(self, chunks: Sequence[ChunkState]) -> None:
        self._chunks = chunks
        self._at = 0
        self._clock = 0
        if chunks:
            self._search()

    @property
    def chunk(self) -> ChunkState | None:
        """None on a server that holds nothing."""
        return self._chunks[self._at] if self._chunks else None

    def move(self) -> bool:
        """Pass chunks that have finished the iteration; whether it moved. One pass over all
        chunks per iteration, however many groups there are."""
        chunks, now = self._chunks, self._clock
        before = at = self._at
        while at < len(chunks):
            chunk = chunks[at]
            clock = chunk.clock
            if clock.changes != clock.limits.changes:
                chunk.catch_up()
            if clock.min_done <= now:
                break
            at += 1
        if at == before:
            return False
        self._at = at
        if at == len(chunks):
            self._search()
        return True

    def admit(self, clock: int) -> bool:
        """A group of which every chunk contains ``clock`` updates counts again; whether the
        frontier moved."""
        before = self._at, self._clock
        if self._chunks and clock <= self._clock:
            self._at, self._clock = 0, clock
        return before != (self._at, self._clock)

    def _search(self) -> None:
        clocks: list[int] = []
        for chunk in self._chunks:
            if chunk.clock.changes != chunk.clock.limits.changes:
                chunk.catch_up()
            clocks.append(chunk.clock.min_done)
        self._clock = min(clocks)
        self._at = clocks.index(self._clock)
