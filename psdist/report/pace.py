"""How fast a count grows, and how long it still takes to a total. Pure; times are passed in.

pace = Pace()
pace.add(at_s=10.0, done=100)
pace.add(at_s=12.0, done=150)
pace.per_s, pace.remaining_s(total=400)      # 25.0, 10.0
"""

from __future__ import annotations

from collections import deque


class Pace:
    """The speed over the last WINDOW_S seconds: a slow start or a pause is soon forgotten, and one
    slow iteration does not make the estimate jump."""

    WINDOW_S = 20.0
    SHORTEST_S = 1.0
    """Over less than this no speed is told."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, *, at_s: float, done: int) -> None:
        """``done`` at time ``at_s``. A count or a time that has gone back begins anew."""
        seen = self._seen
        if seen and (done < seen[-1][1] or at_s < seen[-1][0]):
            seen.clear()
        seen.append((at_s, done))
        # What is just outside the window stays as its edge: with one report a minute there is
        # still a speed.
        while len(seen) > 2 and seen[1][0] <= at_s - self.WINDOW_S:
            seen.popleft()

    def restart(self) -> None:
        """Forget what was seen: time has passed in which the job was stopped."""
        self._seen.clear()

    @property
    def per_s(self) -> float | None:
        """None until there is a second to measure."""
        if not self._seen:
            return None
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        if last_s - first_s < self.SHORTEST_S:
            return None
        return (last - first) / (last_s - first_s)

    def remaining_s(self, *, total: int) -> float | None:
        """Seconds until ``total`` at this speed; None where nothing moves or nothing is known."""
        speed = self.per_s
        if not speed:
            return None
        return max(0, total - self._seen[-1][1]) / speed


def format_duration(seconds: float) -> str:
    """``0:07``, ``12:00``, ``3:05:00``, ``2 d 4 h``."""
    whole = round(seconds)
    if whole >= 48 * 3600:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
