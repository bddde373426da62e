"""Drives the worker's loop while the script computes: in a thread, or in the hooks themselves.

The loop and MPI have one owner at a time: the script's thread, except during a *window*. A hook
that has something to push opens it (``wake``); the next call of the script on the loop closes it
(``take_over``). Within it the thread pushes and receives; without a thread, each ``wake`` does.
Gradients of a model on a GPU come in a thread of autograd's, whose hooks cannot tell what the
script's thread does: there the forward pass, in the script's own thread, opens it (``open``).

    driver = BackgroundProgress(work=lambda: ..., is_awaiting=lambda: ...)
    driver.open()
    driver.wake()
    driver.take_over()                    # raises what went wrong in the window
    driver.stop()

``work()`` does what there is to do, and returns True if there was anything; ``is_awaiting()``: True
if the network still owes something, so that polling again is useful.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_FIRST_SLEEP_S = 50e-6
_LAST_SLEEP_S = 1e-3


class Driver:
    """The driver of the loop, as the sets see it; this one does nothing."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._error: BaseException | None = None

    def open(self) -> None:
        """Called by the script's thread, which leaves the loop alone until it takes over."""

    def wake(self) -> None:
        """Chunks may be complete."""

    def take_over(self) -> None:
        """Give the loop to the script's thread. Raises what went wrong before."""
        self.pause()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def pause(self) -> None:
        """As :meth:`take_over`; an error is raised later."""

    def stop(self) -> None:
        """The job has ended."""


class PollingProgress(Driver):
    """Without a thread: hooks in the script's own thread work in passing."""

    def __init__(self, work: Callable[[], bool]) -> None:
        super().__init__()
        self._work = work

    def wake(self) -> None:
        if threading.get_ident() == self._owner and self._error is None:
            try:
                self._work()
            except BaseException as error:
                self._error = error


class BackgroundProgress(Driver):
    """A thread that owns the loop in windows, and sleeps in between. It begins with the first."""

    def __init__(self, work: Callable[[], bool], *, is_awaiting: Callable[[], bool]) -> None:
        super().__init__()
        self._work = work
        self._is_awaiting = is_awaiting
        self._has_work = threading.Event()
        self._turn = threading.Lock()
        """Held by the thread while it uses the loop."""
        self._is_open = False
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Calls of other threads do nothing: they cannot tell if the script's uses the loop."""
        if threading.get_ident() == self._owner and self._error is None:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="psdist-loop", daemon=True)
                self._thread.start()
            self._is_open = True

    def wake(self) -> None:
        self.open()
        self._has_work.set()

    def pause(self) -> None:
        self._is_open = False
        with self._turn:
            pass

    def stop(self) -> None:
        self.pause()
        self._is_stopping = True
        self._has_work.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        sleep_s: float | None = None
        while not self._is_stopping:
            self._has_work.wait(sleep_s)
            if self._has_work.is_set():
                self._has_work.clear()
                sleep_s = _FIRST_SLEEP_S
            with self._turn:
                has_done, is_awaiting = self._one_turn()
            if has_done:
                sleep_s = 0.0
            elif not is_awaiting:
                sleep_s = None  # until a hook has something
            else:
                sleep_s = min(2 * (sleep_s or _FIRST_SLEEP_S), _LAST_SLEEP_S)

    def _one_turn(self) -> tuple[bool, bool]:
        if not self._is_open:
            return False, False
        try:
            return self._work(), self._is_awaiting()
        except BaseException as error:
            self._error, self._is_open = error, False
            return False, False
