"""Waiting for the network: spin or back off, warn at growing intervals, end with a reason.

waiting = Waiting(is_spinning=False)
while not loop.turn():
    waiting.idle("messages")
"""

from __future__ import annotations

import time
from collections.abc import Callable

from psdist.errors import WaitTimeoutError


class Waiting:
    """The pause between two empty polls: spin or back off, warn, or time out.

    Blocking MPI calls take a whole core. With more ranks than cores that delays the awaited rank.
    So a wait spins only where a core is to spare. Otherwise it sleeps, and the sleeps double from
    ``FIRST_SLEEP_S`` to ``LAST_SLEEP_S``. In a long wait they grow up to ``LONGEST_SLEEP_S``, so
    that an idle rank takes less than 1 % of a core. The end of the wait is noticed at most
    ``LONG_SHARE`` of it late.
    """

    FIRST_SLEEP_S = 20e-6
    LAST_SLEEP_S = 1e-3
    LONGEST_SLEEP_S = 20e-3
    LONG_SHARE = 0.0025
    RELAXED_SHARE = 0.01
    SPINS = 4
    """Empty polls before the first sleep. More would take the core from the awaited rank."""
    LONGEST_POLL_S = 60.0
    """A longer time between two polls does not count: the process was stopped, as by Ctrl-Z."""

    def __init__(
        self,
        *,
        is_spinning: bool,
        warn_s: float = 30.0,
        timeout_s: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``clock()`` returns seconds, ``sleep`` takes seconds."""
        self.is_spinning = is_spinning
        self.warn_s = warn_s
        self.timeout_s = timeout_s
        self._share = self.LONG_SHARE
        self._clock = clock
        self._sleep = sleep
        self.reset()

    def relax(self) -> None:
        """Never spin, and sleep for up to ``RELAXED_SHARE`` of a wait: no step waits for this
        rank."""
        self.is_spinning = False
        self._share = self.RELAXED_SHARE

    def reset(self) -> None:
        """Start a new wait, because an event has come."""
        self._empty_polls = 0
        self._sleep_s = self.FIRST_SLEEP_S
        self._waited_s = 0.0
        self._polled_s: float | None = None
        self._warn_at_s = self.warn_s

    def idle(self, what: str) -> bool:
        """Pause after an empty poll. True if a warning is due. Raises :class:`WaitTimeoutError`."""
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
