"""The loop of a parameter set that tells the server's buddy of every change of its part.

    ServerLoop(..., make_set=RecordingSetLoop, replication=...)

Bytes are copied before they are used: a step leaves nothing of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from psdist.errors import InvariantError
from psdist.protocol.control import Bury, Resume
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered, PeerLost
from psdist.protocol.ids import worker_of
from psdist.protocol.partition import Chunk
from psdist.servers.protocol.actions import (
    Action,
    BeginLevel,
    Build,
    ChangeCodecs,
    ChangeMode,
    Contribution,
    EmptyStep,
    Inherit,
    Load,
    LoadState,
    MembershipEvent,
    ModeEvent,
    SlotContent,
    Step,
    TakeSnapshot,
    TellBuried,
    TellHeldRounds,
    TellResumed,
)
from psdist.servers.protocol.replication.records import (
    BuriedRecord,
    FilledRecord,
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
from psdist.servers.replication.chunk_bytes import pack_regions
from psdist.servers.replication.outbox import Outbox
from psdist.servers.set_loop import SetLoop
from psdist.servers.shard.snapshots import SnapshotMemory

_LOSSES = ("reform", "death")


class RecordingSetLoop(SetLoop):
    """Its transport is the server's :class:`Outbox`."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._untold = set[int]()
        """Chunks of which a copy that is being filled knows nothing yet."""
        self._execute[TellResumed] = self._tell_resumed
        self._execute[TellBuried] = self._tell_buried
        self._execute[TellHeldRounds] = self._tell_held_rounds

    def decide(self, event: Offered | Arrived | ControlArrived | PeerLost) -> Iterable[Action]:
        before, resumed_up_to = self.core.generation, self.core.resumed_up_to
        actions = super().decide(event)
        if self.executor is None or not isinstance(event, ControlArrived):
            return actions
        if isinstance(event.message, Resume) and self.core.resumed_up_to != resumed_up_to:
            return [*actions, TellResumed(self.core.resumed_up_to)]
        if isinstance(event.message, Bury) and self.core.generation != before:
            actions = list(actions)
            return [self._who_is_buried(event.message, actions), *actions]
        return actions

    def hold_rounds(self) -> Iterable[Action]:
        is_holding = self.core.held_above is not None
        actions = super().hold_rounds()
        held_above = self.core.held_above
        if self.executor is None or is_holding or held_above is None:
            return actions
        return [*actions, TellHeldRounds(held_above)]

    def _who_is_buried(self, message: Bury, actions: Iterable[Action]) -> TellBuried:
        """In front of all of ``actions``, which rest on it."""
        events = [each for each in actions if isinstance(each, MembershipEvent)]
        return TellBuried(
            generation=message.generation,
            dead=tuple(message.dead),
            chief=worker_of(self.core.chief),
            inherited=tuple(each for each in actions if isinstance(each, Inherit)),
            losses=tuple(each for each in events if each.kind in _LOSSES),
        )

    def _build(self, action: Build) -> None:
        self._tell(ResumedRecord(seq=self.core.resumed_up_to))
        super()._build(action)

    def _tell_resumed(self, action: TellResumed) -> None:
        self._tell(ResumedRecord(seq=action.seq))

    def _tell_held_rounds(self, action: TellHeldRounds) -> None:
        self._tell(HeldRoundsRecord(highest=action.highest))

    def _tell_buried(self, action: TellBuried) -> None:
        losses = action.losses
        inherited = [each for each in action.inherited if each.chunk not in self._untold]
        record = BuriedRecord(
            generation=action.generation,
            dead=list(action.dead),
            chief=action.chief,
            groups=[each.group for each in losses],
            goes_on=[each.kind == "reform" for each in losses],
            fewest=[each.clock for each in losses],
            workers=[each.workers for each in losses],
            chunks=[each.chunk for each in inherited],
            heirs=[each.group for each in inherited],
            clocks=[each.clock for each in inherited],
        )
        self._tell(record)

    # -- a copy that is filled -----------------------------------------------------------------

    def begin_fill(self) -> None:
        """Tell the new buddy how the set stands; of its chunks nothing, until each is told."""
        self._untold = set(self.core.chunks)
        self._tell(self.core.fill_record())
        for each in self.core.modes:
            self._tell(_mode_record(each))
        for change in self.core.levels:
            self._tell(_level_record(change))
        if self.core.held_above is not None:
            self._tell(HeldRoundsRecord(highest=self.core.held_above))

    def may_tell(self, chunk: int) -> bool:
        """Whether the chunk can be told of now."""
        return self.core.may_copy(chunk)

    def tell_chunk(self, chunk: int) -> int:
        """Tell of the chunk as it is now, between events; the record's number."""
        assert self.executor is not None
        regions = self.executor.snapshot(chunk, SnapshotMemory(), set_index=self.set_index)
        packed = pack_regions(regions)
        record = self.core.chunk_record(chunk, states=packed.states, wholes=packed.wholes)
        self._untold.discard(chunk)
        return self._outbox.record(self.set_index, record, *packed.carried, is_of_fill=True)

    def end_fill(self, keeper: int) -> int:
        """All was told: the copy's log begins here. The number of the last record. What has gone
        into the log by now is in its file: the copy has it from here on only."""
        position = self._log.position
        record = FilledRecord(
            keeper=keeper,
            position=position,
            num_updates=self.core.num_contained,
            num_steps=self.core.num_steps,
        )
        self._log.filled(keeper, position)
        if self._history is not None:
            self._history.flush()
        return self._outbox.record(self.set_index, record)

    # -- changes -------------------------------------------------------------------------------

    def _load(self, action: Load) -> None:
        chunk = self._chunk(action.chunk)
        record = ValuesRecord(
            chunk=action.chunk, group=action.group, clock=action.clock, number=action.number
        )
        self._tell_of(action.chunk, record, _start(action.slot, chunk.num_bytes))
        super()._load(action)

    def _load_state(self, action: LoadState) -> None:
        record = StateRecord(chunk=action.chunk, start=action.start)
        self._tell_of(action.chunk, record, memoryview(action.values))
        super()._load_state(action)

    def _step(self, action: Step) -> None:
        if action.gradient is None:
            raise InvariantError(
                "a step on what is held for a joint norm, on a server with a buddy"
            )
        is_sum = action.content is SlotContent.SUM
        num_bytes = action.gradient.num_received
        if is_sum:
            num_bytes = self._chunk(action.chunk).num_master_bytes
        record = _step_record(
            action.chunk,
            action.contributions,
            is_sum=is_sum,
            gradient_scale=action.gradient_scale,
            lr_scale=action.lr_scale,
            hyper=action.hyper,
            absent=sorted(action.absent),
            held=self._what_workers_hold(action),
        )
        self._tell_of(action.chunk, record, _start(action.gradient, num_bytes))
        super()._step(action)

    def _what_workers_hold(self, action: Step) -> int:
        """Its checksum, where the buddy is to compare that: what it knows it has encoded itself."""
        clock = action.contributions[0].clock
        if not (self._is_shared and self._wire.is_compared(action.chunk, clock)):
            return -1
        crc = self._built.checksum(action.chunk, action.source, encoded=None)
        return -1 if crc is None else crc

    def _empty_step(self, action: EmptyStep) -> None:
        self._tell_of(action.chunk, _step_record(action.chunk, action.contributions))
        super()._empty_step(action)

    def _record_membership(self, action: MembershipEvent) -> None:
        if action.kind not in _LOSSES:  # of which the buddy has been told
            self._tell(
                MemberRecord(
                    kind=action.kind, group=action.group, clock=action.clock, workers=action.workers
                )
            )
        super()._record_membership(action)

    def _record_mode(self, action: ModeEvent) -> None:
        self._tell(_mode_record(action))
        super()._record_mode(action)

    def _begin_level(self, action: BeginLevel) -> None:
        self._tell(_level_record(action))
        super()._begin_level(action)

    def _take_snapshot(self, action: TakeSnapshot) -> None:
        if not action.is_again:
            known = [chunk for chunk in action.chunks if chunk not in self._untold]
            self._tell(SnapshotRecord(number=action.number, chunks=known))
        super()._take_snapshot(action)

    def _tell_of(self, chunk: int, record: Record, *carried: memoryview) -> None:
        """Of a change of the chunk; a copy that does not know it gets it with the change."""
        if chunk not in self._untold:
            self._tell(record, *carried)

    def _tell(self, record: Record, *carried: memoryview) -> None:
        self._outbox.record(self.set_index, record, *carried)

    @property
    def _outbox(self) -> Outbox:
        outbox = self._transport
        assert isinstance(outbox, Outbox)
        return outbox

    def _chunk(self, index: int) -> Chunk:
        assert self._partition is not None
        return self._partition.chunks[index]


def _start(slot: Frame, num_bytes: int) -> memoryview:
    assert slot.payload is not None
    return slot.payload[:num_bytes]


def _mode_record(change: ChangeMode | ModeEvent) -> ModeRecord:
    return ModeRecord(
        round=change.round,
        mode=change.mode,
        staleness=change.staleness,
        number=change.number,
    )


def _level_record(change: ChangeCodecs | BeginLevel) -> LevelRecord:
    return LevelRecord(number=change.number, round=change.round, level=change.level)


def _step_record(
    chunk: int,
    contributions: Iterable[Contribution],
    *,
    is_sum: bool = False,
    gradient_scale: float = 1.0,
    lr_scale: float = 1.0,
    hyper: bytes = b"",
    absent: Iterable[int] = (),
    held: int = -1,
) -> StepRecord:
    groups, clocks, weights, empties, codecs = map(list, zip(*contributions, strict=True))
    return StepRecord(
        chunk=chunk,
        is_sum=is_sum,
        gradient_scale=gradient_scale,
        lr_scale=lr_scale,
        hyper=hyper,
        absent=list(absent),
        groups=groups,
        clocks=clocks,
        weights=weights,
        empties=empties,
        codecs=codecs,
        held=held,
    )
