"""Lines over one another: losses over time, over bytes; panels beside each other, a colour a line.

    svg = plot("Loss", [Panel("seconds", [Line("none", [(0.5, 3.1), (1.0, 2.7)])])], note="where")

All panels have the same values upwards; each has its own scale to the right, logarithmic where one
line ends many times as far right as another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from psdist.commands.bench.plot import COLOURS, GRID
from psdist.topology.draw.svg_canvas import INK, MUTED, Canvas, wrapped

_WIDTH: Final = 420.0
_HEIGHT: Final = 260.0
_LEFT: Final = 46.0
_BETWEEN: Final = 26.0
_TOP: Final = 56.0
_BELOW: Final = 40.0
_LINE: Final = 16.0
_COLUMNS: Final = 2
_LOGARITHMIC_FROM: Final = 6.0
_DASHES: Final = ("", "6 3", "2 2")
"""Once all colours are taken, they come again with these."""


class Line(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]
    """To the right and upwards, from left to right."""


class Panel(NamedTuple):
    label: str
    """What stands to the right, with its unit."""
    lines: Sequence[Line]


class Axis:
    """Values to places between two ends; ``is_logarithmic`` where asked for and all are above 0."""

    def __init__(
        self, low: float, high: float, *, start: float, stop: float, is_logarithmic: bool = False
    ) -> None:
        self._is_logarithmic = is_logarithmic and low > 0
        if high <= low:
            low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
            self._is_logarithmic = False
        self._low, self._high = self._of(low), self._of(high)
        self._start, self._stop = start, stop

    def _of(self, value: float) -> float:
        return math.log10(value) if self._is_logarithmic else value

    def place(self, value: float) -> float:
        share = (self._of(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._stop - self._start)

    def ticks(self) -> list[float]:
        """Round values on the axis."""
        if self._is_logarithmic:
            powers = range(math.floor(self._low), math.ceil(self._high) + 1)
            for digits in ((1,), (1, 2, 5)):
                found = [digit * 10.0**power for power in powers for digit in digits]
                found = [each for each in found if self._low <= self._of(each) <= self._high]
                if len(found) >= 3:
                    break
            return found
        room = self._high - self._low
        size = 10.0 ** math.floor(math.log10(room))
        step = next(size * each for each in (0.1, 0.2, 0.5, 1, 2) if room / size / each <= 6)
        first, last = math.ceil(self._low / step - 1e-9), math.floor(self._high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def plot(title: str, panels: Sequence[Panel], *, note: str) -> str:
    """SVG. ``note``: where it was measured, in words."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    columns = min(_COLUMNS, len(panels))
    width = columns * (_WIDTH + _LEFT) + (columns - 1) * _BETWEEN + 24
    canvas = Canvas()
    canvas.text(12, 24, title, size=15, bold=True, room=width - 24)
    notes = wrapped(note, 11, width - 24)
    for number, words in enumerate(notes):
        canvas.text(12, 42 + 14 * number, words, size=11, fill=MUTED)
    heights = [value for panel in panels for line in panel.lines for _, value in line.points]
    low, high = min(heights), max(heights)
    top = _TOP + 14 * (len(notes) - 1)
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        left = 12 + _LEFT + column * (_WIDTH + _LEFT + _BETWEEN)
        above = top + row * (_HEIGHT + _BELOW)
        _panel(canvas, panel, names, left, above, (low, high))
    bottom = top + math.ceil(len(panels) / columns) * (_HEIGHT + _BELOW)
    for number, name in enumerate(names):
        row, column = divmod(number, columns)
        x, y = 12 + column * (_WIDTH + _LEFT + _BETWEEN), bottom + _LINE * row
        colour, dash = _style(names, name)
        canvas.line([(x, y - 4), (x + 26, y - 4)], stroke=colour, width=2, dash=dash)
        canvas.text(x + 34, y, name, size=11, room=_WIDTH)
    return canvas.document(width, bottom + _LINE * math.ceil(len(names) / columns), title=title)


def _panel(
    canvas: Canvas,
    panel: Panel,
    names: Sequence[str],
    left: float,
    above: float,
    heights: tuple[float, float],
) -> None:
    ends = [line.points[-1][0] for line in panel.lines]
    starts = [line.points[0][0] for line in panel.lines]
    is_logarithmic = min(ends) > 0 and max(ends) / min(ends) > _LOGARITHMIC_FROM
    across = Axis(
        min(starts) if is_logarithmic else 0.0,
        max(ends),
        start=left,
        stop=left + _WIDTH,
        is_logarithmic=is_logarithmic,
    )
    up = Axis(*heights, start=above + _HEIGHT, stop=above)
    for value in up.ticks():
        y = up.place(value)
        canvas.rect(left, y - 0.4, _WIDTH, 0.8, fill=GRID)
        canvas.text(left - 6, y + 4, f"{value:.4g}", size=10, fill=MUTED, anchor="end")
    for value in across.ticks():
        x = across.place(value)
        canvas.rect(x - 0.4, above, 0.8, _HEIGHT, fill=GRID)
        canvas.text(x, above + _HEIGHT + 12, f"{value:.4g}", size=10, fill=MUTED, anchor="middle")
    canvas.text(
        left + _WIDTH / 2, above + _HEIGHT + 26, panel.label, size=11, fill=INK, anchor="middle"
    )
    for line in panel.lines:
        colour, dash = _style(names, line.name)
        points = [(across.place(x), up.place(y)) for x, y in line.points]
        title = f"{line.name}: {line.points[-1][1]:.4g} at {line.points[-1][0]:.4g}"
        canvas.line(points, stroke=colour, width=1.6, dash=dash, title=title)


def _style(names: Sequence[str], name: str) -> tuple[str, str]:
    number = names.index(name)
    return COLOURS[number % len(COLOURS)], _DASHES[number // len(COLOURS) % len(_DASHES)]
