"""Sizes, speeds and intervals as people write them: the one place that reads them, for all commands
and files.

    parse_bytes("4MiB") == 4 << 20; parse_bytes("4M") == parse_bytes("4MB") == 4_000_000
    parse_rate("25Gbit") == 3.125e9; parse_rate("12 GB/s") == 12e9
    parse_interval("100") == 100; parse_interval("10m") == 600.0

None is the answer for anything else; what is too small or too large, and how that is said, is the
caller's. Sizes take either case. Speeds do not: ``Gb`` is read as bits by some and as bytes by
others, and is refused.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_BYTES: Final = re.compile(
    r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?(?:([KMGTP])(i)?)?B?", re.IGNORECASE | re.ASCII
)
_RATE: Final = re.compile(
    r"([0-9]{1,15}(?:\.[0-9]{1,9})?(?:[eE]\+?[0-9]{1,2})?)\s*(?:([kMGT]?)(bps|bit(?:/s)?|B(?:/s)?))?"
)

_INTERVAL: Final = re.compile(r"([0-9]{1,9})(s|m|h)?")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_interval(text: str) -> int | float | None:
    """A whole number counts iterations; with s, m or h it is seconds, a float. At least 1."""
    match = _INTERVAL.fullmatch(text.strip())
    if match is None or int(match[1]) < 1:
        return None
    return int(match[1]) * _SECONDS[match[2]] if match[2] else int(match[1])


def parse_bytes(text: str) -> int | Fraction | None:
    """Bytes: an int wherever they are whole. K, M, G, T, P are powers of 1000, Ki, Mi ... of 1024,
    each with or without B."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        return None
    number, prefix, binary = match.groups()
    unit: int = (1024 if binary else 1000) ** _POWERS[(prefix or "").upper()]
    found = Fraction(number) * unit
    return found.numerator if found.denominator == 1 else found


def parse_rate(text: str) -> float | None:
    """Bytes per second; prefixes are decimal, and without a unit it is bytes already."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        return None
    number, prefix, unit = match.groups()
    is_bits = unit is not None and unit.startswith("b")
    return float(number) * float(1000 ** _POWERS[(prefix or "").upper()]) / (8 if is_bits else 1)
