"""Waiting for the network: spin or back off, warn ever more rarely, give up with a reason.

waiting = Waiting(is_spinning=False)
while not loop.turn():
    waiting.idle("messages")
"""

from __future__ import annotations

import time
from collections.abc import Callable

from psdist.errors import WaitTimeoutError


class Waiting:
    """What to do between two polls that brought nothing: spin, or back off; warn; give up.

    Blocking MPI calls take a whole core; with more ranks than cores that starves the ranks one
    waits for. So a wait spins only where a core is to spare, and otherwise sleeps for times that
    double from ``FIRST_SLEEP_S`` to ``LAST_SLEEP_S``. In a long wait they grow with it up to
    ``LONGEST_SLEEP_S``, so that an idle rank takes less than 1 % of a core; what ends the wait is
    seen ``LONG_SHARE`` of it later at most.
    """

    FIRST_SLEEP_S = 20e-6
    LAST_SLEEP_S = 1e-3
    LONGEST_SLEEP_S = 20e-3
    LONG_SHARE = 0.0025
    RELAXED_SHARE = 0.01
    SPINS = 4
    """Empty polls before the first sleep; more of them take the core from whom one waits for."""
    LONGEST_POLL_S = 60.0
    """More than this between two polls was no waiting: this process was stopped, as by Ctrl-Z."""

    def __init__(
        self,
        *,
        is_spinning: bool,
        warn_s: float = 30.0,
        timeout_s: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``clock()`` gives seconds, ``sleep`` takes them."""
        self.is_spinning = is_spinning
        self.warn_s = warn_s
        self.timeout_s = timeout_s
        self._share = self.LONG_SHARE
        self._clock = clock
        self._sleep = sleep
        self.reset()

    def relax(self) -> None:
        """No step waits for this rank: from now on it never spins and sleeps longer sooner, up to
        ``RELAXED_SHARE`` of a wait."""
        self.is_spinning = False
        self._share = self.RELAXED_SHARE

    def reset(self) -> None:
        """Something happened: start over."""
        self._empty_polls = 0
        self._sleep_s = self.FIRST_SLEEP_S
        self._waited_s = 0.0
        self._polled_s: float | None = None
        self._warn_at_s = self.warn_s

    def idle(self, what: str) -> bool:
        """One empty poll. True when it is time to warn; raises :class:`WaitTimeoutError`."""
        self._empty_polls += 1
        if self._empty_polls <= self.SPINS:
            return False
        if self._empty_polls % 256 == 0 or not self.is_spinning:
            now = self._clock()
            if self._polled_s is not None:
                self._waited_s += min(now - self._polled_s, self.LONGEST_POLL_S)
            self._polled_s = now
            waited_s = self._waited_s
            if waited_s > self.timeout_s:
                raise WaitTimeoutError(
                    f"waited {waited_s:.0f} s for {what}, longer than failures.wait_timeout_s = "
                    f"{self.timeout_s:g}; look in logs/ for a rank that is stuck, or raise "
                    "failures.wait_timeout_s if such waits are normal here"
                )
            if not self.is_spinning:
                self._sleep(self._sleep_s)
                last_s = max(self.LAST_SLEEP_S, self._share * waited_s)
                self._sleep_s = min(2 * self._sleep_s, last_s, self.LONGEST_SLEEP_S)
            if waited_s > self._warn_at_s:
                self._warn_at_s *= 2
                return True
        return False
