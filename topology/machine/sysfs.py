"""Read this machine's processors, memory and devices from /sys, where lstopo is missing.

    package_of_affinity()   # 0, or -1 where /sys does not say
    read_machine().cores    # all that the cgroup allows; restrict it to the affinity

The sets of PUs become a tree of hwloc's objects, which the reader of lstopo's XML interprets. GPUs
carry the names of their drivers (``card0``), not those of a runtime: join by ``pci`` or ``uuid``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from psdist.errors import PlacementError
from psdist.topology.machine import UNKNOWN, Machine, cards, kernel_files, pci
from psdist.topology.machine.hwloc import machine_of
from psdist.topology.machine.hwloc.elements import CpuKind, Document, Element
from psdist.topology.text import bitmap

_CPUS: Final = Path("/sys/devices/system/cpu")
_MAX_CACHES: Final = 16
_TYPES: Final = {
    "cpu_lowpower": "IntelLowPowerAtom",
    "cpu_atom": "IntelAtom",
    "cpu_core": "IntelCore",
}
"""Folder of a kind of cores of Intel's hybrid processors, and hwloc's name of the kind."""
_HOST_BRIDGE: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_UUID: Final = re.compile(r"^GPU UUID:\s+(GPU-[0-9a-fA-F-]{36})$", re.MULTILINE)
_OS_DEVICES: Final = {
    "gpu": ("1", ("drm/card*",)),
    "nic": ("2", ("net/*", "virtio*/net/*", "infiniband/*")),
}
"""hwloc's number of a kind of devices, and where their names are."""


def package_of_affinity(cpus: Path = _CPUS, affinity: set[int] | None = None) -> int:
    """The package (socket) that holds most of ``affinity``, lowest number on a tie; -1 unknown."""
    packages: Counter[int] = Counter()
    for cpu in sorted(os.sched_getaffinity(0) if affinity is None else affinity):
        package = kernel_files.number(cpus / f"cpu{cpu}/topology/physical_package_id")
        if package is not None:
            packages[package] += 1
    if not packages:
        return -1
    return min(packages, key=lambda package: (-packages[package], package))


def read_machine(root: Path = Path("/")) -> Machine:
    """The machine below ``root``, of what is online and allowed by this process's cgroup.

    Raises PlacementError where /sys has no processors, or none that are allowed.
    """
    online, allowed = _online(root), allowed_cpus(root)
    usable = online if allowed is None else online & allowed
    where = f"{root / 'sys/devices/system/cpu'}"
    if not usable:
        raise PlacementError(
            f"{where}: no processor in it is online and allowed; give the machine as a file of "
            "lstopo --of xml"
        )
    tree = _Tree(online)
    levels = _levels(root, online)
    for kind, number, cpus in sorted(levels, key=lambda level: -len(level[2])):
        tree.add(kind, cpus, number)
    for cpu in online:
        tree.add("PU", {cpu}, cpu)
    _add_nodes(tree, root)
    _add_devices(tree, root, usable)
    document = Document(
        version=2,
        allowed=bitmap.mask_of(usable),
        infos={"HostName": kernel_files.text(root / "proc/sys/kernel/hostname")},
        kinds=_kinds(root, usable),
        knows_drivers=True,
    )
    document.root = tree.root
    machine = machine_of(document, where=where)
    in_order = sorted(machine.devices, key=lambda device: device.pci)
    return replace(
        machine, devices=tuple(cards.with_port_speed(device, root) for device in in_order)
    )


class _Tree:
    """Objects in the objects whose PUs contain theirs; larger ones must come first."""

    def __init__(self, online: frozenset[int]) -> None:
        self.online = online
        self.root = Element(kind="Machine", mask=bitmap.mask_of(online))
        self.nodes: dict[int, Iterable[int]] = {}
        self._innermost = dict.fromkeys(online, self.root)

    def add(self, kind: str, cpus: Iterable[int], number: int = UNKNOWN) -> Element:
        inside = self.online.intersection(cpus)
        mask = bitmap.mask_of(inside)
        above = self._innermost[min(inside)] if inside else self.root
        while above.parent is not None and mask & ~(above.mask or 0):
            above = above.parent
        element = above.add(Element(kind=kind, os_index=number, mask=mask))
        if kind not in ("NUMANode", "Near"):
            self._innermost.update(dict.fromkeys(inside, element))
        return element


def allowed_cpus(root: Path = Path("/")) -> frozenset[int] | None:
    """The PUs that the cgroup of this process has; None where no cgroup says. Either version."""
    for line in kernel_files.text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            base, name = "sys/fs/cgroup", "cpuset.cpus.effective"
        elif "cpuset" in controllers.split(","):
            base, name = "sys/fs/cgroup/cpuset", "cpuset.effective_cpus"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        # A container may not see its own folder, but only one above it.
        for end in range(len(parts), -1, -1):
            found = kernel_files.cpu_list(root.joinpath(base, *parts[:end], name))
            if found:
                return found
    return None


def _online(root: Path) -> frozenset[int]:
    folder = root / "sys/devices/system/cpu"
    listed = kernel_files.cpu_list(folder / "online")
    if listed is not None:
        return listed
    names = (path.parent.name[3:] for path in kernel_files.entries(folder, "cpu[0-9]*/topology"))
    return frozenset(int(name) for name in names if name.isdecimal())


def _levels(root: Path, online: frozenset[int]) -> list[tuple[str, int, frozenset[int]]]:
    """Return (kind, number, PUs) from packages down to cores; equal sets in this order."""
    packages: dict[int, set[int]] = {}
    dies: dict[tuple[int, int], set[int]] = {}
    caches: dict[int, list[frozenset[int]]] = {}
    cores: list[frozenset[int]] = []
    seen: set[int] = set()
    for cpu in sorted(online):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}"
        package = kernel_files.number(folder / "topology/physical_package_id")
        if package is not None and package >= 0:
            packages.setdefault(package, set()).add(cpu)
            die = kernel_files.number(folder / "topology/die_id")
            if die is not None and die >= 0:
                dies.setdefault((package, die), set()).add(cpu)
        if cpu in seen:
            continue
        siblings = kernel_files.cpu_list(folder / "topology/core_cpus_list")
        if siblings is None:  # before Linux 5.3
            siblings = kernel_files.cpu_list(folder / "topology/thread_siblings_list")
        core = (((siblings or frozenset()) & online) - seen) | {cpu}
        cores.append(core)
        seen |= core
        _read_caches(folder, online, caches)
    if sum(map(len, packages.values())) != len(online):
        packages = {}
    found = [("Package", number, frozenset(cpus)) for number, cpus in packages.items()]
    if len(dies) > len(packages):  # as in hwloc: else the level says nothing
        found += [("Die", UNKNOWN, frozenset(cpus)) for cpus in dies.values()]
    for level in sorted(caches, reverse=True):
        found += [(f"L{level}Cache", UNKNOWN, cpus) for cpus in caches[level]]
    return found + [("Core", UNKNOWN, cpus) for cpus in cores]


def _read_caches(
    folder: Path, online: frozenset[int], caches: dict[int, list[frozenset[int]]]
) -> None:
    """Add the caches of a PU, by level; of each level disjoint ones."""
    for index in range(_MAX_CACHES):
        cache = folder / f"cache/index{index}"
        level = kernel_files.number(cache / "level")
        if level is None:
            return
        shared = kernel_files.cpu_list(cache / "shared_cpu_list")
        if shared is None or kernel_files.text(cache / "type") == "Instruction":
            continue
        shared &= online
        known = caches.setdefault(level, [])
        if shared and shared not in known[-1:] and not any(shared & other for other in known):
            known.append(shared)


def _add_nodes(tree: _Tree, root: Path) -> None:
    """Add all nodes, by number; one for everything where the kernel has none."""
    nodes = {}
    for folder in kernel_files.entries(root / "sys/devices/system/node", "node[0-9]*"):
        cpus = kernel_files.cpu_list(folder / "cpulist")
        if cpus is not None and folder.name[4:].isdecimal():
            nodes[int(folder.name[4:])] = cpus, folder / "meminfo"
    for number, (cpus, meminfo) in (nodes or {0: (tree.online, root / "proc/meminfo")}).items():
        tree.nodes[number] = cpus
        node = tree.add("NUMANode", cpus, number)
        node.nodes = 1 << number
        node.attributes["local_memory"] = str(_memory_bytes(kernel_files.text(meminfo)))


def _memory_bytes(meminfo: str) -> int:
    for line in meminfo.splitlines():
        words = line.split()
        if "MemTotal:" in words and words[-1] == "kB" and words[-2].isdecimal():
            return int(words[-2][:15]) * 1024
    return 0


def _kinds(root: Path, usable: frozenset[int]) -> list[CpuKind]:
    found = [
        CpuKind(mask=bitmap.mask_of(cpus), infos={"CoreType": name})
        for folder, name in _TYPES.items()
        if (cpus := kernel_files.cpu_list(root / "sys/devices" / folder / "cpus"))
    ]
    if found:
        return found
    by_capacity: dict[int, set[int]] = {}
    for cpu in usable:
        path = root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity"
        by_capacity.setdefault(kernel_files.number(path) or 0, set()).add(cpu)
    return [
        CpuKind(mask=bitmap.mask_of(cpus), infos={"LinuxCapacity": str(capacity)})
        for capacity, cpus in by_capacity.items()
    ]


def _add_devices(tree: _Tree, root: Path, usable: frozenset[int]) -> None:
    """Add displays, GPUs and network cards of /sys/bus/pci, in the order of PCI numbers."""
    for folder in kernel_files.entries(root / "sys/bus/pci/devices", "*"):
        bus = pci.bus_id(folder.name)
        pci_class, vendor, device = (
            kernel_files.number(folder / name) or 0 for name in ("class", "vendor", "device")
        )
        kind = pci.kind(pci_class >> 8, vendor=vendor, device=device)
        is_display = pci.is_display(pci_class >> 8, vendor=vendor, device=device)
        if not bus or (kind is None and not is_display):
            continue
        place = _place(tree, folder, usable)
        for bridge in _bridges(folder):
            place = place.add(Element(kind="Bridge", gp_index=bridge))
        speed = pci.link_bytes_per_s(
            kernel_files.text(folder / "current_link_speed"),
            kernel_files.text(folder / "current_link_width"),
        )
        attributes = {
            "pci_busid": bus,
            "pci_type": f"{pci_class >> 8:04x} [{vendor:04x}:{device:04x}]",
            "pci_link_speed": f"{speed / 1e9}",
        }
        function = place.add(Element(kind="PCIDev", attributes=attributes))
        if kind is not None:
            _add_names(function, folder, kind, root / "proc/driver/nvidia/gpus" / bus)


def _place(tree: _Tree, folder: Path, usable: frozenset[int]) -> Element:
    """Return what is near a device; -1 for the node, with all PUs near, is how the kernel says that
    it does not know."""
    node = kernel_files.number(folder / "numa_node")
    near = kernel_files.cpu_list(folder / "local_cpulist") or tree.nodes.get(
        -1 if node is None else node
    )
    if near is None or (node not in tree.nodes and usable.issubset(near)):
        return tree.root
    place = tree.add("Near", near)
    place.nodes = 1 << node if node in tree.nodes else None
    return place


def _add_names(function: Element, folder: Path, kind: pci.Kind, driver: Path) -> None:
    number, patterns = _OS_DEVICES[kind]
    gids = kernel_files.entries(folder, "infiniband/*/ports/*/gids/0") if kind == "nic" else ()
    infos = {f"Port{at}GID0": kernel_files.text(gid) for at, gid in enumerate(gids)}
    if kind == "gpu" and (uuid := _UUID.search(kernel_files.text(driver / "information"))):
        infos["NVIDIAUUID"] = uuid[1]
    names = [path.name for pattern in patterns for path in kernel_files.entries(folder, pattern)]
    for name in names or [""] * bool(infos):
        attributes = {"name": name, "osdev_type": number}
        function.add(Element(kind="OSDev", attributes=attributes, infos=infos))


def _bridges(folder: Path) -> tuple[str, ...]:
    """The folders that the device lies in, from that of the host's bridge on."""
    try:
        above = folder.resolve().parts[:-1]
    except OSError:
        return ()
    first = next((at for at, name in enumerate(above) if _HOST_BRIDGE.fullmatch(name)), len(above))
    return above[first:][: pci.MAX_BRIDGES]
