"""Signals to a worker whose script trains: they request a checkpoint, and the end after it.

    keep_until_asked()             # first of all: SIGUSR1 does not end a rank that starts
    signals = ScriptSignals(occasions.ask, on_usr1="requeue", grace_s=30.0, parent=context.parent)
    signals.begin()                # SIGUSR1 asks for a checkpoint at the next boundary
    signals.has_boundary()         # from now on SIGTERM of psdist run requests a last checkpoint
    signals.end()

Handlers that the script has set stay. A second SIGTERM, or one that finds no boundary within
``grace_s``, interrupts the script at once, as ever.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

from psdist.ranks.failure import Interrupted, Requeued
from psdist.ranks.parent_link import ParentLink


class _Early:
    """Records SIGUSR1 before psdist.init()."""

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.has_come = True


_EARLY: Final = _Early()


def keep_until_asked() -> None:
    """Record SIGUSR1 until ``psdist.init()``; a time limit may send it that early. By default it
    would end the rank, and the job with status 138."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _EARLY)


class ScriptSignals:
    def __init__(
        self,
        ask: Callable[[str], None],
        *,
        on_usr1: str,
        grace_s: float,
        parent: ParentLink | None,
    ) -> None:
        self._ask = ask
        self._on_usr1 = on_usr1
        self._grace_s = grace_s
        self._parent = parent
        self._has_boundary = False
        self.timer: threading.Timer | None = None
        """Interrupts a script that reaches no boundary."""

    def begin(self) -> None:
        """Handle signals from now on; only in the main thread, as Python requires."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, _EARLY):
            signal.signal(signal.SIGUSR1, self._take_usr1)
            if _EARLY.has_come:
                _EARLY.has_come = False
                self._ask(self._on_usr1)
        if self._parent is not None:
            self._parent.postpone = self._postpone

    def _take_usr1(self, _number: int, _frame: FrameType | None) -> None:
        self._ask(self._on_usr1)

    def has_boundary(self) -> None:
        """The script has reached a place where a checkpoint can be made, and will reach others."""
        self._has_boundary = True

    def _postpone(self, number: int) -> bool:
        """Return True if the script continues to its next boundary, and ends there."""
        is_first = self.timer is None
        if number != signal.SIGTERM or not is_first or not self._has_boundary or not self._grace_s:
            return False
        assert self._parent is not None
        self._ask("end")
        self.timer = threading.Timer(self._grace_s, self._parent.deliver, [number])
        self.timer.daemon = True
        self.timer.start()
        return True

    def end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self._parent is not None:
            self._parent.postpone = None
        if signal.getsignal(signal.SIGUSR1) == self._take_usr1:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def end_behind(reason: str, newest: str | None) -> None:
    """Raise the exception that ends the job, if ``reason`` ends it. All workers have met for it,
    and their checkpoint is on disk. ``newest``: the checkpoint that ``--resume`` starts from."""
    if reason == "requeue":
        raise Requeued(newest)
    if reason == "end":
        raise Interrupted(signal.SIGTERM)
