"""Bytes on their way from ranks to the parent's own output: whole lines, never a blocked write.

    lines = Lines()
    outlet.put(lines.feed(data, now_s=1.0))
    outlet.flush()                   # as much as the reader takes now

Every byte comes out, in the order in which one rank wrote it. Lines of different ranks do not run
into each other, unless one of them waits in the middle of a line, as a prompt does.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from typing import Final, Protocol

READ_BYTES: Final = 65536
# A pipe that poll() calls writable takes this much without blocking (PIPE_BUF); a terminal too.
_WRITE_BYTES: Final = 4096


class Filter(Protocol):
    """What stands between a descriptor that is read and an outlet."""

    @property
    def deadline_s(self) -> float | None:
        """When :meth:`overdue` has something to say; None while nothing is held."""
        ...

    def feed(self, data: bytes, *, now_s: float) -> bytes: ...

    def overdue(self, *, now_s: float) -> bytes: ...

    def close(self) -> bytes: ...


class Lines:
    """Holds back the beginning of a line for a moment."""

    PARTIAL_S = 0.05
    MAX_BYTES = 65536

    def __init__(self) -> None:
        self._rest = b""
        self.deadline_s: float | None = None

    def feed(self, data: bytes, *, now_s: float) -> bytes:
        whole, newline, rest = data.rpartition(b"\n")
        shown = self._rest + whole + newline if newline else b""
        self._rest = rest if newline else self._rest + rest
        if len(self._rest) > self.MAX_BYTES:
            return shown + self.close()
        self.deadline_s = now_s + self.PARTIAL_S if self._rest else None
        return shown

    def overdue(self, *, now_s: float) -> bytes:
        if self.deadline_s is None or now_s < self.deadline_s:
            return b""
        return self.close()

    def close(self) -> bytes:
        shown, self._rest, self.deadline_s = self._rest, b"", None
        return shown


class Outlet:
    """One of the parent's own output streams."""

    FULL_BYTES = 1 << 20
    """With more than this waiting, nothing more is read from the ranks."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._waiting = bytearray()
        self._is_broken = False
        self.failure: str | None = None
        """Why nothing more can be written; None if writing works or the reader has left."""

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) > self.FULL_BYTES

    def put(self, data: bytes) -> None:
        if not self._is_broken:
            self._waiting += data

    def flush(self, *, timeout_s: float = 0.0) -> bytes:
        """Write what the reader takes; what was written. ``timeout_s``: how long to wait for it
        at each step."""
        written = bytearray()
        ready = select.poll()
        ready.register(self.descriptor, select.POLLOUT)
        while self._waiting:
            if not ready.poll(timeout_s * 1000):
                break
            try:
                count = os.write(self.descriptor, self._waiting[:_WRITE_BYTES])
            except BlockingIOError:
                break
            except OSError as error:  # ranks continue, as with mpirun
                self._is_broken = True
                if not self._has_lost_reader(error):
                    self.failure = error.strerror
                self._waiting.clear()
                break
            written += self._waiting[:count]
            del self._waiting[:count]
        return bytes(written)

    def _has_lost_reader(self, error: OSError) -> bool:
        """True if a pipe has no reader any more, or a terminal has gone."""
        is_device = stat.S_ISCHR(os.fstat(self.descriptor).st_mode)
        return error.errno == errno.EPIPE or (error.errno == errno.EIO and is_device)
