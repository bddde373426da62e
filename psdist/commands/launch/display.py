"""Progress as the parent shows it: drawn on a terminal, else a line now and then, or not at all.

    display = Display(screen, style="live", view=View(...))
    display.rank_reached(0, "placing")
    display.tick(now_s)              # again after display.every_s

What there is to show is psdist.commands.launch.view's and psdist.report.progress's; this decides
when.
"""

from __future__ import annotations

import io
import sys
from typing import Final

from rich.console import Console

from psdist.commands.launch.screen import Screen
from psdist.commands.launch.view import View
from psdist.report.facts import Phase, Training
from psdist.report.progress import ProgressDisplay, Style

_LIVE_EVERY_S: Final = 0.1
_LINES_EVERY_S: Final = 1.0
_PHASE_S: Final = 1.0
"""A phase that is over sooner needs no line."""
_PROMPT_S: Final = 2.0


class Display:
    def __init__(self, screen: Screen, *, style: Style, view: View) -> None:
        self._screen = screen
        self._style = style
        self._view = view
        self._lines = ProgressDisplay(
            style="lines" if style == "lines" else "off", stream=_ScreenStream(screen)
        )
        # For its colours and characters only; the screen does the writing.
        self._console = Console(file=sys.stderr, force_terminal=True) if style == "live" else None
        self._phase: Phase | None = None
        self._phase_s = float("inf")
        self._behind = 0
        self._prompt: tuple[float, int] | None = None

    @property
    def every_s(self) -> float:
        return _LIVE_EVERY_S if self._style == "live" else _LINES_EVERY_S

    def rank_reached(self, rank: int, phase: Phase) -> None:
        self._view.rank_reached(rank, phase)

    def take_role(self, rank: int, *, is_worker: bool) -> None:
        self._view.take_role(rank, is_worker=is_worker)

    def training(self, fact: Training) -> None:
        self._behind = fact.behind
        self._view.training(fact)
        self._lines.update(fact)

    def coordinator_is_elsewhere(self) -> None:
        self._view.coordinator_is_elsewhere()

    def restart(self) -> None:
        """The job was stopped, and goes on."""
        self._view.restart()
        self._lines.restart()

    def tick(self, now_s: float) -> None:
        if self._style == "lines":
            self._say_phase(now_s)
        elif self._style == "live":
            self._pass_prompt(now_s)
            lines = self._view.lines(width=self._screen.width, now_s=now_s, console=self._console)
            self._screen.draw(lines)

    def _say_phase(self, now_s: float) -> None:
        phase = self._view.phase
        if phase != self._phase:
            self._phase, self._phase_s = phase, now_s
        elif now_s - self._phase_s >= _PHASE_S:
            self._phase_s = float("inf")
            if phase != "training":  # its lines say more
                self._lines.say(self._view.phase_text())

    def _pass_prompt(self, now_s: float) -> None:
        """Somebody has answered what looked like a prompt, once every group has gone on."""
        if not self._screen.is_mid_line:
            self._prompt = None
        elif self._prompt is None:
            self._prompt = now_s, self._behind
        elif now_s - self._prompt[0] >= _PROMPT_S and self._behind > self._prompt[1]:
            self._screen.end_line()


class _ScreenStream(io.TextIOBase):
    """Lines of progress wait behind nothing: where the reader does not read they are left out."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def write(self, text: str) -> int:
        if not self._screen.waiting:
            self._screen.put(2, text.encode("utf-8", "backslashreplace"))
            self._screen.flush()
        return len(text)
