"""How a fabric of many cables becomes a tree of few links: which switches act as one.

    groups = grouped(fabric, where="fabric.txt")      # leaves first, then level by level
    above, bytes_per_s = uplink(fabric, groups, home, 0)

Leaves that serve (nearly) the same hosts are the rails of one rack and become one switch with all
their uplinks; the switches above that serve the same racks become one as well, level by level. A
rail-optimised fabric with eight leaves for each rack comes out as one switch a rack.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from psdist.errors import PlacementError
from psdist.topology.text import HOST_NAME
from psdist.topology.text.hostlist import natural_key

SAME_RACK = 0.5
"""Two leaves are rails of one rack if at least this share of the hosts of both is on each of them
(Jaccard index). Not "all": a card that has lost its description, or a host with fewer cards,
must not split a rack, and a host with a card in each of two racks must not join them."""

_MAX_COMPARISONS = 2_000_000


@dataclass(slots=True)
class Fabric:
    """Content of the text. Switches by GUID; rates in bytes/s."""

    switches: dict[str, str] = field(default_factory=dict)  # GUID: description
    cards: Counter[str] = field(default_factory=Counter)  # switch: its card ports
    cables: dict[str, dict[str, float]] = field(default_factory=dict)  # as each end says
    ports: dict[str, dict[str, float]] = field(default_factory=dict)  # host: switch: rate
    guids: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_unnamed: int = 0
    num_unknown_rates: int = 0
    num_ports: int = 0


@dataclass(slots=True)
class Group:
    """Switches that act as one."""

    name: str
    members: list[str]
    level: int


def grouped(fabric: Fabric, where: str) -> list[Group]:
    """All switches in groups, leaves first, then level by level. Makes ``cables`` symmetric."""
    neighbours: dict[str, dict[str, float]] = {switch: {} for switch in fabric.switches}
    for switch, ends in fabric.cables.items():
        for peer, rate in ends.items():
            if peer in neighbours and peer != switch:
                # Each cable is told from both ends: take one, or the other where it is missing.
                known = max(rate, neighbours[peer].get(switch, 0.0))
                neighbours[switch][peer] = neighbours[peer][switch] = known
    fabric.cables = neighbours
    levels = _levels(fabric)
    groups: list[Group] = []
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
        by_name = [sorted(members, key=lambda each: natural_key(names[each])) for members in alike]
        for members in sorted(by_name, key=lambda members: natural_key(names[members[0]])):
            extra = f"+{len(members) - 1}" if len(members) > 1 else ""
            groups.append(Group(name=names[members[0]] + extra, members=members, level=level))
    return groups


def _levels(fabric: Fabric) -> dict[str, int]:
    """0 for leaves, and for the others how many cables they are above the nearest leaf.

    A leaf has cards. A spine may have some too (a subnet manager's host, a gateway): a switch is no
    leaf if most of its neighbours have more cards than itself.
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


def uplink(
    fabric: Fabric, groups: list[Group], home: dict[str, int], index: int
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


def num_circles(fabric: Fabric, home: dict[str, int]) -> int:
    """Links between groups that close a circle: 0 where the groups are a tree.

    A ring, a torus or a dragonfly has some; a fat tree has none, for its spines are one group.
    """
    pairs = {
        (min(home[one], home[other]), max(home[one], home[other]))
        for one, ends in fabric.cables.items()
        for other in ends
        if home[one] != home[other]
    }
    above = {group: group for group in home.values()}

    def top(group: int) -> int:
        while above[group] != group:
            above[group] = above[above[group]]
            group = above[group]
        return group

    circles = 0
    for one, other in sorted(pairs):
        first, second = top(one), top(other)
        circles += first == second
        above[first] = second
    return circles


def _switch_names(fabric: Fabric) -> dict[str, str]:
    """By GUID: the host part of the description where that is a name and no other's."""
    words: dict[str, str] = {}
    for guid, description in fabric.switches.items():
        # "MF0;A09-P1-IBLEAF-04-04:MQM9701/U1" -> A09-P1-IBLEAF-04-04
        word = description.rpartition(";")[2].partition(":")[0]
        words[guid] = word if HOST_NAME.fullmatch(word) else ""
    uses = Counter(words.values())
    return {guid: word if word and uses[word] == 1 else f"S-{guid}" for guid, word in words.items()}
