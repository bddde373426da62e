"""What a server tells its buddy: every change of its shard, in the order of its log; pure.

A record travels as one message (``Kind.RECORD``): the bytes that the change was made of, a gradient
or values, and behind them the record as a msgpack map. Its number stands in the header's ``clock``,
the length of what stands before the map in ``settings``.

    packed = pack_record(ResumedRecord(seq=3))
    unpack_record(packed)                  # ProtocolError on anything malformed
"""

from __future__ import annotations

import dataclasses
from itertools import starmap
from typing import Annotated, Any, Final, TypeAlias

import msgpack
from pydantic import ConfigDict, FailFast, ValidationError
from pydantic.dataclasses import dataclass

from psdist.errors import ProtocolError
from psdist.mode_names import Mode
from psdist.servers.protocol.actions import Contribution

_Numbers: TypeAlias = Annotated[list[int], FailFast()]
_Weights: TypeAlias = Annotated[list[float], FailFast()]
_Flags: TypeAlias = Annotated[list[bool], FailFast()]
_Names: TypeAlias = Annotated[list[str], FailFast()]

MOST_RECORD_BYTES: Final = 16 * 2**20
"""Of a record beside the values or the gradient that it carries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Base of the records."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValuesRecord(Record):
    """The chunk has these values: the initial ones, or (``number``) such as the chief has set after
    ``clock`` iterations of its ``group``. Carries them, in the workers' dtype."""

    chunk: int
    group: int
    clock: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRecord(Record):
    """Carries the chief's optimizer state of a part of a chunk, the elements from ``start`` on."""

    chunk: int
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord(Record):
    """One step on a chunk, of these updates (one entry of each list for each of them). Carries the
    gradient that the optimizer was given, before ``gradient_scale``: as it was pushed, encoded
    where pushes are, or (``is_sum``) a sum in the server's dtype. No bytes and no ``hyper``:
    updates without a gradient. ``held``: the CRC-32 of what workers hold before the step, where
    replies are relative to that and this round has it compared; else -1."""

    chunk: int
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

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        columns = self.groups, self.clocks, self.weights, self.empties, self.codecs
        return tuple(starmap(Contribution, zip(*columns, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberRecord(Record):
    """A membership event, as in the history."""

    kind: str
    group: int
    clock: int
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BuriedRecord(Record):
    """From ``generation`` of the membership on the workers ``dead`` are, all that have died, and
    ``chief`` has the chief's duties. Of their ``groups`` (one entry of each list for each event)
    each counts here no more, of so many ``workers``, or ``goes_on`` without the worker that stands
    there; ``chunks``, ``heirs``, ``clocks`` (likewise): the chunk will contain an update of such a
    group that has arrived whole. In one record: what follows rests on all."""

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
    """Collective ``seq`` is over; the first one of a set: it was, when the set was described."""

    seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeRecord(Record):
    """From ``round`` on the mode is another one, by the ``number``-th change that the registrar has
    told of (0: by the run's schedule). What was held back is so no more."""

    round: int
    mode: Mode
    staleness: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelRecord(Record):
    """From ``round`` on messages have the codecs of this level, by the ``number``-th change. What
    was held back is so no more."""

    number: int
    round: int
    level: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldRoundsRecord(Record):
    """Another mode is proposed, or other codecs: parameters were sent for rounds up to ``highest``,
    and are for no later one until it is known what rules there."""

    highest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotRecord(Record):
    """The chunks as they are now were copied for the checkpoint ``number``."""

    number: int
    chunks: _Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class FillRecord(Record):
    """A copy of the set is made while there are changes: this is the first record of it. How the
    set stands beside its chunks: ``standings``, ``stops`` and ``first`` by group
    (psdist.servers.protocol.membership), and what BuriedRecord, ResumedRecord and SnapshotRecord
    have told. Of a chunk nothing follows before its :class:`ChunkRecord`."""

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
    """The chunk as it is now. Carries its values and its optimizer's state, which ``states`` and
    ``wholes`` describe (psdist.servers.replication.chunk_bytes); ``clocks``: by group how many of
    its updates it contains; ``newest_load``: the number of the values that were set last."""

    chunk: int
    clocks: _Numbers
    version: int
    newest_load: int
    states: bytes
    wholes: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FilledRecord(Record):
    """The copy is the set. It is kept by server ``keeper``, and its log begins at ``position`` of
    the shard's, with this event; ``num_updates``, ``num_steps``: as the server has counted."""

    keeper: int
    position: int
    num_updates: int
    num_steps: int


_TYPES: Final[dict[str, type[Record]]] = {
    each.__name__: each
    for each in (
        *(ValuesRecord, StateRecord, StepRecord, MemberRecord, ResumedRecord, SnapshotRecord),
        *(BuriedRecord, FillRecord, ChunkRecord, FilledRecord),
        *(ModeRecord, LevelRecord, HeldRoundsRecord),
    )
}


def pack_record(record: Record) -> bytes:
    body: dict[str, Any] = {"type": type(record).__name__}
    for field in dataclasses.fields(record):
        body[field.name] = getattr(record, field.name)
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return packed


def unpack_record(data: bytes | memoryview) -> Record:
    """Raises :class:`ProtocolError` on anything that :func:`pack_record` does not make."""
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
        raise ProtocolError(f"a {name} whose field {field!r:.80} is not what it must be") from None
    except TypeError:
        raise ProtocolError(f"a {name} with a field that has no name") from None
    if isinstance(record, StepRecord):
        lengths = {len(record.groups), len(record.clocks), len(record.weights), len(record.codecs)}
        if lengths != {len(record.empties)} or not record.empties:
            raise ProtocolError("a StepRecord whose updates are not told in full")
    if isinstance(record, BuriedRecord):
        groups = {len(record.groups), len(record.goes_on)}
        groups |= {len(record.fewest), len(record.workers)}
        updates = {len(record.chunks), len(record.heirs), len(record.clocks)}
        if len(groups) > 1 or len(updates) > 1:
            raise ProtocolError("a BuriedRecord whose groups or updates are not told in full")
    return record
