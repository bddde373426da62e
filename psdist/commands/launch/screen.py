"""The parent's two output streams, and on a terminal the lines that are drawn below what scrolls.

    screen = Screen(is_live=True)
    screen.put(1, b"epoch 1\\n")
    screen.flush()                   # erases what is drawn where text for the terminal comes
    screen.draw(["sync ...", "3533 samples/s ..."])

Owns the cursor. What is drawn goes to standard error; without a terminal there nothing is, and no
control character is ever written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from psdist.commands.launch.relay import Outlet

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
        """The cursor stands behind text, such as a prompt, that nothing is drawn over."""

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
        """Whether the terminal is ours to draw on: not while a shell has put us behind it."""
        try:
            return os.tcgetpgrp(self._outlets[2].descriptor) == os.getpgrp()
        except OSError:  # not our controlling terminal: somebody has given it to us to write on
            return True

    def draw(self, lines: Sequence[str]) -> None:
        """Show these below all text, in place of what was drawn before."""
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
        """Whatever stands before the cursor has been there long enough."""
        if self.is_mid_line:
            self.is_mid_line = False
            self._outlets[2].put(b"\n")

    def _erasing(self) -> str:
        if not self._drawn:
            return ""
        return _ERASE_LINE + (_UP + _ERASE_LINE) * (len(self._drawn) - 1)
