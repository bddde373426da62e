"""The loop of a parameter set that sends the server's replica a record of every change of its part.

    ShardSets(replication.outbox, ..., make_set=RecordingSetLoop)

A record is sent before its change is made, because a step overwrites its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from psdist.errors import InvariantError
from psdist.protocol.control import Evict, Resume
from psdist.protocol.events import Arrived, ControlArrived, Offered, PeerLost
from psdist.protocol.ids import worker_of
from psdist.protocol.partition import Chunk
from psdist.servers.protocol.actions import (
    Action,
    Append,
    Build,
    Inherit,
    Load,
    LoadState,
    MembershipEvent,
    SlotContent,
    Step,
)
from psdist.servers.protocol.replication.records import (
    LOSSES,
    RECORD_OF,
    EvictRecord,
    HeldRoundsRecord,
    LevelRecord,
    ModeRecord,
    Record,
    ResumedRecord,
    SnapshotEnd,
    StepRecord,
)
from psdist.servers.replication.chunk_bytes import pack_regions
from psdist.servers.replication.outbox import Outbox
from psdist.servers.set_loop import SetLoop
from psdist.servers.shard.snapshots import SnapshotMemory


class RecordingSetLoop(SetLoop):
    """Its transport is the server's :class:`Outbox`."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._missing = set[int]()
        """Chunks that a replica which is being filled does not have yet."""
        for change in RECORD_OF:
            self._execute[change] = partial(self._record_and_execute, self._execute[change])
        self._execute[Append] = self._append_record

    def decide(self, event: Offered | Arrived | ControlArrived | PeerLost) -> Iterable[Action]:
        before, resumed_up_to = self.core.generation, self.core.resumed_up_to
        actions = super().decide(event)
        if self.executor is None or not isinstance(event, ControlArrived):
            return actions
        if isinstance(event.message, Resume) and self.core.resumed_up_to != resumed_up_to:
            return [*actions, Append(ResumedRecord(seq=self.core.resumed_up_to))]
        if isinstance(event.message, Evict) and self.core.generation != before:
            actions = list(actions)
            return [Append(self._eviction(event.message, actions)), *actions]
        return actions

    def hold_rounds(self) -> Iterable[Action]:
        is_holding = self.core.held_above is not None
        actions = super().hold_rounds()
        held_above = self.core.held_above
        if self.executor is None or is_holding or held_above is None:
            return actions
        return [*actions, Append(HeldRoundsRecord(highest=held_above))]

    def _eviction(self, message: Evict, actions: Iterable[Action]) -> EvictRecord:
        """Return the record that goes before ``actions``, which depend on it."""
        events = [each for each in actions if isinstance(each, MembershipEvent)]
        losses = [each for each in events if each.kind in LOSSES]
        reform, _ = LOSSES
        inherits = [each for each in actions if isinstance(each, Inherit)]
        inherited = [each for each in inherits if each.chunk not in self._missing]
        return EvictRecord(
            generation=message.generation,
            dead=list(message.dead),
            chief=worker_of(self.core.chief),
            groups=[each.group for each in losses],
            goes_on=[each.kind == reform for each in losses],
            fewest=[each.clock for each in losses],
            workers=[each.workers for each in losses],
            chunks=[each.chunk for each in inherited],
            heirs=[each.group for each in inherited],
            clocks=[each.clock for each in inherited],
        )

    def _build(self, action: Build) -> None:
        self._append(ResumedRecord(seq=self.core.resumed_up_to))
        super()._build(action)

    # -- a replica that is filled during training ----------------------------------------------

    def begin_fill(self) -> None:
        """Send a new replica the state of the set without its chunks."""
        self._missing = set(self.core.chunks)
        self._append(self.core.snapshot_begin())
        for mode in self.core.changes.modes:
            self._append(ModeRecord(**mode._asdict()))
        for level in self.core.changes.levels:
            self._append(LevelRecord(**level._asdict()))
        if self.core.held_above is not None:
            self._append(HeldRoundsRecord(highest=self.core.held_above))

    def send_chunk(self, chunk: int) -> int:
        """Send the whole chunk, between events. Return the record's number."""
        assert self.executor is not None
        regions = self.executor.snapshot(chunk, SnapshotMemory(), set_index=self.set_index)
        states, carried = pack_regions(regions)
        record = self.core.chunk_record(chunk, states=states)
        self._missing.discard(chunk)
        return self._outbox.record(self.set_index, record, *carried, is_of_fill=True)

    def end_fill(self, keeper: int) -> None:
        """The replica has every chunk: its log begins here.

        The history is flushed, because only this server has the events before this one."""
        position = self._log.position
        record = SnapshotEnd(
            keeper=keeper,
            position=position,
            num_updates=self.core.num_contained,
            num_steps=self.core.num_steps,
        )
        self._log.filled(keeper, position)
        self._log.flush()
        self._append(record)

    # -- changes -------------------------------------------------------------------------------

    def _record_and_execute(self, execute: Callable[[Any], None], change: Action) -> None:
        record = RECORD_OF[type(change)](change)
        if record is not None:
            if isinstance(change, Step) and isinstance(record, StepRecord):
                record = self._with_checksum(record, change.source)
            self._append(record, *self._carried(change))
        execute(change)

    def _carried(self, change: Action) -> Iterable[memoryview]:
        """Yield the bytes that the record of the change carries."""
        if isinstance(change, Load):
            assert change.slot.payload is not None
            yield change.slot.payload[: self._chunk(change.chunk).num_bytes]
        elif isinstance(change, LoadState):
            yield memoryview(change.values)
        elif isinstance(change, Step):
            gradient = change.gradient
            if gradient is None or gradient.payload is None:
                raise InvariantError(
                    f"server {self._server}: a step of chunk {change.chunk} without the bytes of "
                    "its gradient, which the replica needs"
                )
            num_bytes = gradient.num_received
            if change.content is SlotContent.SUM:
                num_bytes = self._chunk(change.chunk).num_master_bytes
            yield gradient.payload[:num_bytes]

    def _with_checksum(self, record: StepRecord, buffer: int) -> StepRecord:
        """Return the record with the checksum that the replica compares in some rounds: it encodes
        the values that workers have by itself."""
        if not (self._wire.is_shared and self._wire.is_compared(record.chunk, record.clocks[0])):
            return record
        crc = self._built.checksum(record.chunk, buffer, encoded=None)
        return record if crc is None else replace(record, held=crc)

    def _append_record(self, action: Append) -> None:
        assert isinstance(action.record, Record)
        self._append(action.record)

    def _append(self, record: Record, *carried: memoryview) -> None:
        if self._missing:
            needed = record.without(self._missing)
            if needed is None:
                return
            record = needed
        self._outbox.record(self.set_index, record, *carried)

    @property
    def _outbox(self) -> Outbox:
        outbox = self._transport
        assert isinstance(outbox, Outbox)
        return outbox

    def _chunk(self, index: int) -> Chunk:
        assert self._partition is not None
        return self._partition.chunks[index]
