"""A server's shard: the parameter memory of its chunks and the optimizers that step it.

Owns all tensor arithmetic on a server. Decides nothing: the state machine says what to fold, when
to step and into which buffer. Parameters are held in float32 (float64 for float64 models); where
workers hold bfloat16 or float16, a second copy in their dtype is what goes on the wire.

    shard = Shard(partition, chunks=[0, 3], optimizer="torch.optim.SGD", hyper=packed)
    shard.load(0, slot)
    shard.step(step_action)
    shard.payload(0, buffer=0)       # memoryview: the bytes of a reply
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from psdist.protocol.events import Frame
from psdist.protocol.memory import allocate, as_bytes, as_tensor, master_dtype
from psdist.protocol.optimizers import HyperValue, OptimizerTraits, unpack_hyperparameters
from psdist.protocol.partition import Chunk, Partition
from psdist.servers.protocol.actions import Fold, Step
from psdist.servers.shard.chunk_optimizer import ChunkOptimizer, SegmentSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardStatistics:
    """Bytes held by this shard; buffers beyond the first exist only once they were needed."""

    num_chunks: int
    parameter_bytes: int
    second_buffer_bytes: int
    optimizer_state_bytes: int


class _ChunkMemory:
    """One chunk: ``buffers`` are what replies read, ``values`` what the optimizer steps.

    For float32 and float64 models values *is* the current buffer; else it stays where it is and
    a buffer is filled from it after each step.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.is_wire_master = master_dtype(chunk.dtype) == chunk.dtype
        self.buffers: list[torch.Tensor | None] = [self._new_buffer(), None]
        first = self.buffers[0]
        assert first is not None
        self.values = (
            first if self.is_wire_master else torch.zeros(chunk.length, dtype=torch.float32)
        )
        self.num_steps = 0
        self.optimizer: ChunkOptimizer | None = None
        self.checksum = (-1, 0)  # (num_steps, crc32)

    def _new_buffer(self) -> torch.Tensor:
        return as_tensor(allocate(self.chunk.num_bytes), self.chunk.dtype, self.chunk.length)

    def buffer(self, index: int) -> torch.Tensor:
        tensor = self.buffers[index]
        if tensor is None:
            tensor = self.buffers[index] = self._new_buffer()
        return tensor


class Shard:
    def __init__(
        self,
        partition: Partition,
        *,
        chunks: Sequence[int],
        optimizer: str,
        traits: OptimizerTraits,
        hyper: bytes,
        extra_optimizers: Sequence[str] = (),
    ) -> None:
        """Zeroed memory and an optimizer for each of ``chunks``; raises OptimizerRefusedError."""
        self._unpacked: dict[bytes, list[dict[str, HyperValue]]] = {}
        self._folded: set[Frame] = set()
        self._memory: dict[int, _ChunkMemory] = {}
        groups = self._hyper(hyper)
        for index in chunks:
            chunk = partition.chunks[index]
            memory = self._memory[index] = _ChunkMemory(chunk)
            memory.optimizer = ChunkOptimizer(
                name=optimizer,
                traits=traits,
                hyper=groups[chunk.optimizer_group],
                values=memory.values,
                segments=[
                    SegmentSpec(
                        piece=segment.piece,
                        offset=segment.offset,
                        length=segment.length,
                        shape=(
                            partition.pieces[segment.piece].shape
                            if partition.whole_tensors
                            else None
                        ),
                    )
                    for segment in chunk.segments
                ],
                extra=extra_optimizers,
            )

    def load(self, index: int, slot: Frame) -> None:
        """Initial parameters, in the workers' dtype, from a received message."""
        memory = self._memory[index]
        values = self._payload_as(slot, memory.chunk.dtype, memory.chunk.length)
        memory.values.copy_(values)
        memory.buffer(0).copy_(values)

    def fold(self, fold: Fold) -> None:
        """accumulator += weight * slot, in the server's dtype, in the accumulator's memory."""
        chunk = self._memory[fold.chunk].chunk
        gradient = self._payload_as(fold.slot, chunk.dtype, chunk.length)
        master = master_dtype(chunk.dtype)
        if fold.accumulator is fold.slot:
            if master != chunk.dtype:
                wide = gradient.to(dtype=torch.float32)  # not in place: the memory overlaps
                gradient = self._payload_as(fold.slot, master, chunk.length)
                gradient.copy_(wide)
            if fold.weight != 1.0:
                gradient.mul_(fold.weight)
            self._folded.add(fold.slot)
            return
        total = self._payload_as(fold.accumulator, master, chunk.length)
        if master != chunk.dtype:
            gradient = gradient.to(dtype=torch.float32)
        total.add_(gradient, alpha=fold.weight)

    def step(self, step: Step) -> None:
        """One optimizer step on one chunk; see :class:`psdist.servers.protocol.actions.Step`."""
        slot = step.gradient
        if slot is None:
            return
        memory = self._memory[step.chunk]
        chunk = memory.chunk
        master = master_dtype(chunk.dtype)
        if slot in self._folded:
            self._folded.discard(slot)
            gradient = self._payload_as(slot, master, chunk.length)
        else:
            gradient = self._payload_as(slot, chunk.dtype, chunk.length)
            if master != chunk.dtype:
                gradient = gradient.to(dtype=torch.float32)
        if step.gradient_scale != 1.0:
            gradient.mul_(step.gradient_scale)
        if memory.is_wire_master and step.target != step.source:
            target = memory.buffer(step.target)
            target.copy_(memory.values)
            memory.values = target
        assert memory.optimizer is not None
        memory.optimizer.step(
            values=memory.values,
            grad=gradient,
            hyper=self._hyper(step.hyper)[chunk.optimizer_group],
            lr_scale=step.lr_scale,
            absent=step.absent,
        )
        memory.num_steps += 1
        if not memory.is_wire_master:
            memory.buffer(step.target).copy_(memory.values)

    def payload(self, index: int, buffer: int) -> memoryview:
        """The bytes of buffer ``buffer`` of a chunk, as workers receive them."""
        return as_bytes(self._memory[index].buffer(buffer))

    def checksum(self, index: int, buffer: int) -> int:
        """crc32 of those bytes; computed once per step."""
        memory = self._memory[index]
        if memory.checksum[0] != memory.num_steps:
            memory.checksum = (memory.num_steps, zlib.crc32(self.payload(index, buffer)))
        return memory.checksum[1]

    def statistics(self) -> ShardStatistics:
        parameter_bytes = second_bytes = state_bytes = 0
        for memory in self._memory.values():
            first, second = memory.buffers
            parameter_bytes += first.nbytes if first is not None else 0
            if not memory.is_wire_master:
                parameter_bytes += memory.values.nbytes
            second_bytes += second.nbytes if second is not None else 0
            state_bytes += memory.optimizer.state_bytes() if memory.optimizer else 0
        return ShardStatistics(
            num_chunks=len(self._memory),
            parameter_bytes=parameter_bytes,
            second_buffer_bytes=second_bytes,
            optimizer_state_bytes=state_bytes,
        )

    def _hyper(self, packed: bytes) -> list[dict[str, HyperValue]]:
        groups = self._unpacked.get(packed)
        if groups is None:
            if len(self._unpacked) > 64:  # a schedule that never repeats must not fill memory
                self._unpacked.clear()
            groups = self._unpacked[packed] = unpack_hyperparameters(packed)
        return groups

    @staticmethod
    def _payload_as(slot: Frame, dtype: str, num_elements: int) -> torch.Tensor:
        """The slot's memory as a tensor; chunks have few lengths, so each is made once."""
        if slot.owner is None:
            slot.owner = {}
        key = (dtype, num_elements)
        tensor: torch.Tensor | None = slot.owner.get(key)
        if tensor is None:
            assert slot.payload is not None
            tensor = slot.owner[key] = as_tensor(slot.payload, dtype, num_elements)
        return tensor


def make_slots(partition: Partition, count: int) -> list[Frame]:
    """``count`` receive slots, each large enough for any chunk's gradient in the server's dtype."""
    capacity = max(
        chunk.length * (8 if master_dtype(chunk.dtype) == "float64" else 4)
        for chunk in partition.chunks
    )
    return [Frame(allocate(capacity)) for _ in range(count)]
