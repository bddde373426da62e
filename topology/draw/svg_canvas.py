"""A sheet for an SVG picture: boxes, lines and words at absolute places, everything escaped.

canvas = Canvas()
canvas.rect(0, 0, 40, 20, fill="#ffffff", title="what hovering shows")
canvas.text(4, 14, "n1", size=11, room=32)
canvas.document(40, 20, title="One node")    # no scripts, style sheets, fonts or other files
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

INK = "#1d2433"
MUTED = "#5b6475"

_NARROW = frozenset("ijlrtfI.,:;|!'()[]-/ ")
_WIDE = frozenset("mwMW%@")


class Canvas:
    def __init__(self) -> None:
        self._parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        stroke: str = "",
        stroke_width: float = 1.0,
        radius: float = 0.0,
        dashed: bool = False,
        title: str = "",
    ) -> None:
        """``title`` is what a browser shows under the pointer; it may have several lines."""
        extra = f' rx="{_number(radius)}"' if radius else ""
        if stroke:
            extra += f' stroke="{stroke}" stroke-width="{_number(stroke_width)}"'
        if dashed:
            extra += ' stroke-dasharray="3 2"'
        self._parts.append(
            f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" '
            f'height="{_number(height)}" fill="{fill}"{extra}'
            + (f"><title>{_safe(title)}</title></rect>" if title else "/>")
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
        room: float | None = None,
        is_name: bool = False,
    ) -> None:
        """``y`` is the base line; ``room`` is the width beyond which the words are cut, a name in
        its middle."""
        if room is not None:
            words = (middle_cut if is_name else fitted)(words, size, room, bold=bold)
        extra = ("" if anchor == "start" else f' text-anchor="{anchor}"') + (
            ' font-weight="bold"' if bold else ""
        )
        self._parts.append(
            f'<text x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}" '
            f'fill="{fill}"{extra}>{_safe(words)}</text>'
        )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        *,
        stroke: str,
        width: float = 1.0,
        dash: str = "",
        title: str = "",
    ) -> None:
        """From point to point; ``dash`` as SVG's stroke-dasharray."""
        places = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        extra = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{places}" fill="none" stroke="{stroke}" '
            f'stroke-width="{_number(width)}"{extra}'
            + (f"><title>{_safe(title)}</title></polyline>" if title else "/>")
        )

    def add(self, other: Canvas) -> None:
        """Put what is on the other sheet above what is here."""
        self._parts += other._parts

    def document(self, width: float, height: float, *, title: str) -> str:
        size = f"{_number(width)} {_number(height)}"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
                f'width="{_number(width)}" height="{_number(height)}" font-family="sans-serif">',
                f"<title>{_safe(title)}</title>",
                f'<rect width="{_number(width)}" height="{_number(height)}" fill="#ffffff"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


class Axis:
    """Values to places between two ends; ``is_logarithmic`` where asked for and all are above 0."""

    def __init__(
        self, low: float, high: float, *, start: float, stop: float, is_logarithmic: bool = False
    ) -> None:
        self.is_logarithmic = is_logarithmic and low > 0
        if high <= low:
            low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
            self.is_logarithmic = False
        self._low, self._high = self._of(low), self._of(high)
        self._start, self._stop = start, stop

    def _of(self, value: float) -> float:
        return math.log10(value) if self.is_logarithmic else value

    def place(self, value: float) -> float:
        share = (self._of(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._stop - self._start)

    def ticks(self) -> list[float]:
        """Round values on the axis."""
        if self.is_logarithmic:
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


def text_width(words: str, size: float, *, bold: bool = False) -> float:
    """A guess that is rather too wide: which font a viewer has is not known."""
    ems = sum(
        0.36 if char in _NARROW else 0.95 if char in _WIDE else 0.71 if char.isupper() else 0.62
        for char in words
    )
    return ems * size * (1.1 if bold else 1.0)


def fitted(words: str, size: float, room: float, *, bold: bool = False) -> str:
    """Return the words, cut to the room with an ellipsis at the end if they are too long."""
    if text_width(words, size, bold=bold) <= room:
        return words
    words = words[: int(room / (0.3 * size)) + 1]
    while words and text_width(words + "…", size, bold=bold) > room:
        words = words[:-1]
    return words.rstrip() + "…" if words else ""


def middle_cut(words: str, size: float, room: float, *, bold: bool = False) -> str:
    """A name, or its beginning and its end, by which names differ, with an ellipsis between."""
    if text_width(words, size, bold=bold) <= room:
        return words
    left = min(len(words) - 1, int(room / (0.3 * size)) + 1)
    while left > 0:
        cut = f"{words[: left // 2]}…{words[len(words) - (left - left // 2) :]}"
        if text_width(cut, size, bold=bold) <= room:
            return cut
        left -= 1
    return ""


def wrapped(words: str, size: float, room: float) -> list[str]:
    """Lines that fit; a word that is too long for a line is cut."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, size) <= room:
            lines[-1] = longer
        elif lines[-1]:
            lines.append(fitted(word, size, room))
        else:
            lines[-1] = fitted(word, size, room)
    return lines


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _safe(words: str) -> str:
    """Escaped, and without characters that XML does not allow or that turn text around."""
    return escape("".join(char if char.isprintable() or char == "\n" else "?" for char in words))
