"""Reasons of this worker to pause for a checkpoint that the script does not request. Pure.

occasions = Occasions(every="100", is_leading=True, now_s=0.0)
occasions.reason(clock=100, now_s=7.0)        # "checkpoint"
occasions.have_met(clock=100, now_s=7.5)      # made or aborted: the next one is at 200
occasions.ask("requeue")                      # a signal has come
"""

from __future__ import annotations

from psdist.sizes import parse_interval

_STRONGEST_LAST = ("", "checkpoint", "requeue", "end")


class Occasions:
    def __init__(self, *, every: str | None, is_leading: bool, now_s: float) -> None:
        """``every``: iterations ("100") or time ("10m"). ``is_leading``: this worker chooses the
        moment, as all workers do in sync and the chief does in other modes."""
        self._every = every
        self._is_leading = False
        self._iterations: int | None = None
        self._seconds: float | None = None
        self._next_clock: int | None = None
        self._next_s = 0.0
        self._asked = ""
        if is_leading:
            self.lead(clock=0, now_s=now_s)

    def lead(self, *, clock: int, now_s: float) -> None:
        """Choose the moment from now on, because the former chief has failed."""
        if self._is_leading:
            return
        self._is_leading = True
        found = parse_interval(self._every) if self._every is not None else None
        self._iterations = found if isinstance(found, int) else None
        self._seconds = found if isinstance(found, float) else None
        self._next_s = now_s + (self._seconds or 0.0)
        self.begin_at(clock)

    def begin_at(self, clock: int) -> None:
        """The job resumes from a checkpoint."""
        if self._iterations is not None:
            self._next_clock = (clock // self._iterations + 1) * self._iterations

    def ask(self, what: str) -> None:
        """Request a checkpoint at the next boundary, because of a signal."""
        self._asked = max(self._asked, what, key=_STRONGEST_LAST.index)

    def reason(self, *, clock: int, now_s: float) -> str:
        """Return the reason to pause at this boundary; "" for none."""
        if self._asked:
            return self._asked
        is_due = self._next_clock is not None and clock >= self._next_clock
        is_time = self._seconds is not None and now_s >= self._next_s
        return "checkpoint" if is_due or is_time else ""

    def have_met(self, *, clock: int, now_s: float) -> None:
        """A checkpoint was made or aborted."""
        self._asked = ""
        self.begin_at(clock)
        if self._seconds is not None:
            self._next_s = now_s + self._seconds
