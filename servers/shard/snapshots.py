"""The memory that snapshots are copied to, kept from one checkpoint to the next.

New memory costs more than the copy: the kernel clears every page at its first touch. So what a
checkpoint was written from stays for the next one, and may be made before the first.

    memory = SnapshotMemory()
    memory.reserve((0, 3, 0, ""), values)            # made and touched, nothing copied
    memory.room((0, 3, 0, ""), values).copy_(values)  # the same memory every time
    memory.free()

Who writes a copy to the disk must be done with it before the next is taken (FileKeeper).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

At: TypeAlias = tuple[int, int, int, str]
"""Set, chunk, segment of the chunk, and what of it: "" for its values, else a key of its optimizer
state."""


class SnapshotMemory:
    def __init__(self) -> None:
        self._held: dict[At, torch.Tensor] = {}

    def reserve(self, at: At, like: torch.Tensor) -> None:
        """Memory for a copy of ``like`` is there, every page of it."""
        if not self._fits(at, like):
            self.room(at, like).zero_()

    def room(self, at: At, like: torch.Tensor) -> torch.Tensor:
        """For a copy of ``like`` on the host: until the next at this place or :meth:`free`."""
        if not self._fits(at, like):
            self._held[at] = like.new_empty(like.shape, device="cpu")
        return self._held[at]

    def _fits(self, at: At, values: torch.Tensor) -> bool:
        held = self._held.get(at)
        return held is not None and held.shape == values.shape and held.dtype == values.dtype

    def num_bytes(self, set_index: int) -> int:
        """Held for a parameter set."""
        return sum(held.nbytes for at, held in self._held.items() if at[0] == set_index)

    def free(self) -> None:
        """Nothing is held any more."""
        self._held.clear()
