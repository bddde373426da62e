"""From what is known of the racks to a job's cluster: one function for every source.

tree = read_tree(Path("topology.conf"))
cluster = build_cluster(["n1", "n2"], machine, tree=tree)
cluster.notes                 # what was missing or assumed, for people
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from psdist.errors import PlacementError
from psdist.topology.machine import Machine, cards
from psdist.topology.network import (
    DEFAULT_LINK_BYTES_PER_S,
    Cluster,
    Node,
    Switch,
    host_files,
    infiniband,
    one_rack,
    rack_table,
    slurm,
    topology_yaml,
)
from psdist.topology.network.catalogue import UNMEASURED, Network, Speed
from psdist.topology.network.same_host import by_name, matched
from psdist.topology.network.tree import Tree
from psdist.topology.text import decoded, file_bytes, numbered_lines, shown
from psdist.topology.text.hostlist import listed

MAX_BYTES = 24 << 20
"""An ibnetdiscover listing of some 5,000 hosts with eight cards each."""

# These match a line without blanks at its ends: to skip blanks could take quadratic time.
_SLURM = re.compile(r"(?:SwitchName|BlockName|BlockSizes|AggregatedBlock)\s*=", re.IGNORECASE)
_TOML = re.compile(r"\[\[|(?:\[\s*)?[A-Za-z_\"'-][\w\"'.-]*\s*[=\]]")
_YAML = re.compile(r"---|%YAML|-(?:\s|$)|[A-Za-z_]\w*:(?:\s|$)|\[\s*\{")


def read_tree(path: Path, *, hosts: Mapping[int, str] | None = None) -> Tree:
    """The tree in a file, of whichever format it is; ``hosts`` as for :func:`parse_tree`.

    ``topology.yaml#NAME`` is the topology of that name in it. Raises PlacementError where the file
    cannot be read or has none of the formats.
    """
    file, mark, name = str(path).rpartition("#")
    if not mark or path.exists():
        file, name = str(path), ""
    data, where = file_bytes(Path(file), max_bytes=MAX_BYTES)
    return parse_tree(data, where=where, hosts=hosts, name=name)


def parse_tree(
    data: bytes, *, where: str, hosts: Mapping[int, str] | None = None, name: str = ""
) -> Tree:
    """The tree in a text: topology.conf or .yaml, scontrol's, ibnetdiscover's, or a TOML table.

    Told apart by the first line that is neither empty nor a comment. ``hosts`` names hosts by
    their port GUIDs (:func:`port_guids`), for ibnetdiscover; ``name`` is that of a topology, for
    topology.yaml. Raises PlacementError for all else.
    """
    text = decoded(data, where=where, max_bytes=MAX_BYTES)
    del data
    for number, raw in numbered_lines(text):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        is_yaml = _YAML.match(line) is not None
        if name and not is_yaml:
            raise PlacementError(
                f"{where}:{number}: #{name[:40]}: only a topology.yaml has topologies with names: "
                "leave it out"
            )
        if _SLURM.match(line):
            return slurm.parse_topology_conf(text, where=where)
        if infiniband.begins_one(raw):
            return infiniband.parse_ibnetdiscover(text, where=where, hosts=hosts)
        if _TOML.match(line):
            return rack_table.parse(text, where=where)
        if is_yaml:
            return topology_yaml.parse(text, where=where, name=name)
        if host_files.begins_one(line):
            raise PlacementError(
                f"{where}:{number}: {shown(line)} begins a list of hosts, which says "
                "nothing of racks: give it to --hostfile"
            )
        raise PlacementError(
            f"{where}:{number}: {shown(line)} begins no known format: expected "
            "topology.conf, topology.yaml, `scontrol show topology`, ibnetdiscover or a TOML table "
            "of [[switch]]"
        )
    raise PlacementError(f"{where}: nothing in it but comments: give the right file")


def port_guids(machines: Mapping[str, Machine]) -> dict[int, str]:
    """Host names by port GUID, as far as the machines' network cards tell theirs.

    A GUID that several hosts have is left out: one lstopo file was given for all of them.
    """
    found: dict[int, str] = {}
    shared: set[int] = set()
    for name, machine in machines.items():
        for guid in {guid for nic in machine.nics for guid in nic.port_guids}:
            if found.setdefault(guid, name) != name:
                shared.add(guid)
    return {guid: name for guid, name in found.items() if guid not in shared}


def build_cluster(
    names: Sequence[str],
    machines: Machine | Mapping[str, Machine],
    *,
    tree: Tree | None,
    network: Network | None = None,
    default_bytes_per_s: float | None = None,
) -> Cluster:
    """The cluster of a job on the hosts ``names``, in that order.

    ``n1.example.org`` and ``n1`` are one host where only one fits. Switches without any of the
    hosts are left out; a switch with one switch below it and nothing else is one with it, with
    the slower of both uplinks. Hosts that the tree does not have hang under the root.

    A link's speed (bytes/s, one direction): measured for it in ``network``, else of the tree, else
    for hosts' links typical between nodes in ``network``, else ``default_bytes_per_s``, else that
    of the host's network cards, else DEFAULT_LINK_BYTES_PER_S; of the tree's no more than the cards
    of a fast fabric carry. An uplink of unknown speed carries all that is below it (no
    oversubscription). A measurement that is a lower bound only raises the speed otherwise taken.
    Without a tree: one flat rack. The notes list the assumptions.

    Raises PlacementError for no or repeated names, a host without a machine, and if none of the
    hosts is in the tree.
    """
    _check(names, machines)
    notes: list[str] = []
    if tree is None:
        flat = one_rack(names, machines, bytes_per_s=0.0)
        nodes, switches, source = list(flat.nodes), list(flat.switches), flat.source
        notes.append("nothing is known about racks: one flat rack is assumed")
    else:
        nodes, switches = _placed(names, machines, tree, notes)
        source = tree.source
        notes = [*tree.notes, *notes]
    nodes = _with_node_speeds(nodes, network, default_bytes_per_s, notes)
    switches = _with_uplink_speeds(nodes, switches, network, notes)
    return Cluster(
        nodes=tuple(nodes),
        switches=tuple(switches),
        source=source,
        notes=tuple(notes),
        is_exact=tree is None or tree.is_exact,
    )


def _check(names: Sequence[str], machines: Machine | Mapping[str, Machine]) -> None:
    if not names:
        raise PlacementError("no hosts to plan for: name at least one")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PlacementError(f"host {shown(name)} is named twice: name each host once")
        seen.add(name)
        if not isinstance(machines, Machine) and name not in machines:
            raise PlacementError(
                f"host {shown(name)}: its machine is not known: give its lstopo file"
            )


def _placed(
    names: Sequence[str],
    machines: Machine | Mapping[str, Machine],
    tree: Tree,
    notes: list[str],
) -> tuple[list[Node], list[Switch]]:
    """Nodes under only those switches that matter to them. Speeds are 0 where not known."""
    guids = {} if isinstance(machines, Machine) else port_guids(machines)
    found = matched(names, tree.nodes, guids)
    missing = [name for name in names if name not in found]
    if len(missing) == len(names):
        raise PlacementError(
            f"{tree.source}: none of the hosts is in it ({listed(names)}; it has "
            f"{listed([node.name for node in tree.nodes])}): give the file of this cluster, or "
            "none"
        )
    if missing:
        notes.append(f"{tree.source}: without {listed(missing)}; assumed at the root")
    root = tree.switches[0].name
    homes = {name: found[name].switch if name in found else root for name in names}
    switches, index = _pruned(tree, set(homes.values()))
    nodes = [
        Node(
            name=name,
            machine=machines if isinstance(machines, Machine) else machines[name],
            switch=index[homes[name]],
            bytes_per_s=found[name].bytes_per_s if name in found else 0.0,
        )
        for name in names
    ]
    return nodes, switches


def _pruned(tree: Tree, homes: set[str]) -> tuple[list[Switch], dict[str, int]]:
    """(switches, root first; where each of ``homes`` is among them)."""
    parents = {switch.name: switch.parent for switch in tree.switches}
    needed: dict[str, set[str]] = {}  # name: the needed switches below it
    for home in homes:
        below = home
        needed.setdefault(home, set())
        while (above := parents[below]) and below not in needed.setdefault(above, set()):
            needed[above].add(below)
            below = above
    kept: list[Switch] = []
    index: dict[str, int] = {}
    merged: dict[str, tuple[int, float]] = {}  # its place above, and what the chain above allows
    for switch in tree.switches:  # parents first
        if switch.name not in needed:
            continue
        place, limit = merged.get(switch.parent, (index.get(switch.parent, -1), 0.0))
        rate = _slower(switch.bytes_per_s, limit)
        if switch.name not in homes and len(needed[switch.name]) == 1:
            merged[switch.name] = (place, rate if place >= 0 else 0.0)
            continue
        index[switch.name] = len(kept)
        kept.append(Switch(name=switch.name, parent=place, bytes_per_s=rate))
    return kept, index


def _slower(first: float, second: float) -> float:
    """Return the slower of two speeds; 0 means unknown."""
    return min(first, second) if first and second else first or second


def _with_node_speeds(
    nodes: Iterable[Node], network: Network | None, default: float | None, notes: list[str]
) -> list[Node]:
    nodes = list(nodes)
    links = network.node_links if network is not None else {}
    measured = by_name([node.name for node in nodes], links)
    typical = network.classes.get("node", UNMEASURED).bytes_per_s if network is not None else 0.0
    filled: list[Node] = []
    guessed: dict[tuple[float, str], list[str]] = {}
    limited: dict[tuple[float, float], list[str]] = {}
    for node in nodes:
        own = links[measured[node.name]] if node.name in measured else UNMEASURED
        rate = _known(own, node.bytes_per_s)
        most = _most(node.machine)
        if not rate:
            guess, how = _guess(node.machine, typical, default)
            rate = max(guess, own.bytes_per_s)
            guessed.setdefault((guess, how), []).append(node.name)
        elif max(most, own.bytes_per_s) < rate:
            limited.setdefault((rate, most), []).append(node.name)
            rate = max(most, own.bytes_per_s)
        filled.append(replace(node, bytes_per_s=rate))
    if network is not None and not measured and not typical:
        notes.append(
            f"the measured network has no link of these nodes (measured: {listed(network.hosts)})"
        )
    notes += [
        f"speed of the links of {listed(names)} not known: {guess / 1e9:.3g} GB/s, {how}"
        for (guess, how), names in guessed.items()
    ]
    notes += [
        f"the links of {listed(names)} carry {most / 1e9:.3g} GB/s, as their network cards do, of "
        f"the {rate / 1e9:.3g} GB/s that the switches tell"
        for (rate, most), names in limited.items()
    ]
    return filled


def _most(machine: Machine) -> float:
    """Bandwidth of a fast fabric's cards, in bytes/s; inf for other cards, which may be joined to
    one link."""
    of_cards = cards.link_bytes_per_s(machine) if cards.fabric_cards(machine) else 0.0
    return of_cards or math.inf


def _guess(machine: Machine, typical: float, default: float | None) -> tuple[float, str]:
    """(bytes/s of a host's link, where that is from)."""
    if typical:
        return typical, "typical of those measured"
    if default is not None:
        return default, "as given"
    of_cards = cards.link_bytes_per_s(machine)
    if not of_cards:
        return DEFAULT_LINK_BYTES_PER_S, "by default"
    used = cards.fabric_cards(machine) or machine.nics
    is_told = all(card.port_bytes_per_s for card in used)
    number = len(cards.fabric_cards(machine))
    what = f"its {number} network cards" if number > 1 else "its network card"
    return of_cards, f"{what}, by {'its ports' if is_told else 'the PCI bus, so at most'}"


def _with_uplink_speeds(
    nodes: Sequence[Node], switches: Sequence[Switch], network: Network | None, notes: list[str]
) -> list[Switch]:
    measured = network.switch_uplinks if network is not None else {}
    below = [0.0] * len(switches)
    for node in nodes:
        below[node.switch] += node.bytes_per_s
    filled, guessed = list(switches), []
    for index in reversed(range(len(switches))):  # children before their parents
        switch = switches[index]
        own = measured.get(switch.name, UNMEASURED)
        rate = _known(own, switch.bytes_per_s)
        if switch.parent < 0:
            rate = below[index]
        elif not rate:
            rate = max(below[index], own.bytes_per_s)
            guessed.append(switch.name)
        filled[index] = replace(switch, bytes_per_s=rate)
        if switch.parent >= 0:
            below[switch.parent] += rate
    if guessed:
        notes.append(
            f"speed of the uplinks of {listed(guessed[::-1])} not known: all that is below can "
            "pass (no oversubscription)"
        )
    return filled


def _known(measured: Speed, listed: float) -> float:
    """Speed of a link, from the measurement and the tree; 0 if neither has it."""
    if measured.is_lower_bound:
        return max(measured.bytes_per_s, listed) if listed else 0.0
    return measured.bytes_per_s or listed
