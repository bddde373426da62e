"""The seam for what a server's actions do to memory: real tensors, or sizes with a cost model.

:class:`psdist.servers.shard.tensors.TensorShard` computes. Tests simulate with another executor,
which counts bytes and seconds (tests/support/virtual/sizes.py). The loop drives either. An executor
decides nothing: the state machine chooses what to load, sum and step, and which buffer a reply
reads.

A *slot* is a receive frame that the executor made. The action that names the slot gives the meaning
of its bytes (:class:`~psdist.servers.protocol.actions.SlotContent`); nothing stores it.

    executor = TensorShard(ShardSpec(partition=partition, chunks=(0, 3), ...))
    slots = executor.make_slots(8)
    executor.step(Step(chunk=0, gradient=slots[0], content=SlotContent.GRADIENT, ...))
    executor.payload(0, buffer=0)       # the bytes of a reply
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from psdist.codecs.wire import Wire
from psdist.protocol.events import Frame
from psdist.protocol.optimizer_state import PieceState, StatePart, parts_of
from psdist.protocol.optimizers import OptimizerTraits
from psdist.protocol.partition import Partition
from psdist.servers.protocol.actions import Fold, Hold, Load, LoadState, Reply, StartSum, Step
from psdist.servers.shard.regions import Region
from psdist.servers.shard.snapshots import SnapshotMemory


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """The chunks of a server, and how they are stepped."""

    partition: Partition
    chunks: tuple[int, ...]
    """The indexes of this server's chunks."""
    optimizer: str
    traits: OptimizerTraits
    hyper: bytes
    """Packed hyperparameters, one set for each optimizer group of the partition."""
    wire: Wire
    extra_optimizers: tuple[str, ...] = ()
    compensation: float = 0.0
    """lambda of psdist.servers.shard.given; 0: gradients stay as they are."""
    freeze_step: int = 0
    """Steps after which Adam's second moment stays (psdist.servers.shard.frozen_adam); 0: none."""
    is_holding: bool = False
    """Whether chunks are held before they are stepped: memory for all is made with the shard."""
    states: Mapping[int, PieceState] = field(default_factory=dict)
    """By piece that does not begin with fresh optimizer state: that state."""

    def kept_per_group(self) -> Iterator[tuple[str, int, str]]:
        """Yield each setting that keeps memory for each group: the setting, the bytes of one group,
        and how the group uses the values."""
        chunks = [self.partition.chunks[chunk] for chunk in self.chunks]
        if self.wire.has_copies and chunks:
            yield "codec.pull_copies = on", sum(each.num_bytes for each in chunks), "holds"
        if self.compensation and chunks:
            setting = f"consistency.stale_updates = compensate:{self.compensation:g}"
            yield setting, sum(each.num_master_bytes for each in chunks), "was given"

    @property
    def state_parts(self) -> list[StatePart]:
        """The parts of the optimizer state that the chief sends for these chunks, ascending."""
        chunks = (self.partition.chunks[chunk] for chunk in self.chunks)
        return [part for chunk in chunks for part in parts_of(chunk, self.states)]

    @property
    def slot_bytes(self) -> int:
        """The capacity of a receive slot: any chunk's values, gradient as it is pushed, or sum of
        gradients fits."""
        pushes = self.wire.pushes(self.partition)
        return max(
            max(
                chunk.num_bytes,
                chunk.num_master_bytes,
                pushes.largest(chunk.index) if pushes is not None else 0,
            )
            for chunk in self.partition.chunks
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardStatistics:
    """Bytes held by a shard; buffers beyond the first exist only once they were needed."""

    num_chunks: int
    parameter_bytes: int
    second_buffer_bytes: int
    optimizer_state_bytes: int
    held_bytes: int
    """Where gradients wait for their joint norm: one shard in the server's dtype, or nothing."""
    copy_bytes: int = 0
    """Copies for readers: the bytes of all stages (psdist.servers.shard)."""


class Executor(Protocol):
    """Executes actions on the chunks of one server."""

    def make_slots(self, count: int) -> list[Frame]:
        """``count`` receive slots of ``ShardSpec.slot_bytes`` each."""
        ...

    def settle(self, slot: Frame) -> None:
        """The network may fill the slot from here on: what still reads its memory is awaited."""
        ...

    def load(self, action: Load) -> None:
        """Parameters, in the workers' dtype; the optimizer's state stays as it is."""
        ...

    def load_state(self, action: LoadState) -> None:
        """Optimizer state as ``ShardSpec.states`` describes it; before the first step."""
        ...

    def state(self, chunk: int, start: int) -> tuple[dict[int, PieceState], bytes]:
        """Return the description of a chunk's optimizer state by piece, and the elements of the
        part from ``start`` on (psdist.protocol.optimizer_state); nothing for sizes alone."""
        ...

    def snapshot(
        self, chunk: int, into: SnapshotMemory, *, set_index: int, is_later: bool = False
    ) -> list[Region]:
        """A copy of the values and the optimizer's state, by segment; nothing where there are only
        sizes. ``is_later``: tensors hold it when ``into`` owes no copy any more, and are copied
        before anything of the chunk changes."""
        ...

    def reserve_snapshot(self, chunk: int, memory: SnapshotMemory, *, set_index: int) -> bool:
        """Make the memory that :meth:`snapshot` will copy to; False while the optimizer may not
        have made its state yet, and nothing is done."""
        ...

    def restore(self, chunk: int, regions: Sequence[Region]) -> None:
        """Begin with these values and this state of every segment; before the first step."""
        ...

    def value_checksum(self, chunk: int) -> int | None:
        """crc32 of the values as the optimizer steps them; None where there are only sizes."""
        ...

    def start_sum(self, action: StartSum) -> None: ...

    def fold(self, action: Fold) -> None: ...

    def hold(self, action: Hold) -> tuple[float, ...]:
        """Move a weighted mean to the chunk's held memory. The sums of the squares of its blocks,
        in float64: the same bits wherever the chunk is held; of sizes alone 0."""
        ...

    def step(self, action: Step) -> None:
        """One optimizer step on one chunk. The slot's bytes may be overwritten."""
        ...

    def payload(self, chunk: int, buffer: int) -> memoryview | None:
        """Memory for the payload of replies that read a chunk's parameter buffer. Raw: the
        buffer's own, the same while the executor exists; else new memory, for
        :meth:`encode`. None where there are only sizes."""
        ...

    def begin_reply(self, reply: Reply) -> None:
        """Wait until the buffer's own memory is complete; the reply leaves next."""
        ...

    def encode(self, reply: Reply, *, into: memoryview | None) -> int:
        """Where replies are not raw: the payload of this one; its bytes."""
        ...

    def checksum(
        self,
        chunk: int,
        buffer: int,
        *,
        encoded: memoryview | None,
        clock: int = 0,
        reader: int | None = None,
    ) -> int | None:
        """crc32 of the parameters as a worker will have them: the buffer's own bytes, what it will
        decode from ``encoded``, a reply of round ``clock``, or what ``reader`` holds where each has
        its own. None where there are only sizes."""
        ...

    def statistics(self) -> ShardStatistics: ...

    def take_cost_s(self) -> float:
        """Seconds, on a virtual network's clock, that the actions since the last call take; 0
        where the work itself has taken its time."""
        ...


MakeExecutor = Callable[[ShardSpec], Executor]
