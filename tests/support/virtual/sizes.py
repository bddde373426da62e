"""An executor of sizes alone: it counts bytes and seconds, and holds no parameters.

Tests simulate runs of many ranks with it: a run takes the time that the cost model gives, and
nearly no memory. The server's actor sleeps for that time, so replies leave as late as from a server
that computes. It imports no torch.

    model = CostModel(fold_s_per_byte=1e-10, step_s_per_byte=4e-10, copy_s_per_byte=5e-11)
    store = ShardStore(partial(SizeShard, model=model))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psdist.protocol.events import Frame
from psdist.protocol.header import Flag
from psdist.protocol.optimizer_state import PieceState
from psdist.protocol.partition import Chunk
from psdist.servers.protocol.actions import (
    Fold,
    Hold,
    Load,
    LoadState,
    Reply,
    StartSum,
    Step,
    num_blocks,
)
from psdist.servers.shard.executor import ShardSpec, ShardStatistics
from psdist.servers.shard.regions import Region
from psdist.servers.shard.snapshots import ChunkCopy, SnapshotMemory


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs of actions, in seconds per byte of the chunk in the server's dtype."""

    fold_s_per_byte: float
    """Cost of a gradient that begins a sum or is added to one."""
    step_s_per_byte: float
    """Cost of one optimizer step."""
    copy_s_per_byte: float
    """Cost of loading a chunk, and of a step that ends in another buffer than it began in: the
    second one, or the reply's where workers hold float16 or bfloat16."""
    state_bytes_per_byte: float = 0.0
    """Optimizer state from the first step on: 0 for plain SGD, 1 with momentum, 2 for Adam."""


class SizeShard:
    """See :class:`psdist.servers.shard.executor.Executor`; payloads and checksums are None."""

    def __init__(self, spec: ShardSpec, *, model: CostModel) -> None:
        self.busy_s = 0.0
        """The cost of all actions so far."""
        self._slot_bytes = spec.slot_bytes
        self._model = model
        self._replies = spec.wire.replies(spec.partition)
        self._chunks = {index: spec.partition.chunks[index] for index in spec.chunks}
        self._has_second_buffer: set[int] = set()
        self._has_state: set[int] = set()
        self._taken_s = 0.0
        self._owed: dict[int, ChunkCopy] = {}
        """By chunk: a checkpoint's copy that is still to be made."""
        self._is_holding = spec.is_holding
        self._compensates = spec.compensation > 0

    def make_slots(self, count: int) -> list[Frame]:
        return [Frame(capacity=self._slot_bytes) for _ in range(count)]

    def settle(self, slot: Frame) -> None:
        """Nothing reads it."""

    def load(self, action: Load) -> None:
        self._begin_change(action.chunk)
        self._charge(action.chunk, self._model.copy_s_per_byte)
        if action.target:
            self._has_second_buffer.add(action.chunk)

    def load_state(self, action: LoadState) -> None:
        self._begin_change(action.chunk)
        self.busy_s += len(action.values) * self._model.copy_s_per_byte
        self._has_state.add(action.chunk)

    def state(self, chunk: int, start: int) -> tuple[dict[int, PieceState], bytes]:  # noqa: ARG002 - seam
        return {}, b""

    def snapshot(
        self,
        chunk: int,
        into: SnapshotMemory,
        *,
        set_index: int,  # noqa: ARG002 - seam
        is_later: bool = False,
    ) -> list[Region]:
        s_per_byte = self._model.copy_s_per_byte * (1 + self._model.state_bytes_per_byte)
        copy = ChunkCopy(lambda: self._charge(chunk, s_per_byte))
        if is_later:
            self._owed[chunk] = copy
            into.owe(copy)
        else:
            copy.make()
        return []

    def reserve_snapshot(self, chunk: int, memory: SnapshotMemory, *, set_index: int) -> bool:  # noqa: ARG002 - seam
        return True

    def restore(self, chunk: int, regions: Sequence[Region]) -> None:  # noqa: ARG002 - seam
        self._begin_change(chunk)
        self._charge(chunk, self._model.copy_s_per_byte)

    def value_checksum(self, chunk: int) -> None:  # noqa: ARG002 - seam
        return None

    def start_sum(self, action: StartSum) -> None:
        self._charge(action.chunk, self._model.fold_s_per_byte)

    def fold(self, action: Fold) -> None:
        self._charge(action.chunk, self._model.fold_s_per_byte)

    def hold(self, action: Hold) -> tuple[float, ...]:
        self._charge(action.chunk, self._model.fold_s_per_byte)
        return (0.0,) * num_blocks(self._chunks[action.chunk].length)

    def step(self, action: Step) -> None:
        self._begin_change(action.chunk)
        self._charge(action.chunk, self._model.step_s_per_byte)
        self._has_state.add(action.chunk)
        is_switch = action.target != action.source
        if is_switch or _is_rounded(self._chunks[action.chunk]):
            self._charge(action.chunk, self._model.copy_s_per_byte)
        if is_switch:
            self._has_second_buffer.add(action.chunk)

    def begin_reply(self, reply: Reply) -> None:
        """Charge the copy of what the reader computes on, if delays are compensated."""
        if self._compensates and not reply.flags & Flag.FRESH:
            self._charge(reply.token.chunk, self._model.copy_s_per_byte)

    def payload(self, chunk: int, buffer: int) -> None:  # noqa: ARG002 - seam
        return None

    def encode(self, reply: Reply, *, into: memoryview | None) -> int:  # noqa: ARG002 - seam
        assert self._replies is not None
        return self._replies.at(reply.clock)[reply.token.chunk].usual_bytes

    def checksum(
        self,
        chunk: int,  # noqa: ARG002 - seam
        buffer: int,  # noqa: ARG002
        *,
        encoded: memoryview | None,  # noqa: ARG002
        clock: int = 0,  # noqa: ARG002
        reader: int | None = None,  # noqa: ARG002
    ) -> None:
        return None

    def take_cost_s(self) -> float:
        cost_s = self.busy_s - self._taken_s
        self._taken_s = self.busy_s
        return cost_s

    def statistics(self) -> ShardStatistics:
        """As :class:`psdist.servers.shard.tensors.TensorShard` counts; the optimizer's state by
        the model."""
        parameter_bytes = second_bytes = stepped_bytes = held_bytes = 0
        for index, chunk in self._chunks.items():
            parameter_bytes += chunk.num_bytes
            if _is_rounded(chunk):
                parameter_bytes += chunk.num_master_bytes
            second_bytes += chunk.num_bytes if index in self._has_second_buffer else 0
            stepped_bytes += chunk.num_master_bytes if index in self._has_state else 0
            held_bytes += chunk.num_master_bytes if self._is_holding else 0
        return ShardStatistics(
            num_chunks=len(self._chunks),
            parameter_bytes=parameter_bytes,
            second_buffer_bytes=second_bytes,
            optimizer_state_bytes=round(stepped_bytes * self._model.state_bytes_per_byte),
            held_bytes=held_bytes,
        )

    def _begin_change(self, chunk: int) -> None:
        if (owed := self._owed.pop(chunk, None)) is not None:
            owed.make()

    def _charge(self, chunk: int, s_per_byte: float) -> None:
        self.busy_s += self._chunks[chunk].num_master_bytes * s_per_byte


def _is_rounded(chunk: Chunk) -> bool:
    """Whether replies carry a copy in fewer bits than the server steps."""
    return chunk.num_bytes != chunk.num_master_bytes
