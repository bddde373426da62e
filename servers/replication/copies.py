"""The second copy of another server's part of a parameter set, as its buddy keeps it.

The same executor and the same log as the other server's, changed by the same steps in the same
order: values and optimizer state are the same bits, positions in the log the same numbers. So is
what workers hold, where replies are relative to that and alike for all: each step is encoded here,
too. What each group holds for itself (psdist.servers.shard.reader_copies) is not here: who goes on
sends it in full once. A copy that is filled later gets each chunk as it is then, and logs from
where it is whole.

    copy = ShardCopy(options, setup, partition, chunks, make_executor=TensorShard, ...)
    copy.carry_out(record, frame, num_carried)
    copy.picture                                    # what the server that goes on needs to know
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from psdist.errors import InvariantError, ProtocolError
from psdist.history.writers import EventCount, EventKind, ServerHistory
from psdist.protocol.checkpoints import FirstClocks, number_of
from psdist.protocol.control import Setup
from psdist.protocol.events import Frame
from psdist.protocol.partition import Partition
from psdist.servers.protocol.actions import Load, LoadState, SlotContent, Step
from psdist.servers.protocol.replication.picture import ShardPicture
from psdist.servers.protocol.replication.records import (
    BuriedRecord,
    ChunkRecord,
    FilledRecord,
    FillRecord,
    HeldRoundsRecord,
    LevelRecord,
    MemberRecord,
    ModeRecord,
    Record,
    ResumedRecord,
    SnapshotRecord,
    StateRecord,
    StepRecord,
    ValuesRecord,
)
from psdist.servers.replication.chunk_bytes import unpack_regions
from psdist.servers.set_loop import ServerOptions, has_workers_values, shard_spec, state_parts
from psdist.servers.shard.executor import MakeExecutor


class ShardCopy:
    def __init__(
        self,
        options: ServerOptions,
        setup: Setup,
        partition: Partition,
        chunks: Sequence[int],
        *,
        set_index: int,
        num_groups: int,
        num_substitutes: int = 0,
        make_executor: MakeExecutor,
        make_history: Callable[[int], ServerHistory | None],
        first: FirstClocks | None,
        is_filled: bool = False,
    ) -> None:
        """``options``: the other server's; ``make_history(position)``: its log from there on, None
        where nothing is recorded; ``first``: where the set goes on from a checkpoint;
        ``is_filled``: the set has begun, and the copy is filled."""
        self.setup = setup
        self.wire = options.wire.of_set()
        """Of the shard: who goes on with it is told by which codecs from here on."""
        spec = shard_spec(replace(options, wire=self.wire), setup, partition, chunks)
        self.executor = make_executor(spec)
        self._partition = partition
        self._pushes = spec.wire.pushes(partition)
        self._has_workers_values = has_workers_values(spec.wire, partition)
        self._make_history = make_history
        # Of a copy that is filled there is a log when it is whole.
        self._history = None if is_filled else make_history(0)
        self.log: ServerHistory | EventCount = self._history or EventCount()
        is_restored = bool(setup.restore) and not is_filled
        self.picture = ShardPicture(
            chunks=chunks,
            num_groups=num_groups,
            num_substitutes=num_substitutes,
            num_state_parts=len(state_parts(spec)),
            first=first.clocks if first is not None else (),
            is_restored=is_restored,
        )
        if is_restored:
            number, keeper = number_of(setup.restore), options.keeper
            assert keeper is not None
            assert number is not None
            for chunk in chunks:
                self.executor.restore(chunk, keeper.regions(set_index, partition, chunk))
                self.log.kept(EventKind.RESTORE, chunk, number, self._value_checksum(chunk))

    def carry_out(self, record: Record, frame: Frame, num_carried: int) -> None:
        """Raises :class:`ProtocolError` for a record that does not follow from those before."""
        self.picture.apply(record)
        if isinstance(record, StepRecord):
            self._step(record, frame, num_carried)
        elif isinstance(record, ValuesRecord):
            self._require(num_carried == self._partition.chunks[record.chunk].num_bytes, record)
            self.executor.load(Load(record.chunk, frame, 0, record.group, record.clock))
            if record.number:
                crc = None
                if self._history is not None and self._has_workers_values:
                    crc = self.executor.checksum(record.chunk, 0, encoded=None)
                self.log.load(record.chunk, record.group, record.clock, crc)
        elif isinstance(record, StateRecord):
            assert frame.payload is not None
            values = bytes(frame.payload[:num_carried])
            self.executor.load_state(LoadState(record.chunk, record.start, values))
        elif isinstance(record, MemberRecord):
            kind = EventKind[record.kind.upper()]
            self.log.member(kind, record.group, record.clock, float(record.workers))
        elif isinstance(record, ModeRecord):
            self.log.mode(record.round, record.mode, record.staleness)
        elif isinstance(record, LevelRecord):
            turns, change = self.wire.turns, (record.number, record.round, record.level)
            self._require(turns is not None and turns.begin(*change), record)
        elif isinstance(record, BuriedRecord):
            self._bury(record)
        elif isinstance(record, SnapshotRecord):
            for chunk in record.chunks:
                crc = self._value_checksum(chunk)
                self.log.kept(EventKind.SNAPSHOT, chunk, record.number, crc)
        elif isinstance(record, ChunkRecord):
            assert frame.payload is not None
            regions = unpack_regions(record, frame.payload[:num_carried], self._partition)
            self.executor.restore(record.chunk, regions)
        elif isinstance(record, FilledRecord):
            self._history = self._make_history(record.position)
            self.log = self._history or EventCount(record.position)
            self.log.filled(record.keeper, record.position)
        elif not isinstance(record, ResumedRecord | FillRecord | HeldRoundsRecord):
            raise InvariantError(f"a copy was given {type(record).__name__}")

    def close_history(self) -> None:
        if self._history is not None:
            self._history.close()

    def _step(self, record: StepRecord, frame: Frame, num_carried: int) -> None:
        contributions = record.contributions
        if not record.hyper:
            self._require(not num_carried, record)
            self.log.step(record.chunk, contributions)
            return
        smallest, largest = self._sizes(record)
        self._require(smallest <= num_carried <= largest, record)
        self._compare(record)
        frame.num_received = num_carried
        self.executor.step(
            Step(
                chunk=record.chunk,
                gradient=frame,
                content=SlotContent.SUM if record.is_sum else SlotContent.GRADIENT,
                gradient_scale=record.gradient_scale,
                lr_scale=record.lr_scale,
                hyper=record.hyper,
                absent=frozenset(record.absent),
                source=0,
                target=0,
                contributions=contributions,
            )
        )
        self.log.step(record.chunk, contributions, record.lr_scale)

    def _sizes(self, record: StepRecord) -> tuple[int, int]:
        """Of what the record of a step with a gradient carries: at least, and at most."""
        chunk = self._partition.chunks[record.chunk]
        if record.is_sum or self._pushes is None:
            num_bytes = chunk.num_master_bytes if record.is_sum else chunk.num_bytes
            return num_bytes, num_bytes
        return self._pushes.at(record.clocks[0])[record.chunk].sizes

    def _compare(self, record: StepRecord) -> None:
        """Whether what workers hold is the same here as where they were sent it."""
        if record.held < 0 or self.executor.checksum(record.chunk, 0, encoded=None) == record.held:
            return
        raise ProtocolError(
            f"chunk {record.chunk}: pull_codec encodes other bytes on this server, which keeps the "
            "second copy, than where the shard is served; do all hosts have the same version of "
            "it, and does it give the same bytes for the same values and seed?"
        )

    def _bury(self, record: BuriedRecord) -> None:
        inherited = list(zip(record.chunks, record.heirs, record.clocks, strict=True))
        events = zip(record.groups, record.goes_on, record.fewest, record.workers, strict=True)
        told = set[int]()
        for group, goes_on, fewest, workers in events:
            for chunk, heir, clock in inherited:
                if heir == group and group not in told:
                    self.log.inherit(chunk, group, clock)
            told.add(group)
            kind = EventKind.REFORM if goes_on else EventKind.DEATH
            self.log.member(kind, group, fewest, float(workers))

    @staticmethod
    def _require(fits: bool, record: Record) -> None:
        if not fits:
            raise ProtocolError(
                f"a {type(record).__name__} that does not fit this run, or came with bytes of "
                "another size"
            )

    def _value_checksum(self, chunk: int) -> int | None:
        return self.executor.value_checksum(chunk) if self._history is not None else None
