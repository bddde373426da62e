"""A server's shard: the parameter memory of its chunks and the optimizers that step it.

Owns all tensor arithmetic on a server. Decides nothing: the state machine chooses what to fold,
when to step and into which buffer. Parameters are float32 (float64 for float64 models). Where
workers hold bfloat16 or float16, replies carry a copy in their dtype. With a shard on a
device, parameters, sums and optimizer state lie there. Memory that the network reads and
writes stays on the host, and psdist.transfers copies between the two.

    shard = TensorShard(ShardSpec(partition=partition, chunks=(0, 3), ...), Transfers())
    shard.load(Load(0, slot))
    shard.step(step_action)
    shard.payload(0, buffer=0)       # memoryview: the bytes of a reply
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import torch

from psdist.protocol.events import Frame
from psdist.protocol.header import Flag
from psdist.protocol.memory import as_bytes
from psdist.protocol.optimizer_state import PieceState, stretches
from psdist.protocol.optimizers import HyperValue, unpack_hyperparameters
from psdist.protocol.partition import ALIGN, master_dtype
from psdist.servers.protocol.actions import (
    BLOCK_ELEMENTS,
    Fold,
    Hold,
    Load,
    LoadState,
    Reply,
    SlotContent,
    StartSum,
    Step,
)
from psdist.servers.shard import ShardStage
from psdist.servers.shard.chunk_memory import ChunkMemory, live_regions, restore_regions
from psdist.servers.shard.chunk_optimizer import ChunkOptimizer, SegmentSpec
from psdist.servers.shard.executor import ShardSpec, ShardStatistics
from psdist.servers.shard.given import Given
from psdist.servers.shard.optimizer_state import bytes_of, fill
from psdist.servers.shard.reader_copies import ReaderCopies
from psdist.servers.shard.regions import Region
from psdist.servers.shard.replies import ChangeReplies, CodedReplies, RawReplies
from psdist.servers.shard.slots import CodedGradients, RawGradients, Slots
from psdist.servers.shard.snapshots import SnapshotMemory
from psdist.transfers import Transfers

_LOADED_AND_STEPPED: Final = 2
"""Changes of a chunk: its first values, and a step, in which most optimizers make their state."""


class TensorShard:
    """The executor that computes; see :class:`psdist.servers.shard.executor.Executor`."""

    def __init__(self, spec: ShardSpec, transfers: Transfers | None = None) -> None:
        """Zeroed memory and an optimizer for each chunk; raises OptimizerRefusedError.
        ``transfers``: of the device that has the shard; None: on the CPU."""
        transfers = transfers or Transfers()
        self._transfers = transfers
        self._slots = Slots(transfers, spec.slot_bytes)
        self.gradients = gradients_of(spec, self._slots)
        self.replies = replies_of(spec)
        self._stages = stages_of(spec, self.replies)
        self._unpacked: dict[bytes, list[dict[str, HyperValue]]] = {}
        self.memory: dict[int, ChunkMemory] = {}
        self._held: dict[int, torch.Tensor] = {}
        if spec.is_holding:
            for index in spec.chunks:
                chunk = spec.partition.chunks[index]
                dtype = master_dtype(chunk.dtype)
                self._held[index] = transfers.device_memory(dtype, chunk.length)
        groups = self._hyper(spec.hyper)
        partition = self._partition = spec.partition
        for index in spec.chunks:
            chunk = partition.chunks[index]
            memory = ChunkMemory(chunk, transfers, is_relative=spec.wire.is_shared)
            self.memory[index] = memory
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
                freeze_step=spec.freeze_step,
            )
            memory.optimizer.begin_state(spec.states)
        self._states = spec.states

    def make_slots(self, count: int) -> list[Frame]:
        return self._slots.make(count)

    def settle(self, slot: Frame) -> None:
        self._slots.settle(slot)

    def load(self, action: Load) -> None:
        memory = self.memory[action.chunk]
        where = action.slot, memory.chunk.dtype, memory.chunk.length
        memory.load(self._slots.host(*where), self._slots.received(*where), target=action.target)
        for stage in self._stages:
            stage.on_load(action.chunk)

    def load_state(self, action: LoadState) -> None:
        memory, at = self.memory[action.chunk], 0
        assert memory.optimizer is not None
        memory.begin_change()
        for each in stretches(memory.chunk, self._states, action.start):
            target = memory.optimizer.state_elements(each.key, each.start, each.length)
            fill(target, action.values[at : at + each.num_bytes], each.dtype)
            at += each.num_bytes

    def state(self, chunk: int, start: int) -> tuple[dict[int, PieceState], bytes]:
        memory = self.memory[chunk]
        assert memory.optimizer is not None
        states = memory.optimizer.describe_state()
        elements = self._fetched(
            memory.optimizer.state_elements(each.key, each.start, each.length)
            for each in stretches(memory.chunk, states, start)
        )
        return states, b"".join(map(bytes_of, elements))

    def snapshot(
        self, chunk: int, into: SnapshotMemory, *, set_index: int, is_later: bool = False
    ) -> list[Region]:
        pairs, regions = list[tuple[torch.Tensor, torch.Tensor]](), list[Region]()
        for place, live in enumerate(self._live_regions(chunk)):
            found = {"": live.values, **live.elements}
            rooms = {
                key: into.room((set_index, chunk, place, key), values)
                for key, values in found.items()
            }
            pairs += [(found[key], room) for key, room in rooms.items()]
            regions.append(replace(live, values=rooms.pop(""), elements=rooms))

        def copy() -> None:
            self._transfers.begin(pairs, after=[self._transfers.mark()]).wait()

        if is_later:
            into.owe(self.memory[chunk].owe(copy))
        else:
            copy()
        return regions

    def reserve_snapshot(self, chunk: int, memory: SnapshotMemory, *, set_index: int) -> bool:
        if self.memory[chunk].num_changes < _LOADED_AND_STEPPED:
            return False
        for place, live in enumerate(self._live_regions(chunk)):
            for key, values in (("", live.values), *live.elements.items()):
                memory.reserve((set_index, chunk, place, key), values)
        return True

    def _live_regions(self, chunk: int) -> list[Region]:
        return live_regions(self.memory[chunk], self._partition, self._stages)

    def restore(self, chunk: int, regions: Sequence[Region]) -> None:
        restore_regions(self.memory[chunk], regions, self._stages)

    def value_checksum(self, chunk: int) -> int:
        (values,) = self._fetched([self.memory[chunk].values])
        return zlib.crc32(as_bytes(values))

    def start_sum(self, action: StartSum) -> None:
        chunk = self.memory[action.chunk].chunk
        total = self.gradients.start(action.slot, chunk, action.clock)
        if action.weight != 1.0:
            total.mul_(action.weight)

    def fold(self, action: Fold) -> None:
        chunk = self.memory[action.chunk].chunk
        total = self.gradients.sum(action.accumulator, chunk)
        self.gradients.add(action.slot, chunk, action.clock, total, action.weight)

    def hold(self, action: Hold) -> tuple[float, ...]:
        held = self._held[action.chunk]
        held.copy_(self.gradients.sum(action.slot, self.memory[action.chunk].chunk))
        if action.scale != 1.0:
            held.mul_(action.scale)
        squares = torch.stack([_sum_of_squares(each) for each in torch.split(held, BLOCK_ELEMENTS)])
        return tuple(squares.tolist())

    def step(self, action: Step) -> None:
        slot = action.gradient
        memory = self.memory[action.chunk]
        chunk = memory.chunk
        if slot is None:
            gradient = self._held[action.chunk]
        elif action.content is SlotContent.SUM:
            gradient = self.gradients.sum(slot, chunk)
        else:
            gradient = self.gradients.read(slot, chunk, action.contributions[0].clock)
        if action.gradient_scale != 1.0:
            gradient.mul_(action.gradient_scale)
        memory.begin_step(source=action.source, target=action.target)
        for stage in self._stages:
            stage.before_step(action, memory, gradient)
        assert memory.optimizer is not None
        memory.optimizer.step(
            values=memory.values,
            grad=gradient,
            hyper=self._hyper(action.hyper)[chunk.optimizer_group],
            lr_scale=action.lr_scale,
            absent=action.absent,
        )
        memory.end_step(target=action.target)
        for stage in self._stages:
            stage.after_step(action, memory)

    def payload(self, chunk: int, buffer: int) -> memoryview:
        return self.replies.payload(self.memory[chunk], buffer)

    def begin_reply(self, reply: Reply) -> None:
        memory = self.memory[reply.token.chunk]
        memory.buffer(reply.token.buffer)
        for stage in self._stages:
            stage.before_reply(reply, memory)

    def encode(self, reply: Reply, *, into: memoryview | None) -> int:
        assert into is not None
        memory = self.memory[reply.token.chunk]
        if reply.flags & Flag.FRESH:  # a copy of the values as they are stepped
            coding = self.replies.coding(reply.token.chunk, reply.clock)
            return coding.encode_raw(self._fetched([memory.values])[0], into)
        return self.replies.encode(reply, memory, into)

    def checksum(
        self,
        chunk: int,
        buffer: int,
        *,
        encoded: memoryview | None,
        clock: int = 0,
        reader: int | None = None,
    ) -> int:
        """A buffer's own checksum is computed once per change."""
        memory = self.memory[chunk]
        if reader is not None and (held := self.replies.held_by(reader, chunk)) is not None:
            return zlib.crc32(as_bytes(held))
        if encoded is not None:
            seen = torch.zeros_like(memory.buffer(buffer))
            self.replies.coding(chunk, clock).read(encoded).set(seen)
            return zlib.crc32(as_bytes(seen))
        if memory.checksum[0] != memory.num_changes:
            memory.checksum = (memory.num_changes, zlib.crc32(as_bytes(memory.buffer(buffer))))
        return memory.checksum[1]

    def take_cost_s(self) -> float:
        return 0.0

    def statistics(self) -> ShardStatistics:
        memories = self.memory.values()
        return ShardStatistics(
            num_chunks=len(memories),
            parameter_bytes=sum(memory.parameter_bytes for memory in memories),
            second_buffer_bytes=sum(memory.second_bytes for memory in memories),
            optimizer_state_bytes=sum(
                memory.optimizer.state_bytes() for memory in memories if memory.optimizer
            ),
            held_bytes=sum(held.nbytes for held in self._held.values()),
            copy_bytes=sum(stage.num_bytes for stage in self._stages),
        )

    def _hyper(self, packed: bytes) -> list[dict[str, HyperValue]]:
        groups = self._unpacked.get(packed)
        if groups is None:
            if len(self._unpacked) > 64:  # a schedule that never repeats must not fill memory
                self._unpacked.clear()
            groups = self._unpacked[packed] = unpack_hyperparameters(packed)
        return groups

    def _fetched(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """These on the host: themselves, or copies."""
        found = list(tensors)
        return self._copied(found) if self._transfers.has_mirrors else found

    def _copied(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the host."""
        copies = [torch.empty_like(each, device="cpu") for each in tensors]
        pairs = list(zip(tensors, copies, strict=True))
        self._transfers.begin(pairs, after=[self._transfers.mark()]).wait()
        return copies


def gradients_of(spec: ShardSpec, slots: Slots) -> RawGradients:
    """Return how the server reads its pushes."""
    codings = spec.wire.pushes(spec.partition)
    return RawGradients(slots) if codings is None else CodedGradients(slots, codings)


def replies_of(spec: ShardSpec) -> RawReplies:
    """Return how the server writes its replies."""
    codings = spec.wire.replies(spec.partition)
    if codings is None:
        return RawReplies()
    if spec.wire.has_copies:
        return ReaderCopies(spec.wire, codings)
    return (ChangeReplies if spec.wire.is_shared else CodedReplies)(spec.wire, codings)


def stages_of(spec: ShardSpec, replies: RawReplies) -> list[ShardStage]:
    """Return the stages around steps and replies, in order."""
    stages: list[ShardStage] = [Given(spec.compensation)] if spec.compensation else []
    return [*stages, replies] if isinstance(replies, CodedReplies) else stages


def _sum_of_squares(block: torch.Tensor) -> torch.Tensor:
    """Row by row first: a sum of more elements than these torch may split among threads, and how
    many a server has depends on how many servers there are."""
    rows = block.to(torch.float64).square_().view(-1, ALIGN)
    return rows.sum(dim=1).sum()
