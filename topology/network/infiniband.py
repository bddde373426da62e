"""Racks from what ``ibnetdiscover`` prints of an InfiniBand fabric.

Owns that text; how a fabric of many cables becomes a tree of few links is
:mod:`psdist.topology.network.fabric`'s. The program is not run here.

    tree = parse_ibnetdiscover(text, where="fabric.txt", hosts={0xe09d7303007a4bd8: "n1"})

A host hangs under the rack that has most of its bandwidth, with all its cards.

Hosts are known by the description of their cards (``"n1 mlx5_0"``, what rdma-ndd sets), or, where
that names none, by the GUID of the port.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

from psdist.errors import PlacementError
from psdist.topology.network.fabric import Fabric, grouped, num_circles, uplink
from psdist.topology.network.tree import MAX_SWITCHES, Tree, TreeBuilder
from psdist.topology.text.hostlist import natural_key
from psdist.topology.text.untrusted import HOST_NAME, numbered_lines, shown

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
"""Of switches: both ends of each cable between them, and one of each card's. Some 5,000 hosts with
eight cards each have as many."""

_MAX_LINE = 4096
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
    groups = grouped(fabric, where)
    builder = TreeBuilder(where=where, source=where)
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


def _read(text: str, where: str, hosts: Mapping[int, str]) -> Fabric:
    fabric = Fabric()
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
                f"{place}: {shown(line)} is not a line of ibnetdiscover's: give its output as it is"
            )
    return fabric


def _read_port(
    fabric: Fabric, switch: str, port: re.Match[str], line: str, hosts: Mapping[int, str]
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
