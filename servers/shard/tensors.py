"""A server's shard: the parameter memory of its chunks and the optimizers that step it.

Owns all tensor arithmetic on a server. Decides nothing: the state machine says what to fold, when
to step and into which buffer. Parameters are held in float32 (float64 for float64 models); where
workers hold bfloat16 or float16, a second copy in their dtype is what goes on the wire.

    shard = TensorShard(ShardSpec(partition=partition, chunks=(0, 3), ...))
    shard.load(Load(0, slot))
    shard.step(step_action)
    shard.payload(0, buffer=0)       # memoryview: the bytes of a reply
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from psdist.codecs.raw import Raw
from psdist.codecs.wire import ANY_SERVER, Encoder
from psdist.errors import OptimizerRefusedError
from psdist.protocol.events import Frame
from psdist.protocol.memory import allocate, as_bytes, as_tensor, torch_dtype
from psdist.protocol.optimizer_state import PerElement, PieceState, Uncut, stretches
from psdist.protocol.optimizers import HyperValue, unpack_hyperparameters
from psdist.protocol.partition import ALIGN, Chunk, master_dtype
from psdist.servers.protocol.actions import (
    BLOCK_ELEMENTS,
    Fold,
    Hold,
    Load,
    LoadState,
    SlotContent,
    StartSum,
    Step,
)
from psdist.servers.shard.chunk_optimizer import ChunkOptimizer, SegmentSpec
from psdist.servers.shard.executor import ShardSpec, ShardStatistics
from psdist.servers.shard.optimizer_state import bytes_of, fill
from psdist.servers.shard.regions import Region, starts_of
from psdist.servers.shard.snapshots import SnapshotMemory

_LOADED_AND_STEPPED: Final = 2
"""Changes of a chunk: its first values, and a step, in which most optimizers make their state."""


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
        self.num_changes = 0
        self.optimizer: ChunkOptimizer | None = None
        self.checksum = (-1, 0)  # (num_changes, crc32)

    def _new_buffer(self) -> torch.Tensor:
        return as_tensor(allocate(self.chunk.num_bytes), self.chunk.dtype, self.chunk.length)

    def buffer(self, index: int) -> torch.Tensor:
        tensor = self.buffers[index]
        if tensor is None:
            tensor = self.buffers[index] = self._new_buffer()
        return tensor


class TensorShard:
    """The executor that computes; see :class:`psdist.servers.shard.executor.Executor`."""

    def __init__(self, spec: ShardSpec) -> None:
        """Zeroed memory and an optimizer for each chunk; raises OptimizerRefusedError."""
        self._slot_bytes = spec.slot_bytes
        self._wire = spec.wire
        self._encoder = (
            None
            if isinstance(spec.wire.reply, Raw)
            else Encoder(spec.wire.reply, seed=spec.wire.seed, sender=ANY_SERVER)
        )
        self._unpacked: dict[bytes, list[dict[str, HyperValue]]] = {}
        self._memory: dict[int, _ChunkMemory] = {}
        self._held: dict[int, torch.Tensor] = {}
        if spec.is_holding:
            for index in spec.chunks:
                chunk = spec.partition.chunks[index]
                dtype = master_dtype(chunk.dtype)
                self._held[index] = as_tensor(allocate(chunk.num_master_bytes), dtype, chunk.length)
        groups = self._hyper(spec.hyper)
        partition = self._partition = spec.partition
        for index in spec.chunks:
            chunk = partition.chunks[index]
            memory = self._memory[index] = _ChunkMemory(chunk)
            memory.optimizer = ChunkOptimizer(
                name=spec.optimizer,
                traits=spec.traits,
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
                extra=spec.extra_optimizers,
            )
            memory.optimizer.begin_state(spec.states)
        self._states = spec.states

    def make_slots(self, count: int) -> list[Frame]:
        return [Frame(allocate(self._slot_bytes)) for _ in range(count)]

    def load(self, action: Load) -> None:
        memory = self._memory[action.chunk]
        values = self._payload_as(action.slot, memory.chunk.dtype, memory.chunk.length)
        target = memory.buffer(action.target)
        target.copy_(values)
        if memory.is_wire_master:
            memory.values = target
        else:
            memory.values.copy_(values)
        memory.num_changes += 1

    def load_state(self, action: LoadState) -> None:
        memory, at = self._memory[action.chunk], 0
        assert memory.optimizer is not None
        for each in stretches(memory.chunk, self._states, action.start):
            target = memory.optimizer.state_elements(each.key, each.start, each.length)
            fill(target, action.values[at : at + each.num_bytes], each.dtype)
            at += each.num_bytes

    def state(self, chunk: int, start: int) -> tuple[dict[int, PieceState], bytes]:
        memory = self._memory[chunk]
        assert memory.optimizer is not None
        states = memory.optimizer.describe_state()
        values = (
            bytes_of(memory.optimizer.state_elements(each.key, each.start, each.length))
            for each in stretches(memory.chunk, states, start)
        )
        return states, b"".join(values)

    def snapshot(self, chunk: int, into: SnapshotMemory, *, set_index: int) -> list[Region]:
        return [
            replace(
                live,
                values=into.copy((set_index, chunk, place, ""), live.values),
                elements={
                    key: into.copy((set_index, chunk, place, key), values)
                    for key, values in live.elements.items()
                },
            )
            for place, live in enumerate(self._live_regions(chunk))
        ]

    def reserve_snapshot(self, chunk: int, memory: SnapshotMemory, *, set_index: int) -> bool:
        if self._memory[chunk].num_changes < _LOADED_AND_STEPPED:
            return False
        for place, live in enumerate(self._live_regions(chunk)):
            for key, values in (("", live.values), *live.elements.items()):
                memory.reserve((set_index, chunk, place, key), values)
        return True

    def _live_regions(self, chunk: int) -> list[Region]:
        """What a snapshot copies: views of the memory itself."""
        memory = self._memory[chunk]
        assert memory.optimizer is not None
        states, regions = memory.optimizer.describe_state(), []
        starts = starts_of(self._partition, memory.chunk)
        for segment, start in zip(memory.chunk.segments, starts, strict=True):
            offset, length = segment.offset, segment.length
            state, shapes, elements = states.get(segment.piece, {}), {}, {}
            for key, entry in state.items():
                if isinstance(entry, PerElement):
                    elements[key] = memory.optimizer.state_elements(key, offset, length)
                elif isinstance(entry, Uncut):
                    whole = memory.optimizer.state_tensors(offset)[key]
                    if not isinstance(whole, torch.Tensor):
                        raise OptimizerRefusedError(
                            f"checkpoint: state {key!r} of parameter "
                            f"{self._partition.pieces[segment.piece].name} is {entry.what}, which "
                            "no checkpoint can keep"
                        )
                    shapes[key], elements[key] = tuple(whole.shape), whole.flatten()
            regions.append(
                Region(
                    piece=segment.piece,
                    start=start,
                    values=memory.values[offset : offset + length],
                    state=state,
                    shapes=shapes,
                    elements=elements,
                )
            )
        return regions

    def restore(self, chunk: int, regions: Sequence[Region]) -> None:
        memory = self._memory[chunk]
        optimizer = memory.optimizer
        assert optimizer is not None
        optimizer.begin_state({each.piece: each.state for each in regions if each.state})
        for segment, region in zip(memory.chunk.segments, regions, strict=True):
            offset, length = segment.offset, segment.length
            memory.values[offset : offset + length].copy_(region.values)
            for key, value in region.elements.items():
                if key in region.shapes:
                    optimizer.set_whole(offset, key, value.view(region.shapes[key]).clone())
                else:
                    optimizer.state_elements(key, offset, length).copy_(value)
        if not memory.is_wire_master:
            memory.buffer(0).copy_(memory.values)
        memory.num_changes += 1

    def value_checksum(self, chunk: int) -> int:
        return zlib.crc32(as_bytes(self._memory[chunk].values))

    def start_sum(self, action: StartSum) -> None:
        chunk = self._memory[action.chunk].chunk
        gradient = self._gradient(action.slot, chunk)
        total = self._payload_as(action.slot, master_dtype(chunk.dtype), chunk.length)
        if gradient is not total:
            total.copy_(gradient)
        if action.weight != 1.0:
            total.mul_(action.weight)

    def fold(self, action: Fold) -> None:
        chunk = self._memory[action.chunk].chunk
        total = self._payload_as(action.accumulator, master_dtype(chunk.dtype), chunk.length)
        total.add_(self._gradient(action.slot, chunk), alpha=action.weight)

    def hold(self, action: Hold) -> tuple[float, ...]:
        chunk = self._memory[action.chunk].chunk
        held = self._held[action.chunk]
        held.copy_(self._payload_as(action.slot, master_dtype(chunk.dtype), chunk.length))
        if action.scale != 1.0:
            held.mul_(action.scale)
        return tuple(map(_sum_of_squares, torch.split(held, BLOCK_ELEMENTS)))

    def step(self, action: Step) -> None:
        slot = action.gradient
        memory = self._memory[action.chunk]
        chunk = memory.chunk
        if slot is None:
            gradient = self._held[action.chunk]
        elif action.content is SlotContent.SUM:
            gradient = self._payload_as(slot, master_dtype(chunk.dtype), chunk.length)
        else:
            gradient = self._gradient(slot, chunk)
        if action.gradient_scale != 1.0:
            gradient.mul_(action.gradient_scale)
        if memory.is_wire_master and action.target != action.source:
            target = memory.buffer(action.target)
            target.copy_(memory.values)
            memory.values = target
        assert memory.optimizer is not None
        memory.optimizer.step(
            values=memory.values,
            grad=gradient,
            hyper=self._hyper(action.hyper)[chunk.optimizer_group],
            lr_scale=action.lr_scale,
            absent=action.absent,
        )
        memory.num_changes += 1
        if not memory.is_wire_master:
            memory.buffer(action.target).copy_(memory.values)

    def payload(self, chunk: int, buffer: int) -> memoryview:
        memory = self._memory[chunk]
        if self._encoder is not None:
            return allocate(self._wire.reply.sizes(memory.chunk)[1])
        return as_bytes(memory.buffer(buffer))

    def encode(self, chunk: int, buffer: int, *, clock: int, into: memoryview | None) -> int:
        assert self._encoder is not None
        assert into is not None
        return self._encoder.encode(chunk, clock, self._memory[chunk].buffer(buffer), into)

    def checksum(self, chunk: int, buffer: int, *, encoded: memoryview | None) -> int:
        """Of raw parameters it is computed once per change."""
        memory = self._memory[chunk]
        reply = self._wire.reply
        if encoded is not None and not isinstance(reply, Raw):
            seen = torch.empty_like(memory.buffer(buffer))
            reply.decode(encoded, seen)
            return zlib.crc32(as_bytes(seen))
        if memory.checksum[0] != memory.num_changes:
            memory.checksum = (memory.num_changes, zlib.crc32(self.payload(chunk, buffer)))
        return memory.checksum[1]

    def take_cost_s(self) -> float:
        return 0.0

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
            held_bytes=sum(held.nbytes for held in self._held.values()),
        )

    def _hyper(self, packed: bytes) -> list[dict[str, HyperValue]]:
        groups = self._unpacked.get(packed)
        if groups is None:
            if len(self._unpacked) > 64:  # a schedule that never repeats must not fill memory
                self._unpacked.clear()
            groups = self._unpacked[packed] = unpack_hyperparameters(packed)
        return groups

    def _gradient(self, slot: Frame, chunk: Chunk) -> torch.Tensor:
        """What was pushed, in the server's dtype: the slot's own memory where that is what lies
        there."""
        codec, master = self._wire.push, master_dtype(chunk.dtype)
        if isinstance(codec, Raw):
            gradient = self._payload_as(slot, chunk.dtype, chunk.length)
            return gradient if master == chunk.dtype else gradient.to(dtype=torch.float32)
        assert slot.payload is not None
        gradient = torch.empty(chunk.length, dtype=torch_dtype(master))
        codec.decode(slot.payload[: slot.num_received], gradient)
        return gradient

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


def _sum_of_squares(block: torch.Tensor) -> float:
    """Row by row first: a sum of more elements than these torch may split among threads, and how
    many a server has depends on how many servers there are."""
    rows = block.to(torch.float64).square_().view(-1, ALIGN)
    return float(rows.sum(dim=1).sum())
