"""Writers of the recorded history: what servers applied, and which versions workers used.

Owns the recording objects that the hot path calls: each event is packed into one preallocated
buffer, which goes to its file when it is full or a quarter of a second old. Never judges
(:mod:`psdist.history.replay`) and never reads (:mod:`psdist.history.records`, whose names a user
of histories finds here too).

    history = ServerHistory(run_dir / "history", server=0)      # None instead: kept in memory
    history.member(EventKind.JOIN, group=0, clock=0, weight=2.0)
    history.apply(chunk, group, clock, weight, lr_scale)
    reply_position = history.position                           # contains all of the above
    history.close()

    read_history(run_dir)                                       # -> History, or HistoryError
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from psdist.errors import HistoryError, InvariantError
from psdist.history.records import (
    CHECKSUM,
    DTYPES,
    EVENT,
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    NO_CHUNK,
    OPEN,
    EventKind,
    FileKind,
    History,
    Records,
    RunRecord,
    ServerLog,
    WorkerLog,
    cannot,
    read_history,
    write_run,
)

__all__ = [
    "EventCount",
    "EventKind",
    "History",
    "RunRecord",
    "ServerHistory",
    "WorkerHistory",
    "collect",
    "read_history",
    "write_run",
]


class _Recorder:
    """Appends records of one dtype to a file, or keeps them; one preallocated buffer."""

    CAPACITY = 4096
    FLUSH_EVERY_S = 0.25
    """MPI ends a failing job by killing every process: what is buffered then is not recorded."""

    def __init__(self, path: Path | None, kind: FileKind) -> None:
        self.buffer: Records = np.zeros(self.CAPACITY, dtype=DTYPES[kind])
        self.bytes = self.buffer.view(np.uint8).data
        self.used = 0
        self.flush_at_s = float("inf")
        """``flush`` is due from then on (monotonic); the writers look after each record."""
        self.is_complete = False
        self._kind = kind
        self._path = path
        self._num_written = 0
        self._kept: list[Records] = []
        self._file: Any = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot("write", path.parent, error) from error
        try:
            # Raw, because the buffer is ours; "x", because a history is evidence.
            self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by close()
        except FileExistsError as error:
            raise HistoryError(
                f"{path} is there already, from another run; choose another run directory"
            ) from error
        except OSError as error:
            raise cannot("write", path, error) from error
        self._write(HEADER.pack(MAGIC, FORMAT_VERSION, kind, OPEN))
        self.flush_at_s = 0.0

    def flush(self) -> None:
        """Hand everything to the operating system and start the buffer anew."""
        if self._file is not None:
            self._write(self.bytes[: self.used * self.buffer.itemsize])
            self.flush_at_s = monotonic() + self.FLUSH_EVERY_S
        elif self._path is not None and self.used:
            raise InvariantError(f"{self._path}: {self.used} records came after close()")
        elif self.used:
            self._kept.append(self.buffer[: self.used].copy())
        self._num_written += self.used
        self.used = 0

    def close(self, *, is_complete: bool) -> None:
        if self.is_complete or (self._path is not None and self._file is None):
            return
        self.flush()
        if self._file is not None:
            file, self._file = self._file, None
            self.flush_at_s = 0.0  # whoever records after this is told at once
            try:
                with file:
                    if is_complete:
                        file.seek(0)
                        file.write(
                            HEADER.pack(MAGIC, FORMAT_VERSION, self._kind, self._num_written)
                        )
            except OSError as error:
                raise cannot("write", self._path, error) from error
        self.is_complete = is_complete

    def records(self) -> Records:
        """All records so far; for recorders without a file."""
        if self._path is not None:
            raise InvariantError(f"the records of {self._path} are in the file: read_history()")
        parts = [*self._kept, self.buffer[: self.used]]
        return np.concatenate(parts, dtype=self.buffer.dtype)  # else numpy drops the padding

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            while len(view):
                view = view[self._file.write(view) :]
        except OSError as error:
            # The file may end within a record now: nothing must be written behind that.
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()
            raise cannot("write", self._path, error) from error


Contributions = Sequence[tuple[int, int, float, bool]]
"""(group, clock, weight, whether it brought no gradient) of each update in an optimizer step."""


class EventCount:
    """A server's log of which nothing is kept but its length: without ``--record``."""

    def __init__(self) -> None:
        self.position = 0
        """Events so far (read only)."""

    def step(self, _chunk: int, contributions: Contributions, _lr_scale: float = 1.0) -> None:
        self.position += len(contributions)

    def member(self, _kind: EventKind, _group: int, _clock: int, _weight: float = 0.0) -> None:
        self.position += 1


class ServerHistory:
    """One server's log. With ``path_dir`` None it stays in memory (:meth:`log`).

    Its ``position`` is the only count of a server's events: a reply is stamped with it when it is
    made. ``apply`` is on the hot path: it packs 32 bytes into a preallocated buffer.
    """

    def __init__(self, path_dir: Path | None, server: int) -> None:
        self.server = server
        self.position = 0
        """Events so far: a reply made now contains exactly these (read only)."""
        self._events = _Recorder(path_dir and path_dir / f"server-{server}.events", FileKind.EVENTS)
        self._checksums = _Recorder(
            path_dir and path_dir / f"server-{server}.checksums", FileKind.CHECKSUMS
        )

    def step(self, chunk: int, contributions: Contributions, lr_scale: float = 1.0) -> None:
        """The chunk now contains these updates: in sync all of one iteration, in group order; in
        the other modes one. Call it after the bytes of the shard have changed and before the next
        reply is made."""
        last = len(contributions) - 1
        for index, (group, clock, weight, is_empty) in enumerate(contributions):
            self.apply(
                chunk, group, clock, weight, lr_scale, is_last=index == last, is_empty=is_empty
            )

    def apply(
        self,
        chunk: int,
        group: int,
        clock: int,
        weight: float = 1.0,
        lr_scale: float = 1.0,
        *,
        is_last: bool = True,
        is_empty: bool = False,
    ) -> None:
        """Group ``group``'s update of iteration ``clock`` is now contained in the chunk: one of
        the contributions to a step, of which only the last has ``is_last``."""
        self._event(EventKind.APPLY, chunk, group, clock, weight, lr_scale, is_last | is_empty << 1)

    def member(self, kind: EventKind, group: int, clock: int, weight: float = 0.0) -> None:
        """A membership event. ``clock``: iterations that the group has finished: others wait for
        these and no more (after DEATH: the fewest that a chunk of this server contains)."""
        if kind == EventKind.APPLY:
            raise InvariantError("an apply is not a membership event")
        self._event(kind, NO_CHUNK, group, clock, weight, 1.0, 0)

    def checksum(self, chunk: int, crc: int) -> None:
        """crc32 of the chunk's bytes as workers must see them now, taken from the shard itself."""
        sums = self._checksums
        if sums.used == sums.CAPACITY:
            sums.flush()
        CHECKSUM.pack_into(sums.bytes, sums.used * CHECKSUM.size, self.position, chunk, crc)
        sums.used += 1
        if monotonic() >= sums.flush_at_s:
            sums.flush()

    def flush(self) -> None:
        """Hand what is buffered to the operating system. It happens by itself, with the first
        record after ``FLUSH_EVERY_S``; call it where a failure is noticed."""
        self._events.flush()
        self._checksums.flush()

    def close(self, *, is_complete: bool = True) -> None:
        """Flush and end the files; ``is_complete=False`` when the run failed. May be repeated."""
        self._events.close(is_complete=is_complete)
        self._checksums.close(is_complete=is_complete)

    def log(self) -> ServerLog:
        """What was recorded so far, for histories in memory."""
        return ServerLog(
            server=self.server,
            events=self._events.records(),
            checksums=self._checksums.records(),
            is_complete=self._events.is_complete,
        )

    def _event(
        self,
        kind: int,
        chunk: int,
        group: int,
        clock: int,
        weight: float,
        lr_scale: float,
        flags: int,
    ) -> None:
        events = self._events
        if events.used == events.CAPACITY:
            events.flush()
        EVENT.pack_into(
            events.bytes,
            events.used * EVENT.size,
            clock,
            weight,
            lr_scale,
            chunk,
            group,
            kind,
            flags,
        )
        events.used += 1
        self.position += 1
        if monotonic() >= events.flush_at_s:
            events.flush()


class WorkerHistory:
    """One worker's record of the versions it used. With ``path_dir`` None it stays in memory."""

    def __init__(self, path_dir: Path | None, worker: int) -> None:
        self.worker = worker
        self._uses = _Recorder(path_dir and path_dir / f"worker-{worker}.uses", FileKind.USES)

    def uses(
        self,
        iteration: int,
        chunks: npt.ArrayLike,
        servers: npt.ArrayLike,
        positions: npt.ArrayLike,
        has_crc: npt.ArrayLike = False,
        crcs: npt.ArrayLike = 0,
    ) -> None:
        """The forward pass of ``iteration`` used these versions.

        ``chunks`` [n], and for each its server, the position that its last reply carried, and
        where ``has_crc`` the crc32 of *this worker's own memory* of the chunk, taken now.
        Scalars stand for all.
        """
        chunks = np.asarray(chunks)
        num, recorder = len(chunks), self._uses
        if recorder.used + num > recorder.CAPACITY:
            recorder.flush()
        if num > recorder.CAPACITY:
            half = num // 2
            columns = [
                np.broadcast_to(np.asarray(values), chunks.shape)
                for values in (chunks, servers, positions, has_crc, crcs)
            ]
            self.uses(iteration, *(column[:half] for column in columns))
            self.uses(iteration, *(column[half:] for column in columns))
            return
        into = recorder.buffer[recorder.used : recorder.used + num]
        into["iteration"] = iteration
        into["chunk"] = chunks
        into["server"] = servers
        into["position"] = positions
        into["has_crc"] = has_crc
        into["crc"] = crcs
        recorder.used += num
        if monotonic() >= recorder.flush_at_s:
            recorder.flush()

    def flush(self) -> None:
        self._uses.flush()

    def close(self, *, is_complete: bool = True) -> None:
        """Flush and end the file; ``is_complete=False`` when the run failed. May be repeated."""
        self._uses.close(is_complete=is_complete)

    def log(self) -> WorkerLog:
        """What was recorded so far, for histories in memory."""
        return WorkerLog(
            worker=self.worker, uses=self._uses.records(), is_complete=self._uses.is_complete
        )


def collect(
    run: RunRecord, servers: Iterable[ServerHistory], workers: Iterable[WorkerHistory]
) -> History:
    """The history that writers kept in memory, each in order of its index."""
    return History(
        run=run,
        servers=tuple(server.log() for server in servers),
        workers=tuple(worker.log() for worker in workers),
    )
