"""The recorded history of a run, for ``psdist check`` (docs/reference/history.md).

``writers`` records it, ``files`` and ``lines`` read it, ``summary`` reads summary.json,
and ``rules`` judges. The layout is here and in ``run_record``. Every file is a header and
whole fixed-size records, appended, so that a crash leaves a readable prefix; only a closed file has
its number of records in the header, and only such a file counts as complete. Refuses records that
name something that the run does not have. Never judges (:mod:`psdist.history.rules`).

    history = read_history(run_dir)              # psdist.history.files
    history.servers[0].events["clock"]
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

from psdist.errors import HistoryError
from psdist.history.run_record import RunRecord

HEADER = struct.Struct("<4sHHIIq")
"""Magic, format version, file kind, number of the server or worker, zero, number of records."""
MAGIC = b"PSDH"
OPEN = -1
"""The number of records in the header of a file that was not closed."""
NO_CHUNK = 2**32 - 1
"""The chunk of an event without chunk (membership), and of a push record for all chunks."""

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
    LOAD = 7
    """The chief has set the values of a chunk; ``weight`` is the CRC-32 of the bytes, a whole
    number."""
    SNAPSHOT = 8
    """The chunk was copied for the checkpoint that is named after ``clock``; ``weight`` as above,
    of what the optimizer steps."""
    RESTORE = 9
    """The chunk begins with what that checkpoint has of it."""
    INHERIT = 10
    """The group's update ``clock`` has arrived whole, and the chunk will contain it although the
    group's DEATH follows."""
    TAKEOVER = 11
    """The server has failed; its replica, on server ``clock``, continues."""
    MODE = 12
    """From round ``clock`` on the mode is another one: ``weight`` is the bound of ssp, or SYNC, or
    ASYNC."""
    MISSED = 13
    """The group has missed round ``clock``: the chunk's next step is made without it."""
    FILLED = 14
    """Server ``clock`` keeps another copy of the shard from here on, the event at position
    ``weight``: with it the log of that copy begins."""
    REFORM = 18
    """Worker ``weight`` of the group has failed, and the group continues; ``clock``: the fewest
    updates of the group that a chunk of the server contains."""


SYNC, ASYNC = -1, -2
"""Modes without a bound, in a MODE event."""


def code_of(mode: str, staleness: int | None) -> int:
    """Return the weight of a MODE event."""
    return {"sync": SYNC, "async": ASYNC}.get(mode, staleness or 0)


RETIRED_KINDS = (15, 16, 17)
"""Kinds of events that earlier versions wrote when they rebuilt a shard from what workers held."""

OF_CHUNK = (
    *(EventKind.APPLY, EventKind.LOAD, EventKind.SNAPSHOT, EventKind.RESTORE),
    *(EventKind.INHERIT, EventKind.MISSED),
)
"""Events about a chunk."""
OF_MEMBERSHIP = (
    *(EventKind.JOIN, EventKind.SUSPEND, EventKind.RESUME, EventKind.LEAVE, EventKind.DEATH),
    EventKind.REFORM,
)
"""Events about a group."""
OF_BYTES = (EventKind.LOAD, EventKind.SNAPSHOT, EventKind.RESTORE)
"""Those that may have a checksum."""


class EventFlag(IntFlag):
    NONE = 0
    LAST = 1
    """On APPLY: with this contribution the chunk's optimizer step was complete."""
    EMPTY = 2
    """On APPLY: the contribution held no gradient; only the clock advanced."""
    CRC = 4
    """On LOAD, SNAPSHOT, RESTORE: there is a checksum, on LOAD that of the bytes as workers get
    them; else it is 0."""


# Writers pack single records with a struct, which is faster than numpy; a test pins that both
# have one layout.
EVENT = struct.Struct("<qdfIIBBBx")
EVENT_DTYPE = np.dtype(
    {
        "names": ["clock", "weight", "lr_scale", "chunk", "group", "kind", "flags", "codec"],
        "formats": ["<i8", "<f8", "<f4", "<u4", "<u4", "u1", "u1", "u1"],
        "offsets": [0, 8, 16, 20, 24, 28, 29, 30],
        "itemsize": 32,
    }
)
CHECKSUM = struct.Struct("<QiIII")
CHECKSUM_DTYPE = np.dtype(
    [("position", "<u8"), ("clock", "<i4"), ("worker", "<u4"), ("chunk", "<u4"), ("crc", "<u4")]
)
USE_DTYPE = np.dtype(
    {
        "names": ["iteration", "reply", "position", "chunk", "server", "crc", "has_crc"],
        "formats": ["<i4", "<i4", "<u8", "<u4", "<u4", "<u4", "u1"],
        "offsets": [0, 4, 8, 16, 20, 24, 28],
        "itemsize": 32,
    }
)
IS_CORRECTED = False
"""Value in each push. Before 2026-11-27 a later push could correct an iteration."""
PUSH = struct.Struct("<iIddBB6x")
PUSH_DTYPE = np.dtype(
    {
        "names": ["iteration", "chunk", "own", "weight", "is_empty", "is_corrected"],
        "formats": ["<i4", "<u4", "<f8", "<f8", "u1", "u1"],
        "offsets": [0, 4, 8, 16, 24, 25],
        "itemsize": 32,
    }
)


class FileKind(IntEnum):
    EVENTS = 1
    CHECKSUMS = 2
    USES = 3
    PUSHES = 4


DTYPES = {
    FileKind.EVENTS: EVENT_DTYPE,
    FileKind.CHECKSUMS: CHECKSUM_DTYPE,
    FileKind.USES: USE_DTYPE,
    FileKind.PUSHES: PUSH_DTYPE,
}


@dataclass(frozen=True, kw_only=True)
class ServerLog:
    """One server's events (EVENT_DTYPE) and checksums (CHECKSUM_DTYPE), in order."""

    server: int
    events: Records
    checksums: Records
    is_complete: bool
    """True if it was written to its end: events that are missing did not happen."""
    has_died: bool = False
    """True if the server failed after the last event, and no replica had to continue: the events
    are the replica's, and checksums that the server had not written are missing."""


@dataclass(frozen=True, kw_only=True)
class WorkerLog:
    """One worker's uses (USE_DTYPE) and pushes (PUSH_DTYPE), in order."""

    worker: int
    uses: Records
    pushes: Records
    is_complete: bool


@dataclass(frozen=True, kw_only=True)
class History:
    """A whole run, as :func:`psdist.history.files.read_history` returns it.

    Raises :class:`HistoryError` where a record names something that the run does not have, or
    that the format does not know.
    """

    run: RunRecord
    servers: tuple[ServerLog, ...]
    workers: tuple[WorkerLog, ...]
    notes: tuple[str, ...] = ()
    """Findings of the reader that are no damage: a record cut short by a crash."""

    @property
    def first(self) -> Ints:
        """[groups]: their first clocks; a substitute's is that of the first server's JOIN."""
        first = self.run.first.copy()
        for log in reversed(self.servers):
            where = joined_at(self.run, log.events)
            first[list(where)] = list(where.values())
        return first

    def __post_init__(self) -> None:
        run = self.run
        if [log.server for log in self.servers] != list(range(run.num_servers)):
            raise HistoryError(f"a history of {run.num_servers} servers needs one log of each")
        if [log.worker for log in self.workers] != list(range(run.num_workers)):
            raise HistoryError(f"a history of {run.num_workers} workers needs one log of each")
        for server in self.servers:
            _refuse_events(f"server-{server.server}.events", server.events, run)
            where, sums = f"server-{server.server}.checksums", server.checksums
            _refuse(where, "chunk", sums["chunk"], sums["chunk"] >= run.num_chunks)
            _refuse(where, "worker", sums["worker"], sums["worker"] >= run.num_workers)
            _refuse(where, "clock", sums["clock"], ~_is_a_clock(sums["clock"]))
            _refuse(where, "position", sums["position"], sums["position"] >= _POSITION_LIMIT)
        for worker in self.workers:
            _refuse_uses(f"worker-{worker.worker}.uses", worker.uses, run)
            where, pushes = f"worker-{worker.worker}.pushes", worker.pushes
            chunk = pushes["chunk"]
            _refuse(where, "iteration", pushes["iteration"], ~_is_a_clock(pushes["iteration"]))
            _refuse(where, "chunk", chunk, (chunk >= run.num_chunks) & (chunk != NO_CHUNK))
            _refuse(where, "is_empty", pushes["is_empty"], pushes["is_empty"] > 1)
            if pushes["is_corrected"].any():
                raise other_version(
                    f"history/{where} is",
                    "a later push corrected an iteration (psdist before 2026-11-27, overlap)",
                )


def joined_at(run: RunRecord, events: Records) -> dict[int, int]:
    """Return the clocks at which substitutes have joined, by group."""
    late = events[(events["kind"] == EventKind.JOIN) & (events["group"] >= run.first_substitute)]
    return dict(zip(late["group"].tolist()[::-1], late["clock"].tolist()[::-1], strict=True))


REBUILT = "a shard was rebuilt from what workers held (on_server_death = rebuild)"


def other_version(what: str, why: str) -> HistoryError:
    """Return the error of a history of an earlier version; ``what``: the file, and a verb."""
    return HistoryError(
        f"{what} of another version of psdist: {why}, which this version does not check; check the "
        "run with the version that wrote it"
    )


def _refuse_events(where: str, events: Records, run: RunRecord) -> None:
    kind, chunk, flags = events["kind"], events["chunk"], events["flags"]
    is_apply, has_bytes = kind == EventKind.APPLY, np.isin(kind, OF_BYTES)
    is_of_chunk = np.isin(kind, OF_CHUNK)
    if np.isin(kind, RETIRED_KINDS).any():
        raise other_version(f"history/{where} is", REBUILT)
    _refuse(where, "kind", kind, ~np.isin(kind, tuple(EventKind)))
    _refuse(where, "group", events["group"], events["group"] >= len(run.groups))
    _refuse(where, "clock", events["clock"], ~_is_a_clock(events["clock"]))
    _refuse(where, "chunk", chunk, is_of_chunk & (chunk >= run.num_chunks))
    _refuse(where, "chunk", chunk, ~is_of_chunk & (chunk != NO_CHUNK))
    known = np.where(is_apply, EventFlag.LAST | EventFlag.EMPTY, EventFlag.NONE)
    known = np.where(has_bytes, EventFlag.CRC, known)
    _refuse(where, "flags", flags, flags & ~known != 0)
    crc, has_crc = events["weight"], flags & EventFlag.CRC != 0
    is_a_crc = (crc >= 0) & (crc < 2**32) & (crc == np.floor(crc)) & (has_crc | (crc == 0))
    _refuse(where, "weight", crc, has_bytes & ~is_a_crc)
    is_a_mode = (crc >= ASYNC) & (crc < _CLOCK_LIMIT) & (crc == np.floor(crc))
    _refuse(where, "weight", crc, (kind == EventKind.MODE) & ~is_a_mode)
    at = np.arange(len(events))
    _refuse(where, "weight", crc, (kind == EventKind.FILLED) & (crc != at))


def _refuse_uses(where: str, uses: Records, run: RunRecord) -> None:
    _refuse(where, "iteration", uses["iteration"], ~_is_a_clock(uses["iteration"]))
    _refuse(where, "reply", uses["reply"], ~_is_a_clock(uses["reply"]))
    _refuse(where, "chunk", uses["chunk"], uses["chunk"] >= run.num_chunks)
    _refuse(where, "server", uses["server"], uses["server"] >= run.num_servers)
    _refuse(where, "position", uses["position"], uses["position"] >= _POSITION_LIMIT)
    _refuse(where, "has_crc", uses["has_crc"], uses["has_crc"] > 1)
    has_number = (uses["has_crc"] == 0) & (uses["crc"] != 0)
    _refuse(where, "crc", uses["crc"], has_number & (not run.is_of_rows))


def _is_a_clock(values: Ints) -> npt.NDArray[np.bool_]:
    return (values >= 0) & (values < _CLOCK_LIMIT)


def _refuse(where: str, field: str, values: Ints, is_wrong: Ints) -> None:
    if is_wrong.any():
        record = int(np.argmax(is_wrong))
        raise HistoryError(
            f"history/{where} is damaged: record {record} has {field} {values[record]}, "
            "which this run does not have"
        )
