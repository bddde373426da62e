"""The processors and memories in a tree of hwloc's objects, in the order in which hwloc counts.

found = walk(document, where="node.xml")
[core.cpus for core in found.cores], found.usable      # online, allowed, no PU twice
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from psdist.errors import PlacementError
from psdist.topology.machine import UNKNOWN
from psdist.topology.machine.hwloc.elements import IO_KINDS, Document, Element, in_order
from psdist.topology.text import bitmap

_MAX_NODES: Final = 1024
"""Linux has no more NUMA nodes."""
_MAX_MEMBERS: Final = 1_000_000


@dataclass(kw_only=True, slots=True)
class Place:
    """A package, die, L3 or core with its usable PUs."""

    os_index: int
    element: Element | None = None
    cpus: list[int] = field(default_factory=list)
    has_memory: bool = False
    package: Place | None = None
    l3: Place | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inside:
    """The nearest enclosing element of each kind."""

    package: Place | None = None
    die: Place | None = None
    l3: Place | None = None
    core: Place | None = None
    group: Element | None = None
    near: Element


@dataclass(kw_only=True, slots=True)
class Found:
    """All there is, in hwloc's order; places without usable PUs included."""

    packages: list[Place] = field(default_factory=list)
    dies: list[Place] = field(default_factory=list)
    l3s: list[Place] = field(default_factory=list)
    cores: list[Place] = field(default_factory=list)
    groups: list[Element] = field(default_factory=list)
    """The outermost ones."""
    memories: list[tuple[Element, Element]] = field(default_factory=list)
    """Allowed NUMA nodes, each with the element that names the PUs near it."""
    usable: int = 0
    num_coreless: int = 0
    """PUs in no core; each got a core of its own."""


class CpuSets:
    """Sets of usable PUs for masks. Equal sets are one object, and all together are capped."""

    def __init__(self, usable: int, where: str) -> None:
        self._usable = usable
        self._where = where
        self._known: dict[int, frozenset[int]] = {}
        self._num_members = 0

    def __call__(self, mask: int | None) -> frozenset[int]:
        """The usable PUs in ``mask``; all of them for None. Raises PlacementError at the cap."""
        mask = self._usable if mask is None else mask & self._usable
        known = self._known.get(mask)
        if known is None:
            self._num_members += mask.bit_count()
            if self._num_members > _MAX_MEMBERS:
                raise PlacementError(
                    f"{self._where}: its sets of PUs have more than {_MAX_MEMBERS:,} members "
                    "together, as no machine's have; export the machine again"
                )
            known = self._known[mask] = bitmap.members(mask)
        return known


def walk(document: Document, *, where: str) -> Found:
    """Visits every object once: of siblings the normal ones first, then memory (hwloc's order).

    Raises PlacementError for PUs without a possible number, or twice in the tree.
    """
    return _Walk(document, where).run()


class _Walk:
    def __init__(self, document: Document, where: str) -> None:
        self.root = document.root
        self.where = where
        self.allowed = -1 if document.allowed is None else document.allowed
        if document.root.mask is not None:
            self.allowed &= document.root.mask
        self.allowed_nodes = -1 if document.allowed_nodes is None else document.allowed_nodes
        # In hwloc 1 a NUMA node is a level of the tree like any other.
        self.memory_kinds = ("NUMANode", "MemCache") if document.version > 1 else ()
        self.found = Found()

    def run(self) -> Found:
        waiting = [(self.root, _Inside(near=self.root))]
        while waiting:
            element, outside = waiting.pop()
            inside = self.enter(element, outside)
            normal: list[Element] = []
            memory: list[Element] = []
            for child in element.children:
                if child.kind in self.memory_kinds:
                    memory.append(child)
                elif child.kind not in IO_KINDS:
                    normal.append(child)
            # A stack: the element to visit first is pushed last.
            for child in reversed(in_order(normal) + sorted(memory, key=_first_node)):
                waiting.append((child, inside))
        return self.found

    def enter(self, element: Element, outside: _Inside) -> _Inside:
        """Notes what ``element`` is; returns what its children are inside of."""
        found = self.found
        package, die, l3, core = outside.package, outside.die, outside.l3, outside.core
        group, near = outside.group, element if element.mask is not None else outside.near
        match element.kind:
            case "Package":
                package = Place(os_index=element.os_index, element=element)
                found.packages.append(package)
            case "Die":
                die = Place(os_index=element.os_index)
                found.dies.append(die)
            case "L3Cache":
                l3 = Place(os_index=element.os_index)
                found.l3s.append(l3)
            case "Core":
                core = Place(os_index=element.os_index, package=package, l3=l3)
                found.cores.append(core)
            case "Group":
                if group is None:
                    found.groups.append(element)
                group = element
            case "NUMANode":
                self.add_memory(element, near, package)
            case "PU":
                self.add_pu(element, outside)
            case _:
                pass
        return _Inside(package=package, die=die, l3=l3, core=core, group=group, near=near)

    def add_memory(self, element: Element, near: Element, package: Place | None) -> None:
        number = element.os_index
        if number >= bitmap.MAX_CPUS or len(self.found.memories) >= _MAX_NODES:
            raise PlacementError(
                f"{self.where}: {element}: no machine has such a NUMA node, or more than "
                f"{_MAX_NODES} of them; export the machine again"
            )
        if number != UNKNOWN and not self.allowed_nodes >> number & 1:
            return
        self.found.memories.append((element, near))
        if package is not None:
            package.has_memory = True

    def add_pu(self, element: Element, inside: _Inside) -> None:
        number = element.os_index
        if not 0 <= number < bitmap.MAX_CPUS:
            raise PlacementError(
                f"{self.where}: a PU has the OS number {number}, which cannot be; export the "
                "machine again"
            )
        if not self.allowed >> number & 1:
            return
        if self.found.usable >> number & 1:
            raise PlacementError(
                f"{self.where}: {element} is in it twice; export the machine again"
            )
        self.found.usable |= 1 << number
        core = inside.core
        if core is None:
            core = Place(os_index=UNKNOWN, package=inside.package, l3=inside.l3)
            self.found.cores.append(core)
            self.found.num_coreless += 1
        for place in (inside.package, inside.die, inside.l3, core):
            if place is not None:
                place.cpus.append(number)


def _first_node(element: Element) -> int:
    """Sort key: neighbouring memories are in the order of node numbers."""
    nodes = element.nodes or 0
    return nodes & -nodes
