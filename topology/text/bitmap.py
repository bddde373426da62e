"""Sets of PU numbers as text: hwloc's bitmaps and the kernel's lists, within limits.

    members(parse_mask("0x00000001,,0x0"))      # frozenset({64})
    parse_list("0-3,8")                         # frozenset({0, 1, 2, 3, 8})

Bitmaps are those of hwloc_bitmap_sscanf: groups of 32 bits, most significant first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from psdist.errors import PlacementError
from psdist.topology.text import shown

MAX_CPUS: Final = 16_384
"""PU numbers are below this; Linux knows 8,192 at most."""

_GROUP_BITS: Final = 32
_GROUP_DIGITS: Final = 8
_ZERO: Final = "0" * _GROUP_DIGITS
_CHARACTERS: Final = re.compile(r"[0-9a-fA-Fx,]*")
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
# "0x" and eight digits and a comma for each group.
_CHARS_PER_GROUP: Final = 11


def parse_mask(text: str) -> int:
    """A bitmap as an integer: bit n is set if n is in the set. Far smaller than a set.

    Raises PlacementError for other text and for infinite bitmaps.
    """
    if text.startswith("0xf...f"):
        raise PlacementError(
            f"bitmap {shown(text)} is infinite: it names no PUs; export the machine again"
        )
    num_groups = text.count(",") + 1
    limit = -(-MAX_CPUS // _GROUP_BITS)
    if num_groups > limit or len(text) > limit * _CHARS_PER_GROUP:
        raise PlacementError(
            f"bitmap {shown(text)} has more than {MAX_CPUS:,} bits; no machine has so many PUs"
        )
    # Whole-string steps, for hostile texts hold millions of groups; empty groups are zero.
    groups = text.replace("0x", "").split(",")
    num_prefixes = text.count(",0x") + text.startswith("0x")
    if (
        not _CHARACTERS.fullmatch(text)
        or text.count("x") != num_prefixes
        or max(map(len, groups)) > _GROUP_DIGITS
        or (num_prefixes and "0x," in f"{text},")
    ):
        raise PlacementError(
            f"bitmap {shown(text)} is not groups of up to 8 hexadecimal digits with commas between"
        )
    mask = int("".join([group.zfill(_GROUP_DIGITS) if group else _ZERO for group in groups]), 16)
    if mask.bit_length() > MAX_CPUS:
        raise PlacementError(
            f"bitmap {shown(text)} names PU {mask.bit_length() - 1}; numbers end at {MAX_CPUS - 1}"
        )
    return mask


def members(mask: int) -> frozenset[int]:
    """The numbers of the bits that are set."""
    return frozenset(index for index, bit in enumerate(reversed(f"{mask:b}")) if bit == "1")


def mask_of(cpus: Iterable[int]) -> int:
    """The integer with these bits set."""
    mask = 0
    for cpu in cpus:
        mask |= 1 << cpu
    return mask


def parse_list(text: str) -> frozenset[int]:
    """The numbers in ``0-3,8``, the kernel's notation; empty text is the empty set.

    Raises PlacementError for anything else, for ranges that run backwards and for numbers from
    MAX_CPUS on.
    """
    text = text.strip()
    if not text:
        return frozenset()
    # Every second number, "2,4,6 ...", makes the longest list, about 3 characters for each PU.
    if len(text) > 4 * MAX_CPUS:
        raise PlacementError(f"CPU list {shown(text)} is longer than any list of {MAX_CPUS:,} CPUs")
    mask = 0
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise PlacementError(
                f"CPU list {shown(text)}: {shown(part)} is neither a number nor a range like 0-3"
            )
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first or last >= MAX_CPUS:
            raise PlacementError(
                f"CPU list {shown(text)}: {shown(part)} runs backwards or beyond {MAX_CPUS - 1}"
            )
        mask |= ((1 << (last - first + 1)) - 1) << first
    return members(mask)


def format_list(cpus: Iterable[int]) -> str:
    """``0-3,8``: ascending, neighbours as ranges; "" for the empty set."""
    parts: list[str] = []
    ordered = sorted(set(cpus))
    start = 0
    for index, cpu in enumerate(ordered):
        if index + 1 < len(ordered) and ordered[index + 1] == cpu + 1:
            continue
        first = ordered[start]
        parts.append(str(first) if first == cpu else f"{first}-{cpu}")
        start = index + 1
    return ",".join(parts)
