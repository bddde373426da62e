"""Progress without a parent that draws: a line now and then, or one line that is rewritten.

    display = ProgressDisplay(style="lines", stream=sys.stderr)
    display.say("4 ranks connected")
    display.update(training)

Under a foreign mpirun or srun, and where ``psdist run -n`` has no terminal, lines come ever more
rarely. The rewritten line is for a job in one process on a terminal of its own. A reader that
does not read never holds the job up: what it has no room for is left out.
"""

from __future__ import annotations

import select
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final, Literal, Protocol, TypeAlias

from psdist.report import Phase, Training
from psdist.report.meter import Meter


class Stream(Protocol):
    def fileno(self) -> int: ...

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


Style: TypeAlias = Literal["live", "lines", "off"]

# The parts of a start that take long, and are the coordinator's to see.
_PHASE_LINES: Final[Mapping[Phase, str]] = {
    "importing": "{num_ranks} ranks are connected after {elapsed_s:.1f} s; importing torch",
    "training": "the servers are ready after {elapsed_s:.1f} s",
}


def say_phase(phase: Phase, *, num_ranks: int, elapsed_s: float) -> None:
    """A line at the phases of a start, where no parent draws them."""
    if phase in _PHASE_LINES:
        text = _PHASE_LINES[phase].format(num_ranks=num_ranks, elapsed_s=elapsed_s)
        ProgressDisplay(style="lines", stream=sys.stderr).say(text)


class ProgressDisplay:
    FIRST_LINE_S = 3.0
    LAST_LINES_S = 30.0
    GROWTH = 1.5

    def __init__(
        self, *, style: Style, stream: Stream, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._style = style
        self._stream = stream
        self._clock = clock
        self._meter = Meter()
        self._line_s = clock()
        self._lines_every_s = self.FIRST_LINE_S
        self._is_line_open = False

    def say(self, what: str) -> None:
        """A line at once: the job has come to another part of its life."""
        if self._style != "off":
            self.close()
            self._write(f"psdist: {what}\n")

    def update(self, training: Training) -> None:
        """Note how the job stands, and show it if it is time to; a few times a second."""
        if self._style == "off":
            return
        now = self._clock()
        text = " | ".join(self._meter.update(training).all())
        if self._style == "live":
            width = shutil.get_terminal_size().columns - 1
            self._is_line_open |= self._write(f"\r{text[:width]:<{width}}")
        elif self._style == "lines" and now - self._line_s >= self._lines_every_s:
            self._line_s = now
            self._lines_every_s = min(self.GROWTH * self._lines_every_s, self.LAST_LINES_S)
            self._write(f"psdist: {text}\n")

    def restart(self) -> None:
        """The job resumes after a stop."""
        self._meter.restart()

    def close(self) -> None:
        """End a rewritten line, so that what follows starts on its own."""
        if self._is_line_open:
            self._is_line_open = False
            self._write("\n")

    def _write(self, text: str) -> bool:
        try:
            ready = select.select([], [self._stream], [], 0.0)[1]
        except (OSError, ValueError):  # no file of the system's, such as a test's: nothing blocks
            ready = [self._stream]
        if not ready:
            return False
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the reader has gone, or the script has closed it
            return False
        return True
