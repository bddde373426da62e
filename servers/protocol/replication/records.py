"""Records: what a server sends its replica, one for each change of its shard, in log order; pure.

A record travels as one message (``Kind.RECORD``): the bytes of the change (a gradient, values or
state), then the record as a msgpack map. ``clock`` in the header is the record's number,
``settings`` the length of the bytes before the map.

    record = RECORD_OF[type(action)](action)
    packed = pack_record(record)
    unpack_record(packed)                  # ProtocolError on anything malformed

ShardState.apply (shard_state) is the only place that tells the records apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from itertools import starmap
from typing import Annotated, Any, Final, Self, TypeAlias

import msgpack
from pydantic import ConfigDict, FailFast, ValidationError
from pydantic.dataclasses import dataclass

from psdist.errors import ProtocolError
from psdist.mode_names import Mode
from psdist.servers.protocol.actions import (
    BeginLevel,
    Contribution,
    EmptyStep,
    Load,
    LoadState,
    LogEntry,
    MembershipEvent,
    ModeEvent,
    SlotContent,
    Step,
    TakeSnapshot,
)

_Numbers: TypeAlias = Annotated[list[int], FailFast()]
_Weights: TypeAlias = Annotated[list[float], FailFast()]
_Flags: TypeAlias = Annotated[list[bool], FailFast()]
_Names: TypeAlias = Annotated[list[str], FailFast()]

MOST_RECORD_BYTES: Final = 16 * 2**20
"""Maximum bytes of a packed record, without the bytes that it carries."""

LOSSES: Final = ("reform", "death")
"""Kinds of membership events that an EvictionRecord contains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record(LogEntry):
    """Base of the records."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    @classmethod
    def of(cls, change: Any) -> Self | None:
        """Return the record of an action with fields of the same names; None if it has none."""
        return cls(**{each.name: getattr(change, each.name) for each in dataclasses.fields(cls)})

    def without(self, missing: Collection[int]) -> Self | None:  # noqa: ARG002 - no chunk in it
        """Return the record for a replica without the chunks ``missing``; None if it needs none."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkChange(Record):
    """Base of the records that change one chunk."""

    chunk: int

    def without(self, missing: Collection[int]) -> Self | None:
        return None if self.chunk in missing else self


@dataclass(frozen=True, kw_only=True, slots=True)
class ValuesRecord(ChunkChange):
    """New values of a chunk. Carries them in the workers' dtype.

    ``number`` is 0 for the initial values. Otherwise the chief set them as its ``number``-th
    values, after ``clock`` iterations of its ``group``."""

    group: int
    clock: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRecord(ChunkChange):
    """Carries the chief's optimizer state of a chunk for the elements from ``start`` on."""

    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
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
    absent: _Numbers
    groups: _Numbers
    clocks: _Numbers
    weights: _Weights
    empties: _Flags
    codecs: _Numbers
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

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        columns = self.groups, self.clocks, self.weights, self.empties, self.codecs
        return tuple(starmap(Contribution, zip(*columns, strict=True)))


def _columns(contributions: Sequence[Contribution]) -> dict[str, Any]:
    names = "groups", "clocks", "weights", "empties", "codecs"
    columns = map(list, zip(*contributions, strict=True))
    return dict(zip(names, columns, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictRecord(Record):
    """The membership is at ``generation``; the workers ``dead`` have failed so far.

    ``chief`` is the worker with the chief's duties. The lists from ``groups`` to ``workers`` have
    one item for each event: a group of so many ``workers`` leaves the job, or ``goes_on`` without
    the worker whose number is in ``workers``. The lists from ``chunks`` to ``clocks`` have one
    item for each update of these groups that arrived whole and that the chunk will contain. One
    record has all of them, because later records depend on all of them."""

    generation: int
    dead: _Numbers
    chief: int
    groups: _Numbers
    goes_on: _Flags
    fewest: _Numbers
    workers: _Numbers
    chunks: _Numbers
    heirs: _Numbers
    clocks: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumedRecord(Record):
    """Collective ``seq`` has ended. The first record of a set has the last collective that ended
    before the chief described the set."""

    seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeRecord(Record):
    """From ``round`` on the mode is another one: the ``number``-th change of the run, or 0 if the
    schedule changes it. Ends a HeldRoundsRecord."""

    round: int
    mode: Mode
    staleness: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelRecord(Record):
    """From ``round`` on messages have the codecs of ``level``: the ``number``-th change of the run.
    Ends a HeldRoundsRecord."""

    number: int
    round: int
    level: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldRoundsRecord(Record):
    """A change of the mode or the codecs is proposed. The server sends no parameters for rounds
    above ``highest`` until the change is committed."""

    highest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotRecord(Record):
    """The chunks were copied for checkpoint ``number`` as they were at this record."""

    number: int
    chunks: _Numbers

    @classmethod
    def of(cls, change: TakeSnapshot) -> Self | None:
        """Return None for a snapshot that the log already contains."""
        if change.is_again:
            return None
        return cls(number=change.number, chunks=list(change.chunks))

    def without(self, missing: Collection[int]) -> Self:
        chunks = [chunk for chunk in self.chunks if chunk not in missing]
        return dataclasses.replace(self, chunks=chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotBegin(Record):
    """The first record for a replica that is filled while training continues.

    ``standings``, ``stops`` and ``first`` describe each group (psdist.servers.protocol.membership).
    The other fields contain what EvictRecord, ResumedRecord and SnapshotRecord would have told.
    A chunk has no record before its :class:`ChunkRecord`."""

    standings: _Names
    stops: _Numbers
    first: _Numbers
    generation: int
    dead: _Numbers
    chief: int
    resumed_up_to: int
    is_kept: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkRecord(Record):
    """The whole chunk at this record. Carries its values and its optimizer state.

    ``states`` and ``wholes`` describe the state (psdist.servers.replication.chunk_bytes).
    ``clocks`` is by group the number of its updates in the chunk; ``newest_load`` is the number of
    the values that the chief set last."""

    chunk: int
    clocks: _Numbers
    version: int
    newest_load: int
    states: bytes
    wholes: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotEnd(Record):
    """The replica on server ``keeper`` is complete. Its log begins at ``position`` of the shard's
    log, with this event. ``num_updates`` and ``num_steps`` are the server's counts."""

    keeper: int
    position: int
    num_updates: int
    num_steps: int


_TYPES: Final[dict[str, type[Record]]] = {
    "ValuesRecord": ValuesRecord,
    "StateRecord": StateRecord,
    "StepRecord": StepRecord,
    "MemberRecord": MemberRecord,
    "BuriedRecord": EvictRecord,
    "ResumedRecord": ResumedRecord,
    "ModeRecord": ModeRecord,
    "LevelRecord": LevelRecord,
    "HeldRoundsRecord": HeldRoundsRecord,
    "SnapshotRecord": SnapshotRecord,
    "FillRecord": SnapshotBegin,
    "ChunkRecord": ChunkRecord,
    "FilledRecord": SnapshotEnd,
}
"""Name of a record on the wire -> its class."""
_NAMES: Final = {cls: name for name, cls in _TYPES.items()}

RECORD_OF: Final[dict[type, Callable[[Any], Record | None]]] = {
    Load: ValuesRecord.of,
    LoadState: StateRecord.of,
    Step: StepRecord.of,
    EmptyStep: StepRecord.of_empty,
    MembershipEvent: MemberRecord.of,
    ModeEvent: ModeRecord.of,
    BeginLevel: LevelRecord.of,
    TakeSnapshot: SnapshotRecord.of,
}
"""Class of an action that changes the shard -> its record."""


def pack_record(record: Record) -> bytes:
    body: dict[str, Any] = {"type": _NAMES[type(record)]}
    for field in dataclasses.fields(record):
        body[field.name] = getattr(record, field.name)
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return packed


def unpack_record(data: bytes | memoryview) -> Record:
    """Parse the result of :func:`pack_record`. Raises :class:`ProtocolError` on anything else."""
    if len(data) > MOST_RECORD_BYTES:
        raise ProtocolError(f"a record of {len(data)} bytes, limit {MOST_RECORD_BYTES}")
    try:
        body = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a record that is not msgpack: {error}") from error
    name = body.pop("type", None) if isinstance(body, dict) else None
    cls = _TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ProtocolError(f"a record of unknown type {name!r:.80}")
    try:
        record = cls(**body)
    except ValidationError as error:
        field = error.errors(include_url=False, include_input=False)[0]["loc"]
        raise ProtocolError(f"a {name} with an invalid field {field!r:.80}") from None
    except TypeError:
        raise ProtocolError(f"a {name} with a field without a name") from None
    if isinstance(record, StepRecord):
        lengths = {len(record.groups), len(record.clocks), len(record.weights), len(record.codecs)}
        if lengths != {len(record.empties)} or not record.empties:
            raise ProtocolError("a StepRecord whose lists of updates are empty or differ in length")
    if isinstance(record, EvictRecord):
        groups = {len(record.groups), len(record.goes_on)}
        groups |= {len(record.fewest), len(record.workers)}
        updates = {len(record.chunks), len(record.heirs), len(record.clocks)}
        if len(groups) > 1 or len(updates) > 1:
            raise ProtocolError("a BuriedRecord whose lists of groups or updates differ in length")
    return record
