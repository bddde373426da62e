"""Records: what a server sends its replica, one for each change of its shard, in log order; pure.

A record travels as one message (``Kind.RECORD``): the bytes of the change (a gradient, values or
state), then the record as a msgpack map. ``clock`` in the header is the record's number,
``settings`` the length of the bytes before the map.

    record = RECORD_OF[type(action)](action)
    packed = record.encode()
    Record.decode(packed)                  # ProtocolError on anything malformed

ShardState.apply (shard_state) is the only place that tells the records apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from itertools import starmap
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias

from pydantic import FailFast

from psdist.mode_names import Mode
from psdist.protocol.messages import Message, Numbers
from psdist.servers.protocol.actions import (
    ChangeCodecs,
    ChangeMode,
    Contribution,
    EmptyStep,
    Load,
    LoadState,
    LogEntry,
    MembershipEvent,
    SlotContent,
    Step,
    TakeSnapshot,
)

_Weights: TypeAlias = Annotated[list[float], FailFast()]
_Flags: TypeAlias = Annotated[list[bool], FailFast()]
_Names: TypeAlias = Annotated[list[str], FailFast()]

LOSSES: Final = ("reform", "death")
"""Kinds of membership events that an EvictionRecord contains."""


class Record(Message, LogEntry, sent_as=None):
    """Base of the records."""

    WHAT: ClassVar[str] = "record"
    MOST_BYTES: ClassVar[int] = 16 * 2**20  # without the bytes that it carries

    @classmethod
    def of(cls, change: Any) -> Self | None:
        """Return the record of an action with fields of the same names; None if it has none."""
        return cls(**{each.name: getattr(change, each.name) for each in dataclasses.fields(cls)})

    def without(self, missing: Collection[int]) -> Self | None:  # noqa: ARG002 - no chunk in it
        """Return the record for a replica without the chunks ``missing``; None if it needs none."""
        return self


class ChunkChange(Record, sent_as=None):
    """Base of the records that change one chunk."""

    chunk: int

    def without(self, missing: Collection[int]) -> Self | None:
        return None if self.chunk in missing else self


class ValuesRecord(ChunkChange):
    """New values of a chunk. Carries them in the workers' dtype.

    ``number`` is 0 for the initial values. Otherwise the chief set them as its ``number``-th
    values, after ``clock`` iterations of its ``group``."""

    group: int
    clock: int
    number: int


class StateRecord(ChunkChange):
    """Carries the chief's optimizer state of a chunk for the elements from ``start`` on."""

    start: int


class StepRecord(ChunkChange):
    """One step on a chunk. Carries the gradient before it is multiplied by ``gradient_scale``.

    The gradient is encoded as a worker pushed it. With ``is_sum`` it is a sum in the server's
    dtype. The lists from ``groups`` to ``codecs`` have one item for each update of the step. An
    empty ``hyper`` marks updates without a gradient; their record carries no bytes. ``held`` is
    the CRC-32 of the values that workers have before the step, or -1 if the replica does not
    compare them in this round."""

    is_sum: bool
    gradient_scale: float
    lr_scale: float
    hyper: bytes
    absent: Numbers
    groups: Numbers
    clocks: Numbers
    weights: _Weights
    empties: _Flags
    codecs: Numbers
    held: int

    @classmethod
    def of(cls, change: Step) -> Self:
        return cls(
            chunk=change.chunk,
            is_sum=change.content is SlotContent.SUM,
            gradient_scale=change.gradient_scale,
            lr_scale=change.lr_scale,
            hyper=change.hyper,
            absent=sorted(change.absent),
            held=-1,
            **_columns(change.contributions),
        )

    @classmethod
    def of_empty(cls, change: EmptyStep) -> Self:
        return cls(
            chunk=change.chunk,
            is_sum=False,
            gradient_scale=1.0,
            lr_scale=1.0,
            hyper=b"",
            absent=[],
            held=-1,
            **_columns(change.contributions),
        )

    def fault(self) -> str:
        return _fault_of_lists(
            self.groups, self.clocks, self.weights, self.empties, self.codecs, least=1
        )

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        columns = self.groups, self.clocks, self.weights, self.empties, self.codecs
        return tuple(starmap(Contribution, zip(*columns, strict=True)))


def _fault_of_lists(*lists: Sequence[Any], least: int = 0) -> str:
    """``least``: least length."""
    lengths = {*map(len, lists)}
    is_wrong = len(lengths) > 1 or min(lengths) < least
    return f"lists of {sorted(lengths)} items, which are empty or differ in length" * is_wrong


def _columns(contributions: Sequence[Contribution]) -> dict[str, Any]:
    names = "groups", "clocks", "weights", "empties", "codecs"
    columns = map(list, zip(*contributions, strict=True))
    return dict(zip(names, columns, strict=True))


class MemberRecord(Record):
    """A membership event (join, suspend, resume, leave), with the same fields as in the history."""

    kind: str
    group: int
    clock: int
    workers: int

    @classmethod
    def of(cls, change: MembershipEvent) -> Self | None:
        """Return None for a failure: its EvictRecord was appended before it."""
        return None if change.kind in LOSSES else cls(**dataclasses.asdict(change))


class EvictRecord(Record, sent_as="BuriedRecord"):
    """The membership is at ``generation``; the workers ``dead`` have failed so far.

    ``chief`` is the worker with the chief's duties. The lists from ``groups`` to ``workers`` have
    one item for each event: a group of ``workers`` members leaves the job, or ``goes_on`` without
    the worker whose number is in ``workers``. The lists from ``chunks`` to ``clocks`` have one
    item for each update of these groups that arrived whole and that the chunk will contain. One
    record has all of them, because later records depend on all of them."""

    generation: int
    dead: Numbers
    chief: int
    groups: Numbers
    goes_on: _Flags
    fewest: Numbers
    workers: Numbers
    chunks: Numbers
    heirs: Numbers
    clocks: Numbers

    def fault(self) -> str:
        groups = _fault_of_lists(self.groups, self.goes_on, self.fewest, self.workers)
        return groups or _fault_of_lists(self.chunks, self.heirs, self.clocks)


class ResumedRecord(Record):
    """Collective ``seq`` has ended. The first record of a set has the last collective that ended
    before the chief described the set."""

    seq: int


class ModeRecord(Record):
    """From ``round`` on the mode is another one: the ``number``-th change of the run, or 0 if the
    schedule changes it. Ends a HeldRoundsRecord."""

    round: int
    mode: Mode
    staleness: int
    number: int


class LevelRecord(Record):
    """From ``round`` on messages have the codecs of ``level``: the ``number``-th change of the run.
    Ends a HeldRoundsRecord."""

    number: int
    round: int
    level: int


class HeldRoundsRecord(Record):
    """A change of the mode or the codecs is proposed. The server sends no parameters for rounds
    above ``highest`` until the change is committed."""

    highest: int


class SnapshotRecord(Record):
    """The chunks were copied for checkpoint ``number`` as they were at this record."""

    number: int
    chunks: Numbers

    @classmethod
    def of(cls, change: TakeSnapshot) -> Self | None:
        """Return None for a snapshot that the log already contains."""
        if change.is_again:
            return None
        return cls(number=change.number, chunks=list(change.chunks))

    def without(self, missing: Collection[int]) -> Self:
        chunks = [chunk for chunk in self.chunks if chunk not in missing]
        return dataclasses.replace(self, chunks=chunks)


class SnapshotBegin(Record, sent_as="FillRecord"):
    """The first record for a replica that is filled while training continues.

    ``standings``, ``stops`` and ``first`` describe each group (psdist.servers.protocol.membership).
    The other fields contain what EvictRecord, ResumedRecord and SnapshotRecord would have told.
    A chunk has no record before its :class:`ChunkRecord`."""

    standings: _Names
    stops: Numbers
    first: Numbers
    generation: int
    dead: Numbers
    chief: int
    resumed_up_to: int
    is_kept: bool


class ChunkRecord(Record):
    """The whole chunk at this record. Carries its values and its optimizer state.

    ``states`` describes the state (psdist.servers.replication.chunk_bytes).
    ``clocks`` is by group the number of its updates in the chunk; ``newest_load`` is the number of
    the values that the chief set last."""

    chunk: int
    clocks: Numbers
    version: int
    newest_load: int
    states: bytes


class SnapshotEnd(Record, sent_as="FilledRecord"):
    """The replica on server ``keeper`` is complete. Its log begins at ``position`` of the shard's
    log, with this event. ``num_updates`` and ``num_steps`` are the server's counts."""

    keeper: int
    position: int
    num_updates: int
    num_steps: int


RECORD_OF: Final[dict[type, Callable[[Any], Record | None]]] = {
    Load: ValuesRecord.of,
    LoadState: StateRecord.of,
    Step: StepRecord.of,
    EmptyStep: StepRecord.of_empty,
    MembershipEvent: MemberRecord.of,
    ChangeMode: ModeRecord.of,
    ChangeCodecs: LevelRecord.of,
    TakeSnapshot: SnapshotRecord.of,
}
"""Class of an action that changes the shard -> its record."""
