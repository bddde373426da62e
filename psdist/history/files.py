"""Reads a recorded history from its files, and joins the logs of a shard that moved.

Damage is one :class:`HistoryError` in one line. Never judges what the records say.

    histories = read_histories(run_dir)          # by parameter set
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from psdist.errors import HistoryError
from psdist.history import (
    DTYPES,
    HEADER,
    MAGIC,
    OPEN,
    REBUILT,
    EventKind,
    FileKind,
    History,
    Records,
    ServerLog,
    WorkerLog,
    other_version,
)
from psdist.history.run_record import FORMAT_VERSION, cannot, read_run

_VERSION_BYTES = slice(4, 6)  # the same in every version


def history_folder(run_dir: Path, set_index: int) -> Path:
    """Return the folder of the history of a parameter set."""
    path_dir = run_dir / "history"
    return path_dir / f"set-{set_index}" if set_index else path_dir


def copy_name(server: int, number: int = 1) -> str:
    """Return the name, without suffix, of the files of replica ``number`` of a server's shard."""
    return f"copy-{server}" if number == 1 else f"copy-{server}-{number}"


def _numbers(path_dir: Path, first: str) -> list[int]:
    """Return the numbers of the files named like ``first``, which is number 1; ascending."""
    later = (each.stem.rpartition("-")[2] for each in path_dir.glob(f"{first}-*.events"))
    numbers = sorted(int(each) for each in later if each.isdecimal() and int(each) > 1)
    return [*([1] if (path_dir / f"{first}.events").exists() else []), *numbers]


def read_histories(run_dir: Path) -> tuple[History, ...]:
    """Return the histories of all parameter sets of a run. Each is judged alone, because their
    clocks and log positions are independent."""
    first = read_history(run_dir)
    found = sorted(path.name for path in (run_dir / "history").glob("set-*"))
    names = [f"set-{index}" for index in range(1, len(found) + 1)]
    if found != sorted(names):
        raise HistoryError(
            f"{run_dir / 'history'} contains {', '.join(found)}; parameter sets are numbered "
            "without gaps, the first one's records are next to these folders"
        )
    others = (read_history(run_dir, index) for index in range(1, len(found) + 1))
    return first, *others


def read_history(run_dir: Path, set_index: int = 0) -> History:
    """Return the history of one set. Raises :class:`HistoryError`, in one line, on damage."""
    path_dir = history_folder(run_dir, set_index)
    if not path_dir.is_dir():
        raise HistoryError(
            f"{path_dir} does not exist: {run_dir} is not a run directory, or the run was made "
            "without --record"
        )
    run = read_run(path_dir / "run.json")
    if run.set_index != set_index:
        raise HistoryError(
            f"{path_dir / 'run.json'} is damaged: it is of parameter set {run.set_index}"
        )
    notes: list[str] = []
    servers, workers = [], []

    def read_log(name: str, server: int) -> ServerLog:
        path = path_dir / name
        events, is_closed = _read(path.with_suffix(".events"), FileKind.EVENTS, server, notes)
        sums, is_also = _read(path.with_suffix(".checksums"), FileKind.CHECKSUMS, server, notes)
        is_complete = is_closed and is_also
        return ServerLog(server=server, events=events, checksums=sums, is_complete=is_complete)

    for path in path_dir.glob("rebuilt-*.events"):
        raise other_version(f"{path_dir / path.name} is", REBUILT)
    for server in range(run.num_servers):
        copies, name = _numbers(path_dir, copy_name(server)), f"server-{server}"
        if copies and not (path_dir / f"{name}.events").exists():
            # It failed before this set was described.
            log = _empty_log(server)
        else:
            log = read_log(name, server)
        for number in copies:
            name = copy_name(server, number)
            log = joined(log, read_log(name, server), name=name)
        servers.append(log)
    for worker in range(run.num_workers):
        path = path_dir / f"worker-{worker}"
        if worker >= run.num_beginning and not path.with_suffix(".uses").exists():
            workers.append(_never_there(worker))
            continue
        uses, is_closed = _read(path.with_suffix(".uses"), FileKind.USES, worker, notes)
        pushes, is_also = _read(path.with_suffix(".pushes"), FileKind.PUSHES, worker, notes)
        is_complete = is_closed and is_also
        workers.append(WorkerLog(worker=worker, uses=uses, pushes=pushes, is_complete=is_complete))
    return History(run=run, servers=tuple(servers), workers=tuple(workers), notes=tuple(notes))


def _empty_log(server: int) -> ServerLog:
    events, checksums = (
        np.empty(0, DTYPES[kind]) for kind in (FileKind.EVENTS, FileKind.CHECKSUMS)
    )
    return ServerLog(server=server, events=events, checksums=checksums, is_complete=False)


def _never_there(worker: int) -> WorkerLog:
    """Return the log of a substitute that has not joined."""
    uses, pushes = (np.zeros(0, DTYPES[kind]) for kind in (FileKind.USES, FileKind.PUSHES))
    return WorkerLog(worker=worker, uses=uses, pushes=pushes, is_complete=True)


def _read(path: Path, kind: FileKind, index: int, notes: list[str]) -> tuple[Records, bool]:
    """Return the records, and True if the file was closed."""
    dtype = DTYPES[kind]
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(HEADER.size)
        num_closed = _check_header(path, header, kind, index)
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
    _check_padding(path, records)
    return records, num_closed != OPEN


def _check_header(path: Path, header: bytes, kind: FileKind, index: int) -> int:
    """Return the number of records in the header, OPEN if the file was not closed."""
    if header[: len(MAGIC)] == MAGIC and len(header) >= _VERSION_BYTES.stop:
        version = int.from_bytes(header[_VERSION_BYTES], "little")
        if version != FORMAT_VERSION:
            raise HistoryError(
                f"{path} is of format version {version}, this psdist reads {FORMAT_VERSION}"
            )
    if len(header) < HEADER.size:
        raise HistoryError(f"{path} is damaged: {len(header)} bytes, shorter than its header")
    magic, _, seen_kind, seen_index, zero, num_closed = HEADER.unpack(header)
    if magic != MAGIC or seen_kind != kind or zero or num_closed < OPEN:
        raise HistoryError(f"{path} is damaged: its header is not that of such a file")
    if seen_index != index:
        raise HistoryError(
            f"{path} is damaged: its header says that it was written by number {seen_index}"
        )
    return int(num_closed)


def _check_padding(path: Path, records: Records) -> None:
    """Refuse bytes other than zero that belong to no field."""
    fields = (records.dtype.fields or {}).values()
    in_fields = {byte for field in fields for byte in range(field[1], field[1] + field[0].itemsize)}
    padding = sorted(set(range(records.dtype.itemsize)) - in_fields)
    if not padding or not len(records):
        return
    is_wrong = records.view(np.uint8).reshape(len(records), -1)[:, padding].any(axis=1)
    if is_wrong.any():
        raise HistoryError(
            f"{path} is damaged: record {int(np.argmax(is_wrong))} has bytes other than zero where "
            "nothing stands"
        )


def joined(log: ServerLog, copy: ServerLog, *, name: str) -> ServerLog:
    """Return the log of a shard: ``log``, of its server and earlier copies, and then ``copy``.

    A replica logs what the server logs, at the same positions, and continues after its TAKEOVER
    event. Entries that the failed server logged beyond were sent to no rank. Checksums of the
    failed server's replies are in its own record, as far as it wrote them. A copy that was filled
    later begins with a FILLED event, which has the position in the shard's log. If the parameter
    set was described after the failure, or only groups had registered until then, the log is
    ``copy``. ``name`` is that of the files of ``copy``. Raises :class:`HistoryError` if the two
    logs are not of one shard.
    """
    first = _first_position(copy, name)
    (taken,) = np.nonzero(copy.events["kind"] == EventKind.TAKEOVER)
    if len(taken) > 1:
        raise HistoryError(
            f"history/{name}.events is damaged: a replica has taken the server's place "
            f"{len(taken)} times"
        )
    is_taken = bool(len(taken))
    had_begun = log.is_complete or (log.events["kind"] != EventKind.JOIN).any()
    if not (had_begun or is_taken or first) and len(copy.checksums):  # whose replies were sampled
        return replace(copy, server=log.server)
    until = int(taken[0]) if is_taken else len(copy.events)
    both = min(until, max(0, len(log.events) - first))
    differs = np.flatnonzero(log.events[first : first + both] != copy.events[:both])
    is_short = log.is_complete and copy.is_complete and first + until != len(log.events)
    if len(differs) or first > len(log.events) or (is_short and not is_taken):
        at = first + (int(differs[0]) if len(differs) else both)
        raise HistoryError(
            f"history/server-{log.server}.events and history/{name}.events differ from record {at} "
            "on: a server and its replica did not apply the same updates"
        )
    if not is_taken:
        is_further = len(log.events) > first + until and not copy.is_complete
        if log.is_complete or is_further:
            return log
        events = np.concatenate([log.events[:first], copy.events])
        ends = copy.is_complete
        return replace(log, events=events, is_complete=ends, has_died=ends)
    sums = log.checksums[log.checksums["position"] <= first + until]
    return ServerLog(
        server=log.server,
        events=np.concatenate([log.events[:first], copy.events], dtype=copy.events.dtype),
        checksums=np.concatenate([sums, copy.checksums]),
        is_complete=copy.is_complete,
    )


def _first_position(copy: ServerLog, name: str) -> int:
    """Return the position of the copy's first event in the shard's log."""
    if not len(copy.events) or copy.events[0]["kind"] != EventKind.FILLED:
        return 0
    position = float(copy.events[0]["weight"])
    if not position.is_integer() or position < 0:
        raise HistoryError(f"history/{name}.events is damaged: it begins at position {position:g}")
    return int(position)
