"""Racks from Slurm: topology.conf, ``scontrol show topology``, and what each task is told.

    tree = parse_topology_conf(text, where="topology.conf")
    tree = from_addresses({"h1": ("spine.rack1.h1", "switch.switch.node")})

The plugins are topology/tree and topology/block. The output of ``scontrol show topology`` has the
form of topology.conf; its lines have ``Level=`` or ``BlockIndex=``, and list below a switch *all*
nodes of its switches once more. Slurm's LinkSpeed has no unit and is not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from psdist.errors import PlacementError
from psdist.topology.network.tree import MAX_NODES, MAX_SWITCHES, ROOT, Tree, TreeBuilder, too_many
from psdist.topology.text import HOST_NAME, hostlist, numbered_lines, shown

_PAIR = re.compile(r"""\s*([A-Za-z]+)\s*=\s*(?:"([^"]*)"|(\S*))""")
_KEYS = {
    "switchname": {"switchname", "switches", "nodes", "linkspeed", "level"},
    "blockname": {"blockname", "nodes", "blockindex", "blocksize"},
    "aggregatedblock": {"aggregatedblock", "nodes", "blockindex", "blocksize"},
    "blocksizes": {"blocksizes"},
}
_OUTPUT_ONLY = {"level", "blockindex"}
_MAX_LINE = 4 << 20
_MAX_CHILDREN = 200_000  # parallel spines list the same leaves again


def parse_topology_conf(text: str, *, where: str) -> Tree:
    """The tree of a topology.conf or of ``scontrol show topology``, of switches or of blocks.

    Switches with the same switches below them (parallel spines) become one, called ``s[1-2]``.
    Blocks become racks under one root: BlockSizes says which unions of blocks a job may get, not
    how they are wired. ``where`` names the text in messages. Raises PlacementError, with the line,
    for what is neither, for a switch or node in two places, a circle, or an unknown switch.
    """
    builder = TreeBuilder(where=where, source=where)
    switches = Switches(builder)
    kinds: set[str] = set()
    has_speed = False
    for number, line in _joined_lines(text, where):
        place = f"{where}:{number}"
        fields = _fields(line, place)
        kind = next(iter(fields))
        kinds.add("tree" if kind == "switchname" else "block")
        has_speed = has_speed or "linkspeed" in fields
        if kind == "switchname":
            switches.add(
                fields["switchname"],
                place,
                switches=fields.get("switches", ""),
                nodes=fields.get("nodes", ""),
                is_shown="level" in fields,
            )
        elif kind == "blockname":
            add_block(builder, fields["blockname"], place, nodes=fields.get("nodes", ""))
        if len(kinds) > 1:
            raise PlacementError(
                f"{place}: switches and blocks in one text: give the one or the other"
            )
    switches.join()
    if has_speed:
        builder.notes.append(
            f"{where}: LinkSpeed has no unit in Slurm and is not used; links have the default speed"
        )
    return builder.build()


def from_addresses(addresses: Mapping[str, tuple[str, str]]) -> Tree:
    """The tree from each host's (SLURM_TOPOLOGY_ADDR, SLURM_TOPOLOGY_ADDR_PATTERN).

    ``spine.rack1.h1`` with ``switch.switch.node``. Parallel switches that Slurm writes as a list
    (``s[1-2].rack1.h1``) are one switch here, of that name. A host without a switch in its address
    is left out, with a note; where no host has one (pattern ``node``: no topology plugin),
    all are under one root. Raises PlacementError for addresses that fit no tree.
    """
    builder = TreeBuilder(where="SLURM_TOPOLOGY_ADDR", source="SLURM_TOPOLOGY_ADDR")
    left_out = []
    for host, (address, pattern) in addresses.items():
        place = f"SLURM_TOPOLOGY_ADDR of {host if HOST_NAME.fullmatch(host) else shown(host)}"
        if not HOST_NAME.fullmatch(host):
            raise PlacementError(f"{place}: that is not a host name: give the one of its node")
        kinds = pattern.split(".")
        # The node comes last, and may have dots in its own name.
        parts = address.split(".", len(kinds) - 1)
        if kinds[-1] != "node" or len(kinds) > 64 or len(parts) != len(kinds) or not all(parts):
            raise PlacementError(
                f"{place}: {shown(address)} does not fit its pattern {shown(pattern)}: expected "
                "switches and then the node, like 'spine.rack1.n1' with 'switch.switch.node'"
            )
        above = ""
        for name in parts[:-1]:
            hostlist.expand(name, max_hosts=MAX_SWITCHES, where=place)
            if not builder.has_switch(name):
                builder.add_switch(name, place=place)
                if above:
                    builder.put_under(name, above, place=place)
            elif builder.parent_of(name) != above:
                raise PlacementError(
                    f"{place}: switch {shown(name)} is under {shown(above)} here and under "
                    f"{shown(builder.parent_of(name))} for another host: no tree, give the racks "
                    "in a table of your own"
                )
            above = name
        if above:
            builder.add_node(host, above, place=place)
        else:
            left_out.append(host)
    if len(left_out) == len(addresses):
        builder.add_switch(ROOT, place="SLURM_TOPOLOGY_ADDR")
        for host in left_out:
            builder.add_node(host, ROOT, place="SLURM_TOPOLOGY_ADDR")
        builder.notes.append(
            "SLURM_TOPOLOGY_ADDR names no switches (Slurm runs without a topology plugin): one "
            "flat rack is assumed"
        )
        return builder.build()
    if left_out:
        builder.notes.append(
            f"SLURM_TOPOLOGY_ADDR names no switch for {hostlist.compress(left_out)}"
        )
    return builder.build()


class Switches:
    """The descriptions of switches, until all are read and can be joined.

    ``words`` are what the text calls the switches and the nodes below one.
    """

    def __init__(
        self, builder: TreeBuilder, *, words: tuple[str, str] = ("Switches=", "Nodes=")
    ) -> None:
        self._builder = builder
        self._words = words
        self._places: dict[str, str] = {}
        self._above: dict[frozenset[str], list[str]] = {}  # what is below: the switches above it
        self._num_children = 0

    def add(
        self, name: str, place: str, *, switches: str, nodes: str, is_shown: bool = False
    ) -> None:
        """``switches`` and ``nodes`` are host lists; ``is_shown``: as scontrol shows it, where
        the nodes are all below."""
        name = _name(name, place)
        if name in self._places:
            raise PlacementError(
                f"{place}: switch {shown(name)} is already at {self._places[name]}: name each "
                "switch once"
            )
        if len(self._places) >= MAX_SWITCHES:
            raise too_many(place, MAX_SWITCHES, "switches")
        self._places[name] = place
        if switches and nodes and not is_shown:
            raise PlacementError(
                f"{place}: switch {shown(name)} has both {' and '.join(self._words)}: Slurm takes "
                "one of them"
            )
        if not switches and not nodes and not is_shown:
            raise PlacementError(
                f"{place}: switch {shown(name)} has neither {' nor '.join(self._words)}: give one "
                "of them"
            )
        if switches:
            children = hostlist.expand(
                switches, max_hosts=_MAX_CHILDREN - self._num_children, where=place
            )
            self._num_children += len(children)
            self._above.setdefault(frozenset(children), []).append(name)
            return
        self._builder.add_switch(name, place=place)
        for node in hostlist.expand(nodes, max_hosts=MAX_NODES, where=place):
            self._builder.add_node(node, name, place=place)

    def join(self) -> None:
        """Put the switches under each other; parallel ones, with the same below them, become one.

        Slurm takes parallel spines (each leaf is listed by every one of them) and calls them
        ``s[1-2]`` in SLURM_TOPOLOGY_ADDR; so does this.
        """
        called = {
            name: hostlist.compress(names) for names in self._above.values() for name in names
        }
        for children, names in self._above.items():
            name, place = called[names[0]], self._places[names[0]]
            self._builder.add_switch(name, place=place)
            if len(names) > 1:
                self._builder.notes.append(f"{place}: {name} are parallel and count as one switch")
            for child in sorted(children, key=hostlist.natural_key):
                self._builder.put_under(called.get(child, child), name, place=place)


def add_block(builder: TreeBuilder, name: str, place: str, *, nodes: str) -> None:
    """A block is a rack; ``nodes`` is a host list."""
    name = _name(name, place)
    builder.add_switch(name, place=place)
    for node in hostlist.expand(nodes, max_hosts=MAX_NODES, where=place):
        builder.add_node(node, name, place=place)


def _name(text: str, place: str) -> str:
    if not HOST_NAME.fullmatch(text):
        raise PlacementError(
            f"{place}: {shown(text)} is not a name of a switch or block: use letters, digits, '.', "
            "'_' and '-'"
        )
    return text


def _joined_lines(text: str, where: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, line): without comments and empty lines, continuations joined."""
    begun, pieces, length = 0, [], 0
    for number, raw in numbered_lines(text):
        line = raw.split("#", 1)[0].rstrip()
        goes_on = line.endswith("\\")
        begun = begun or number
        pieces.append(line[:-1] if goes_on else line)
        length += len(line)
        if length > _MAX_LINE:
            raise PlacementError(
                f"{where}:{begun}: a line of more than {_MAX_LINE:,} characters: give the right "
                "file"
            )
        if goes_on:
            continue
        joined = " ".join(pieces)
        if joined.strip():
            yield begun, joined
        begun, pieces, length = 0, [], 0
    if " ".join(pieces).strip():
        yield begun, " ".join(pieces)


def _fields(line: str, place: str) -> dict[str, str]:
    """``Key=value`` pairs by lower-case key; the first says what the line describes."""
    fields: dict[str, str] = {}
    position, end = 0, len(line.rstrip())
    while position < end:
        match = _PAIR.match(line, position)
        if match is None or match.end() == position:
            raise PlacementError(
                f"{place}: {shown(line[position:end].strip())} is not Key=value: expected a line "
                "of topology.conf, like SwitchName=rack1 Nodes=n[1-16]"
            )
        key = match[1].lower()
        if key in fields:
            raise PlacementError(f"{place}: {shown(match[1])} is given twice: leave one")
        fields[key] = match[3] if match[2] is None else match[2]
        position = match.end()
    kind = next(iter(fields))
    known = _KEYS.get(kind)
    if known is None:
        raise PlacementError(
            f"{place}: a line that starts with {shown(kind)}: expected SwitchName=, BlockName= or "
            "BlockSizes="
        )
    unknown = [] if _OUTPUT_ONLY & fields.keys() else [key for key in fields if key not in known]
    if unknown:  # scontrol's lines may have more in newer versions; the file may not
        raise PlacementError(
            f"{place}: unknown key {shown(unknown[0])}: {kind} takes {', '.join(sorted(known))}"
        )
    return fields
