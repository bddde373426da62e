"""lstopo's XML, of hwloc 1, 2 or 3, as a :class:`~psdist.topology.machine.Machine`.

This module interprets the tree for processors and memory, and replaces levels that are missing.
``elements`` parses it under limits, ``walk`` goes through the tree in hwloc's order, ``devices``
reads attached devices. The input is not trusted. No module here starts a program:
:mod:`psdist.topology.machine.live` does that.

    machine = read(Path("node.xml"))
    machine.restricted({0, 1, 2, 3}).cores

Cores are numbered as hwloc (and so Open MPI) numbers them when it imports the same file: in the
order of the tree, without those that are offline or not allowed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Final

from psdist.errors import PlacementError
from psdist.topology.machine import (
    UNKNOWN,
    Core,
    Device,
    DeviceLink,
    Machine,
    NumaNode,
    Package,
    pci,
)
from psdist.topology.machine.hwloc.devices import read_devices
from psdist.topology.machine.hwloc.elements import (
    MAX_BYTES,
    CpuKind,
    Distances,
    Document,
    Element,
    read_document,
)
from psdist.topology.machine.hwloc.walk import CpuSets, Found, Place, walk
from psdist.topology.machine.numa import MemoryNode, nearest, ordinary
from psdist.topology.text import HOST_NAME, file_bytes, shown

_MAX_MEMORY_BYTES: Final = 1 << 60
_MAX_KINDS: Final = 64
_CORE_TYPES: Final = {"IntelLowPowerAtom": 0, "IntelAtom": 1, "IntelCore": 2}


def read(path: Path) -> Machine:
    """The machine in a file. Raises PlacementError, also where the file cannot be read."""
    data, where = file_bytes(path, max_bytes=MAX_BYTES)
    return parse(data, where=where)


def parse(data: bytes | str, *, where: str = "XML") -> Machine:
    """The usable part of the machine in ``data``; ``where`` is what errors call the source.

    Raises PlacementError, one line, for everything that is not a machine with at least one PU
    that is online and allowed. Levels that are missing are made up, each with a note.
    """
    where = " ".join(where.split())
    return machine_of(read_document(data, where=where), where=where)


def machine_of(document: Document, *, where: str) -> Machine:
    """The usable part of a tree of hwloc's objects, as :func:`parse`."""
    found = walk(document, where=where)
    if not found.usable:
        raise PlacementError(
            f"{where}: no PU in it is online and allowed; export the machine again, inside the job"
        )
    notes: list[str] = []
    if found.num_coreless:
        notes.append(f"{found.num_coreless} PUs are in no core: each of them counts as a core")
    cpu_sets = CpuSets(found.usable, where)
    numa_nodes = _numa_nodes(document, found, cpu_sets)
    packages = _packages(found, numa_nodes, cpu_sets, notes)
    devices = read_devices(document, packages, numa_nodes, cpu_sets, notes)
    l3s = [l3 for l3 in found.l3s if l3.cpus]
    return Machine(
        name=_name(document, notes),
        packages=tuple(
            Package(os_index=each.os_index, cpus=frozenset(each.cpus)) for each in packages
        ),
        dies=tuple(frozenset(die.cpus) for die in found.dies if die.cpus),
        numa_nodes=numa_nodes,
        l3_groups=tuple(frozenset(l3.cpus) for l3 in l3s),
        cores=_cores(document, found, packages, l3s, numa_nodes),
        devices=devices,
        links=read_links(document, devices, notes),
        notes=tuple(notes),
    )


def _name(document: Document, notes: list[str]) -> str:
    text = document.infos.get("HostName", "")
    if text and not HOST_NAME.fullmatch(text):
        notes.append(f"the host name {shown(text)} is none and was left out")
        return ""
    return text


def _numa_nodes(document: Document, found: Found, cpu_sets: CpuSets) -> tuple[NumaNode, ...]:
    nodes = [
        MemoryNode(
            os_index=element.os_index,
            cpus=cpu_sets(near.mask),
            memory_bytes=_memory_bytes(element),
            subtype=element.subtype or element.infos.get("Type", ""),
            is_special="DAXDevice" in element.infos,
            bandwidth=document.bandwidths.get(element.gp_index, 0),
        )
        for element, near in found.memories
    ]
    if not nodes:
        # Where there is one node only hwloc 1 has no element for it; its memory is the machine's.
        memory_bytes = _memory_bytes(document.root)
        nodes = [MemoryNode(os_index=0, cpus=cpu_sets(None), memory_bytes=memory_bytes)]
    return ordinary(nodes)


def _memory_bytes(element: Element) -> int:
    number = int(element.attributes.get("local_memory", "0"))
    return number if 0 <= number < _MAX_MEMORY_BYTES else 0


def _packages(
    found: Found, numa_nodes: Sequence[NumaNode], cpu_sets: CpuSets, notes: list[str]
) -> list[Place]:
    """Return the packages, or a substitute if that level is missing. Every core gets one."""
    if not found.packages:
        return _made_up_packages(found, numa_nodes, cpu_sets, notes)
    packages = [each for each in found.packages if each.cpus or each.has_memory]
    homeless = [core for core in found.cores if core.cpus and core.package is None]
    if homeless:
        notes.append("PUs that are in no package count as a package of their own")
        rest = Place(os_index=UNKNOWN)
        for core in homeless:
            core.package = rest
            rest.cpus.extend(core.cpus)
        packages.append(rest)
    return packages


def _made_up_packages(
    found: Found, numa_nodes: Sequence[NumaNode], cpu_sets: CpuSets, notes: list[str]
) -> list[Place]:
    everything = cpu_sets(None)
    groups = [cpu_sets(group.mask) for group in found.groups]
    nodes = [node.cpus for node in numa_nodes if node.is_dram]
    cores = [core for core in found.cores if core.cpus]
    parts = [everything]
    what = "the whole machine counts as one"
    for sets, name in ((groups, "groups"), (nodes, "NUMA nodes")):
        distinct = [part for part in dict.fromkeys(sets) if part]
        if len(distinct) > 1 and _shares_out(distinct, everything, cores):
            parts, what = distinct, f"{name} count as packages"
            break
    notes.append(f"no packages are named: {what}")
    packages = [Place(os_index=index, cpus=sorted(part)) for index, part in enumerate(parts)]
    owner = {cpu: package for package in packages for cpu in package.cpus}
    for core in cores:
        core.package = owner[core.cpus[0]]
    return packages


def _shares_out(
    parts: Sequence[frozenset[int]], everything: frozenset[int], cores: Sequence[Place]
) -> bool:
    """Whether each PU is in exactly one part and no core is cut."""
    if sum(map(len, parts)) != len(everything) or frozenset().union(*parts) != everything:
        return False
    owner = {cpu: index for index, part in enumerate(parts) for cpu in part}
    return all(len({owner[cpu] for cpu in core.cpus}) == 1 for core in cores)


def _cores(
    document: Document,
    found: Found,
    packages: Sequence[Place],
    l3s: Sequence[Place],
    numa_nodes: Sequence[NumaNode],
) -> tuple[Core, ...]:
    package_index = {id(place): index for index, place in enumerate(packages)}
    l3_index = {id(place): index for index, place in enumerate(l3s)}
    own_node = nearest(numa_nodes)
    masks = _ranked_kinds(document.kinds)
    return tuple(
        Core(
            logical=logical,
            cpus=tuple(sorted(core.cpus)),
            package=package_index[id(core.package)],
            numa=own_node.get(core.cpus[0], UNKNOWN),
            l3=UNKNOWN if core.l3 is None else l3_index[id(core.l3)],
            kind=next((rank for rank, mask in enumerate(masks) if mask >> core.cpus[0] & 1), 0),
        )
        for logical, core in enumerate(core for core in found.cores if core.cpus)
    )


def _ranked_kinds(kinds: Sequence[CpuKind]) -> list[int]:
    """Masks of the kinds of cores, the least powerful first; none where nothing ranks them.

    Frequencies alone do not: favoured cores of one kind differ in them.
    """
    if not 1 < len(kinds) <= _MAX_KINDS:
        return []
    for power_of in (_core_type, _capacity, lambda kind: kind.efficiency):
        powers = [power_of(kind) for kind in kinds]
        levels = sorted(set(powers))
        if len(levels) > 1 and levels[0] >= 0:
            masks = dict.fromkeys(levels, 0)
            for kind, power in zip(kinds, powers, strict=True):
                masks[power] |= kind.mask
            return list(masks.values())
    return []


def _core_type(kind: CpuKind) -> int:
    return _CORE_TYPES.get(kind.infos.get("CoreType", ""), -1)


def _capacity(kind: CpuKind) -> int:
    text = kind.infos.get("LinuxCapacity", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


_MAX_OBJECTS: Final = 256
_BYTES_PER_S: Final = 1e6
"""The unit of hwloc's matrices is MB/s."""
_INDEX: Final = re.compile(r"(?:([A-Za-z0-9]{1,16}):)?([0-9]{1,20})")
_VALUE: Final = re.compile(r"[0-9]{1,12}")
_SWITCH: Final = "switch"
_PROCESSOR: Final = ""


def read_links(
    document: Document, devices: Sequence[Device], notes: list[str]
) -> tuple[DeviceLink, ...]:
    """Return one link per pair of GPUs, or GPU and processor, from the bandwidth matrices (NVLink,
    XGMI), however many matrices name the pair. Unreadable entries are left out with a note.

    hwloc 1 has no matrices. NVSwitches have no place among devices: GPUs that share switches count
    as linked, by the sum over the switches of the slower of the two ways. So do GPUs on different
    switches: if a host has two boards of them (DGX-2), trunks join the boards at full speed, which
    the driver does not report.
    """
    gpus = {device.pci for device in devices if device.kind == "gpu" and device.pci}
    if not document.distances or not gpus:
        return ()
    names = _names(document, gpus)
    found: dict[tuple[str, str], float] = {}
    for distances in document.distances:
        matrix = _matrix(distances)
        if matrix is None:
            notes.append(f"its matrix {distances.name} cannot be read and was left out")
            continue
        ends = [names.get(match[2], "?") for match in matrix[0]]
        for pair, speed in _pairs(ends, matrix[1], gpus):
            found[pair] = max(found.get(pair, 0.0), speed)
    return tuple(
        DeviceLink(first=first, second=second, bytes_per_s=speed * _BYTES_PER_S)
        for (first, second), speed in found.items()
    )


def _names(document: Document, gpus: set[str]) -> dict[str, str]:
    """gp_index to the bus id of its GPU, to "" for a processor, or to ``switch``."""
    names: dict[str, str] = {}
    waiting = [(document.root, "")]
    while waiting:
        element, bus = waiting.pop()
        if element.kind == "PCIDev":
            bus = pci.bus_id(element.attributes.get("pci_busid", ""))
            names[element.gp_index] = bus if bus in gpus else _SWITCH
        elif element.kind == "OSDev":
            if bus in gpus:
                names[element.gp_index] = bus
        elif element.kind in ("Package", "NUMANode", "Machine"):
            names[element.gp_index] = _PROCESSOR
        waiting.extend((child, bus) for child in element.children)
    return names


def _matrix(distances: Distances) -> tuple[list[re.Match[str]], list[list[int]]] | None:
    # hwloc cuts the text into elements at ends of words only.
    words = " ".join(distances.indexes).split()
    numbers = " ".join(distances.values).split()
    size = len(words)
    if not 0 < size <= _MAX_OBJECTS or len(numbers) != size * size:
        return None
    indexes = [match for word in words if (match := _INDEX.fullmatch(word))]
    if len(indexes) != size or not all(_VALUE.fullmatch(each) for each in numbers):
        return None
    values = [int(each) for each in numbers]
    return indexes, [values[start : start + size] for start in range(0, size * size, size)]


def _pairs(
    ends: Sequence[str], rows: Sequence[Sequence[int]], gpus: set[str]
) -> list[tuple[tuple[str, str], float]]:
    own = [index for index, end in enumerate(ends) if end in gpus]
    switches = [index for index, end in enumerate(ends) if end == _SWITCH]
    pairs: list[tuple[tuple[str, str], float]] = []
    for one, other in combinations(own, 2):
        direct = max(rows[one][other], rows[other][one])
        switched = sum(
            min(rows[one][switch], rows[switch][other], rows[other][switch]) for switch in switches
        ) or min(sum(rows[end][switch] for switch in switches) for end in (one, other))
        if ends[one] != ends[other] and direct + switched > 0:
            pair = (min(ends[one], ends[other]), max(ends[one], ends[other]))
            pairs.append((pair, float(direct + switched)))
    for one in own:
        speed = max((rows[one][at] for at, end in enumerate(ends) if end == _PROCESSOR), default=0)
        if speed > 0:
            pairs.append(((ends[one], _PROCESSOR), float(speed)))
    return pairs
