"""The progress display of a run: one line that is rewritten, or a line now and then.

    display = ProgressDisplay(style="live", stream=sys.stderr, title="ssp (staleness 3)")
    display.show(clocks=[120, 118], samples=15232, last={"loss": 0.3})

mpirun gives ranks pipes, so whether a person is watching is told from outside (``style``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TextIO

WIDTH = 100


class ProgressDisplay:
    LIVE_EVERY_S = 0.25
    LINES_EVERY_S = 10.0

    def __init__(
        self,
        *,
        style: Literal["live", "lines", "off"],
        stream: TextIO,
        title: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._style = style
        self._stream = stream
        self._title = title
        self._clock = clock
        self._started_s = self._last_shown_s = clock()
        self._is_line_open = False

    @property
    def is_due(self) -> bool:
        if self._style == "off":
            return False
        every_s = self.LIVE_EVERY_S if self._style == "live" else self.LINES_EVERY_S
        return self._clock() - self._last_shown_s >= every_s

    def show(self, *, clocks: Sequence[int], samples: int, last: Mapping[str, Any]) -> None:
        """``clocks``: iterations finished by each worker; ``last``: the chief's logged values."""
        now = self._clock()
        self._last_shown_s = now
        if not clocks:
            return
        behind, ahead = min(clocks), max(clocks)
        iteration = str(ahead) if behind == ahead else f"{behind}..{ahead}"
        rate = samples / max(now - self._started_s, 1e-9)
        values = " ".join(f"{name} {_short(value)}" for name, value in last.items())
        text = f"{self._title} | iteration {iteration} | {rate:.0f} samples/s | {values}"
        text = text[:WIDTH].rstrip(" |")
        if self._style == "live":
            self._stream.write(f"\r{text:<{WIDTH}}")
            self._is_line_open = True
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """End a rewritten line, so that what follows starts on its own."""
        if self._is_line_open:
            self._stream.write("\n")
            self._stream.flush()
            self._is_line_open = False


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
