"""Render bytes as a terminal would: lines, and the few codes that psdist uses.

    tape = Tape()
    tape.write(b"one\\ntwo\\r\\x1b[2K\\x1b[1A")
    tape.lines()                     # ["one"]

Owns a screen without an end, and no colours. An escape code that it does not know is an error.
"""

from __future__ import annotations

import re

_CODE = re.compile(rb"\x1b\[(\??\d*(?:;\d+)*)([A-Za-z])")


class Tape:
    def __init__(self) -> None:
        self._rows: list[str] = [""]
        self._row = self._column = 0

    def write(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            match = _CODE.match(data, at)
            if match is not None:
                self._obey(match[1].decode(), match[2].decode())
                at = match.end()
                continue
            end = at + 1
            while end < len(data) and data[end] & 0xC0 == 0x80:
                end += 1
            self._show(data[at:end].decode())
            at = end

    def lines(self) -> list[str]:
        """Without the empty ones at the end."""
        rows = [row.rstrip() for row in self._rows]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def _show(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row, self._column = self._row + 1, 0
            if self._row == len(self._rows):
                self._rows.append("")
        elif not character.isprintable():
            raise AssertionError(f"the control character {character!r}")
        else:
            row = self._rows[self._row].ljust(self._column)
            self._rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
            self._column += 1

    def _obey(self, numbers: str, letter: str) -> None:
        if (numbers, letter) == ("2", "K"):
            self._rows[self._row] = ""
        elif (numbers, letter) == ("1", "A"):
            self._row = max(0, self._row - 1)
        elif letter != "m" and numbers not in ("?7", "?25"):
            raise AssertionError(f"the escape code {numbers}{letter}")
