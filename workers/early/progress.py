"""Who drives the worker's loop while the script computes: a thread, or the hooks themselves.

The loop and MPI have one owner at a time. It is the script's thread but for a *window*: a hook that
has something to push opens it (``wake``), whatever the script calls next on the loop closes it
(``take_over``). Between the two the thread pushes and receives; without one, each ``wake`` does.
Gradients of a model on a GPU come in a thread of autograd's, whose hooks cannot know what the
script's thread does: there the forward pass, in the script's own thread, opens it (``open``).

    progress = BackgroundProgress(work=lambda: ..., is_awaiting=lambda: ...)
    progress.open()
    progress.wake()
    progress.take_over()                  # raises what went wrong in the window
    progress.stop()

``work()`` does what there is to do, and returns whether there was anything; ``is_awaiting()``:
whether the network owes something, so that it is worth asking again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

_FIRST_SLEEP_S = 50e-6
_LAST_SLEEP_S = 1e-3


class Driver(Protocol):
    """What drives the worker's loop during backward, as the sets see it."""

    def open(self) -> None:
        """The script's thread, which calls this, leaves the loop alone until it takes over."""
        ...

    def wake(self) -> None:
        """Chunks may be complete."""
        ...

    def take_over(self) -> None:
        """The loop is the caller's; raises what has gone wrong before."""
        ...


class PollingProgress:
    """Without a thread: hooks work in passing."""

    def __init__(self, work: Callable[[], bool]) -> None:
        self._work = work
        self._owner = threading.get_ident()
        self._error: BaseException | None = None

    def open(self) -> None:
        """Hooks in the script's own thread work in passing; others would need a thread for it."""

    def wake(self) -> None:
        """There is something to do."""
        if threading.get_ident() != self._owner or self._error is not None:
            return
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def take_over(self) -> None:
        """The script's thread owns the loop from here on."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def pause(self) -> None:
        """Nobody uses the loop beside the script's thread."""

    def stop(self) -> None:
        """The job is over."""


class BackgroundProgress:
    """A thread that owns the loop in windows, and sleeps in between. It begins with the first."""

    def __init__(self, work: Callable[[], bool], *, is_awaiting: Callable[[], bool]) -> None:
        self._work = work
        self._is_awaiting = is_awaiting
        self._owner = threading.get_ident()
        self._has_work = threading.Event()
        self._turn = threading.Lock()
        """Held by the thread while it touches the loop."""
        self._is_open = False
        self._is_stopping = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """The script's thread leaves the loop alone until it takes over. Any other's word is
        nothing."""
        if threading.get_ident() == self._owner and self._error is None:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="psdist-loop", daemon=True)
                self._thread.start()
            self._is_open = True

    def wake(self) -> None:
        """There is something to do. Opens the window, if this is the script's own thread: another
        one does not know whether that uses the loop."""
        self.open()
        self._has_work.set()

    def take_over(self) -> None:
        """The script's thread owns the loop from here on."""
        self.pause()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def pause(self) -> None:
        """As :meth:`take_over`; what went wrong is told later."""
        self._is_open = False
        with self._turn:
            pass

    def stop(self) -> None:
        """The job is over: the thread ends."""
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


Progress = PollingProgress | BackgroundProgress
