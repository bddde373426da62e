"""Checkpoints that stay in memory, for jobs on the virtual network.

A keeper says that it has written when all is copied and its server next looks, or that it could
not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from psdist.protocol.checkpoints import Misses
from psdist.protocol.control import WriteFailed, Written
from psdist.protocol.partition import Partition
from psdist.servers.shard.regions import Keeper, Region, starts_of
from psdist.servers.shard.snapshots import SnapshotMemory

Parts = dict[tuple[int, int, int], Region]
"""By set, piece, and the element of that with which it begins."""


@dataclass
class MemoryCheckpoint:
    """State that a server keeps for a checkpoint."""

    name: str
    parts: Parts


class MemoryKeeper(Keeper):
    """Keeps checkpoints in memory."""

    fail_rate = 0.0

    def __init__(self, seed: int, restored: Parts | None = None) -> None:
        """``restored``: everything of the checkpoint that the job continues from."""
        self.checkpoints: list[MemoryCheckpoint] = []
        self._memory = SnapshotMemory()
        self._next: MemoryCheckpoint | None = None
        """Not all of it is copied."""
        self._pick = random.Random(f"{seed} keeper")
        self._kept: Parts = {}
        self._told: Written | WriteFailed | None = None
        self._restored = restored or {}

    @property
    def is_busy(self) -> bool:
        return self._next is not None or self._told is not None

    @property
    def memory(self) -> SnapshotMemory:
        """New for every checkpoint: what was kept stays."""
        assert not self.is_busy, "a checkpoint began before the last one was over"
        return self._memory

    def statistics(self, set_index: int) -> dict[str, int]:  # noqa: ARG002 - a keeper's
        return {"snapshot_bytes": 0}

    def keep(
        self,
        set_index: int,
        regions: list[Region],
        *,
        misses: Misses | None = None,  # noqa: ARG002 - a keeper's
    ) -> None:
        self._kept |= {(set_index, each.piece, each.start): each for each in regions}

    def write(self, checkpoint: str) -> None:
        assert not self.is_busy, "a checkpoint began before the last one was over"
        self._next, self._kept = MemoryCheckpoint(checkpoint, self._kept), {}

    def go_on(self) -> bool:
        whole = self._next
        if whole is None:
            return False
        if not self._memory.make_next():
            self._next, self._memory = None, SnapshotMemory()
            self.checkpoints.append(whole)
            self._told = Written(checkpoint=whole.name, num_bytes=len(self.checkpoints), crc32=0)
            if self._pick.random() < self.fail_rate:
                self._told = WriteFailed(checkpoint=whole.name, problem="the disk is full")
        return True

    def outcome(self) -> Written | WriteFailed | None:
        told, self._told = self._told, None
        return told

    def regions(self, set_index: int, partition: Partition, chunk: int) -> list[Region]:
        each = partition.chunks[chunk]
        starts = starts_of(partition, each)
        segments = zip(each.segments, starts, strict=True)
        return [self._restored[set_index, segment.piece, start] for segment, start in segments]
