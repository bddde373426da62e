"""The file of one kind of record: appended, flushed often, closed with its number of records.

recorder = Recorder(path_dir / "server-0.events", FileKind.EVENTS, 0)
EVENT.pack_into(recorder.bytes, recorder.used * EVENT.size, ...)
recorder.used += 1                   # and flush(), from recorder.flush_at_s on
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from psdist.errors import HistoryError, InvariantError
from psdist.history import DTYPES, HEADER, MAGIC, OPEN, FileKind, Records
from psdist.history.run_record import FORMAT_VERSION, cannot
from psdist.whole_writes import write_whole


class Recorder:
    """Appends records of one dtype to a file; one preallocated buffer."""

    CAPACITY = 4096
    FLUSH_EVERY_S = 0.25
    """MPI ends a failing job by killing every process: what is buffered then is not recorded."""

    def __init__(self, path: Path, kind: FileKind, index: int) -> None:
        self.buffer: Records = np.zeros(self.CAPACITY, dtype=DTYPES[kind])
        self.bytes = self.buffer.view(np.uint8).data
        self.used = 0
        self.flush_at_s = 0.0
        """``flush`` is due from then on (monotonic); the writers look after each record."""
        self._kind, self._index = kind, index
        self._path = path
        self._num_written = 0
        self._file: Any = None
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
        self._write(self._header(OPEN))

    def flush(self) -> None:
        """Hand everything to the operating system and empty the buffer."""
        if self._file is not None:
            self._write(self.bytes[: self.used * self.buffer.itemsize])
            self.flush_at_s = monotonic() + self.FLUSH_EVERY_S
        elif self.used:
            raise InvariantError(f"{self._path}: {self.used} records came after close()")
        self._num_written += self.used
        self.used = 0

    def close(self, *, is_complete: bool) -> None:
        if self._file is None:
            return
        self.flush()
        file, self._file = self._file, None
        self.flush_at_s = 0.0  # a record after this fails at once
        try:
            with file:
                if is_complete:
                    file.seek(0)
                    file.write(self._header(self._num_written))
        except OSError as error:
            raise cannot("write", self._path, error) from error

    def _header(self, num_records: int) -> bytes:
        return HEADER.pack(MAGIC, FORMAT_VERSION, self._kind, self._index, 0, num_records)

    def _write(self, data: bytes | memoryview) -> None:
        try:
            write_whole(self._file, data)
        except OSError as error:
            # The file may end within a record now: nothing may follow.
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()
            raise cannot("write", self._path, error) from error
