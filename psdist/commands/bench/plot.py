"""The plots of benchmarks, as SVG: medians with quartiles, and curves.

    svg = plot("push + pull", [Size("4 KiB", [Way("push + pull", seconds), ...])], note="2 ranks")
    svg = curves("Loss", [Panel("seconds", [Line("none", [(0.5, 3.1), (1.0, 2.7)])])], note="where")
    write(path, svg)

``plot`` has one way in a row, size by size; a limit is a line. ``curves`` has panels in a
row, which share the vertical scale; each has its own horizontal scale. A scale is logarithmic
where the largest value is many times the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from psdist.commands.bench import quartiles
from psdist.errors import UsageError
from psdist.topology.draw.svg_canvas import INK, MUTED, Axis, Canvas, wrapped

COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6bb1")
"""Colours of ways, in the order of their first use; safe for colour-blind readers."""
LIMIT: Final = "#1d2433"
WIDTH: Final = 860
LEFT: Final = 250
RIGHT: Final = 210
_ROW: Final = 20
_GAP: Final = 14
_TOP: Final = 48
GRID: Final = "#e3e6ec"
_LOGARITHMIC_FROM: Final = 12.0
"""Largest time by smallest."""
_CURVES_LOGARITHMIC_FROM: Final = 6.0
"""Largest end of a curve by smallest."""
_PANEL_WIDTH: Final = 420.0
_PANEL_HEIGHT: Final = 260.0
_PANEL_LEFT: Final = 46.0
_BETWEEN: Final = 26.0
_PANELS_TOP: Final = 56.0
_BELOW: Final = 40.0
_LINE_HEIGHT: Final = 16.0
_COLUMNS: Final = 2
_DASHES: Final = ("", "6 3", "2 2")
"""Once all colours are taken, they come again with these."""


@dataclass(frozen=True)
class Way:
    name: str
    seconds: Sequence[float]


@dataclass(frozen=True)
class Size:
    """Ways at one size, and what bounds them, where that is known."""

    label: str
    ways: Sequence[Way]
    limit_s: float | None = None


class Line(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]
    """To the right and upwards, from left to right."""


class Panel(NamedTuple):
    label: str
    """Label of the horizontal axis, with its unit."""
    lines: Sequence[Line]


def time_axis(least_s: float, most_s: float) -> Axis:
    """Return the axis of :func:`plot` for these times, from left to right."""
    if least_s > 0 and most_s / least_s > _LOGARITHMIC_FROM:
        ends, is_logarithmic = (least_s / 1.2, most_s * 1.2), True
    else:
        ends, is_logarithmic = (0.0, (most_s or 1.0) * 1.05), False
    return Axis(*ends, start=LEFT, stop=WIDTH - RIGHT, is_logarithmic=is_logarithmic)


def plot(title: str, sizes: Sequence[Size], *, note: str) -> str:
    """SVG. ``note``: where it was measured, in words."""
    every = [seconds for size in sizes for way in size.ways for seconds in quartiles(way.seconds)]
    every += [size.limit_s for size in sizes if size.limit_s is not None]
    scale = time_axis(min(every), max(every))
    names = list(dict.fromkeys(way.name for size in sizes for way in size.ways))
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    canvas = Canvas()
    top = _TOP + 14.0 * _heading(canvas, title, note, WIDTH)
    bottom = top + sum(_ROW * len(size.ways) + _GAP for size in sizes)
    for tick in scale.ticks():
        x = scale.place(tick)
        canvas.rect(x - 0.4, top - 6, 0.8, bottom - top, fill=GRID)
        canvas.text(x, bottom + 10, short_time(tick), size=10, fill=MUTED, anchor="middle")
    y = top
    for size in sizes:
        y = _size(canvas, scale, size, colours, y) + _GAP
    words = "dot: median; bar: quartiles" + (
        "; line: what the link allows" if any(size.limit_s is not None for size in sizes) else ""
    )
    canvas.text(LEFT, bottom + 28, words, size=10, fill=MUTED)
    return canvas.document(WIDTH, bottom + 40, title=title)


def _heading(canvas: Canvas, title: str, note: str, width: float) -> int:
    """Draw the title and the note below it; return the number of lines of the note."""
    canvas.text(12, 24, title, size=15, bold=True, room=width - 24)
    lines = wrapped(note, 11, width - 24)
    for number, line in enumerate(lines):
        canvas.text(12, 42 + 14 * number, line, size=11, fill=MUTED)
    return len(lines)


def _size(canvas: Canvas, scale: Axis, size: Size, colours: dict[str, str], y: float) -> float:
    height = _ROW * len(size.ways)
    canvas.text(12, y + 10, size.label, size=12, bold=True, room=70)
    if size.limit_s is not None:
        x = scale.place(size.limit_s)
        title = f"limit: {short_time(size.limit_s)}"
        canvas.rect(x - 0.8, y - 4, 1.6, height, fill=LIMIT, title=title)
    for way in size.ways:
        low, middle, high = quartiles(way.seconds)
        told = f"{short_time(middle)} ({short_time(low)} to {short_time(high)})"
        colour, begin = colours[way.name], scale.place(low)
        canvas.text(LEFT - 10, y + 10, way.name, size=11, fill=INK, anchor="end", room=LEFT - 90)
        title = f"{size.label}, {way.name}: {told}"
        canvas.rect(begin, y + 4, max(scale.place(high) - begin, 1.0), 4, fill=colour, title=title)
        canvas.rect(scale.place(middle) - 4, y + 2, 8, 8, fill=colour, radius=4, title=title)
        canvas.text(WIDTH - RIGHT + 14, y + 10, told, size=11, fill=INK)
        y += _ROW
    return y


def curves(title: str, panels: Sequence[Panel], *, note: str) -> str:
    """Return SVG. ``note``: where it was measured, in words."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    columns = min(_COLUMNS, len(panels))
    width = columns * (_PANEL_WIDTH + _PANEL_LEFT) + (columns - 1) * _BETWEEN + 24
    canvas = Canvas()
    top = _PANELS_TOP + 14 * (_heading(canvas, title, note, width) - 1)
    heights = [value for panel in panels for line in panel.lines for _, value in line.points]
    low, high = min(heights), max(heights)
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        left = 12 + _PANEL_LEFT + column * (_PANEL_WIDTH + _PANEL_LEFT + _BETWEEN)
        above = top + row * (_PANEL_HEIGHT + _BELOW)
        _panel(canvas, panel, names, left, above, (low, high))
    bottom = top + math.ceil(len(panels) / columns) * (_PANEL_HEIGHT + _BELOW)
    for number, name in enumerate(names):
        row, column = divmod(number, columns)
        x, y = 12 + column * (_PANEL_WIDTH + _PANEL_LEFT + _BETWEEN), bottom + _LINE_HEIGHT * row
        colour, dash = _style(names, name)
        canvas.line([(x, y - 4), (x + 26, y - 4)], stroke=colour, width=2, dash=dash)
        canvas.text(x + 34, y, name, size=11, room=_PANEL_WIDTH)
    return canvas.document(
        width, bottom + _LINE_HEIGHT * math.ceil(len(names) / columns), title=title
    )


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
    is_logarithmic = min(ends) > 0 and max(ends) / min(ends) > _CURVES_LOGARITHMIC_FROM
    across = Axis(
        min(starts) if is_logarithmic else 0.0,
        max(ends),
        start=left,
        stop=left + _PANEL_WIDTH,
        is_logarithmic=is_logarithmic,
    )
    below = above + _PANEL_HEIGHT
    up = Axis(*heights, start=below, stop=above)
    for value in up.ticks():
        y = up.place(value)
        canvas.rect(left, y - 0.4, _PANEL_WIDTH, 0.8, fill=GRID)
        canvas.text(left - 6, y + 4, f"{value:.4g}", size=10, fill=MUTED, anchor="end")
    for value in across.ticks():
        x = across.place(value)
        canvas.rect(x - 0.4, above, 0.8, _PANEL_HEIGHT, fill=GRID)
        canvas.text(
            x, above + _PANEL_HEIGHT + 12, f"{value:.4g}", size=10, fill=MUTED, anchor="middle"
        )
    canvas.text(
        left + _PANEL_WIDTH / 2,
        above + _PANEL_HEIGHT + 26,
        panel.label,
        size=11,
        fill=INK,
        anchor="middle",
    )
    for line in panel.lines:
        colour, dash = _style(names, line.name)
        points = [(across.place(x), up.place(y)) for x, y in line.points]
        title = f"{line.name}: {line.points[-1][1]:.4g} at {line.points[-1][0]:.4g}"
        canvas.line(points, stroke=colour, width=1.6, dash=dash, title=title)


def _style(names: Sequence[str], name: str) -> tuple[str, str]:
    number = names.index(name)
    return COLOURS[number % len(COLOURS)], _DASHES[number // len(COLOURS) % len(_DASHES)]


def short_time(seconds: float) -> str:
    """Three digits and a unit."""
    if not seconds:
        return "0"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 0.9995 or unit == "us":
            value = seconds * factor
            return f"{value:.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
    raise AssertionError


def write(path: Path, svg: str) -> None:
    """On the rank that reports."""
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--plot: cannot write {path}: {error.strerror}") from error
    print(f"drawn in {path}")
