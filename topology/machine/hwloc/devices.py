"""GPUs and network cards in a tree of hwloc's objects, with what is near them.

    devices = read_devices(document, packages, numa_nodes, cpu_sets, notes)
    devices[0].names, devices[0].package        # ('cuda0', 'nvml0'), 1

A device is near its nearest ancestor that is no I/O object. If that is the machine itself, the
place is unknown, unless there is one package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from psdist.topology.machine import UNKNOWN, Device, NumaNode, pci
from psdist.topology.machine.hwloc.elements import IO_KINDS, Document, Element
from psdist.topology.machine.hwloc.walk import CpuSets, Place
from psdist.topology.machine.numa import nearest, node_of

_GUID: Final = re.compile(r"Port[0-9]{1,2}GID0")
_PCI_TYPE: Final = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]")
_UUIDS: Final = ("NVIDIAUUID", "AMDUUID", "LevelZeroUUID")
# A GPU has several names; the one that users know comes first.
_NAME_ORDER: Final = ("cuda", "rsmi", "ze", "nvml", "opencl", "card", "renderD")
_COMPUTE: Final = ("CUDA", "NVML", "RSMI", "LevelZero")
# Only compute runtimes name GPUs here. A display driver's names (card0, controlD64, :0.0) do not
# count: a console's chip has them, too.
_COMPUTE_NAMES: Final = ("cuda", "rsmi", "ze", "nvml", "opencl")
_SCREEN_NAMES: Final = ("card", "render", "controlD", ":")

# osdev_type in hwloc 3 is a mask.
_GPU_BIT, _COPROCESSOR_BIT, _NETWORK_BITS = 4, 8, 16 | 32
# In 1 and 2 it is one number.
_GPU, _NETWORK, _OPENFABRICS, _COPROCESSOR = 1, 2, 3, 5


@dataclass(kw_only=True, slots=True)
class _Function:
    """A PCI function, or an OS device that is on none, and all that was found on it."""

    kind: pci.Kind | None
    pci: str
    near: Element
    bytes_per_s: float = 0.0
    bridges: tuple[str, ...] = ()
    is_display: bool = False
    """By its class; a GPU all the same where a compute runtime has named it."""
    names: list[str] = field(default_factory=list)
    uuid: str = ""
    guids: list[int] = field(default_factory=list)


def read_devices(
    document: Document,
    packages: Sequence[Place],
    numa_nodes: Sequence[NumaNode],
    cpu_sets: CpuSets,
    notes: list[str],
) -> tuple[Device, ...]:
    """Each GPU and network card once, in the tree's order; adds to ``notes`` what was left out."""
    found = _functions(document)
    functions = [each for each in found if each.kind is not None and (each.pci or each.names)]
    screens = [each.pci for each in found if each.is_display and each.kind is None and each.pci]
    cards = [each for each in functions if each.kind == "nic"]
    # An export without OS devices shows no card with a driver: then all stay.
    is_told = document.knows_drivers or any(card.names for card in cards)
    num_idle = sum(not card.names for card in cards) if is_told else 0
    if num_idle:
        functions = [each for each in functions if each.kind != "nic" or each.names]
    notes += pci.device_notes(screens, num_idle)
    num_beyond = len(functions) - pci.MAX_DEVICES
    if num_beyond > 0:
        notes.append(f"{num_beyond:,} devices beyond {pci.MAX_DEVICES:,} left out")
        del functions[pci.MAX_DEVICES :]
    places = _Places(document.root, packages, numa_nodes, cpu_sets)
    devices = tuple(places.device(each) for each in functions)
    num_unknown = sum(device.cpus is None for device in devices)
    if num_unknown:
        notes.append(
            f"for {num_unknown} of {len(devices)} devices the source does not say what is near"
        )
    return devices


def _functions(document: Document) -> list[_Function]:
    by_pci: dict[str, _Function] = {}
    others: list[_Function] = []
    root = document.root
    waiting: list[tuple[Element, Element, _Function | None]] = [(root, root, None)]
    while waiting:
        element, near, function = waiting.pop()
        if element.kind == "PCIDev":
            function = _function(element, near, by_pci)
        elif element.kind == "OSDev":
            if (kind := _os_kind(element, document.version)) is not None:
                on = function
                if on is None:
                    is_screen = element.attributes.get("name", "").startswith(_SCREEN_NAMES)
                    on = _Function(kind=None if is_screen else kind, pci="", near=near)
                    others.append(on)
                _add_names(on, element, kind)
        elif element.kind not in IO_KINDS:
            near, function = element, None
        waiting.extend((child, near, function) for child in reversed(element.children))
    return [*by_pci.values(), *others]


def _function(element: Element, near: Element, by_pci: dict[str, _Function]) -> _Function | None:
    bus = pci.bus_id(element.attributes.get("pci_busid", ""))
    if not bus:
        return None
    if bus not in by_pci:
        match = _PCI_TYPE.match(element.attributes.get("pci_type", "").lower())
        numbers = [int(each, 16) for each in match.groups()] if match else [0, 0, 0]
        by_pci[bus] = _Function(
            kind=pci.kind(numbers[0], vendor=numbers[1], device=numbers[2]),
            pci=bus,
            near=near,
            bytes_per_s=_speed(element.attributes.get("pci_link_speed", "")),
            bridges=_bridges(element),
            is_display=pci.is_display(numbers[0], vendor=numbers[1], device=numbers[2]),
        )
    return by_pci[bus]


def _bridges(element: Element) -> tuple[str, ...]:
    """Numbers of the bridges above a device, that of the host first."""
    found: list[str] = []
    above = element.parent
    while above is not None and above.kind == "Bridge":
        found.append(above.gp_index)
        above = above.parent
    return tuple(found[: -pci.MAX_BRIDGES - 1 : -1])


def _speed(text: str) -> float:
    """From hwloc's GB/s; 0 for anything that no link has."""
    try:
        speed = float(text)
    except ValueError:
        return 0.0
    return speed * 1e9 if 0 < speed < 1e6 else 0.0


def _os_kind(element: Element, version: int) -> pci.Kind | None:
    text = element.attributes.get("osdev_type", "")
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 4 else 0
    if version >= 3:
        is_network = bool(number & _NETWORK_BITS)
        is_gpu = bool(number & _GPU_BIT)
        is_coprocessor = bool(number & _COPROCESSOR_BIT)
    else:
        is_network = number in (_NETWORK, _OPENFABRICS)
        is_gpu = number == _GPU
        is_coprocessor = number == _COPROCESSOR
    if is_network:
        return "nic"
    name = element.attributes.get("name", "")
    is_compute = element.subtype in _COMPUTE or name.startswith(_NAME_ORDER)
    return "gpu" if is_gpu or (is_coprocessor and is_compute) else None


def _add_names(function: _Function, element: Element, kind: pci.Kind) -> None:
    name = element.attributes.get("name", "")
    # The class of the function decides; a console's chip stays one, with a card0 on it or not.
    is_certain = kind == "nic" or name.startswith(_COMPUTE_NAMES) or element.subtype in _COMPUTE
    if function.kind is None and is_certain:
        function.kind = kind
    if function.kind != kind:
        return
    if pci.NAME.fullmatch(name) and name not in function.names:
        function.names.append(name)
    for key in _UUIDS:
        text = element.infos.get(key, "")
        if not function.uuid and pci.NAME.fullmatch(text):
            function.uuid = text
    for key, value in element.infos.items():
        guid = pci.guid_of(value) if _GUID.fullmatch(key) else 0
        if guid and guid not in function.guids:
            function.guids.append(guid)


class _Places:
    """Finds what is near an element; caches the answers, for many devices share an element."""

    def __init__(
        self,
        root: Element,
        packages: Sequence[Place],
        numa_nodes: Sequence[NumaNode],
        cpu_sets: CpuSets,
    ) -> None:
        self._root = root
        self._is_single = len(packages) == 1
        self._by_element = {
            id(place.element): index for index, place in enumerate(packages) if place.element
        }
        self._by_cpu = {cpu: index for index, place in enumerate(packages) for cpu in place.cpus}
        self._own_node = nearest(numa_nodes)
        self._node_bits = {
            index: node.os_index for index, node in enumerate(numa_nodes) if node.is_dram
        }
        self._cpu_sets = cpu_sets
        self._known: dict[int, tuple[frozenset[int] | None, int, int]] = {}

    def device(self, function: _Function) -> Device:
        assert function.kind is not None
        key = id(function.near)
        if key not in self._known:
            self._known[key] = self._place(function.near)
        cpus, package, numa = self._known[key]
        return Device(
            kind=function.kind,
            names=tuple(sorted(function.names, key=_name_key)),
            pci=function.pci,
            cpus=cpus,
            package=package,
            numa=numa,
            uuid=function.uuid,
            port_guids=tuple(function.guids),
            bytes_per_s=function.bytes_per_s,
            bridges=function.bridges,
        )

    def _place(self, near: Element) -> tuple[frozenset[int] | None, int, int]:
        element: Element | None = near
        while element is not None and element.mask is None:
            element = element.parent
        if element is None or element is self._root:
            if not self._is_single:
                return None, UNKNOWN, UNKNOWN
            element = self._root
        cpus = self._cpu_sets(element.mask)
        return cpus, self._package(element, cpus), self._node(element, cpus)

    def _package(self, near: Element, cpus: frozenset[int]) -> int:
        element: Element | None = near
        while element is not None:
            if (index := self._by_element.get(id(element))) is not None:
                return index
            element = element.parent
        found = {self._by_cpu[cpu] for cpu in cpus}
        return found.pop() if len(found) == 1 else UNKNOWN

    def _node(self, near: Element, cpus: frozenset[int]) -> int:
        if cpus:
            return node_of(cpus, self._own_node)
        # None of the PUs near it is usable; the memory there may be.
        nodes = near.nodes or 0
        found = [index for index, bit in self._node_bits.items() if bit >= 0 and nodes >> bit & 1]
        return found[0] if len(found) == 1 else UNKNOWN


def _name_key(name: str) -> tuple[int, str]:
    for rank, prefix in enumerate(_NAME_ORDER):
        if name.startswith(prefix):
            return rank, name
    return len(_NAME_ORDER), name
