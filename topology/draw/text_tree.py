"""The lines of a plan's tree: switches, hosts, packages and ranks, at the given level of detail.

    lines = Tree(scene, Detail.ALIKE_FOLDED).lines()

In a group of alike hosts or switches the first is printed in full, for all of them
(``n[2-16]  as n1``); the one with the worst link always comes first in its group.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from psdist.topology.draw import (
    ACROSS,
    UNBOUND,
    Place,
    Scene,
    counted,
    machine_words,
    middle_cut,
    names,
    package_name,
    percent,
    roles_words,
    short_pci,
    shortened,
    speed,
)
from psdist.topology.machine import Device, Machine
from psdist.topology.plan import LinkLoad, PlannedRank
from psdist.topology.text.bitmap import format_list

MAX_INDENT = 30
"""Maximum indent in columns; deeper levels stay at it."""
MAX_LIST = 14
"""Characters of a list of cores; the plan itself has all of them."""


class Detail(IntEnum):
    """How much is told; each level folds what the one before tells."""

    EVERYTHING = 0
    ALIKE_FOLDED = 1
    LOADS_FOLDED = 2
    WITHOUT_RANKS = 3
    SWITCHES = 4


@dataclass(frozen=True, slots=True)
class Line:
    indent: str
    label: str
    loads: tuple[LinkLoad, ...] = ()


class Tree:
    """The lines of the tree at one level of detail. Walks with a stack: trees may be very deep."""

    def __init__(self, scene: Scene, detail: Detail, *, name_room: int = 1000) -> None:
        """Names of more characters than ``name_room`` are cut in their middle."""
        self._scene = scene
        self._detail = detail
        self._name_room = name_room
        self._numbers: dict[Hashable, int] = {}
        self._node_keys = [self._number(self._node_key(place)) for place in scene.nodes]
        self._switch_keys = self._keys_of_switches()
        self._marked = self._towards_worst()

    def lines(self) -> Iterator[Line]:
        root = list(self._scene.order[:1])
        waiting = [("", "", root, False)] if root else []
        while waiting:
            own, below, switches, is_folded = waiting.pop()
            if is_folded:
                yield self._folded_line(own, switches)
                continue
            yield self._switch_line(own, switches[0])
            hosts = self._node_groups(switches[0])
            groups = self._switch_groups(switches[0])
            for number, members in enumerate(hosts, start=1):
                yield from self._node_lines(below, number == len(hosts) and not groups, members)
            for number, group in reversed(list(enumerate(groups, start=1))):
                is_last = number == len(groups)
                if len(group) > 1:  # told after the first, so put on the stack before it
                    waiting.append((*_branch(below, is_last), group, True))
                waiting.append((*_branch(below, is_last and len(group) == 1), group[:1], False))

    # Keys by which equal subtrees are found

    def _number(self, key: Hashable) -> int:
        """Equal numbers for equal keys, so that a key of a subtree is not as deep as the tree."""
        return self._numbers.setdefault(key, len(self._numbers))

    def _node_key(self, place: Place) -> Hashable:
        detail = self._detail
        if detail == Detail.EVERYTHING:
            return place.node.name
        if detail == Detail.SWITCHES:
            return None
        seats: Hashable = roles_words(place.ranks)
        if detail < Detail.WITHOUT_RANKS:
            seats = tuple(
                (each.role, each.cores, each.package, each.gpu, each.nic) for each in place.ranks
            )
        if detail < Detail.LOADS_FOLDED:
            weights = self._scene.plan.weights
            servers = (each for each in place.ranks if each.role == "server")
            seats = (seats, tuple(percent(weights[each.index]) for each in servers))
        return (machine_words(place.node.machine), seats, self._load_key(place.link))

    def _load_key(self, link: LinkLoad | None) -> Hashable:
        if link is None or self._detail >= Detail.LOADS_FOLDED:
            return None
        return percent(self._scene.share(link))

    def _keys_of_switches(self) -> dict[int, int]:
        scene = self._scene
        keys: dict[int, int] = {}
        for switch in reversed(scene.order):
            uplink = scene.uplinks[switch]
            keys[switch] = self._number(
                (
                    tuple(sorted(self._node_keys[index] for index in scene.nodes_under[switch])),
                    tuple(sorted(keys[child] for child in scene.switches_under[switch])),
                    self._load_key(uplink),
                )
            )
        return keys

    def _towards_worst(self) -> frozenset[int]:
        """Switches whose uplink is the worst link, or that have it below them."""
        scene = self._scene
        found: set[int] = set()
        for switch in reversed(scene.order):
            below = scene.switches_under[switch]
            if (
                scene.is_worst(scene.uplinks[switch])
                or any(scene.is_worst(scene.nodes[i].link) for i in scene.nodes_under[switch])
                or not found.isdisjoint(below)
            ):
                found.add(switch)
        return frozenset(found)

    def _switch_groups(self, switch: int) -> list[list[int]]:
        groups: dict[int, list[int]] = {}
        for child in self._scene.switches_under[switch]:
            groups.setdefault(self._switch_keys[child], []).append(child)
        return [
            sorted(group, key=lambda child: child not in self._marked) for group in groups.values()
        ]

    def _node_groups(self, switch: int) -> list[list[Place]]:
        groups: dict[Hashable, list[Place]] = {}
        for index in self._scene.nodes_under[switch]:
            place = self._scene.nodes[index]
            if self._detail < Detail.SWITCHES or self._scene.is_worst(place.link):
                groups.setdefault(self._node_keys[index], []).append(place)
        return [
            sorted(group, key=lambda place: not self._scene.is_worst(place.link))
            for group in groups.values()
        ]

    # Lines

    def _switch_line(self, indent: str, index: int) -> Line:
        scene = self._scene
        switch, uplink = scene.cluster.switches[index], scene.uplinks[index]
        holds = ", ".join(
            words
            for words in (
                counted(len(scene.switches_under[index]), "switch", "switches"),
                counted(len(scene.nodes_under[index]), "node"),
            )
            if not words.startswith("0 ")
        )
        up = f", {speed(switch.bytes_per_s)} up" if uplink is not None else ""
        return Line(indent, f"{self._name(switch.name)}  {holds}{up}", _known([uplink]))

    def _name(self, name: str) -> str:
        return middle_cut(name, self._name_room)

    def _folded_line(self, indent: str, switches: list[int]) -> Line:
        scene = self._scene
        first, *others = switches
        folded = names([scene.cluster.switches[each].name for each in others])
        return Line(
            indent,
            f"{self._name(folded)}  as {self._name(scene.cluster.switches[first].name)}"
            f"{_rank_numbers(scene.below_switches(others))}",
            _known(scene.uplinks[each] for each in others),
        )

    def _node_lines(self, indent: str, is_last: bool, members: list[Place]) -> Iterator[Line]:
        if self._detail >= Detail.WITHOUT_RANKS:
            label = self._name(names([place.node.name for place in members]))
            each = " each" if len(members) > 1 else ""
            seats = f"{roles_words(members[0].ranks)}{each}{_rank_numbers(members)}"
            yield Line(
                _branch(indent, is_last)[0],
                f"{label}  {seats}",
                _known(place.link for place in members),
            )
            return
        first, others = members[0], members[1:]
        own, below = _branch(indent, is_last and not others)
        label = f"{self._name(first.node.name)}  {machine_words(first.node.machine)}"
        yield Line(own, label, _known([first.link]))
        yield from self._seat_lines(below, first)
        if others:
            folded = self._name(names([place.node.name for place in others]))
            label = f"{folded}  as {self._name(first.node.name)}"
            yield Line(
                _branch(indent, is_last)[0],
                f"{label}{_rank_numbers(others)}",
                _known(place.link for place in others),
            )

    def _seat_lines(self, indent: str, place: Place) -> Iterator[Line]:
        machine = place.node.machine
        entries = [
            (
                f"{package_name(package, index)}  {_package_words(place, index)}",
                place.on_package(index),
            )
            for index, package in enumerate(machine.packages)
        ]
        if place.across:
            entries.append((ACROSS, place.across))
        if place.unbound:
            entries.append((UNBOUND, place.unbound))
        for number, (label, ranks) in enumerate(entries, start=1):
            own, below = _branch(indent, number == len(entries))
            yield Line(own, label)
            for position, rank in enumerate(ranks, start=1):
                words = self._rank_words(rank, machine)
                yield Line(_branch(below, position == len(ranks))[0], words)

    def _rank_words(self, rank: PlannedRank, machine: Machine) -> str:
        plan = self._scene.plan
        num_packages, num_numa = len(machine.packages), len(machine.numa_nodes)
        parts = [f"rank {rank.rank:<4} {rank.role} {rank.index:<4}"]
        if rank.role == "server":
            parts[0] += f" holds {100 * plan.weights[rank.index]:5.1f} %"
        elif rank.role == "worker":
            parts[0] += f" group {rank.group:<7}"
        listed = shortened(format_list(rank.cores), MAX_LIST)
        words = f"{'core' if len(rank.cores) == 1 else 'cores'} {listed}"
        parts.append(f"{words if rank.cores else 'not bound':<12}")
        if rank.numa >= 0 and num_numa > num_packages:
            parts.append(f"numa {rank.numa}")
        if rank.gpu:
            parts.append(f"GPU {short_pci(rank.gpu)}")
        if rank.nic:
            parts.append(f"NIC {rank.nic}")
        return "  ".join(parts)


def _rank_numbers(places: Sequence[Place]) -> str:
    found = [each.rank for place in places for each in place.ranks]
    return f", {'rank' if len(found) == 1 else 'ranks'} {format_list(found)}" if found else ""


def _known(links: Iterable[LinkLoad | None]) -> tuple[LinkLoad, ...]:
    return tuple(link for link in links if link is not None)


def _package_words(place: Place, package: int) -> str:
    machine = place.node.machine
    cores = [core.logical for core in machine.cores if core.package == package]
    taken = place.rank_of_core()
    num_free = sum(core not in taken for core in cores)
    parts = [f"cores {format_list(cores)}, {num_free} free" if cores else "no cores"]
    parts += _device_words("GPU", machine.gpus, package)
    parts += _device_words("NIC", machine.nics, package)
    return "; ".join(parts)


def _device_words(word: str, devices: Sequence[Device], package: int) -> list[str]:
    found = [
        short_pci(device.pci) or device.name if word == "GPU" else device.name
        for device in devices
        if device.package == package
    ]
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return [f"{word} {', '.join(found[:4])}{more}"] if found else []


def _branch(indent: str, is_last: bool) -> tuple[str, str]:
    """The indent of a line one level further in, and of what hangs below that line."""
    below = indent + ("   " if is_last else "│  ")
    return indent + ("└─ " if is_last else "├─ "), below[:MAX_INDENT]
