"""What the forward passes of an iteration found in memory: staleness, and versions when recording.

uses = Uses(partition, flat, owners, history)
uses.record(staleness, versions)           # a forward pass; those over the same values are one
uses.values_changed()
uses.commit(clock)                         # the iteration has ended in a step
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from psdist.history.writers import WorkerHistory
from psdist.protocol.partition import Partition
from psdist.workers.model.flat import FlatModel

IntArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Use:
    """By chunk (the arrays only when recording)."""

    staleness: Counter[int]
    positions: IntArray
    replies: IntArray
    has_crc: npt.NDArray[np.bool_] | IntArray
    crcs: IntArray
    is_outdated: bool = False


class Uses:
    def __init__(
        self,
        partition: Partition,
        flat: FlatModel,
        owners: Sequence[int],
        history: WorkerHistory | None,
    ) -> None:
        self.staleness: Counter[int] = Counter()
        """Of all chunk uses of finished iterations."""
        self.versions = torch.zeros((len(partition.chunks), 2), dtype=torch.int64)
        """Of what is in memory, by chunk: position; twice the clock of the reply, and 1 more where
        it has a checksum. Kept when recording."""
        self._numbers = self.versions.numpy()  # now: not within a transformation of torch.func
        self._partition = partition
        self._flat = flat
        self._owners = np.asarray(owners, dtype=np.int64)
        self._history = history
        self._uses: list[_Use] = []
        self._landed: IntArray | None = None
        """crc32 by chunk of what came last, where a use may not look itself."""

    def record(self, staleness: Callable[[], Counter[int]]) -> None:
        """A forward pass uses what is in memory now."""
        if self._uses and not self._uses[-1].is_outdated:
            return
        positions = replies = has_crc = crcs = np.empty(0, dtype=np.int64)
        if self._history is not None:
            positions, stamps = self._numbers.T.copy()
            replies, has_crc = stamps >> 1, stamps & 1 != 0
            landed = self._landed
            crcs = self._checksums(np.flatnonzero(has_crc)) if landed is None else landed
        self._uses.append(_Use(staleness(), positions, replies, has_crc, crcs))

    def _checksums(self, chunks: IntArray) -> IntArray:
        """crc32 of the memory that the forward pass reads, 0 for chunks not asked for."""
        crcs = np.zeros(len(self._partition.chunks), dtype=np.int64)
        if len(chunks):
            self._flat.values_to_host()
        for chunk in chunks:
            crcs[chunk] = zlib.crc32(self._flat.parameter_bytes(self._partition.chunks[chunk]))
        return crcs

    def look_as_values_land(self) -> None:
        """Checksums are of values as they come: at the use this worker's own steps may have moved
        them on, or the next ones land where they would be read."""
        self._landed = self._checksums(np.empty(0, dtype=np.int64))

    def values_changed(self) -> None:
        """What is in memory now is another version: the next use is another one."""
        for use in self._uses:
            use.is_outdated = True
        if self._landed is not None and self._history is not None:
            self._landed = self._checksums(np.flatnonzero(self._numbers[:, 1] & 1))

    def commit(self, clock: int) -> None:
        """Iteration ``clock`` has ended: its uses count."""
        chunks = np.arange(len(self._partition.chunks))
        for use in self._uses:
            self.staleness.update(use.staleness)
            if self._history is not None:
                versions = use.positions, use.replies, use.has_crc, use.crcs
                self._history.uses(clock, chunks, self._owners, *versions)
        self._uses.clear()
