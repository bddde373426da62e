"""The parameters of one chunk on a server: what the optimizer steps, and what replies read.

memory = ChunkMemory(chunk, transfers)
memory.begin_step(source=0, target=1)      # memory.values is what is stepped
memory.end_step(target=1)
memory.buffer(1)                           # the bytes of replies
copy = memory.owe(make)                    # of a checkpoint: made before anything here changes
live_regions(memory, partition, stages)    # the contents for a checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from psdist.errors import InvariantError, OptimizerRefusedError
from psdist.protocol.memory import as_tensor, dtype_name, torch_dtype
from psdist.protocol.optimizer_state import PerElement, PieceState, Uncut, Whole
from psdist.protocol.partition import Chunk, Partition, master_dtype
from psdist.servers.shard import ShardStage
from psdist.servers.shard.chunk_optimizer import ChunkOptimizer
from psdist.servers.shard.regions import HELD, Region, starts_of
from psdist.servers.shard.snapshots import ChunkCopy
from psdist.transfers import DONE, Copy, Transfers


class ChunkMemory:
    """``values`` are in the server's dtype. Where they are in the workers' dtype, too, and on the
    CPU, they *are* the current buffer; else they stay where they are, and a buffer, which lies
    where the network reads it, is filled from them after each step: rounded, or (``is_relative``)
    by the shard, with what workers will hold when a codec has told them of it."""

    def __init__(self, chunk: Chunk, transfers: Transfers, *, is_relative: bool = False) -> None:
        """Zeroed."""
        self.chunk = chunk
        self._transfers = transfers
        self.is_relative = is_relative
        is_aside = transfers.has_mirrors or is_relative
        self.is_buffer = master_dtype(chunk.dtype) == chunk.dtype and not is_aside
        """Whether ``values`` are the current buffer."""
        self._buffers: list[torch.Tensor | None] = [None, None]
        first = self.buffer(0)
        self.values = (
            first
            if self.is_buffer
            else transfers.device_memory(master_dtype(chunk.dtype), chunk.length)
        )
        self.newest = 0
        """The buffer that was written last."""
        self.change: memoryview | None = None
        """The encoded change of the newest step to the workers' values; None before a step."""
        self.change_clock = 0
        """The round of that step."""
        self.change_memory: memoryview | None = None
        self.num_changes = 0
        self.optimizer: ChunkOptimizer | None = None
        self.checksum = (-1, 0)
        """(num_changes, crc32)"""
        self._copy: Copy = DONE
        """From the device to a buffer."""
        self._owed: ChunkCopy | None = None

    def buffer(self, index: int) -> torch.Tensor:
        """Complete: what is still on its way there is awaited."""
        tensor = self._buffers[index]
        if tensor is None:
            memory = self._transfers.allocate(self.chunk.num_bytes)
            tensor = as_tensor(memory, self.chunk.dtype, self.chunk.length)
            self._buffers[index] = tensor
            return tensor
        if not self.is_buffer:
            self._copy.wait()
        return tensor

    @property
    def held(self) -> torch.Tensor:
        """Where replies are relative: what workers hold."""
        return self.buffer(self.newest)

    def load(self, host: torch.Tensor, values: torch.Tensor, *, target: int) -> None:
        """Begin with these, in the workers' dtype: where they lie for the network, and where they
        are computed with."""
        self.begin_change()
        buffer = self.buffer(target)
        buffer.copy_(host)
        if self.is_buffer:
            self.values = buffer
        else:
            self.values.copy_(values)
        self.newest, self.change = target, None
        self.num_changes += 1

    def owe(self, make: Callable[[], None]) -> ChunkCopy:
        """Return a copy whose ``make`` copies values and optimizer state as they are now. It is
        called before they change, at the latest."""
        num_changes = self.num_changes

        def make_of_this() -> None:
            if self.num_changes != num_changes:
                raise InvariantError(
                    f"chunk {self.chunk.index} changed before a checkpoint had its copy"
                )
            make()

        self._owed = ChunkCopy(make_of_this)
        return self._owed

    def begin_change(self) -> None:
        """Values, what workers hold, or the optimizer's state may change from here on."""
        if self._owed is not None:
            self._owed.make()
            self._owed = None

    def begin_step(self, *, source: int, target: int) -> None:
        """``values`` may be stepped: they lie in buffer ``target``, or in none."""
        self.begin_change()
        if not self.is_buffer:
            self._copy.wait()
        elif target != source:
            buffer = self.buffer(target)
            buffer.copy_(self.values)
            self.values = buffer

    def end_step(self, *, target: int) -> None:
        """``values`` have changed: buffer ``target`` is to hold them."""
        self.num_changes += 1
        self.newest = target
        if self.is_buffer or self.is_relative:
            return
        buffer = self.buffer(target)
        if not self._transfers.has_mirrors:
            buffer.copy_(self.values)
            return
        values = self.values.to(torch_dtype(self.chunk.dtype))
        self._copy = self._transfers.begin([(values, buffer)], after=[self._transfers.mark()])

    @property
    def parameter_bytes(self) -> int:
        """Without a second buffer."""
        first = self._buffers[0]
        assert first is not None
        return first.nbytes + (0 if self.is_buffer else self.values.nbytes)

    @property
    def second_bytes(self) -> int:
        second = self._buffers[1]
        return second.nbytes if second is not None else 0


def live_regions(
    memory: ChunkMemory, partition: Partition, stages: Sequence[ShardStage]
) -> list[Region]:
    """Return the regions that a snapshot copies: views of the memory itself."""
    assert memory.optimizer is not None
    states, regions = memory.optimizer.describe_state(), []
    saved = {key: each for stage in stages for key, each in stage.saved(memory).items()}
    starts = starts_of(partition, memory.chunk)
    for segment, start in zip(memory.chunk.segments, starts, strict=True):
        offset, length = segment.offset, segment.length
        state, elements = {**states.get(segment.piece, {})}, {}
        for key, entry in tuple(state.items()):
            if isinstance(entry, PerElement):
                elements[key] = memory.optimizer.state_elements(key, offset, length)
            elif isinstance(entry, Uncut):
                whole = memory.optimizer.state_tensors(offset)[key]
                if not isinstance(whole, torch.Tensor):
                    raise OptimizerRefusedError(
                        f"checkpoint: state {key!r} of parameter "
                        f"{partition.pieces[segment.piece].name} is {entry.what}, which "
                        "no checkpoint can keep"
                    )
                state[key] = Whole(dtype_name(whole.dtype), tuple(whole.shape))
                elements[key] = whole.flatten()
        for key, values in saved.items():
            state[key] = PerElement(memory.chunk.dtype)
            elements[key] = values[offset : offset + length]
        regions.append(
            Region(
                piece=segment.piece,
                start=start,
                values=memory.values[offset : offset + length],
                state=state,
                elements=elements,
            )
        )
    return regions


def restore_regions(
    memory: ChunkMemory, regions: Sequence[Region], stages: Sequence[ShardStage]
) -> None:
    """Set the chunk to these contents, one region for each segment."""
    optimizer = memory.optimizer
    assert optimizer is not None
    memory.begin_change()
    states = {each.piece: _without_held(each.state) for each in regions}
    optimizer.begin_state({piece: state for piece, state in states.items() if state})
    for segment, region in zip(memory.chunk.segments, regions, strict=True):
        offset, length = segment.offset, segment.length
        memory.values[offset : offset + length].copy_(region.values)
        for key, value in region.elements.items():
            if key == HELD:
                continue
            entry = region.state[key]
            if isinstance(entry, Whole):
                whole = value.view(entry.shape).to(memory.values.device, copy=True)
                optimizer.set_whole(offset, key, whole)
            else:
                optimizer.state_elements(key, offset, length).copy_(value)
    memory.end_step(target=0)
    places = [slice(each.offset, each.offset + each.length) for each in memory.chunk.segments]
    elements = [region.elements for region in regions]
    for stage in stages:
        stage.restore(memory, list(zip(places, elements, strict=True)))


def _without_held(state: PieceState) -> PieceState:
    return {key: entry for key, entry in state.items() if key != HELD}
