"""The contents of a shard in a checkpoint: stretches of pieces, with their optimizer state.

A region is the part of a piece that lies in one chunk, addressed by its position in the piece. It
does not depend on chunks, servers or groups. A job with other chunks reads from several regions.

    regions = executor.snapshot(chunk, memory, set_index=0)    # copies; is_later: made later
    executor.restore(chunk, regions)                # on the same chunk of another server

State entries of one value are in the state's description, as on the wire
(psdist.protocol.optimizer_state). A tensor with neither one value nor a value per element is kept
whole. Only optimizers of whole tensors have such tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from psdist.errors import InvariantError
from psdist.protocol.checkpoints import Misses
from psdist.protocol.control import WriteFailed, Written
from psdist.protocol.optimizer_state import PieceState
from psdist.protocol.partition import Chunk, Partition
from psdist.servers.shard.snapshots import SnapshotMemory

if TYPE_CHECKING:
    import torch

    from psdist.checkpoint.reading import KeptSet

HELD: Final = "psdist.held"
"""Additional key when replies are relative: the values that workers hold, in their dtype."""


@dataclass(frozen=True, kw_only=True)
class Region:
    piece: int
    start: int
    """First element of the region in the piece, in memory order."""
    values: torch.Tensor
    """Values that the optimizer steps: one dimension, the server's dtype."""
    state: PieceState = field(default_factory=dict)
    """Description of the state, in the optimizer's order."""
    elements: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """State tensors, flattened: entries with a value per element, and entries kept whole."""


class Keeper:
    """Writes a server's part of checkpoints, and reads it back. This one keeps no checkpoints."""

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint waits or is being written, or its outcome was not taken."""
        return False

    @property
    def is_reserving(self) -> bool:
        """True if memory for copies is to be allocated before the first checkpoint."""
        return False

    @property
    def memory(self) -> SnapshotMemory:
        """Memory for the copies. Raises InvariantError while :attr:`is_busy`."""
        raise InvariantError("a checkpoint began on a server that keeps none")

    def statistics(self, set_index: int) -> dict[str, int]:  # noqa: ARG002 - for those that keep
        """Return ``snapshot_bytes``, the bytes of that memory that are held for a set; nothing if
        this server keeps no checkpoints."""
        return {}

    def keep(self, set_index: int, regions: list[Region], *, misses: Misses | None = None) -> None:
        """Add a set's part to the next checkpoint; :attr:`memory` may still owe its copies.
        ``misses``: rounds that groups have missed, on the server that decides this."""
        raise NotImplementedError

    def write(self, checkpoint: str) -> None:
        """Write the parts that were added since the last call, once all are copied. The server
        continues meanwhile."""
        raise NotImplementedError

    def go_on(self) -> bool:
        """When the server is idle: copy one chunk of the next file, or begin to write the file.
        False if neither is left to do."""
        return False

    def outcome(self) -> Written | WriteFailed | None:
        """Return the outcome of the last write, once; None while there is none."""
        return None

    def regions(self, set_index: int, partition: Partition, chunk: int) -> list[Region]:
        """Return the contents of a chunk restored from a checkpoint."""
        raise NotImplementedError

    def kept(self, set_index: int) -> KeptSet:
        """Return what the job's first checkpoint has of a set, however that is divided."""
        raise NotImplementedError


def starts_of(partition: Partition, chunk: Chunk) -> list[int]:
    """Return, for each segment of the chunk, its first element in its piece."""
    first = dict(partition.buffers[chunk.buffer].piece_starts)
    return [chunk.start + each.offset - first[each.piece] for each in chunk.segments]
