"""The plot of a benchmark: a median with its quartiles for each way, way under way, size by size.

    svg = plot("push + pull", [Size("4 KiB", [Way("push + pull", seconds), ...])], note="2 ranks")
    write(path, svg)

Times stand on a logarithmic scale where the largest is many times the smallest. A limit is a line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psdist.commands.bench.raw import quartiles
from psdist.errors import UsageError
from psdist.topology.draw.svg_canvas import INK, MUTED, Canvas, wrapped

COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6bb1")
"""Of ways, in the order in which they are first seen; safe for colour-blind readers."""
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


class Scale:
    """Seconds to places from left to right."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self.is_logarithmic = least_s > 0 and most_s / least_s > _LOGARITHMIC_FROM
        if self.is_logarithmic:
            self._low, self._high = math.log10(least_s / 1.2), math.log10(most_s * 1.2)
        else:
            self._low, self._high = 0.0, (most_s or 1.0) * 1.05

    def x(self, seconds: float) -> float:
        value = math.log10(seconds) if self.is_logarithmic else seconds
        return LEFT + (value - self._low) / (self._high - self._low) * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> list[float]:
        """Round times that lie on the scale."""
        if not self.is_logarithmic:
            size = 10.0 ** math.floor(math.log10(self._high))
            step = next(size * each for each in (0.2, 0.5, 1, 2) if self._high / each / size <= 6)
            return [number * step for number in range(int(self._high / step) + 1)]
        powers = range(math.floor(self._low), math.ceil(self._high) + 1)
        found = [10.0**power for power in powers if self._low <= power <= self._high]
        if len(found) < 3:
            every = (digit * 10.0**power for power in powers for digit in (1, 2, 5))
            found = [each for each in every if self._low <= math.log10(each) <= self._high]
        return found


def plot(title: str, sizes: Sequence[Size], *, note: str) -> str:
    """SVG. ``note``: where it was measured, in words."""
    every = [seconds for size in sizes for way in size.ways for seconds in quartiles(way.seconds)]
    every += [size.limit_s for size in sizes if size.limit_s is not None]
    scale = Scale(min(every), max(every))
    names = list(dict.fromkeys(way.name for size in sizes for way in size.ways))
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    canvas = Canvas()
    lines = wrapped(note, 11, WIDTH - 24)
    top = _TOP + 14.0 * len(lines)
    bottom = top + sum(_ROW * len(size.ways) + _GAP for size in sizes)
    canvas.text(12, 24, title, size=15, bold=True, room=WIDTH - 24)
    for number, line in enumerate(lines):
        canvas.text(12, 42 + 14 * number, line, size=11, fill=MUTED)
    for tick in scale.ticks():
        x = scale.x(tick)
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


def _size(canvas: Canvas, scale: Scale, size: Size, colours: dict[str, str], y: float) -> float:
    height = _ROW * len(size.ways)
    canvas.text(12, y + 10, size.label, size=12, bold=True, room=70)
    if size.limit_s is not None:
        x = scale.x(size.limit_s)
        title = f"limit: {short_time(size.limit_s)}"
        canvas.rect(x - 0.8, y - 4, 1.6, height, fill=LIMIT, title=title)
    for way in size.ways:
        low, middle, high = quartiles(way.seconds)
        told = f"{short_time(middle)} ({short_time(low)} to {short_time(high)})"
        colour, begin = colours[way.name], scale.x(low)
        canvas.text(LEFT - 10, y + 10, way.name, size=11, fill=INK, anchor="end", room=LEFT - 90)
        title = f"{size.label}, {way.name}: {told}"
        canvas.rect(begin, y + 4, max(scale.x(high) - begin, 1.0), 4, fill=colour, title=title)
        canvas.rect(scale.x(middle) - 4, y + 2, 8, 8, fill=colour, radius=4, title=title)
        canvas.text(WIDTH - RIGHT + 14, y + 10, told, size=11, fill=INK)
        y += _ROW
    return y


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
