"""The parent's signals, taken one by one by its loop and never in the middle of something else.

    with Signals() as signals:
        signals.descriptor               # can be read when one has come
        for number in signals.take(): ...

A signal that was ignored when the parent started stays so: ``nohup``, and shells that start a
command in the background, mean it.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any, Final

ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TAKEN: Final = (
    *ENDINGS,
    signal.SIGUSR1,
    signal.SIGTSTP,
    signal.SIGCONT,
    signal.SIGCHLD,
    signal.SIGWINCH,
)


class Signals:
    def __init__(self) -> None:
        self.descriptor, self._write_end = os.pipe()
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Signals:
        for end in (self.descriptor, self._write_end):
            os.set_blocking(end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in _TAKEN:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, _take_note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.descriptor)
        os.close(self._write_end)

    def take(self) -> list[int]:
        """Those that have come since the last call, in order."""
        try:
            return list(os.read(self.descriptor, 4096))
        except BlockingIOError:
            return []

    def stop_here(self) -> list[int]:
        """Be stopped as by Ctrl-Z, until somebody continues this process; what came meanwhile,
        without the SIGCONT that did. Where nobody could (no shell), this returns at once."""
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, _take_note)
        came = self.take()
        if signal.SIGCONT in came:
            came.remove(signal.SIGCONT)
        return came


def _take_note(_number: int, _frame: FrameType | None) -> None:
    """The number is in the pipe by now."""
