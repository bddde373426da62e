"""Racks from what ``ibnetdiscover`` prints of an InfiniBand fabric.

Owns that text, and how a fabric of many cables becomes a tree of few links. The program is not
run here.

    tree = parse_ibnetdiscover(text, where="fabric.txt", hosts={0xe09d7303007a4bd8: "n1"})

Leaves that serve (nearly) the same hosts are the rails of one rack and become one switch, whose
uplinks are those of all of them; the switches above that serve the same racks become one as well,
level by level. So a rail-optimised fabric with eight leaves for each rack of nodes comes out as one
switch a rack. A host hangs under the rack that has most of its bandwidth.

Hosts are known by the description of their cards (``"n1 mlx5_0"``, what rdma-ndd sets), or, where
that names none, by the GUID of the port.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from psdist.errors import PlacementError
from psdist.topology.tree import MAX_SWITCHES, Tree, TreeBuilder
from psdist.topology.untrusted import HOST_NAME, numbered_lines, shown

LANE_GBIT_PER_S = {
    "SDR": 2.0,
    "DDR": 4.0,
    "QDR": 8.0,
    "FDR10": 10.0,
    "FDR": 14.0625 * 64 / 66,
    "EDR": 25.0,
    "HDR": 50.0,
    "NDR": 100.0,
    "XDR": 200.0,
}
"""Data rate of one lane. From the signalling rates of the InfiniBand architecture specification:
SDR 2.5, DDR 5, QDR 10 Gbit/s less 8b/10b coding; FDR10 10.3125, FDR 14.0625, EDR 25.78125 less
64b/66b; from HDR on (53.125, 106.25, 212.5) less 64b/66b in 256b/257b blocks and error correction,
the rates by which the links are sold."""

SAME_RACK = 0.5
"""Two leaves are rails of one rack if at least this share of the hosts of both is on each of them
(Jaccard index). Not "all": a card that has lost its description, or a host with fewer cards,
must not split a rack, and a host with a card in each of two racks must not join them."""

MAX_PORTS = 250_000
"""Of switches: both ends of each cable between them, and one of each card's. Some 5,000 hosts with
eight cards each have as many."""

_MAX_LINE = 4096
_MAX_COMPARISONS = 5_000_000
_SWITCH = re.compile(r'Switch\s+\d+\s+"S-([0-9a-fA-F]{1,16})"(?:\s+#\s+"(.*?)")?')
_OTHER_BLOCK = re.compile(r'(?:Ca|Rt)\s+\d+\s+"[HR]-')
_PORT = re.compile(
    r'\[\d+\](?:\[ext [^\]]*\])?(?:\([0-9a-fA-F]+\))?\s+"([SHR])-([0-9a-fA-F]{1,16})"\[\d+\]'
    r"(?:\[ext [^\]]*\])?(?:\(([0-9a-fA-F]{1,16})\))?"
)
_RATE = re.compile(r"([0-9]{1,2})x([A-Z]+[0-9]*)")
_ATTRIBUTE = re.compile(r"[a-z]+=|#")
_HOST_AND_DEVICE = re.compile(
    r"'?([A-Za-z0-9_][A-Za-z0-9._-]*) ([A-Za-z][A-Za-z0-9]*[-_]?[0-9]\S*)"
)
_NOT_HOSTS = {"localhost", "localhost.localdomain"}
_AGGREGATION = "aggregation node"


@dataclass(slots=True)
class _Fabric:
    """What the text says. Switches by GUID; rates in bytes/s."""

    switches: dict[str, str] = field(default_factory=dict)  # GUID: description
    cards: Counter[str] = field(default_factory=Counter)  # switch: its card ports
    cables: dict[str, dict[str, float]] = field(default_factory=dict)  # as each end says
    ports: dict[str, dict[str, float]] = field(default_factory=dict)  # host: switch: rate
    guids: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_unnamed: int = 0
    num_unknown_rates: int = 0
    num_ports: int = 0


@dataclass(slots=True)
class _Group:
    """Switches that act as one."""

    name: str
    members: list[str]
    level: int


def parse_ibnetdiscover(text: str, *, where: str, hosts: Mapping[int, str] | None = None) -> Tree:
    """The tree of a fabric. ``hosts`` names hosts by the GUIDs of their ports.

    A name in ``hosts`` goes before the card's description. Cards whose host is not known are left
    out, with a note. Speeds are bytes/s of data, one direction, by width and rate of each link.
    Raises PlacementError, with the line, for a text that ibnetdiscover does not print, and for one
    that names no host or no switch.
    """
    fabric = _read(text, where, hosts or {})
    if not fabric.switches:
        raise PlacementError(f"{where}: no switch in it: give all that ibnetdiscover printed")
    if not fabric.ports:
        raise PlacementError(
            f"{where}: none of the {fabric.num_unnamed} cards in it names its host: set node "
            "descriptions (rdma-ndd), or give the racks in a table"
        )
    groups = _grouped(fabric, where)
    builder = TreeBuilder(where=where, source=where)
    home = {member: index for index, group in enumerate(groups) for member in group.members}
    for index, group in enumerate(groups):
        above, rate = _uplink(fabric, groups, home, index)
        builder.add_switch(group.name, place=where, bytes_per_s=rate)
        if above >= 0:
            builder.put_under(group.name, groups[above].name, place=where)
    num_split = 0
    for host in sorted(fabric.ports):
        rates: dict[int, float] = defaultdict(float)
        for switch, rate in fabric.ports[host].items():
            rates[home[switch]] += rate or 1.0  # of unknown rate: counted, hardly weighed
        chosen = min(rates, key=lambda index: (-rates[index], index))
        num_split += len(rates) > 1
        builder.add_node(
            host,
            groups[chosen].name,
            place=where,
            bytes_per_s=sum(fabric.ports[host].values()),
            port_guids=tuple(sorted(fabric.guids[host])),
        )
    builder.notes += _notes(fabric, where, num_split)
    return builder.build()


def _notes(fabric: _Fabric, where: str, num_split: int) -> list[str]:
    notes = []
    if fabric.num_unnamed:
        notes.append(
            f"{where}: {fabric.num_unnamed} cards do not name their host and are left out; with "
            "the hosts' port GUIDs (from their lstopo files) they are found"
        )
    if fabric.num_unknown_rates:
        notes.append(f"{where}: {fabric.num_unknown_rates} links of unknown speed count as 0")
    if num_split:
        notes.append(
            f"{where}: {num_split} hosts have cards in several racks; each counts with all its "
            "cards to the rack that has most of its bandwidth"
        )
    return notes


def _read(text: str, where: str, hosts: Mapping[int, str]) -> _Fabric:
    fabric = _Fabric()
    block = ""  # GUID of the switch whose ports follow; "" in other blocks
    is_in_block = False
    for number, line in numbered_lines(text):
        place = f"{where}:{number}"
        if len(line) > _MAX_LINE:
            raise PlacementError(
                f"{place}: a line of {len(line):,} characters: give the right file"
            )
        if not line or line.isspace() or _ATTRIBUTE.match(line):
            continue
        if line[0] == "[" and is_in_block and not block:
            continue  # a card's own block: its switch's has told of the cable
        if match := _SWITCH.match(line):
            block, is_in_block = match[1].lower(), True
            if block in fabric.switches:
                raise PlacementError(f"{place}: switch S-{block} is there twice: give one listing")
            if len(fabric.switches) >= MAX_SWITCHES:
                raise PlacementError(
                    f"{place}: more than {MAX_SWITCHES:,} switches: give the right file"
                )
            fabric.switches[block] = match[2] or ""
        elif _OTHER_BLOCK.match(line):
            block, is_in_block = "", True
        elif block and (port := _PORT.match(line)):
            fabric.num_ports += 1
            if fabric.num_ports > MAX_PORTS:
                raise PlacementError(
                    f"{place}: more than {MAX_PORTS:,} ports: give the racks in a table"
                )
            _read_port(fabric, block, port, line, hosts)
        else:
            raise PlacementError(
                f"{place}: {shown(line)} is no line of ibnetdiscover's: give its output as it is"
            )
    return fabric


def _read_port(
    fabric: _Fabric, switch: str, port: re.Match[str], line: str, hosts: Mapping[int, str]
) -> None:
    """One cable, as the switch's side tells it: what is at the other end, and how fast it is."""
    kind, peer = port[1], port[2].lower()
    description = line[port.end() :]
    rate = _bytes_per_s(line.rstrip().rpartition(" ")[2])
    if kind == "S":
        ends = fabric.cables.setdefault(switch, {})
        ends[peer] = ends.get(peer, 0.0) + rate
        fabric.num_unknown_rates += not rate
        return
    quoted = description.partition('"')[2].rpartition('"')[0]
    if kind == "R" or _AGGREGATION in quoted.lower():  # inside the switch (SHARP), no host
        return
    fabric.cards[switch] += 1
    guid = int(port[3] or peer, 16)
    host = hosts.get(guid, "")
    if not host and (match := _HOST_AND_DEVICE.fullmatch(quoted)) and match[1] not in _NOT_HOSTS:
        host = match[1]
    if not HOST_NAME.fullmatch(host):
        fabric.num_unnamed += 1
        return
    fabric.num_unknown_rates += not rate
    links = fabric.ports.setdefault(host, {})
    links[switch] = links.get(switch, 0.0) + rate
    fabric.guids[host].append(guid)


@lru_cache(maxsize=64)
def _bytes_per_s(word: str) -> float:
    """Of ``4xNDR``; 0 for a speed that is not in the table."""
    match = _RATE.fullmatch(word)
    if match is None:
        return 0.0
    return int(match[1]) * LANE_GBIT_PER_S.get(match[2], 0.0) * 1e9 / 8


def _grouped(fabric: _Fabric, where: str) -> list[_Group]:
    """All switches in groups, leaves first, then level by level."""
    neighbours: dict[str, dict[str, float]] = {switch: {} for switch in fabric.switches}
    for switch, ends in fabric.cables.items():
        for peer, rate in ends.items():
            if peer in neighbours and peer != switch:
                # Each cable is told from both ends: take one, or the other where it is missing.
                known = max(rate, neighbours[peer].get(switch, 0.0))
                neighbours[switch][peer] = neighbours[peer][switch] = known
    fabric.cables = neighbours
    levels = _levels(fabric)
    groups: list[_Group] = []
    served: dict[str, set[str]] = {switch: set() for switch in fabric.switches}
    for host, links in fabric.ports.items():
        for switch in links:
            served[switch].add(host)
    names = _switch_names(fabric)
    for level in range(max(levels.values()) + 1):
        here = [switch for switch in fabric.switches if levels[switch] == level]
        if level:
            below = {s: group.name for group in groups for s in group.members}
            served = {
                switch: {below[peer] for peer in neighbours[switch] if levels[peer] == level - 1}
                for switch in here
            }
        alike = _alike({switch: served[switch] for switch in here}, names, where)
        by_name = [sorted(members, key=names.__getitem__) for members in alike]
        for members in sorted(by_name, key=lambda members: names[members[0]]):
            extra = f"+{len(members) - 1}" if len(members) > 1 else ""
            groups.append(_Group(name=names[members[0]] + extra, members=members, level=level))
    return groups


def _levels(fabric: _Fabric) -> dict[str, int]:
    """0 for leaves, and for the others how many cables they are above the nearest leaf.

    A leaf has cards. A spine may have some too (a subnet manager's host, a gateway): a switch most
    of whose neighbours have more cards than itself is no leaf.
    """
    cards, cables = fabric.cards, fabric.cables
    leaves = []
    for switch in fabric.switches:
        num_richer = sum(cards[peer] > cards[switch] for peer in cables[switch])
        if cards[switch] and 2 * num_richer <= len(cables[switch]):
            leaves.append(switch)
    levels = dict.fromkeys(leaves, 0)
    queue = list(leaves)
    for switch in queue:  # grows while it is walked: breadth first
        for peer in cables[switch]:
            if peer not in levels:
                levels[peer] = levels[switch] + 1
                queue.append(peer)
    return {switch: levels.get(switch, 0) for switch in fabric.switches}


def _alike(served: dict[str, set[str]], names: dict[str, str], where: str) -> list[list[str]]:
    """Switches that serve nearly the same, together. Those that serve nothing stay alone.

    Each is compared with the first of every group so far, fullest switches first; only groups that
    share something with it are looked at, and in all only so many: a made-up fabric ends here.
    """
    found: list[list[str]] = []
    sizes: list[int] = []
    holders: dict[str, list[int]] = defaultdict(list)
    num_comparisons = 0
    for switch in sorted(served, key=lambda each: (-len(served[each]), names[each])):
        mine = served[switch]
        num_comparisons += sum(len(holders[each]) for each in mine)
        if num_comparisons > _MAX_COMPARISONS:
            raise PlacementError(
                f"{where}: too many switches share hosts in too many ways to find racks: give the "
                "racks in a table"
            )
        shared = Counter(index for each in mine for index in holders[each])
        likeness = {
            index: number / (len(mine) + sizes[index] - number) for index, number in shared.items()
        }
        best = max(likeness, key=lambda index: (likeness[index], -index), default=-1)
        if best >= 0 and likeness[best] >= SAME_RACK:
            found[best].append(switch)
            continue
        for each in mine:
            holders[each].append(len(found))
        found.append([switch])
        sizes.append(len(mine))
    return found


def _uplink(
    fabric: _Fabric, groups: list[_Group], home: dict[str, int], index: int
) -> tuple[int, float]:
    """(index of the group above, or -1; bytes/s of all cables that lead up).

    At the top, where no cable leads up, the cables to neighbours count: they carry what leaves.
    """
    up: dict[int, float] = defaultdict(float)
    beside = 0.0
    for member in groups[index].members:
        for peer, rate in fabric.cables[member].items():
            other = home[peer]
            if groups[other].level > groups[index].level:
                up[other] += rate
            elif groups[other].level == groups[index].level and other != index:
                beside += rate
    if not up:
        return -1, beside
    return min(up, key=lambda other: (-up[other], other)), sum(up.values())


def _switch_names(fabric: _Fabric) -> dict[str, str]:
    """By GUID: the host part of the description where that is a name and no other's."""
    words: dict[str, str] = {}
    for guid, description in fabric.switches.items():
        # "MF0;A09-P1-IBLEAF-04-04:MQM9701/U1" -> A09-P1-IBLEAF-04-04
        word = description.rpartition(";")[2].partition(":")[0]
        words[guid] = word if HOST_NAME.fullmatch(word) else ""
    uses = Counter(words.values())
    return {guid: word if word and uses[word] == 1 else f"S-{guid}" for guid, word in words.items()}
