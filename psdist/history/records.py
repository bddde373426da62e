"""The layout of a recorded history, what a whole one consists of, and its reader.

Owns the record types (docs/history.md has them as tables), ``run.json``, and
:func:`read_history`. Every file is a header and whole fixed-size records, appended, so that a
crash leaves a readable prefix; only a closed file has its number of records in the header, and
only such a file counts as complete. Never judges what it reads: that is
:mod:`psdist.history.replay`.

    history = read_history(run_dir)              # raises HistoryError in one line on damage
    history.servers[0].events["clock"]
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from psdist.errors import HistoryError

FORMAT_VERSION = 1
HEADER = struct.Struct("<4sHHq")  # magic, format version, file kind, number of records
MAGIC = b"PSDH"
OPEN = -1
"""The number of records in the header of a file that was not closed."""
NO_CHUNK = 2**32 - 1
"""The chunk of an event that concerns no chunk (membership)."""

_RUN_JSON_LIMIT_BYTES = 64 * 2**20
_POSITION_LIMIT = 2**48  # positions and clocks beyond these are damage, not data
_CLOCK_LIMIT = 2**31 - 1

Records = npt.NDArray[np.void]
Ints = npt.NDArray[Any]


class EventKind(IntEnum):
    APPLY = 1
    JOIN = 2
    SUSPEND = 3
    RESUME = 4
    LEAVE = 5
    DEATH = 6


class EventFlag(IntFlag):
    NONE = 0
    LAST = 1
    """On APPLY: with this contribution the chunk's optimizer step was complete."""
    EMPTY = 2
    """On APPLY: the contribution held no gradient; only the clock advanced."""


# Writers pack single records with a struct, which is faster than numpy; a test pins that both
# have one layout.
EVENT = struct.Struct("<qdfIIBBxx")
EVENT_DTYPE = np.dtype(
    {
        "names": ["clock", "weight", "lr_scale", "chunk", "group", "kind", "flags"],
        "formats": ["<i8", "<f8", "<f4", "<u4", "<u4", "u1", "u1"],
        "offsets": [0, 8, 16, 20, 24, 28, 29],
        "itemsize": 32,
    }
)
CHECKSUM = struct.Struct("<QII")
CHECKSUM_DTYPE = np.dtype([("position", "<u8"), ("chunk", "<u4"), ("crc", "<u4")])
USE_DTYPE = np.dtype(
    {
        "names": ["iteration", "position", "chunk", "server", "crc", "has_crc"],
        "formats": ["<i8", "<u8", "<u4", "<u4", "<u4", "u1"],
        "offsets": [0, 8, 16, 20, 24, 28],
        "itemsize": 32,
    }
)


class FileKind(IntEnum):
    EVENTS = 1
    CHECKSUMS = 2
    USES = 3


DTYPES = {
    FileKind.EVENTS: EVENT_DTYPE,
    FileKind.CHECKSUMS: CHECKSUM_DTYPE,
    FileKind.USES: USE_DTYPE,
}


_Count = Annotated[int, Field(ge=0, lt=2**31)]


class RunRecord(BaseModel):
    """What was promised: the mode, who is in which group, and which server owns which chunk."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    psdist: Annotated[str, Field(max_length=100)]
    """The version that wrote the history."""
    mode: Literal["sync", "ssp", "async"]
    staleness: _Count | None = None
    """The bound of ssp; not looked at in other modes."""
    pipeline: _Count = 0
    """Replies that a worker may leave outstanding."""
    groups: Annotated[tuple[tuple[_Count, ...], ...], Field(min_length=1)]
    """For each group the indexes of its workers."""
    num_servers: Annotated[int, Field(ge=1, lt=2**31)]
    num_chunks: _Count
    owners: tuple[_Count, ...]
    """For each chunk its server."""
    checksum_every: _Count = 0
    """Every how many replies one was sampled with a checksum; 0 for none."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        workers = [worker for group in self.groups for worker in group]
        if sorted(workers) != list(range(len(workers))) or not all(self.groups):
            raise ValueError("groups must hold every worker 0, 1, 2 ... once, and none be empty")
        if len(self.owners) != self.num_chunks:
            raise ValueError(f"owners names {len(self.owners)} chunks of {self.num_chunks}")
        if max(self.owners, default=0) >= self.num_servers:
            raise ValueError(f"owners names server {max(self.owners)} of {self.num_servers}")
        if self.mode == "ssp" and self.staleness is None:
            raise ValueError("mode ssp needs a staleness")
        if self.mode == "sync" and self.pipeline:
            raise ValueError(f"mode sync allows no pipeline, seen {self.pipeline}")
        return self

    @property
    def bound(self) -> int | None:
        """Iterations that a use may be behind the slowest active group; None: no bound."""
        return {"sync": 0, "ssp": self.staleness, "async": None}[self.mode]

    @property
    def num_workers(self) -> int:
        return sum(len(group) for group in self.groups)


def write_run(path_dir: Path, run: RunRecord) -> None:
    """Write ``run.json``, complete or not at all. Call it when every rank's writer exists."""
    partial = path_dir / "run.json.partial"
    try:
        path_dir.mkdir(parents=True, exist_ok=True)
        partial.write_text(run.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path_dir / "run.json")
    except OSError as error:
        raise cannot("write", partial, error) from error


# ---------------------------------------------------------------------------------------------
# What is known of a run


@dataclass(frozen=True, kw_only=True)
class ServerLog:
    """One server's events (EVENT_DTYPE) and checksums (CHECKSUM_DTYPE), in order."""

    server: int
    events: Records
    checksums: Records
    is_complete: bool
    """Written to its end: what is not in here did not happen."""


@dataclass(frozen=True, kw_only=True)
class WorkerLog:
    """One worker's uses (USE_DTYPE), in order."""

    worker: int
    uses: Records
    is_complete: bool


@dataclass(frozen=True, kw_only=True)
class History:
    """A whole run; from files by :func:`read_history`, or from writers in memory by
    :func:`psdist.history.writers.collect`.

    Raises :class:`HistoryError` where a record names something that the run does not have.
    """

    run: RunRecord
    servers: tuple[ServerLog, ...]
    workers: tuple[WorkerLog, ...]
    notes: tuple[str, ...] = ()
    """What the reader met that is no damage: a record cut short by a crash."""

    def __post_init__(self) -> None:
        run = self.run
        if [log.server for log in self.servers] != list(range(run.num_servers)):
            raise HistoryError(f"a history of {run.num_servers} servers needs one log of each")
        if [log.worker for log in self.workers] != list(range(run.num_workers)):
            raise HistoryError(f"a history of {run.num_workers} workers needs one log of each")
        for server in self.servers:
            where, events = f"server-{server.server}.events", server.events
            is_apply = events["kind"] == EventKind.APPLY
            _refuse(where, "kind", events["kind"], (events["kind"] < 1) | (events["kind"] > 6))
            _refuse(where, "group", events["group"], events["group"] >= len(run.groups))
            _refuse(where, "clock", events["clock"], ~_is_a_clock(events["clock"]))
            _refuse(where, "chunk", events["chunk"], is_apply & (events["chunk"] >= run.num_chunks))
            where, sums = f"server-{server.server}.checksums", server.checksums
            _refuse(where, "chunk", sums["chunk"], sums["chunk"] >= run.num_chunks)
            _refuse(where, "position", sums["position"], sums["position"] >= _POSITION_LIMIT)
        for worker in self.workers:
            where, uses = f"worker-{worker.worker}.uses", worker.uses
            _refuse(where, "iteration", uses["iteration"], ~_is_a_clock(uses["iteration"]))
            _refuse(where, "chunk", uses["chunk"], uses["chunk"] >= run.num_chunks)
            _refuse(where, "server", uses["server"], uses["server"] >= run.num_servers)
            _refuse(where, "position", uses["position"], uses["position"] >= _POSITION_LIMIT)
            _refuse(where, "has_crc", uses["has_crc"], uses["has_crc"] > 1)


def _is_a_clock(values: Ints) -> npt.NDArray[np.bool_]:
    return (values >= 0) & (values < _CLOCK_LIMIT)


def _refuse(where: str, field: str, values: Ints, is_wrong: Ints) -> None:
    if is_wrong.any():
        record = int(np.argmax(is_wrong))
        raise HistoryError(
            f"history/{where} is damaged: record {record} has {field} {values[record]}, "
            "which this run does not have"
        )


# ---------------------------------------------------------------------------------------------
# Reader


def read_history(run_dir: Path) -> History:
    """The history under ``run_dir/history``; :class:`HistoryError` in one line on damage."""
    path_dir = run_dir / "history"
    if not path_dir.is_dir():
        raise HistoryError(
            f"{path_dir} does not exist: {run_dir} is not a run directory, or the run was made "
            "without --record"
        )
    run = _read_run(path_dir / "run.json")
    notes: list[str] = []
    servers, workers = [], []
    for server in range(run.num_servers):
        path = path_dir / f"server-{server}"
        events, is_closed = _read_records(path.with_suffix(".events"), FileKind.EVENTS, notes)
        sums, is_sums_closed = _read_records(
            path.with_suffix(".checksums"), FileKind.CHECKSUMS, notes
        )
        servers.append(
            ServerLog(
                server=server,
                events=events,
                checksums=sums,
                is_complete=is_closed and is_sums_closed,
            )
        )
    for worker in range(run.num_workers):
        uses, is_closed = _read_records(path_dir / f"worker-{worker}.uses", FileKind.USES, notes)
        workers.append(WorkerLog(worker=worker, uses=uses, is_complete=is_closed))
    return History(run=run, servers=tuple(servers), workers=tuple(workers), notes=tuple(notes))


def _read_run(path: Path) -> RunRecord:
    try:
        if path.stat().st_size > _RUN_JSON_LIMIT_BYTES:
            raise HistoryError(
                f"{path} is damaged: {path.stat().st_size} bytes, more than any run writes"
            )
        text = path.read_bytes()
    except OSError as error:
        raise cannot("read", path, error) from error
    try:
        return RunRecord.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise HistoryError(
            f"{path} is damaged or of another version of psdist: "
            f"{where + ': ' if where else ''}{first['msg']}"
        ) from error


def _read_records(path: Path, kind: FileKind, notes: list[str]) -> tuple[Records, bool]:
    dtype = DTYPES[kind]
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            raise HistoryError(f"{path} is damaged: {num_bytes} bytes, shorter than its header")
        magic, version, seen_kind, num_closed = HEADER.unpack(header)
        if magic != MAGIC or seen_kind != kind:
            raise HistoryError(f"{path} is damaged: its header is not that of such a file")
        if version != FORMAT_VERSION:
            raise HistoryError(
                f"{path} is of format version {version}, this psdist reads {FORMAT_VERSION}"
            )
        num_records, rest = divmod(num_bytes - HEADER.size, dtype.itemsize)
        if num_closed != OPEN and (rest or num_records != num_closed):
            raise HistoryError(
                f"{path} is damaged: it was closed with {num_closed} records and now holds "
                f"{num_records}{' and a part of one' if rest else ''}"
            )
        if rest:
            notes.append(f"{path.name} ends in the middle of record {num_records}")
        records = np.fromfile(path, dtype=dtype, count=num_records, offset=HEADER.size)
    except OSError as error:
        raise cannot("read", path, error) from error
    return records, num_closed != OPEN


def cannot(verb: str, path: Path | None, error: OSError) -> HistoryError:
    return HistoryError(f"cannot {verb} {path}: {error.strerror or error}")
