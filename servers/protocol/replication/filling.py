"""The next chunk that a server sends a new replica while training continues; pure.

At most :data:`MOST_FILLING` chunks are in flight, which bounds memory and leaves the network to
training. A chunk without values, or with new values on their way, waits while others go first.

    filling = Filling(number=2, chunks=[(0, 0), (0, 3)])
    filling.next(is_ready)                # (0, 0)
    filling.on_sent(4)                    # in record 4
    filling.on_ack(4)                     # the replica has it: another chunk can be sent
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

MOST_FILLING = 2
"""Maximum number of chunks in flight."""


class Filling:
    def __init__(self, *, number: int, chunks: Iterable[tuple[int, int]]) -> None:
        """``number``: the replica's; ``chunks``: set and chunk."""
        self.number = number
        self._waiting = deque(chunks)
        self._in_flight: deque[int] = deque()
        """Numbers of the records that carry chunks."""
        self.ends_with: int | None = None
        """Number of the last record; None until all chunks are sent."""

    @property
    def is_all_sent(self) -> bool:
        return not self._waiting

    def next(self, is_ready: Callable[[int, int], bool]) -> tuple[int, int] | None:
        """Return the set and the chunk to send now; None if no chunk can be sent."""
        if len(self._in_flight) >= MOST_FILLING:
            return None
        for _ in range(len(self._waiting)):
            if is_ready(*self._waiting[0]):
                return self._waiting.popleft()
            self._waiting.rotate(-1)
        return None

    def on_sent(self, number: int) -> None:
        """Record ``number`` carries the chunk."""
        self._in_flight.append(number)

    def on_ack(self, number: int) -> None:
        """The replica has all records up to ``number``."""
        while self._in_flight and self._in_flight[0] <= number:
            self._in_flight.popleft()

    def is_complete(self, num_acknowledged: int) -> bool:
        """True if the replica has the whole shard."""
        return self.ends_with is not None and num_acknowledged >= self.ends_with
