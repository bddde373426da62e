"""A tree of switches as a source tells it, before a job's hosts are put into it.

    builder.add_switch("rack1", place="topology.conf:1")
    builder.add_node("n1", "rack1", place="topology.conf:1")
    tree = builder.build()

Every source ends here: the builder collects in any order, and refuses what is no tree.
"""

from __future__ import annotations

from dataclasses import dataclass

from psdist.errors import PlacementError
from psdist.topology.text import shown

MAX_SWITCHES = 20_000
MAX_NODES = 100_000

ROOT = "network"
"""Name of the root that is added where a source has several roots, or none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeSwitch:
    name: str
    parent: str
    """Name of the switch above; "" for the root."""
    bytes_per_s: float
    """Sum of its uplinks' bandwidths, one direction; 0 unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeNode:
    name: str
    switch: str
    bytes_per_s: float
    """Sum of the bandwidths of its links to the switches, one direction; 0 unknown."""
    port_guids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tree:
    """``switches[0]`` is the root; every switch comes after its parent."""

    switches: tuple[TreeSwitch, ...]
    nodes: tuple[TreeNode, ...]
    source: str
    notes: tuple[str, ...] = ()
    is_exact: bool = True
    """False where the source's network is none, and this an approximation."""


class TreeBuilder:
    """Collects switches and nodes, each with its place for messages (``topology.conf:3``)."""

    def __init__(self, *, where: str, source: str) -> None:
        self._where = where
        self._source = source
        self._switches: dict[str, tuple[float, str]] = {}
        self._parents: dict[str, tuple[str, str]] = {}
        self._nodes: dict[str, tuple[TreeNode, str]] = {}
        self.notes: list[str] = []
        self.is_exact = True

    def has_switch(self, name: str) -> bool:
        return name in self._switches

    def parent_of(self, name: str) -> str:
        return self._parents[name][0] if name in self._parents else ""

    def add_switch(self, name: str, *, place: str, bytes_per_s: float = 0.0) -> None:
        if name in self._switches:
            raise PlacementError(
                f"{place}: switch {shown(name)} is already at {self._switches[name][1]}: name each "
                "switch once"
            )
        if len(self._switches) >= MAX_SWITCHES:
            raise too_many(place, MAX_SWITCHES, "switches")
        self._switches[name] = (bytes_per_s, place)

    def put_under(self, child: str, parent: str, *, place: str) -> None:
        """``child`` hangs under ``parent``; either may be added later."""
        known, at = self._parents.get(child, (parent, place))
        if known != parent:
            raise PlacementError(
                f"{place}: switch {shown(child)} is under {shown(parent)} here and under "
                f"{shown(known)} at {at}: psdist takes trees only, leave one (of "
                "parallel switches, each must have all the same below it)"
            )
        if len(self._parents) >= MAX_SWITCHES:
            raise too_many(place, MAX_SWITCHES, "switches")
        self._parents[child] = (parent, place)

    def add_node(
        self,
        name: str,
        switch: str,
        *,
        place: str,
        bytes_per_s: float = 0.0,
        port_guids: tuple[int, ...] = (),
    ) -> None:
        """A node twice under the same switch is taken (Slurm's lists overlap), the first counts."""
        if name in self._nodes:
            other, at = self._nodes[name]
            if other.switch == switch:
                return
            raise PlacementError(
                f"{place}: node {shown(name)} is under {shown(switch)} here and under "
                f"{shown(other.switch)} at {at}: leave one"
            )
        if len(self._nodes) >= MAX_NODES:
            raise too_many(place, MAX_NODES, "nodes")
        node = TreeNode(name=name, switch=switch, bytes_per_s=bytes_per_s, port_guids=port_guids)
        self._nodes[name] = (node, place)

    def build(self) -> Tree:
        """The tree; several roots get one above them. PlacementError for what is no tree."""
        if not self._switches:
            raise PlacementError(f"{self._where}: no switch in it: give the right file")
        children: dict[str, list[str]] = {name: [] for name in self._switches}
        for child, (parent, place) in self._parents.items():
            for name in (child, parent):
                if name not in self._switches:
                    raise PlacementError(
                        f"{place}: switch {shown(name)} is described nowhere: correct the name or "
                        "add the switch"
                    )
            children[parent].append(child)
        for node, place in self._nodes.values():
            if node.switch not in self._switches:
                raise PlacementError(
                    f"{place}: switch {shown(node.switch)} is described nowhere: correct the name "
                    "or add the switch"
                )
        roots = [name for name in self._switches if name not in self._parents]
        top = roots[0] if len(roots) == 1 else self._free_name(ROOT)
        if len(roots) > 1:
            self.notes.append(
                f"{self._where}: {len(roots)} switches have none above them "
                f"({', '.join(roots[:4])}{', ...' if len(roots) > 4 else ''}); one that joins them "
                "all is assumed"
            )
        ordered = list(roots)
        for name in ordered:  # grows while it is walked: breadth first, parents before children
            ordered += children[name]
        if len(ordered) < len(self._switches):
            reached = set(ordered)
            name = next(child for child in self._parents if child not in reached)
            place = self._parents[name][1]
            raise PlacementError(
                f"{place}: switch {shown(name)} is in a circle (it hangs below itself, or below "
                "switches that do): correct one of them"
            )
        switches = [] if len(roots) == 1 else [TreeSwitch(name=top, parent="", bytes_per_s=0.0)]
        for name in ordered:
            above = self.parent_of(name) or ("" if name == top else top)
            switches.append(
                TreeSwitch(name=name, parent=above, bytes_per_s=self._switches[name][0])
            )
        return Tree(
            switches=tuple(switches),
            nodes=tuple(node for node, _ in self._nodes.values()),
            source=self._source,
            notes=tuple(self.notes),
            is_exact=self.is_exact,
        )

    def _free_name(self, name: str) -> str:
        while name in self._switches:
            name += "+"
        return name


def too_many(place: str, limit: int, what: str) -> PlacementError:
    """The complaint about a text that describes more than any real network has."""
    return PlacementError(f"{place}: more than {limit:,} {what}: give the right file")
