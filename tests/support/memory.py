"""What a virtual worker's parameters and gradients lie in: real memory, or sizes alone.

memory = TensorMemory(partition)      # or SizeMemory(partition)
memory.fill_gradients(1.0, absent=[2])
memory.copy_from(mate.memory, chunk=0)
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from psdist.protocol.events import Frame
from psdist.protocol.memory import as_tensor
from psdist.protocol.partition import Chunk, Partition
from psdist.workers.model.plain import PlainMemory


class TensorMemory(PlainMemory):
    def __init__(self, partition: Partition) -> None:
        super().__init__(partition)
        self.partition = partition
        self.parameters = [self.parameter_bytes(chunk) for chunk in partition.chunks]
        self.gradients = [self.gradient_bytes(chunk) for chunk in partition.chunks]

    def fill_parameters(self) -> None:
        """Every chunk with 0, 1, 2 ... and its own index on top."""
        for chunk in self.partition.chunks:
            values = as_tensor(self.parameters[chunk.index], "float32", chunk.length)
            values.copy_(torch.arange(chunk.length) + chunk.index)

    def fill_gradients(self, value: float, *, absent: Collection[int]) -> None:
        """``value`` everywhere, 0 in padding and in pieces that are absent."""
        for chunk in self.partition.chunks:
            gradient = as_tensor(self.gradients[chunk.index], "float32", chunk.length)
            gradient.zero_()
            for segment in chunk.segments:
                if segment.piece not in absent:
                    gradient[segment.offset : segment.offset + segment.length].fill_(value)

    def copy_from(self, other: Any, chunk: int) -> None:
        self.parameters[chunk][:] = other.parameters[chunk]

    def checksums(self) -> dict[str, Any]:
        """crc32 of every chunk, as the history records it with a use."""
        crcs = np.array([zlib.crc32(memory) for memory in self.parameters], dtype=np.int64)
        return {"has_crc": True, "crcs": crcs}


class SizeMemory:
    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.parameters = self.gradients = [memoryview(b"")] * len(partition.chunks)

    def parameter_frame(self, chunk: Chunk) -> Frame:
        return Frame(capacity=chunk.num_bytes)

    gradient_frame = parameter_frame

    def fill_parameters(self) -> None:
        """There is nothing to fill."""

    def fill_gradients(self, value: float, *, absent: Collection[int]) -> None:
        """There is nothing to fill."""

    def copy_from(self, other: Any, chunk: int) -> None:
        """There is nothing to copy."""

    def checksums(self) -> dict[str, Any]:
        return {}
