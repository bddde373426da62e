"""A plan for people: as text for a terminal, and as an SVG picture.

    scene = Scene.of(plan, cluster)
    scene.nodes[0].ranks, scene.nodes[0].link, scene.share(scene.nodes[0].link)
    size(4.9e9), duration(0.409)                    # "4.90 GB", "409 ms"

Here is what both show: a plan joined to its cluster (ranks to nodes, loads to links, the worst
link), and amounts in words. ``text``, ``matrix`` and ``svg`` draw it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from psdist.errors import PlacementError
from psdist.topology.machine import Device, Machine, Package
from psdist.topology.network import Cluster, Node
from psdist.topology.plan import LinkLoad, Plan, PlannedRank
from psdist.topology.text.hostlist import compress

TIE = 0.99
"""A link with at least this share of the worst link's time is as good as the worst."""
ACROSS, UNBOUND = "across packages", "not bound to cores"
"""Headings for ranks that are not inside one package."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A node with who sits on it."""

    node: Node
    ranks: tuple[PlannedRank, ...]
    """In rank order."""
    link: LinkLoad | None
    """None where the plan says nothing of this link."""

    def on_package(self, package: int) -> tuple[PlannedRank, ...]:
        return tuple(each for each in self.ranks if each.package == package)

    @property
    def across(self) -> tuple[PlannedRank, ...]:
        """Ranks with cores, but not all on one package that is known."""
        return tuple(each for each in self._elsewhere() if each.cores)

    @property
    def unbound(self) -> tuple[PlannedRank, ...]:
        """Ranks without cores of their own and without a package."""
        return tuple(each for each in self._elsewhere() if not each.cores)

    def _elsewhere(self) -> Iterator[PlannedRank]:
        known = range(len(self.node.machine.packages))
        return (each for each in self.ranks if each.package not in known)

    def rank_of_core(self) -> dict[int, PlannedRank]:
        """Rank by logical core number; unused cores are absent."""
        return {core: each for each in self.ranks for core in each.cores}

    def users(self, device: Device) -> list[PlannedRank]:
        """Return the ranks that compute on this GPU or send over this card."""
        if device.kind == "gpu":
            return [each for each in self.ranks if each.gpu and each.gpu == device.pci]
        names = (*device.names, device.pci)
        return [each for each in self.ranks if each.nic and each.nic in names]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    plan: Plan
    cluster: Cluster
    nodes: tuple[Place, ...]
    """As ``cluster.nodes``."""
    uplinks: tuple[LinkLoad | None, ...]
    """As ``cluster.switches``."""
    switches_under: tuple[tuple[int, ...], ...]
    """For each switch the switches directly below that have nodes somewhere below them."""
    nodes_under: tuple[tuple[int, ...], ...]
    """For each switch the nodes that hang directly on it."""
    order: tuple[int, ...]
    """Switches with nodes below them, parents before their children; the root first."""
    worst: LinkLoad | None
    """None where no link carries anything."""

    @classmethod
    def of(cls, plan: Plan, cluster: Cluster) -> Scene:
        """Raises PlacementError where the plan names a host that the cluster does not have."""
        loads = {(link.kind, link.name): link for link in plan.links}
        sitting: dict[str, list[PlannedRank]] = {node.name: [] for node in cluster.nodes}
        for each in sorted(plan.ranks, key=lambda each: each.rank):
            if each.host not in sitting:
                raise PlacementError(
                    f"the plan places rank {each.rank} on host {each.host[:80]!r}, which the "
                    "cluster does not have: draw a plan with the cluster that it was made for"
                )
            sitting[each.host].append(each)
        nodes_under: list[list[int]] = [[] for _ in cluster.switches]
        for index, node in enumerate(cluster.nodes):
            nodes_under[node.switch].append(index)
        order, switches_under = _tree(cluster, nodes_under)
        worst = plan.worst_link
        return cls(
            plan=plan,
            cluster=cluster,
            nodes=tuple(
                Place(
                    node=node,
                    ranks=tuple(sitting[node.name]),
                    link=loads.get(("node", node.name)),
                )
                for node in cluster.nodes
            ),
            uplinks=tuple(
                None if switch.parent < 0 else loads.get(("switch", switch.name))
                for switch in cluster.switches
            ),
            switches_under=tuple(map(tuple, switches_under)),
            nodes_under=tuple(map(tuple, nodes_under)),
            order=order,
            worst=worst if worst is not None and worst.seconds > 0 else None,
        )

    def share(self, link: LinkLoad) -> float:
        """The link's time over that of the worst link, 0 to 1."""
        return link.seconds / self.worst.seconds if self.worst is not None else 0.0

    def is_worst(self, link: LinkLoad | None) -> bool:
        """True for exactly one link, even if several have the same load."""
        return link is not None and link is self.worst

    @property
    def num_tied(self) -> int:
        """Other links within 1 % of the worst."""
        return sum(self.share(link) >= TIE for link in self.plan.links if not self.is_worst(link))

    def below(self, link: LinkLoad) -> tuple[Place, ...]:
        """The nodes that a link cuts off from the root."""
        if link.kind == "node":
            return tuple(place for place in self.nodes if place.node.name == link.name)
        switches = self.cluster.switches
        return self.below_switches(i for i in self.order if switches[i].name == link.name)

    def below_switches(self, switches: Iterable[int]) -> tuple[Place, ...]:
        """The nodes on these switches and on those below them."""
        waiting = list(switches)
        places: list[Place] = []
        while waiting:
            switch = waiting.pop()
            places += (self.nodes[index] for index in self.nodes_under[switch])
            waiting += self.switches_under[switch]
        return tuple(places)


def _tree(
    cluster: Cluster, nodes_under: list[list[int]]
) -> tuple[tuple[int, ...], list[list[int]]]:
    children: list[list[int]] = [[] for _ in cluster.switches]
    waiting: list[int] = []
    for index, switch in enumerate(cluster.switches):
        (children[switch.parent] if switch.parent >= 0 else waiting).append(index)
    order: list[int] = []
    for switch_index in iter(waiting):  # grows while it is walked
        order.append(switch_index)
        waiting += children[switch_index]
    has_nodes = [bool(members) for members in nodes_under]
    for index in reversed(order):
        children[index] = [child for child in children[index] if has_nodes[child]]
        has_nodes[index] = has_nodes[index] or bool(children[index])
    return tuple(index for index in order if has_nodes[index]), children


def size(num_bytes: float) -> str:
    """Three digits, decimal units: ``4.90 GB``."""
    return _scaled(num_bytes, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1, "B")))


def duration(seconds: float) -> str:
    """Three digits: ``409 ms``."""
    return _scaled(seconds, ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def speed(bytes_per_s: float) -> str:
    """Three digits without zeros at the end: ``12 GB/s``."""
    number, unit = size(bytes_per_s).split(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}/s"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    if value < 0.005 * units[-1][0]:  # what is left of nothing after sums of floats
        return f"0 {units[-1][1]}"
    factor, unit = next((each for each in units if value >= 0.9995 * each[0]), units[-1])
    scaled = value / factor
    return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"


def percent(share: float) -> str:
    return f"{max(0.0, 100 * share):.0f} %"


def times(ratio: float) -> str:
    """Format a ratio of two durations: ``2.63 times``."""
    return f"{ratio:.2f} times"


def counted(number: int, singular: str, plural: str = "") -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def names(hosts: Sequence[str]) -> str:
    """Many names in brackets, ``n[2-16]``; names that brackets cannot hold: the first and last."""
    if len(hosts) == 1:
        return hosts[0]
    try:
        return compress(hosts)
    except PlacementError:
        return f"{hosts[0]} to {hosts[-1]}"


def shortened(text: str, num_chars: int) -> str:
    """Cut to a length, with dots where something is missing."""
    if len(text) <= num_chars:
        return text
    return text[: max(0, num_chars - 3)] + "..."[: max(0, num_chars)]


def middle_cut(name: str, num_chars: int) -> str:
    """A name, or its beginning and its end, by which names differ."""
    if len(name) <= num_chars:
        return name
    kept = max(0, num_chars - 3)
    return name[: kept // 2] + "..."[: max(0, num_chars)] + name[len(name) - (kept - kept // 2) :]


def plain(text: str) -> str:
    """Return a name from a file without anything that a terminal would obey, one column a
    character."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)


def short_pci(pci: str) -> str:
    """Without the domain where it is the usual one: ``3b:00.0``."""
    return pci.removeprefix("0000:")


def machine_words(machine: Machine) -> str:
    """``2 packages, 16 cores, 2 GPUs, 1 NIC``; what it does not have is left out."""
    amounts = [
        counted(len(machine.packages), "package"),
        counted(len(machine.cores), "core"),
        counted(len(machine.gpus), "GPU"),
        counted(len(machine.nics), "NIC"),
    ]
    return ", ".join(words for words in amounts if not words.startswith("0 "))


def roles_words(ranks: Sequence[PlannedRank]) -> str:
    """``1 server, 4 workers, 1 spare``, or ``nobody``."""
    numbers = Counter(each.role for each in ranks)
    amounts = [counted(numbers[role], role) for role in ("server", "worker", "spare")]
    return ", ".join(words for words in amounts if not words.startswith("0 ")) or "nobody"


def gain_words(plan: Plan) -> list[str]:
    """For each other placement how its time compares: ``block 1.08 s, 2.63 times as long``."""
    found = []
    for name, seconds in plan.compared.items():
        ratio = seconds / plan.exchange_s if plan.exchange_s > 0 else 1.0
        compared = "the same" if abs(ratio - 1) < 0.005 else f"{times(ratio)} as long"
        found.append(f"{name} {duration(seconds)}, {compared}")
    return found


def limit_words(plan: Plan) -> str:
    """Name the limit, and the slowest link's time if links are not the limit."""
    if plan.limit == "links":
        return "the links limit"
    return f"the {plan.limit} limit; the slowest link takes {duration(plan.cost_s)}"


def bound_words(plan: Plan) -> str:
    """How far the plan is above what is proved: ``0.5 % above the bound of 410 ms``."""
    if plan.bound_s <= 0:
        return "without a proven bound" if plan.cost_s > 0 else "nothing crosses a link"
    above = 100 * (plan.cost_s / plan.bound_s - 1)
    # Below 0.05 % the distance is a rounding error of the solver.
    distance = "at" if above < 0.05 else f"{above:.1f} % above"
    of = "" if plan.limit == "links" else " of the links"
    return f"{distance} the lower bound{of} of {duration(plan.bound_s)}"


def worst_words(scene: Scene) -> str:
    """The worst link with its load, and how many are as bad."""
    worst = scene.worst
    if worst is None:
        return "none: nothing crosses a link"
    tied = f"; {counted(scene.num_tied, 'other')} within 1 % of it" if scene.num_tied else ""
    return (
        f"{link_name(worst)}, {speed(worst.bytes_per_s)}: {size(worst.num_bytes)} each way, "
        f"{duration(worst.seconds)}{tied}"
    )


def link_name(link: LinkLoad) -> str:
    return f"the link of node {link.name}" if link.kind == "node" else f"the uplink of {link.name}"


def package_name(package: Package, index: int) -> str:
    """By its logical number, and the system's where that is another one."""
    return f"package {index}" + (
        f" (P#{package.os_index})" if package.os_index not in (index, -1) else ""
    )
