"""Racks from what ``ibnetdiscover`` prints of an InfiniBand fabric.

    tree = parse_ibnetdiscover(text, where="fabric.txt", hosts={0xe09d7303007a4bd8: "n1"})

A host hangs under the rack that has most of its bandwidth, with all its cards. Its name is in the
description of its cards (``"n1 mlx5_0"``, what rdma-ndd sets) or found by the GUID of the port.
Warnings among the lines and the headings of ``ibnetdiscover -g`` are passed over. Hosts whose cards
are joined without a switch are one rack.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

from psdist.errors import PlacementError
from psdist.topology.network.fabric import Fabric, grouped, num_circles, uplink
from psdist.topology.network.tree import MAX_SWITCHES, Tree, TreeBuilder
from psdist.topology.text import HOST_NAME, numbered_lines, shown
from psdist.topology.text.hostlist import natural_key

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

MAX_PORTS = 250_000
"""Maximum ports of switches: both ends of each cable between them, and one end of each card's.
Some 5,000 hosts with eight cards each have this number."""

_MAX_LINE = 4096
_SWITCH = re.compile(r'Switch\s+\d+\s+"S-([0-9a-fA-F]{1,16})"(?:\s+#\s+"(.*?)")?')
_OTHER_BLOCK = re.compile(r'(?:Ca|Rt)\s+\d+\s+"([HR])-[0-9a-fA-F]{1,16}"(?:\s+#\s+"(.*?)")?')
_PORT = re.compile(
    r'\[\d+\](?:\[ext [^\]]*\])?(?:\(([0-9a-fA-F]{1,16})\))?\s+"([SHR])-([0-9a-fA-F]{1,16})"\[\d+\]'
    r"(?:\[ext [^\]]*\])?(?:\s?\(([0-9a-fA-F]{1,16})\))?"
)
_RATE = re.compile(r"([0-9]{1,2})x([A-Z]+[0-9]*)")
_ATTRIBUTE = re.compile(r"[a-z]+=|#")
_MESSAGE = re.compile(
    r"ib(?:warn|debug|panic|error): |\S{0,200}: iberror: |\S{1,200}\.c:\d+; |DR path |-[IWE]- "
)
"""Lines of ibnetdiscover and its libraries on standard error, and of -s on standard output."""
_HEADING = re.compile(r"Chassis \d+(?: \(guid 0x[0-9a-fA-F]+\))?$|Non-Chassis Nodes|Hostname: ")
"""Headings of -g, which lists a switch of a chassis twice: as a spine or line node and a switch."""
_LIST = re.compile(r"(?:Switch|Ca|Router)\s+: 0x[0-9a-fA-F]+ ports ")
_PORTS_REPORT = re.compile(r"(?:SW|CA|RT)\s+\d+\s+\d+ 0x[0-9a-fA-F]+ ")
_DIFFERENCES = re.compile(r"[<>] ")
_LINK_INFO = re.compile(r"(?:Switch|CA): .*:$")
_OTHERS = {
    _LIST: "a list of nodes (ibnetdiscover -l, -H, -S or -R)",
    _PORTS_REPORT: "a report of ports (ibnetdiscover -p)",
    _DIFFERENCES: "differences between two fabrics (ibnetdiscover --diff)",
    _LINK_INFO: "the output of iblinkinfo",
}
_FIRST = re.compile(r'(?:vendid|devid|sysimgguid|switchguid|caguid)=|(?:Switch|Ca|Rt)\s+\d+\s+"')
_REMEDY = "give what ibnetdiscover prints without options"
_HOST_AND_DEVICE = re.compile(
    r"'?([A-Za-z0-9_][A-Za-z0-9._-]*) ([A-Za-z][A-Za-z0-9]*[-_]?[0-9]\S*)"
)
_DIRECT = "direct"
"""In place of a switch, where there is none."""
_NOT_HOSTS = {"localhost", "localhost.localdomain"}
_AGGREGATION = "aggregation node"


def begins_one(line: str) -> bool:
    """True if a text whose first line is ``line`` was printed by ibnetdiscover or iblinkinfo."""
    return any(each.match(line) for each in (_FIRST, _MESSAGE, _HEADING, *_OTHERS))


def parse_ibnetdiscover(text: str, *, where: str, hosts: Mapping[int, str] | None = None) -> Tree:
    """The tree of a fabric. ``hosts`` names hosts by the GUIDs of their ports.

    A name in ``hosts`` goes before the card's description. Cards whose host is not known are left
    out, with a note. Speeds are bytes/s of data, one direction, by width and rate of each link.
    Raises PlacementError, with the line, for a text that ibnetdiscover does not print, and for one
    that names no host or joins none to anything.
    """
    fabric, direct = _read(text, where, hosts or {})
    if not fabric.switches and not direct.cards:
        raise PlacementError(
            f"{where}: no switch in it, and no cards that are joined without one: give all that "
            "ibnetdiscover printed"
        )
    listed = fabric if fabric.switches else direct
    if not listed.cards:
        raise PlacementError(
            f"{where}: no card of a host in it: give all that ibnetdiscover printed"
        )
    if not listed.ports:
        raise PlacementError(
            f"{where}: none of the {listed.num_unnamed} cards in it names its host: set node "
            "descriptions (rdma-ndd), or give the racks in a table"
        )
    if not fabric.switches:
        return _without_switches(direct, where)
    ends = {peer for peers in fabric.cables.values() for peer in peers}
    num_missing = len(ends - fabric.switches.keys())
    groups = grouped(fabric, where)
    builder = TreeBuilder(where=where, source=where)
    if num_missing:
        builder.notes.append(
            f"{where}: cables lead to {num_missing} switches that are not listed: give all that "
            "ibnetdiscover printed"
        )
    home = {member: index for index, group in enumerate(groups) for member in group.members}
    num_tops = 0
    for index, group in enumerate(groups):
        above, rate = uplink(fabric, groups, home, index)
        builder.add_switch(group.name, place=where, bytes_per_s=rate)
        num_tops += above < 0
        if above >= 0:
            builder.put_under(group.name, groups[above].name, place=where)
    circles = num_circles(fabric, home)
    if circles or num_tops > 2:  # two that are joined are a tree
        builder.is_exact = False
        builder.notes.append(
            f"{where}: no tree: {num_tops} switches have none above them and {circles} links close "
            "circles, as in a ring, a torus or a dragonfly; the tree here is an approximation"
        )
    num_split = 0
    for host in sorted(fabric.ports, key=natural_key):
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


def _notes(fabric: Fabric, where: str, num_split: int) -> list[str]:
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


def _without_switches(fabric: Fabric, where: str) -> Tree:
    """One rack of hosts whose cards are joined to each other."""
    builder = TreeBuilder(where=where, source=where)
    builder.add_switch(_DIRECT, place=where)
    for host in sorted(fabric.ports, key=natural_key):
        builder.add_node(
            host,
            _DIRECT,
            place=where,
            bytes_per_s=fabric.ports[host][_DIRECT],
            port_guids=tuple(sorted(fabric.guids[host])),
        )
    if len(fabric.ports) > 2:
        builder.is_exact = False
        builder.notes.append(
            f"{where}: {len(fabric.ports)} hosts are joined without a switch; one rack of them all "
            "is an approximation"
        )
    builder.notes += _notes(fabric, where, num_split=0)
    return builder.build()


def _read(text: str, where: str, hosts: Mapping[int, str]) -> tuple[Fabric, Fabric]:
    """Return the fabric of switches, and the cards that are joined to other cards."""
    fabric, direct = Fabric(), Fabric()
    block = ""  # GUID of the switch whose ports follow; "" in other blocks
    card = ""  # description of the card whose ports follow
    is_in_block = is_grouped = is_known = False
    message = ""
    for number, line in numbered_lines(text):
        place = f"{where}:{number}"
        if len(line) > _MAX_LINE:
            raise PlacementError(
                f"{place}: a line of {len(line):,} characters: give the right file"
            )
        if not line or line.isspace() or _ATTRIBUTE.match(line):
            continue
        if match := _SWITCH.match(line):
            block, is_in_block = match[1].lower(), True
            is_known = block in fabric.switches
            if is_known and not is_grouped:
                raise PlacementError(f"{place}: switch S-{block} is there twice: give one listing")
            if len(fabric.switches) >= MAX_SWITCHES:
                raise PlacementError(
                    f"{place}: more than {MAX_SWITCHES:,} switches: give the right file"
                )
            fabric.switches.setdefault(block, match[2] or "")
        elif match := _OTHER_BLOCK.match(line):
            block, is_in_block = "", True
            card = (match[2] or "") if match[1] == "H" else ""
        elif is_in_block and (port := _PORT.match(line)):
            if block and is_known:
                continue
            if not block and port[2] != "H":
                continue  # its switch's own block has told of the cable
            fabric.num_ports += 1
            if fabric.num_ports > MAX_PORTS:
                raise PlacementError(
                    f"{place}: more than {MAX_PORTS:,} ports: give the racks in a table"
                )
            if block:
                _read_port(fabric, block, port, line, hosts)
            elif port[1]:
                _add_card(direct, _DIRECT, int(port[1], 16), card, _rate_in(line, port), hosts)
        elif _HEADING.match(line):
            block, is_in_block, is_grouped = "", False, True
        elif _MESSAGE.match(line):
            message = message or line
        else:
            raise _no_line(line, place)
    if message and not fabric.switches and not direct.cards:
        raise PlacementError(
            f"{where}: {shown(message)}: ibnetdiscover has listed nothing: mend what it complains "
            "of (run it as root, on a host with an active InfiniBand port)"
        )
    return fabric, direct


def _no_line(line: str, place: str) -> PlacementError:
    for kind, words in _OTHERS.items():
        if kind.match(line):
            return PlacementError(f"{place}: this is {words}, which has no tree: {_REMEDY}")
    return PlacementError(f"{place}: {shown(line)} is not a line of ibnetdiscover's: {_REMEDY}")


def _read_port(
    fabric: Fabric, switch: str, port: re.Match[str], line: str, hosts: Mapping[int, str]
) -> None:
    """One cable, as the switch's side tells it: what is at the other end, and how fast it is."""
    kind, peer = port[2], port[3].lower()
    rate = _rate_in(line, port)
    if kind == "S":
        ends = fabric.cables.setdefault(switch, {})
        ends[peer] = ends.get(peer, 0.0) + rate
        fabric.num_unknown_rates += not rate
        return
    quoted = line[port.end() :].partition('"')[2].rpartition('"')[0]
    if kind == "R" or _AGGREGATION in quoted.lower():  # inside the switch (SHARP), no host
        return
    _add_card(fabric, switch, int(port[4] or peer, 16), quoted, rate, hosts)


def _add_card(
    fabric: Fabric,
    switch: str,
    guid: int,
    description: str,
    bytes_per_s: float,
    hosts: Mapping[int, str],
) -> None:
    """A port of a card, known by its GUID, is joined to ``switch``."""
    fabric.cards[switch] += 1
    host = hosts.get(guid, "")
    match = _HOST_AND_DEVICE.fullmatch(description)
    if not host and match and match[1] not in _NOT_HOSTS:
        host = match[1]
    if not HOST_NAME.fullmatch(host):
        fabric.num_unnamed += 1
        return
    fabric.num_unknown_rates += not bytes_per_s
    links = fabric.ports.setdefault(host, {})
    links[switch] = links.get(switch, 0.0) + bytes_per_s
    fabric.guids[host].append(guid)


def _rate_in(line: str, port: re.Match[str]) -> float:
    """Bytes/s of the link; what -f prints comes after its rate."""
    for word in line[port.end() :].rpartition('"')[2].split():
        if _RATE.fullmatch(word):
            return _bytes_per_s(word)
    return 0.0


@lru_cache(maxsize=64)
def _bytes_per_s(word: str) -> float:
    """Return the bandwidth of a word such as ``4xNDR``; 0 for a speed that is not in the table."""
    match = _RATE.fullmatch(word)
    if match is None:
        return 0.0
    return int(match[1]) * LANE_GBIT_PER_S.get(match[2], 0.0) * 1e9 / 8
