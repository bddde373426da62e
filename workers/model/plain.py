"""A worker's flat memory without a model: what benchmarks and tests of the protocol push and pull.

memory = PlainMemory(partition)
memory.parameter_bytes(partition.chunks[0])
"""

from __future__ import annotations

from collections.abc import Sequence

from psdist.protocol.events import Frame
from psdist.protocol.memory import allocate
from psdist.protocol.partition import ITEM_BYTES, Chunk, Partition


class PlainMemory:
    def __init__(
        self, partition: Partition, *, gradients: Sequence[memoryview] | None = None
    ) -> None:
        """``gradients``: by buffer, memory that other workers push, too; else it is this worker's
        own."""
        self._parameters = allocate_buffers(partition)
        self._gradients = allocate_buffers(partition) if gradients is None else gradients

    def parameter_bytes(self, chunk: Chunk) -> memoryview:
        return part_of(self._parameters, chunk)

    def gradient_bytes(self, chunk: Chunk) -> memoryview:
        return part_of(self._gradients, chunk)

    def parameter_frame(self, chunk: Chunk) -> Frame:
        """A new frame over :meth:`parameter_bytes`."""
        return Frame(self.parameter_bytes(chunk))

    def gradient_frame(self, chunk: Chunk) -> Frame:
        """A new frame over :meth:`gradient_bytes`."""
        return Frame(self.gradient_bytes(chunk))


def allocate_buffers(partition: Partition) -> list[memoryview]:
    """Zeroed memory for each buffer of ``partition``."""
    return [
        allocate(buffer.num_elements * ITEM_BYTES[buffer.dtype]) for buffer in partition.buffers
    ]


def part_of(buffers: Sequence[memoryview], chunk: Chunk) -> memoryview:
    """The bytes of ``chunk`` in the memory of the partition's buffers."""
    start = chunk.start * ITEM_BYTES[chunk.dtype]
    return buffers[chunk.buffer][start : start + chunk.num_bytes]
