"""Which chunk a server tells its new buddy of next, while it goes on serving; pure.

A few are under way at a time: a fill takes memory for these, and leaves the network to training. A
chunk that cannot be told of now (it has no values yet, or is about to be given others) waits, and
others go before it.

    filling = Filling(number=2, chunks=[(0, 0), (0, 3)])
    filling.next(is_ready)                # (0, 0)
    filling.on_told(4)                    # in record 4
    filling.on_held(4)                    # the buddy has it: there is room for another one
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

MOST_FILLING = 2
"""Chunks that are on their way to the buddy, at most."""


class Filling:
    def __init__(self, *, number: int, chunks: Iterable[tuple[int, int]]) -> None:
        """``number``: of the copy; ``chunks``: set and chunk."""
        self.number = number
        self._waiting = deque(chunks)
        self._under_way: deque[int] = deque()
        """Numbers of the records that tell of chunks."""
        self.ends_with: int | None = None
        """Number of the last record of the fill; None before there is one."""

    @property
    def is_all_told(self) -> bool:
        return not self._waiting

    def next(self, is_ready: Callable[[int, int], bool]) -> tuple[int, int] | None:
        """The set and the chunk to be told of now; None where none can, or enough are."""
        if len(self._under_way) >= MOST_FILLING:
            return None
        for _ in range(len(self._waiting)):
            if is_ready(*self._waiting[0]):
                return self._waiting.popleft()
            self._waiting.rotate(-1)
        return None

    def on_told(self, number: int) -> None:
        """Record ``number`` tells of the chunk."""
        self._under_way.append(number)

    def on_held(self, number: int) -> None:
        """The buddy holds all records up to ``number``."""
        while self._under_way and self._under_way[0] <= number:
            self._under_way.popleft()

    def is_over(self, num_held: int) -> bool:
        """Whether the buddy holds all of the shard."""
        return self.ends_with is not None and num_held >= self.ends_with
