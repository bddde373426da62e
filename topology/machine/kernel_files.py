"""Small files of /sys and /proc: text, a number or a list of CPUs, or nothing.

    cpu_list(root / "sys/devices/system/cpu/online")                    # frozenset({0, 1}), or None

A missing or malformed file is one that says nothing, since kernels differ in what they have.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from psdist.errors import PlacementError
from psdist.topology.text import bitmap

_MAX_BYTES: Final = 1 << 20
_NUMBER: Final = re.compile(r"(?:0x[0-9a-fA-F]{1,16}|-?[0-9]{1,18})")


def text(path: Path) -> str:
    """Without blanks at its ends; "" where there is no such file, or none that can be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace").strip()
    except (OSError, ValueError):
        return ""


def number(path: Path) -> int | None:
    """Decimal, or hexadecimal after ``0x``."""
    found = text(path)
    return int(found, 0 if "x" in found else 10) if _NUMBER.fullmatch(found) else None


def cpu_list(path: Path) -> frozenset[int] | None:
    """None for a file that is missing or holds no list; an empty file is an empty set."""
    if not path.is_file():
        return None
    try:
        return bitmap.parse_list(text(path))
    except PlacementError:
        return None


def entries(folder: Path, pattern: str) -> list[Path]:
    """Sorted; none where there is no such folder."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []
