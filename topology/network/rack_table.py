"""Racks as the user writes them down: a TOML table of switches.

    [[switch]]
    name = "rack1"
    parent = "spine"        # the switch above; without: the root
    nodes = "n[1-16]"       # the hosts at it
    link = "25Gbit"         # of each of these hosts
    uplink = "100Gbit"      # of this switch to the one above, all its cables together

Only ``name`` is needed. Speeds are data rates in one direction: ``25Gbit`` or ``12GB`` (a second),
or plain bytes per second, ``12e9``.

    tree = parse(text, where="racks.toml")
"""

from __future__ import annotations

import re
import tomllib

from psdist.errors import PlacementError
from psdist.sizes import parse_rate
from psdist.topology.network.tree import MAX_NODES, Tree, TreeBuilder
from psdist.topology.text import HOST_NAME, hostlist, numbered_lines, shown

MAX_CHARACTERS = 1 << 20
MIN_BYTES_PER_S = 1e5
"""Less is a number whose unit was forgotten."""
MAX_BYTES_PER_S = 1e15

_KEYS = ("name", "parent", "nodes", "link", "uplink")
_MAX_DOTS = 32
_DOT_OR_QUOTED = re.compile(r"""[."'#]""")
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')


def parse(text: str, *, where: str) -> Tree:
    """The tree of a table. Raises PlacementError, naming the entry, for what is no such table."""
    entries = _entries(text, where)
    builder = TreeBuilder(where=where, source=where)
    for number, entry in enumerate(entries, start=1):
        place = f"{where}: [[switch]] number {number}"
        name = _text(entry, "name", place)
        if not HOST_NAME.fullmatch(name):
            raise PlacementError(
                f"{place}: name = {shown(name)}: give it a name of letters, digits, '.', '_', '-'"
            )
        place = f"{where}: switch {shown(name)}"
        unknown = [key for key in entry if key not in _KEYS]
        if unknown:
            raise PlacementError(
                f"{place}: unknown key {shown(unknown[0])}: a switch takes {', '.join(_KEYS)}"
            )
        builder.add_switch(name, place=place, bytes_per_s=_speed(entry, "uplink", place))
        if parent := _text(entry, "parent", place):
            builder.put_under(name, parent, place=place)
        link = _speed(entry, "link", place)
        nodes = _text(entry, "nodes", place)
        for node in hostlist.expand(nodes, max_hosts=MAX_NODES, where=f"{place}: nodes"):
            builder.add_node(node, name, place=place, bytes_per_s=link)
    return builder.build()


def parse_speed(value: object, *, where: str) -> float:
    """A speed as people write it, in bytes/s: ``"25Gbit"``, ``"25Gbps"``, ``"12 GB/s"``, ``12e9``.

    Prefixes are decimal. ``Gb`` is refused: it is read as bits by some and as bytes by others.
    Raises PlacementError for that, and for speeds below 10^5 bytes/s or above 10^15.
    """
    found: float | None = None
    if isinstance(value, str):
        found = parse_rate(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value) if abs(value) <= MAX_BYTES_PER_S else None
    if found is not None and 0 < found < MIN_BYTES_PER_S:
        raise PlacementError(
            f"{where}: {shown(value)} is {found:g} bytes per second, too slow for a network: write "
            "25Gbit, 12GB, or bytes per second like 12e9"
        )
    if found is None or not MIN_BYTES_PER_S <= found <= MAX_BYTES_PER_S:
        raise PlacementError(
            f"{where}: {shown(value)} is not a speed: write 25Gbit, 12GB, or bytes per second like "
            "12e9"
        )
    return found


def _entries(text: str, where: str) -> list[dict[str, object]]:
    if len(text) > MAX_CHARACTERS:
        raise PlacementError(
            f"{where}: {len(text):,} characters, more than {MAX_CHARACTERS:,}: write host lists "
            "with ranges, n[1-16]"
        )
    if '"""' in text or "'''" in text:
        raise PlacementError(f"{where}: strings over several lines have no use here: use one line")
    for number, line in numbered_lines(text):
        # tomllib takes quadratic time for a key of many parts, a.b.c. ...
        if line.count(".") > _MAX_DOTS and _dots_outside_of_quotes(line) > _MAX_DOTS:
            raise PlacementError(
                f"{where}:{number}: more than {_MAX_DOTS} dots outside of quotes: write nodes as "
                'a quoted host list, nodes = "n[1-16]"'
            )
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise PlacementError(f"{where}: lists nested too deep: write [[switch]] entries") from None
    except ValueError as error:  # TOMLDecodeError, and numbers of thousands of digits
        reason = " ".join(str(error).split())[:120]
        raise PlacementError(f"{where}: not TOML ({reason}): correct it") from None
    entries = table.pop("switch", None)
    if table:
        raise PlacementError(
            f"{where}: unknown key {shown(next(iter(table)))}: only [[switch]] entries belong here"
        )
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise PlacementError(f"{where}: no [[switch]] entry: describe each switch in one")
    return entries


def _dots_outside_of_quotes(line: str) -> int:
    """Dots outside of strings and comments, where those of host names are. Never goes back: what
    follows a quote that is not closed is not looked at, and no TOML."""
    count, position = 0, 0
    while found := _DOT_OR_QUOTED.search(line, position):
        position = found.end()
        if found[0] == ".":
            count += 1
        elif found[0] == '"':
            position = _end_of_basic_string(line, position)
        elif found[0] == "'":
            position = line.find("'", position) + 1 or len(line)
        else:
            break
    return count


def _end_of_basic_string(line: str, position: int) -> int:
    """Behind the closing quote of the string that begins at ``position``, or the line's end."""
    while found := _QUOTE_OR_ESCAPE.search(line, position):
        if found[0] == '"':
            return found.end()
        position = found.end() + 1
    return len(line)


def _text(entry: dict[str, object], key: str, place: str) -> str:
    value = entry.get(key, "")
    if not isinstance(value, str):
        raise PlacementError(f"{place}: {key} is {shown(value)}, not a text: put it into quotes")
    return value


def _speed(entry: dict[str, object], key: str, place: str) -> float:
    return parse_speed(entry[key], where=f"{place}: {key}") if key in entry else 0.0
