"""The memory that snapshots are copied to, kept from one checkpoint to the next; copies to it that
are made later.

New memory costs more than the copy: the kernel clears every page at its first touch. So what a
checkpoint was written from stays for the next one, and may be made before the first.

    memory = SnapshotMemory()
    memory.reserve((0, 3, 0, ""), values)            # made and touched, nothing copied
    memory.room((0, 3, 0, ""), values).copy_(values)  # the same memory every time
    memory.owe(copy)                                 # that of a chunk which may be copied later
    memory.make_next()                               # in a moment in which nothing else is to do

The writer to the disk (FileKeeper) begins when no copy is owed, and must end before the next copies
are taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

At: TypeAlias = tuple[int, int, int, str]
"""Set, chunk, segment of the chunk, and what of it: "" for its values, else a key of its optimizer
state."""


class ChunkCopy:
    """A copy of a chunk as it is, made in an idle moment, or before the chunk changes."""

    def __init__(self, make: Callable[[], None]) -> None:
        self._make: Callable[[], None] | None = make

    @property
    def is_made(self) -> bool:
        return self._make is None

    def make(self) -> None:
        """Unless it is made."""
        if self._make is not None:
            self._make()
            self._make = None


class SnapshotMemory:
    def __init__(self) -> None:
        self._held: dict[At, torch.Tensor] = {}
        self._owed: deque[ChunkCopy] = deque()

    def reserve(self, at: At, like: torch.Tensor) -> None:
        """Memory for a copy of ``like`` is there, every page of it."""
        if not self._fits(at, like):
            self.room(at, like).zero_()

    def room(self, at: At, like: torch.Tensor) -> torch.Tensor:
        """For a copy of ``like`` on the host: until the next at this place."""
        if not self._fits(at, like):
            self._held[at] = like.new_empty(like.shape, device="cpu")
        return self._held[at]

    def owe(self, copy: ChunkCopy) -> None:
        """This memory is complete after ``copy`` is made."""
        self._owed.append(copy)

    def make_next(self) -> bool:
        """Make one of the copies that are owed; False if none is."""
        while self._owed:
            copy = self._owed.popleft()
            if not copy.is_made:
                copy.make()
                return True
        return False

    def _fits(self, at: At, values: torch.Tensor) -> bool:
        held = self._held.get(at)
        return held is not None and held.shape == values.shape and held.dtype == values.dtype

    def num_bytes(self, set_index: int) -> int:
        """Held for a parameter set."""
        return sum(held.nbytes for at, held in self._held.items() if at[0] == set_index)
