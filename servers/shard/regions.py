"""What a checkpoint keeps of a shard: stretches of pieces, with their optimizer state.

A region is the part of a piece that lies in a chunk, by where it lies in the piece: nothing in it
depends on chunks, servers or groups, so another cut reads what it needs out of several.

    regions = executor.snapshot(chunk, memory, set_index=0)    # copies; is_later: memory owes them
    executor.restore(chunk, regions)                # on the same chunk of another server

What the optimizer's state holds beside a value for each element is in its description, as on the
wire (psdist.protocol.optimizer_state). A tensor of a shape of its own is kept whole: only
optimizers of whole tensors have such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from psdist.protocol.checkpoints import Misses
from psdist.protocol.control import WriteFailed, Written
from psdist.protocol.optimizer_state import PieceState
from psdist.protocol.partition import Chunk, Partition
from psdist.servers.shard.snapshots import SnapshotMemory

if TYPE_CHECKING:
    import torch

HELD: Final = "psdist.held"
"""Beside the optimizer's keys, where replies are relative: what workers hold, in their dtype."""

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Region:
    piece: int
    start: int
    """In the piece, in elements as they lie in memory."""
    values: torch.Tensor
    """What the optimizer steps: one dimension, the server's dtype."""
    state: PieceState = field(default_factory=dict)
    """In the optimizer's order; what is kept whole is Uncut."""
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """Of what is kept whole."""
    elements: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """One dimension each, of what has values by element, and of what is kept whole."""


class Keeper(Protocol):
    """Where a server's part of checkpoints goes, and where it comes from."""

    @property
    def is_busy(self) -> bool:
        """Whether something is to be written, or is, or its outcome was not taken."""
        ...

    @property
    def is_reserving(self) -> bool:
        """Whether memory for copies is to be made before the first checkpoint."""
        ...

    @property
    def memory(self) -> SnapshotMemory:
        """What is kept is copied to; InvariantError while a file is to be made of it, or is."""
        ...

    def snapshot_bytes(self, set_index: int) -> int:
        """What of that memory is held for a set."""
        ...

    def keep(self, set_index: int, regions: list[Region], *, misses: Misses | None = None) -> None:
        """A set's part of the next checkpoint, whose copies :attr:`memory` may still owe; and
        which rounds groups have missed, on the server that decides that."""
        ...

    def write(self, checkpoint: str) -> None:
        """Write what was kept since the last call, beside what the server does: when all of it is
        copied."""
        ...

    def go_on(self) -> bool:
        """In a moment in which nothing else is to do: copy a chunk of what is to be written, or
        begin to write it. False where neither is left."""
        ...

    def outcome(self) -> Written | WriteFailed | None:
        """What has become of it, once."""
        ...

    def regions(self, set_index: int, partition: Partition, chunk: int) -> list[Region]:
        """What a chunk begins with whose set goes on from a checkpoint."""
        ...


def starts_of(partition: Partition, chunk: Chunk) -> list[int]:
    """For each segment of the chunk the element of its piece with which it begins."""
    first = dict(partition.buffers[chunk.buffer].piece_starts)
    return [chunk.start + each.offset - first[each.piece] for each in chunk.segments]
