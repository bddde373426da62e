"""The replica of another server's part of a parameter set.

It has the same executor and the same log as the primary, and ShardState makes the same changes in
the same order of both. Values and optimizer state are therefore the same bits, and log positions
the same numbers. If replies are relative to values that all workers have, the replica encodes each
step, too. Values that differ by group (psdist.servers.shard.reader_copies) are not replicated; a
server that takes over sends these in full once. A replica that is made during training gets each
chunk as it is at that time; its log begins when it is complete.

    replica = ShardReplica(options, setup, partition, chunks, make_executor=TensorShard, ...)
    replica.apply(record, frame)
    replica.state                         # what a server that takes over needs to know
"""

from __future__ import annotations

from psdist.errors import ProtocolError
from psdist.history.writers import EventCount
from psdist.protocol.checkpoints import FirstClocks
from psdist.protocol.events import Frame
from psdist.servers.protocol.actions import Load, SlotContent, Step, TakeSnapshot
from psdist.servers.protocol.replication.records import Record
from psdist.servers.protocol.replication.shard_state import (
    BeginLog,
    CompareValues,
    RestoreChunk,
    ShardState,
)
from psdist.servers.replication.chunk_bytes import unpack_regions
from psdist.servers.set_loop import ShardPart
from psdist.servers.set_store import BuiltSet, ServerOptions, SetStore


class ShardReplica(ShardPart):
    def __init__(
        self,
        options: ServerOptions,
        store: SetStore,
        built: BuiltSet,
        *,
        num_groups: int,
        num_substitutes: int = 0,
        first: FirstClocks | None,
        is_filled: bool = False,
    ) -> None:
        """``options``: the primary's; ``first``: the clocks of the checkpoint that the set was
        restored from; ``is_filled``: True if the replica is made during training."""
        super().__init__(options.server, store, EventCount() if is_filled else store.make_log(0))
        self.setup, self._partition = built.setup, built.partition
        contents = store.choose(built.setup, store.wire, store.make_executor)
        spec = self._make(options, contents, built)
        self._pushes = self._wire.pushes(built.partition)
        is_restored = bool(built.setup.restore) and not is_filled
        self.state = ShardState(
            chunks=spec.chunks,
            num_groups=num_groups,
            num_substitutes=num_substitutes,
            num_state_parts=len(spec.state_parts),
            first=first.clocks if first is not None else (),
            is_restored=is_restored,
        )
        self._execute |= {
            CompareValues: self._compare,
            TakeSnapshot: self._log_snapshot,
            RestoreChunk: self._restore,
            BeginLog: self._begin_log,
        }
        if is_restored:
            self._restore_all(built)

    def as_store(self) -> SetStore:
        """Return the store of the set for the server that takes over."""
        return self._store._replace(
            make_executor=lambda _spec: self._built, make_log=lambda _position: self._log
        )

    def apply(self, record: Record, carried: Frame) -> None:
        """Make the change of the record. Raises :class:`ProtocolError` for a record that cannot
        follow those before it, or whose bytes do not have the size that it needs."""
        for action in self.state.apply(record, carried):
            self.execute(action)

    def _load(self, action: Load) -> None:
        num_bytes = self._partition.chunks[action.chunk].num_bytes
        self._require_bytes(action.chunk, action.slot, num_bytes, num_bytes)
        super()._load(action)

    def _step(self, action: Step) -> None:
        assert action.gradient is not None
        self._require_bytes(action.chunk, action.gradient, *self._sizes(action))
        super()._step(action)

    def _sizes(self, action: Step) -> tuple[int, int]:
        """Return the minimum and the maximum bytes of the gradient."""
        chunk = self._partition.chunks[action.chunk]
        is_sum = action.content is SlotContent.SUM
        if is_sum or self._pushes is None:
            num_bytes = chunk.num_master_bytes if is_sum else chunk.num_bytes
            return num_bytes, num_bytes
        return self._pushes.at(action.contributions[0].clock)[action.chunk].sizes

    def _require_bytes(self, chunk: int, carried: Frame, smallest: int, largest: int) -> None:
        if not smallest <= carried.num_received <= largest:
            raise ProtocolError(
                f"a record of chunk {chunk} of server {self._server} came with "
                f"{carried.num_received} bytes; expected {smallest} to {largest}"
            )

    def _compare(self, action: CompareValues) -> None:
        if self._built.checksum(action.chunk, 0, encoded=None) == action.crc:
            return
        raise ProtocolError(
            f"chunk {action.chunk}: codec.pull encodes other bytes on this server, which has the "
            f"replica, than on server {self._server}; install the same version of the codec on all "
            "hosts, and make it give the same bytes for the same values and seed"
        )

    def _restore(self, action: RestoreChunk) -> None:
        carried = action.carried
        assert carried.payload is not None
        data = carried.payload[: carried.num_received]
        regions = unpack_regions(action.record, data, self._partition)
        self._built.restore(action.record.chunk, regions)

    def _begin_log(self, action: BeginLog) -> None:
        self._log = self._store.make_log(action.position)
        self._log.filled(action.keeper, action.position)
