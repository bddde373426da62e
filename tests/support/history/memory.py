"""Writers of histories that keep records in memory, for virtual jobs and tests of the check.

history = ServerHistory(None, server=0)         # with a folder, as the product's
history.apply(chunk, group, clock)
collect(run, [history], [WorkerHistory(None, 0)])
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from psdist.history import (
    DTYPES,
    EventKind,
    FileKind,
    History,
    Records,
    ServerLog,
    WorkerLog,
    writers,
)
from psdist.history.recorder import Recorder
from psdist.history.run_record import RunRecord


class MemoryRecorder(Recorder):
    """Keeps records of one dtype."""

    def __init__(self, kind: FileKind) -> None:
        self.buffer = np.zeros(self.CAPACITY, dtype=DTYPES[kind])
        self.bytes = self.buffer.view(np.uint8).data
        self.used = 0
        self.flush_at_s = float("inf")
        self.is_complete = False
        self._kept: list[Records] = []

    def flush(self) -> None:
        self._kept.append(self.buffer[: self.used].copy())
        self.used = 0

    def close(self, *, is_complete: bool) -> None:
        self.is_complete |= is_complete

    def records(self) -> Records:
        parts = [*self._kept, self.buffer[: self.used]]
        return np.concatenate(parts, dtype=self.buffer.dtype)  # else numpy drops the padding


class ServerHistory(writers.ServerHistory):
    def __init__(
        self, path_dir: Path | None, server: int, *, copy: int = 0, position: int = 0
    ) -> None:
        self.server = server
        if path_dir is not None:
            super().__init__(path_dir, server, copy=copy, position=position)
            return
        writers.EventCount.__init__(self, position)
        self._events = MemoryRecorder(FileKind.EVENTS)
        self._checksums = MemoryRecorder(FileKind.CHECKSUMS)

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
        codec: int = 0,
    ) -> None:
        """Add that the chunk contains update ``clock`` of the group, one contribution to a step;
        ``is_last``: the last one."""
        flags = is_last | is_empty << 1
        self._event(EventKind.APPLY, chunk, group, clock, weight, lr_scale, flags, codec)

    def log(self) -> ServerLog:
        """Return the records so far, for histories in memory."""
        return ServerLog(
            server=self.server,
            events=self._events.records(),
            checksums=self._checksums.records(),
            is_complete=self._events.is_complete,
        )


class WorkerHistory(writers.WorkerHistory):
    def __init__(self, path_dir: Path | None, worker: int) -> None:
        self.worker = worker
        if path_dir is not None:
            super().__init__(path_dir, worker)
            return
        self._uses = MemoryRecorder(FileKind.USES)
        self._pushes = MemoryRecorder(FileKind.PUSHES)

    def log(self) -> WorkerLog:
        """Return the records so far, for histories in memory."""
        return WorkerLog(
            worker=self.worker,
            uses=self._uses.records(),
            pushes=self._pushes.records(),
            is_complete=self._uses.is_complete,
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
