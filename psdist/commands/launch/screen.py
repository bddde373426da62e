"""Bytes on their way from ranks to the parent's two output streams, and the lines drawn below them.

    screen = Screen(is_live=True)
    screen.put(1, Lines().feed(data, now_s=1.0))
    screen.draw(["sync ...", "3533 samples/s ..."])

Every byte comes out, in the order in which one rank wrote it. Lines of different ranks do not run
into each other, unless one of them waits in the middle of a line, as a prompt does. No write
blocks. Owns the cursor. Drawings go to standard error. Without a terminal there, nothing is drawn
and no control character is written.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Sequence
from typing import Final, Protocol

READ_BYTES: Final = 65536
# A pipe that poll() calls writable takes this much without blocking (PIPE_BUF); a terminal too.
_WRITE_BYTES: Final = 4096


class Filter(Protocol):
    """A filter between a descriptor that is read and an outlet."""

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


_ERASE_LINE: Final = "\r\x1b[2K"
_UP: Final = "\x1b[1A"
# Lines longer than the terminal is wide would be two, and could not be erased.
_NO_WRAP: Final = "\x1b[?7l"
_WRAP: Final = "\x1b[?7h"
_LEAST_WIDTH: Final = 20


class Screen:
    def __init__(self, *, is_live: bool, stdout: int = 1, stderr: int = 2) -> None:
        """``is_live``: standard error is a terminal, and is to be drawn on."""
        error = Outlet(stderr)
        # One queue where both are the same terminal: what erases must not overtake text.
        output = error if is_live and os.path.sameopenfile(stdout, stderr) else Outlet(stdout)
        self._outlets: Final = {1: output, 2: error}
        self.is_live = is_live
        self._drawn: tuple[str, ...] = ()
        self.is_mid_line = False
        """True if the cursor is after text, such as a prompt, that no drawing may cover."""

    @property
    def waiting(self) -> list[Outlet]:
        """Outlets whose readers have not taken everything yet."""
        return [outlet for outlet in set(self._outlets.values()) if outlet.is_waiting]

    def is_full(self, stream: int) -> bool:
        return self._outlets[stream].is_full

    def failure(self, stream: int) -> str | None:
        """Return why this stream takes no more; None if it does, or if its reader has left."""
        return self._outlets[stream].failure

    def put(self, stream: int, data: bytes) -> None:
        """Bytes for standard output (1) or error (2)."""
        if not data:
            return
        outlet = self._outlets[stream]
        if outlet is self._outlets[2] and self.is_live:
            self.erase()
            self.is_mid_line = not data.endswith(b"\n")
        outlet.put(data)

    def say(self, line: str) -> None:
        """A line of the parent's own."""
        self.end_line()
        self.put(2, f"{line}\n".encode("utf-8", "backslashreplace"))

    def flush(self, *, timeout_s: float = 0.0) -> None:
        for outlet in self.waiting:
            outlet.flush(timeout_s=timeout_s)

    @property
    def width(self) -> int:
        try:
            return max(_LEAST_WIDTH, os.get_terminal_size(self._outlets[2].descriptor).columns)
        except OSError:
            return 80

    @property
    def is_in_foreground(self) -> bool:
        """True if this process may draw: a shell has not put it into the background."""
        try:
            return os.tcgetpgrp(self._outlets[2].descriptor) == os.getpgrp()
        except OSError:  # not the controlling terminal: it was given to write on
            return True

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines below all text, instead of the previous drawing."""
        if not self.is_live or self.is_mid_line or self.waiting or not self.is_in_foreground:
            return
        if self._drawn == tuple(lines):
            return
        text = self._erasing()
        if lines:
            text += _NO_WRAP + "\n".join(lines) + _WRAP
        self._drawn = tuple(lines)
        self._outlets[2].put(text.encode("utf-8", "backslashreplace"))
        self.flush()

    def erase(self) -> None:
        if self._drawn:
            text, self._drawn = self._erasing(), ()
            self._outlets[2].put(text.encode())
            self.flush()

    def end_line(self) -> None:
        """Treat the text before the cursor as a whole line."""
        if self.is_mid_line:
            self.is_mid_line = False
            self._outlets[2].put(b"\n")

    def _erasing(self) -> str:
        if not self._drawn:
            return ""
        return _ERASE_LINE + (_UP + _ERASE_LINE) * (len(self._drawn) - 1)
