"""The one :class:`~psdist.workers.group.channel.Pending` of all group channels: a generator.

The steps of an operation are a generator. It yields where it has to wait for other workers, and
what it yields can wait for a while (:class:`Waiter`). Its return value is the result.

    def steps() -> Steps[int]:
        number = yield from until_done(channel.agree("save", [1.0]))
        return len(number)

    operation = Operation(steps())          # runs until the first yield
    while not operation.is_done():
        operation.wait(0.1)
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator
from typing import Any, Final, Generic, Protocol, TypeAlias

from psdist.errors import InvariantError, PsdistError
from psdist.workers.group.channel import Pending, T

_YIELDS: Final = 40
"""Looks between which other processes may run, before a worker sleeps: about 30 us on an idle
core."""
_FIRST_SLEEP_S: Final = 20e-6
_LAST_SLEEP_S: Final = 1e-3


class Waiter(Protocol):
    """Waits for progress of an operation."""

    def wait(self, at_most_s: float) -> bool | None:
        """Block for at most ``at_most_s`` seconds. True if it was a short pause, after which the
        operation looks and waits again."""
        ...


Steps: TypeAlias = Generator[Waiter, None, T]


class Operation(Generic[T]):
    """An operation that a channel has begun."""

    def __init__(self, steps: Steps[T], line: deque[Operation[Any]] | None = None) -> None:
        """Run ``steps`` until they have to wait.

        ``line``: the unfinished operations of a channel that runs one operation at a time, in
        order. Without it, this operation runs independently of others.
        """
        self._line = deque[Operation[Any]]() if line is None else line
        self._results: list[T] = []
        self.error: PsdistError | None = None
        self.is_taken = False
        """True when the caller has received the result or the error."""
        self.restart(steps)

    def restart(self, steps: Steps[T]) -> None:
        """Replace the remaining steps, and a result that the caller has not taken."""
        self._steps = steps
        self._waiter: Waiter | None = None
        self._results.clear()
        self.error = None
        if self not in self._line:
            self._line.append(self)
        self._advance_line()

    def _advance_line(self) -> None:
        while self._line and self._line[0]._advance():
            self._line.popleft()

    def _advance(self) -> bool:
        """Run the steps as far as the other workers allow. True if they have ended."""
        try:
            self._waiter = next(self._steps)
        except StopIteration as stop:
            self._results.append(stop.value)
        except PsdistError as error:
            self.error = error
        else:
            return False
        return True

    def is_done(self) -> bool:
        if not self._results and self.error is None:
            self._advance_line()
        return bool(self._results) or self.error is not None

    def wait(self, at_most_s: float) -> None:
        ends_s = time.monotonic() + at_most_s
        while not self.is_done() and (left_s := ends_s - time.monotonic()) > 0:
            waiter = self._line[0]._waiter
            if waiter is None or not waiter.wait(left_s):
                return

    def result(self) -> T:
        if not self.is_done():
            raise InvariantError("the result of an operation of a group before it was done")
        self.is_taken = True
        if self.error is not None:
            raise self.error
        return self._results[0]


class BackOff:
    """A :class:`Waiter` that spins where a core is to spare, and otherwise yields, then sleeps."""

    def __init__(self, *, is_spinning: bool) -> None:
        self._is_spinning = is_spinning
        self._num_looks = 0
        self._sleep_s = _FIRST_SLEEP_S

    def wait(self, at_most_s: float) -> bool:
        self._num_looks += 1
        if not self._is_spinning:
            if self._num_looks <= _YIELDS:
                os.sched_yield()
            else:
                self.sleep(at_most_s)
        return True

    def sleep(self, at_most_s: float) -> None:
        """Sleep for longer each time: nothing wakes this worker."""
        time.sleep(min(self._sleep_s, at_most_s))
        self._sleep_s = min(2 * self._sleep_s, _LAST_SLEEP_S)


def until_done(pending: Pending[T]) -> Steps[T]:
    """Wait for an operation of another channel; return its result."""
    while not pending.is_done():
        yield pending
    return pending.result()
