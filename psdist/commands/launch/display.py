"""Progress as the parent shows it: drawn on a terminal, else a line now and then, or not at all.

    display = Display(screen, style="live", view=View(num_ranks=4, script="train.py", started_s=0))
    display.tick(now_s)              # again after display.every_s

:class:`View`, which is pure, has the phase of the start, then the state of the training. Its facts
come from ranks on this host only: nothing is drawn where the coordinator is elsewhere, whose own
lines come through the launcher. :class:`Display` decides when to draw.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.text import Text

from psdist.commands.launch.screen import Screen
from psdist.report import PHASES, Phase, Training
from psdist.report.meter import Meter, Words, format_duration
from psdist.report.progress import ProgressDisplay, Style

_PHASE_WORDS: Final[Mapping[Phase, str]] = {
    "connecting": "connecting {ranks} ranks",
    "placing": "placing {ranks} ranks",
    "importing": "importing torch",
    "starting": "starting {script}",
    "preparing": "preparing the model",
    "training": "training",
}
_GAP: Final = "  "
_LEAST_BAR: Final = 8
_MOST_BAR: Final = 40


class View:
    def __init__(self, *, num_ranks: int, script: str, started_s: float) -> None:
        self._num_ranks = num_ranks
        self._script = script
        self._started_s = started_s
        self._phases: dict[int, Phase] = {}
        self._servers: set[int] = set()
        self._words: Words | None = None
        self._meter = Meter()
        self._is_blind = False

    def rank_reached(self, rank: int, phase: Phase) -> None:
        """Ranks only go forward; a later ``prepare`` is no start."""
        before = self._phases.get(rank)
        if before is None or PHASES.index(phase) > PHASES.index(before):
            self._phases[rank] = phase

    def take_role(self, rank: int, *, is_worker: bool) -> None:
        """Servers have no part in what scripts do before they train."""
        if not is_worker:
            self._servers.add(rank)

    def training(self, fact: Training) -> None:
        self._words = self._meter.update(fact)

    def coordinator_is_elsewhere(self) -> None:
        self._is_blind = True

    def restart(self) -> None:
        """Continue after the job was stopped."""
        self._meter.restart()

    @property
    def phase(self) -> Phase | None:
        """Where the rank is that is furthest behind; None before the first has started."""
        if not self._phases:
            return None
        if len(self._phases) < self._num_ranks and set(self._phases.values()) == {"connecting"}:
            return "connecting"
        return min(self._phases.values(), key=PHASES.index)

    def phase_text(self) -> str:
        """``importing torch (2 of 4 ranks are done)``."""
        phase = self.phase
        if phase is None:
            return "starting mpirun"
        text = _PHASE_WORDS[phase].format(ranks=self._num_ranks, script=self._script)
        if phase == "connecting":
            done, of = len(self._phases), self._num_ranks
            return text if done == of else f"{text} ({done} have started)"
        skipped = self._servers if phase in ("starting", "preparing") else set()
        taking_part = [each for rank, each in self._phases.items() if rank not in skipped]
        done = sum(PHASES.index(each) > PHASES.index(phase) for each in taking_part)
        return f"{text} ({done} of {len(taking_part)} ranks are done)" if done else text

    def lines(self, *, width: int, now_s: float, console: Console | None = None) -> list[str]:
        """At most ``width`` columns each. ``console``: whose colours and characters to use."""
        console = console or Console(file=io.StringIO(), force_terminal=True, color_system=None)
        if self._words is None:
            if self._is_blind and self.phase == "training":
                return []
            since = format_duration(now_s - self._started_s)
            return [_rendered(console, _fitted([self.phase_text(), since], width))]
        first = _bar(self._words, width, console)
        values, notes = self._words.values, self._words.notes
        second = _fitted([self._words.speed, *values[:1], *notes, *values[1:]], width)
        return [_rendered(console, text) for text in (first, second) if text]


def _bar(words: Words, width: int, console: Console) -> Text:
    """``sync ━━━━━╸╺━━━━  43 %  epoch 2 of 5  iteration 150 of 345  ETA 0:12``."""
    percent = "" if words.fraction is None else f"{100 * words.fraction:3.0f} %"
    text = _fitted([percent, *words.position, words.eta], width)
    room = width - text.cell_len - len(_GAP)
    mode = words.mode.split(" ")[0]
    room_for_bar = min(_MOST_BAR, room - len(mode) - 1)
    line = Text()
    if words.fraction is not None and room_for_bar >= _LEAST_BAR:
        bar = ProgressBar(total=1.0, completed=words.fraction, width=room_for_bar)
        line.append(f"{mode} ", style="bold")
        for segment in console.render(bar, console.options.update(width=room_for_bar)):
            line.append(segment.text.rstrip("\n"), style=segment.style)
        line.pad_right(len(mode) + 1 + room_for_bar - line.cell_len)  # without colours it is short
        line.append(_GAP)
    elif room >= len(mode):
        line.append(f"{mode}{_GAP}", style="bold")
    return line.append_text(text)


def _fitted(parts: Sequence[str], width: int) -> Text:
    """As many of the parts, from the first on, as there is room for; the first one cut to it."""
    present = [part for part in parts if part]
    line = Text()
    for part in present:
        piece = Text(part) if not line else Text(_GAP + part)
        if line.cell_len + piece.cell_len > width:
            if not line:
                piece.truncate(width)
                line.append_text(piece)
            continue
        line.append_text(piece)
    return line


def _rendered(console: Console, text: Text) -> str:
    with console.capture() as capture:
        console.print(text, end="", soft_wrap=True, highlight=False, markup=False)
    return capture.get()


_LIVE_EVERY_S: Final = 0.1
_LINES_EVERY_S: Final = 1.0
_PHASE_S: Final = 1.0
"""A shorter phase needs no line."""
_PROMPT_S: Final = 2.0


class Display:
    def __init__(self, screen: Screen, *, style: Style, view: View) -> None:
        self._screen = screen
        self._style = style
        self.view = view
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

    def training(self, fact: Training) -> None:
        self._behind = fact.behind
        self.view.training(fact)
        self._lines.update(fact)

    def restart(self) -> None:
        """Continue after the job was stopped."""
        self.view.restart()
        self._lines.restart()

    def tick(self, now_s: float) -> None:
        if self._style == "lines":
            self._say_phase(now_s)
        elif self._style == "live":
            self._pass_prompt(now_s)
            lines = self.view.lines(width=self._screen.width, now_s=now_s, console=self._console)
            self._screen.draw(lines)

    def _say_phase(self, now_s: float) -> None:
        phase = self.view.phase
        if phase != self._phase:
            self._phase, self._phase_s = phase, now_s
        elif now_s - self._phase_s >= _PHASE_S:
            self._phase_s = float("inf")
            if phase != "training":  # its lines say more
                self._lines.say(self.view.phase_text())

    def _pass_prompt(self, now_s: float) -> None:
        """Treat what looked like a prompt as answered once every group has moved."""
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
