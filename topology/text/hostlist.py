"""Host lists as Slurm writes them, both ways: ``n[1-3,07-12],gpu[0-1]-ib[0-3],login``.

Pure functions on text. Nothing is looked up: a name is a name.

    expand("n[08-10],login")                    # ["n08", "n09", "n10", "login"]
    compress(["n08", "n09", "n10", "login"])    # "n[08-10],login"

Agrees with ``scontrol show hostnames`` (Slurm 22.05), with two differences. Text after the last
bracket (``n[1-2].example.org``), which Slurm refuses, is taken; ``compress`` does not write it.
Where a name has three or more brackets, the last counts fastest, then the one before it, and so
on; Slurm has the same names in another order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import product

from psdist.errors import PlacementError
from psdist.topology.text import HOST_NAME, shown

MAX_TEXT = 1 << 20
MAX_BRACKETS = 8
MAX_DIGITS = 18
MAX_SORTED = 255
"""Characters of a name that its place in an order depends on."""

_ITEM = re.compile(r"[^,\s\[\]]*(?:\[[^\[\]]*\][^,\s\[\]]*)*")
"""It looks at each character at most twice. Not possessive: Python 3.11.2 loses what a possessive
group matched before."""
_RANGE = re.compile(rf"([0-9]{{1,{MAX_DIGITS}}})(?:-([0-9]{{1,{MAX_DIGITS}}}))?")
_TRAILING_NUMBER = re.compile(rf"(.*?)([0-9]{{1,{MAX_DIGITS}}})", re.DOTALL)


def expand(text: str, *, max_hosts: int = 100_000, where: str = "") -> list[str]:
    """Return the names in a host list, in its order; a name given twice is there twice.

    A range keeps the width of its first number (``08-10``: 08, 09, 10). Names are separated by
    commas or blanks; empty ones are skipped, as Slurm does. Raises PlacementError for a bracket or
    range that is none, a name of other characters than letters, digits, ``.``, ``_`` and ``-``,
    and for more than ``max_hosts`` names, which is found out before they are made. Messages begin
    with ``where``.
    """
    where = f"{where}: host list" if where else "host list"
    if len(text) > MAX_TEXT:
        raise PlacementError(
            f"{where}: {len(text):,} characters, more than {MAX_TEXT:,}: write ranges"
        )
    names: list[str] = []
    position = 0
    while position < len(text):
        item = _ITEM.match(text, position)
        assert item is not None  # it may be empty
        position = item.end()
        if position < len(text) and text[position] in "[]":
            raise PlacementError(
                f"{where}: {shown(text[position:])} after {len(names)} names: a bracket without "
                "its other half; write n[1-3,7]"
            )
        if item[0]:
            names += _expand_item(item[0], max_hosts - len(names), max_hosts, where)
        position += 1  # the separator
    return names


def compress(names: Iterable[str]) -> str:
    """A host list for names: ``expand(compress(names)) == list(names)``, order and repeats kept.

    Only neighbours are put into one bracket, and only the number at the end of a name: that is
    what every version of Slurm takes. Raises PlacementError for a name that is no host name.
    """
    groups: list[tuple[str, list[tuple[str, str]]]] = []  # prefix, its ranges as (first, last)
    for name in names:
        if not HOST_NAME.fullmatch(name):
            raise PlacementError(_bad_name(name, "host list"))
        match = _TRAILING_NUMBER.fullmatch(name)
        if match is None:
            groups.append((name, []))
            continue
        prefix, number = match.groups()
        if not groups or groups[-1][0] != prefix or not groups[-1][1]:
            groups.append((prefix, [(number, number)]))
            continue
        ranges = groups[-1][1]
        first, last = ranges[-1]
        if number == f"{int(last) + 1:0{len(first)}d}":
            ranges[-1] = (first, number)
        else:
            ranges.append((number, number))
    return ",".join(_group_text(prefix, ranges) for prefix, ranges in groups)


def natural_key(name: str) -> tuple[tuple[int, str | int], ...]:
    """To sort names as people count: n1, n2, n10."""
    parts = re.split(r"([0-9]+)", name[:MAX_SORTED])
    return tuple((1, int(part)) if index % 2 else (0, part) for index, part in enumerate(parts))


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return ``n1, n2 and 3 more``: at most ``most`` names, then the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _group_text(prefix: str, ranges: list[tuple[str, str]]) -> str:
    inside = ",".join(first if first == last else f"{first}-{last}" for first, last in ranges)
    is_single = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return prefix + (inside if is_single or not ranges else f"[{inside}]")


def _expand_item(item: str, room: int, max_hosts: int, where: str) -> list[str]:
    pieces = re.split(r"[\[\]]", item)  # outside, inside, outside, inside, ..., outside
    fixed, brackets = pieces[0::2], pieces[1::2]
    if len(brackets) > MAX_BRACKETS:
        raise PlacementError(
            f"{where}: {shown(item)} has {len(brackets)} brackets, more than {MAX_BRACKETS}: "
            "write fewer"
        )
    num_ranges = sum(inside.count(",") + 1 for inside in brackets)
    if num_ranges > max_hosts + MAX_BRACKETS:
        raise PlacementError(
            f"{where}: {shown(item)} has {num_ranges:,} ranges, more than the limit of "
            f"{max_hosts:,} names: correct it"
        )
    parsed = [_ranges(inside, item, where) for inside in brackets]
    total = math.prod(sum(last - first + 1 for first, last, _ in ranges) for ranges in parsed)
    if total > room:
        raise PlacementError(
            f"{where}: {shown(item)} stands for {total:,} names, with those before it more than "
            f"the limit of {max_hosts:,}: correct the range"
        )
    numbers = [
        [f"{n:0{width}d}" for first, last, width in ranges for n in range(first, last + 1)]
        for ranges in parsed
    ]
    names = []
    for chosen in product(*numbers):
        name = fixed[0] + "".join(
            number + after for number, after in zip(chosen, fixed[1:], strict=True)
        )
        if not HOST_NAME.fullmatch(name):
            raise PlacementError(_bad_name(name, where))
        names.append(name)
    return names


def _ranges(inside: str, item: str, where: str) -> list[tuple[int, int, int]]:
    """(first, last, width) of each range of a bracket."""
    found = []
    for word in inside.split(","):
        match = _RANGE.fullmatch(word)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise PlacementError(
                f"{where}: {shown(word)} in {shown(item)} is no range: write numbers and ranges "
                "that go up, like [1-3,7]"
            )
        found.append((int(match[1]), int(match[2] or match[1]), len(match[1])))
    return found


def _bad_name(name: str, where: str) -> str:
    return (
        f"{where}: {shown(name)} is no host name: up to 255 letters, digits, '.', '_' and '-', "
        "and no '-' or '.' at the start"
    )
