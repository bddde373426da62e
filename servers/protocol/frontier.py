"""The lowest chunk of the lowest iteration in progress on a server (sync); pure.

Every group has this chunk on its way or will send it next, because workers send a server's chunks
in ascending order. Whatever serves it therefore ends: psdist.servers.protocol.receive_pool keeps a
slot for it, and that is why no order of arrival can block a server.

    frontier = Frontier(chunks)       # in ascending order
    frontier.move()                   # after a chunk's clock has advanced
"""

from __future__ import annotations

from collections.abc import Sequence

from psdist.servers.protocol.chunk_state import ChunkState


class Frontier:
    def __init__(self, chunks: Sequence[ChunkState]) -> None:
        self._chunks = chunks
        self._at = 0
        self._clock = 0
        self.search()

    @property
    def chunk(self) -> ChunkState | None:
        """None on a server that holds nothing."""
        return self._chunks[self._at] if self._chunks else None

    def move(self) -> bool:
        """Pass chunks that have finished the iteration; whether it moved. One pass over all
        chunks per iteration, however many groups there are."""
        before = self._at
        while self._chunks[self._at].clock.min_done > self._clock:
            self._at += 1
            if self._at == len(self._chunks):
                self.search()
                return True
        return self._at != before

    def search(self) -> None:
        """From scratch: after groups came, left, were suspended or resumed."""
        if self._chunks:
            clocks = [chunk.clock.min_done for chunk in self._chunks]
            self._clock = min(clocks)
            self._at = clocks.index(self._clock)
