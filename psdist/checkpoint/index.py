"""index.json: what a checkpoint is of and which files it has; with a checksum of its own.

text = encode(Index(mode="sync", ...))
decode(text, where="step-00000100/index.json")    # CheckpointError for anything else
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

from pydantic import AfterValidator, Field

from psdist.checkpoint import plain as plain_values
from psdist.checkpoint import strict
from psdist.checkpoint.strict import parse_json
from psdist.controller.kept import TuningState
from psdist.errors import CheckpointError, PlacementError
from psdist.mode_names import Mode
from psdist.protocol.partition import ITEM_BYTES, Partition, Piece
from psdist.topology.text.models import (
    CLOSED,
    FIRST_FAULT,
    TABLE,
    Number,
    String,
    Text,
    Truth,
    Whole,
    check_format,
    fits,
    validated,
)

NAME: Final = "index.json"
FORMAT: Final = "psdist checkpoint"
VERSION: Final = 1
MAX_BYTES: Final = 1 << 28
_REMEDY: Final = "use another checkpoint"
_MOST_ELEMENTS: Final = 1 << 48

Count: TypeAlias = Annotated[Whole, Field(ge=0, lt=2**31)]
_Size: TypeAlias = Annotated[Whole, Field(ge=0, lt=2**60)]
_Name: TypeAlias = Annotated[String, Field(max_length=2000)]


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file of the checkpoint, as it was written."""

    __pydantic_config__ = CLOSED
    name: Annotated[String, Field(pattern=r"^(server|worker)-(0|[1-9][0-9]{0,6})\.safetensors$")]
    num_bytes: _Size
    crc32: Annotated[Whole, Field(ge=0, lt=2**32)]


def _fitting(piece: PieceRecord) -> PieceRecord:
    dense = 1
    for extent, stride in sorted(
        zip(piece.shape, piece.stride, strict=False), key=lambda pair: pair[::-1]
    ):
        if extent > 1 and stride == dense:
            dense *= extent
    if len(piece.stride) != len(piece.shape) or dense != piece.num_elements:
        raise ValueError("a parameter whose shape and stride do not fit")
    if dense > _MOST_ELEMENTS:
        raise ValueError("a parameter that no memory holds")
    return piece


@dataclass(frozen=True, kw_only=True)
class PieceRecord:
    """A parameter, as psdist.protocol.partition.Piece."""

    __pydantic_config__ = CLOSED
    name: _Name
    shape: Annotated[tuple[_Size, ...], Field(max_length=64)]
    stride: Annotated[tuple[_Size, ...], Field(max_length=64)]
    dtype: Annotated[String, fits(lambda name: name in ITEM_BYTES, f"of {', '.join(ITEM_BYTES)}")]
    optimizer_group: Count
    is_frozen: Truth

    @classmethod
    def of(cls, piece: Piece) -> PieceRecord:
        return cls(**{each.name: getattr(piece, each.name) for each in dataclasses.fields(cls)})

    @property
    def num_elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True, kw_only=True)
class TableRecord:
    """A table, as psdist.tables.specs.TableSpec."""

    __pydantic_config__ = CLOSED
    name: Text
    num_rows: _Size | None
    dim: _Size
    optimizer: Text
    arguments: Annotated[dict[String, Number], TABLE]
    seed: Whole
    scale: Number
    admit: Count
    evict: Text

    @classmethod
    def of(cls, table: object) -> TableRecord:
        return cls(**{each.name: getattr(table, each.name) for each in dataclasses.fields(cls)})


@dataclass(frozen=True, kw_only=True)
class SetRecord:
    """A parameter set, or the set of all tables: a piece is a part of the tables."""

    __pydantic_config__ = CLOSED
    optimizer: _Name
    pieces: Annotated[tuple[Annotated[PieceRecord, AfterValidator(_fitting)], ...], FIRST_FAULT]
    clocks: tuple[Count, ...]
    """By group: how many of its iterations the parameters contain."""
    hyper: Any
    """Hyperparameters of each optimizer group, packed by psdist.checkpoint.plain."""
    tables: tuple[TableRecord, ...] = ()

    @classmethod
    def of(
        cls,
        partition: Partition,
        *,
        optimizer: str,
        clocks: tuple[int, ...],
        hyper: list[Any],
        tables: Iterable[object] = (),
    ) -> SetRecord:
        """``hyper``: as psdist.protocol.optimizers.hyperparameters gives it; ``tables``: specs."""
        return cls(
            optimizer=optimizer,
            pieces=tuple(map(PieceRecord.of, partition.pieces)),
            clocks=clocks,
            hyper=plain_values.pack([dict(group) for group in hyper]),
            tables=tuple(map(TableRecord.of, tables)),
        )

    @property
    def hyperparameters(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = plain_values.unpack(self.hyper)
        return found

    def difference(self, pieces: Sequence[Piece], *, optimizer: str) -> str:
        """In what this is not of these parameters or this optimizer, for people; "" for nothing.
        How values lie in memory and which optimizer group a piece is in may be others."""
        if optimizer != self.optimizer:
            return f"optimizer {self.optimizer} there, {optimizer} here"
        for mine, its in zip(self.pieces, pieces, strict=False):
            if mine.name != its.name:
                return f"parameter {mine.name} there, {its.name} here"
            for field in ("shape", "dtype"):
                there, here = getattr(mine, field), getattr(its, field)
                if there != here:
                    return f"parameter {its.name}: {field} {there} there, {here} here"
        if len(self.pieces) != len(pieces):
            return f"{len(self.pieces)} parameters there, {len(pieces)} here"
        return ""


def difference_of_tables(there: Iterable[object], here: Iterable[object]) -> str:
    """Return in what the tables of a checkpoint are not these, for people; "" for nothing. Both are
    records or specs."""
    kept, own = list(map(TableRecord.of, there)), list(map(TableRecord.of, here))
    for mine, its in zip(kept, own, strict=False):
        if mine.name != its.name:
            return f"table {mine.name} there, {its.name} here"
        for field, value in dataclasses.asdict(mine).items():
            if value != getattr(its, field):
                return f"table {its.name}: {field} {value} there, {getattr(its, field)} here"
    if len(kept) != len(own):
        return f"{len(kept)} tables there, {len(own)} here"
    return ""


@dataclass(frozen=True, kw_only=True)
class Index:
    __pydantic_config__ = CLOSED
    psdist: Text
    """The version that wrote it."""
    time: Text
    """In UTC, as 2026-01-31T12:00:00Z."""
    attempt: Count
    mode: Mode
    seed: Annotated[Whole, Field(ge=0, lt=2**63)]
    world: Count
    """Ranks."""
    servers: Count
    groups: tuple[tuple[Count, ...], ...]
    """Workers of each group."""
    sets: Annotated[tuple[SetRecord, ...], Field(min_length=1)]
    files: tuple[FileRecord, ...]
    fidelity: TuningState | None = None
    """Tuning state, under its older name in files: what psdist chose during the run. None if no
    choice is to be restored."""

    @property
    def step(self) -> int:
        return min(self.sets[0].clocks)

    @property
    def num_workers(self) -> int:
        return sum(map(len, self.groups))

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def encode(index: Index) -> str:
    """Raises :class:`CheckpointError` for what :func:`decode` would refuse."""
    content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(index)}
    if index.fidelity is None:
        del content["fidelity"]
    for each in content["sets"]:
        if not each["tables"]:
            del each["tables"]
    # In one line: a model of many parameters would have more lines than a text may have.
    text = json.dumps({**content, "crc32": _checksum(content)}) + "\n"
    try:
        decode(strict.decode(text.encode(), where=NAME, max_bytes=MAX_BYTES), where=NAME)
    except CheckpointError as error:
        raise CheckpointError(f"this run cannot have checkpoints: {error}") from None
    return text


def decode(text: str, *, where: str) -> Index:
    content = parse_json(text, where=where)
    try:
        members = check_format(content, FORMAT, VERSION, where=where, remedy=_REMEDY)
        crc32 = members.pop("crc32", None)
        if crc32 != _checksum({"format": FORMAT, "version": VERSION, **members}):
            raise CheckpointError(f"{where}: damaged: its checksum is of other contents")
        index = validated(Index, members, where=where, remedy=_REMEDY)
    except PlacementError as error:
        raise CheckpointError(str(error)) from None
    _check(index, where)
    return index


def _checksum(content: dict[str, object]) -> int:
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError:  # 1e999 in the file
        return -1
    return zlib.crc32(text.encode())


def _check(index: Index, where: str) -> None:
    """Check the parts of the index against each other."""
    workers = sorted(worker for group in index.groups for worker in group)
    names = [file.name for file in index.files]
    faults = {
        "groups that are not of workers 0, 1, 2 ...": not workers
        or workers != list(range(len(workers))),
        "clocks that are not of its groups": any(
            len(each.clocks) != len(index.groups) for each in index.sets
        ),
        "a file twice": len(set(names)) != len(names),
    }
    for fault, is_there in faults.items():
        if is_there:
            raise CheckpointError(f"{where}: damaged: {fault}")
    for each in index.sets:
        try:
            groups = each.hyperparameters
        except CheckpointError as error:
            raise CheckpointError(f"{where}: damaged: hyperparameters: {error}") from None
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise CheckpointError(f"{where}: damaged: hyperparameters that are none")
