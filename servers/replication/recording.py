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
    Build,
    Contribution,
    EmptyStep,
    Inherit,
    Load,
    LoadState,
    MembershipEvent,
    SlotContent,
    Step,
    TakeSnapshot,
    TellBuried,
    TellResumed,
)
from psdist.servers.protocol.replication.records import (
    BuriedRecord,
    MemberRecord,
    Record,
    ResumedRecord,
    SnapshotRecord,
    StateRecord,
    StepRecord,
    ValuesRecord,
)
from psdist.servers.replication.outbox import Outbox
from psdist.servers.set_loop import SetLoop

_DEATH = "death"


class RecordingSetLoop(SetLoop):
    """Its transport is the server's :class:`Outbox`."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._execute[TellResumed] = self._tell_resumed
        self._execute[TellBuried] = self._tell_buried

    def decide(self, event: Offered | Arrived | ControlArrived | PeerLost) -> Iterable[Action]:
        before = self.core.generation
        actions = super().decide(event)
        if self.executor is None or not isinstance(event, ControlArrived):
            return actions
        if isinstance(event.message, Resume):
            return [*actions, TellResumed(self.core.resumed_up_to)]
        if isinstance(event.message, Bury) and self.core.generation != before:
            actions = list(actions)
            return [self._who_is_buried(event.message, actions), *actions]
        return actions

    def _who_is_buried(self, message: Bury, actions: Iterable[Action]) -> TellBuried:
        """In front of all of ``actions``, which rest on it."""
        events = [each for each in actions if isinstance(each, MembershipEvent)]
        return TellBuried(
            generation=message.generation,
            dead=tuple(message.dead),
            chief=worker_of(self.core.chief),
            inherited=tuple(each for each in actions if isinstance(each, Inherit)),
            deaths=tuple(each for each in events if each.kind == _DEATH),
        )

    def _build(self, action: Build) -> None:
        self._tell(ResumedRecord(seq=self.core.resumed_up_to))
        super()._build(action)

    def _tell_resumed(self, action: TellResumed) -> None:
        self._tell(ResumedRecord(seq=action.seq))

    def _tell_buried(self, action: TellBuried) -> None:
        deaths, inherited = action.deaths, action.inherited
        record = BuriedRecord(
            generation=action.generation,
            dead=list(action.dead),
            chief=action.chief,
            out=[each.group for each in deaths],
            fewest=[each.clock for each in deaths],
            workers=[each.workers for each in deaths],
            chunks=[each.chunk for each in inherited],
            heirs=[each.group for each in inherited],
            clocks=[each.clock for each in inherited],
        )
        self._tell(record)

    def _load(self, action: Load) -> None:
        chunk = self._chunk(action.chunk)
        record = ValuesRecord(
            chunk=action.chunk, group=action.group, clock=action.clock, number=action.number
        )
        self._tell(record, _start(action.slot, chunk.num_bytes))
        super()._load(action)

    def _load_state(self, action: LoadState) -> None:
        record = StateRecord(chunk=action.chunk, start=action.start)
        self._tell(record, memoryview(action.values))
        super()._load_state(action)

    def _step(self, action: Step) -> None:
        chunk = self._chunk(action.chunk)
        if action.gradient is None:
            raise InvariantError(
                "a step on what is held for a joint norm, on a server with a buddy"
            )
        is_sum = action.content is SlotContent.SUM
        num_bytes = chunk.num_master_bytes if is_sum else chunk.num_bytes
        record = _step_record(
            action.chunk,
            action.contributions,
            is_sum=is_sum,
            gradient_scale=action.gradient_scale,
            lr_scale=action.lr_scale,
            hyper=action.hyper,
            absent=sorted(action.absent),
        )
        self._tell(record, _start(action.gradient, num_bytes))
        super()._step(action)

    def _empty_step(self, action: EmptyStep) -> None:
        self._tell(_step_record(action.chunk, action.contributions))
        super()._empty_step(action)

    def _record_membership(self, action: MembershipEvent) -> None:
        if action.kind != _DEATH:  # of which the buddy has been told
            self._tell(
                MemberRecord(
                    kind=action.kind, group=action.group, clock=action.clock, workers=action.workers
                )
            )
        super()._record_membership(action)

    def _take_snapshot(self, action: TakeSnapshot) -> None:
        self._tell(SnapshotRecord(number=action.number, chunks=list(action.chunks)))
        super()._take_snapshot(action)

    def _tell(self, record: Record, carried: memoryview | None = None) -> None:
        outbox = self._transport
        assert isinstance(outbox, Outbox)
        outbox.record(self.set_index, record, carried)

    def _chunk(self, index: int) -> Chunk:
        assert self._partition is not None
        return self._partition.chunks[index]


def _start(slot: Frame, num_bytes: int) -> memoryview:
    assert slot.payload is not None
    return slot.payload[:num_bytes]


def _step_record(
    chunk: int,
    contributions: Iterable[Contribution],
    *,
    is_sum: bool = False,
    gradient_scale: float = 1.0,
    lr_scale: float = 1.0,
    hyper: bytes = b"",
    absent: Iterable[int] = (),
) -> StepRecord:
    groups, clocks, weights, empties = map(list, zip(*contributions, strict=True))
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
    )
