"""GPUs and network cards from /sys/bus/pci, for machines without lstopo.

    devices = read_devices(Path("/"), locate, notes)
    devices[0].pci, devices[0].port_guids

GPUs carry the names of their drivers (``card0``), not those of a runtime: join by ``pci`` or
``uuid``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from psdist.topology.machine import UNKNOWN, Device, cards, kernel_files, pci

Place: TypeAlias = tuple[frozenset[int] | None, int, int]
"""PUs nearby (None unknown), package, NUMA node."""
Locate: TypeAlias = Callable[[frozenset[int] | None, int], Place]
"""From ``local_cpulist`` (None where there is none) and ``numa_node`` (-1: the firmware is silent)
to the place."""

_HOST_BRIDGE: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_UUID: Final = re.compile(r"^GPU UUID:\s+(GPU-[0-9a-fA-F-]{36})$", re.MULTILINE)


def read_devices(root: Path, locate: Locate, notes: list[str]) -> tuple[Device, ...]:
    """In the order of PCI numbers; adds to ``notes`` what was left out."""
    devices: list[Device] = []
    num_idle = 0
    screens: list[str] = []
    for folder in kernel_files.entries(root / "sys/bus/pci/devices", "*"):
        bus = pci.bus_id(folder.name)
        pci_class = kernel_files.number(folder / "class") or 0
        vendor = kernel_files.number(folder / "vendor") or 0
        device = kernel_files.number(folder / "device") or 0
        kind = pci.kind(pci_class >> 8, vendor=vendor, device=device)
        if bus and pci.is_display(pci_class >> 8, vendor=vendor, device=device):
            screens.append(bus)
        if not bus or kind is None:
            continue
        names = _names(folder, kind)
        if kind == "nic" and not names:
            num_idle += 1  # no driver: often a virtual function, for a virtual machine
            continue
        if len(devices) == pci.MAX_DEVICES:
            notes.append(f"devices beyond {pci.MAX_DEVICES:,} left out")
            break
        devices.append(_device(root, folder, bus, kind, names, locate))
    notes += pci.device_notes(screens, num_idle)
    num_unknown = sum(device.cpus is None for device in devices)
    if num_unknown:
        notes.append(f"for {num_unknown} of {len(devices)} devices /sys does not say what is near")
    return tuple(devices)


def _device(
    root: Path, folder: Path, bus: str, kind: pci.Kind, names: tuple[str, ...], locate: Locate
) -> Device:
    node = kernel_files.number(folder / "numa_node")
    near = kernel_files.cpu_list(folder / "local_cpulist")
    cpus, package, numa = locate(near, UNKNOWN if node is None else node)
    information = root / "proc/driver/nvidia/gpus" / bus / "information"
    uuid = _UUID.search(kernel_files.text(information)) if kind == "gpu" else None
    return Device(
        kind=kind,
        names=names,
        pci=bus,
        cpus=cpus,
        package=package,
        numa=numa,
        uuid=uuid[1] if uuid else "",
        port_guids=_port_guids(folder) if kind == "nic" else (),
        bytes_per_s=pci.link_bytes_per_s(
            kernel_files.text(folder / "current_link_speed"),
            kernel_files.text(folder / "current_link_width"),
        ),
        bridges=_bridges(folder),
        port_bytes_per_s=cards.port_bytes_per_s(folder) if kind == "nic" else 0.0,
    )


def _names(folder: Path, kind: pci.Kind) -> tuple[str, ...]:
    patterns = ("drm/card*",) if kind == "gpu" else ("net/*", "virtio*/net/*", "infiniband/*")
    found = (path.name for pattern in patterns for path in kernel_files.entries(folder, pattern))
    return tuple(dict.fromkeys(name for name in found if pci.NAME.fullmatch(name)))


def _bridges(folder: Path) -> tuple[str, ...]:
    """The folders that the device lies in, from that of the host's bridge on."""
    try:
        above = folder.resolve().parts[:-1]
    except OSError:
        return ()
    first = next((at for at, name in enumerate(above) if _HOST_BRIDGE.fullmatch(name)), len(above))
    return above[first:][: pci.MAX_BRIDGES]


def _port_guids(folder: Path) -> tuple[int, ...]:
    """The lower halves of the ports' first GIDs."""
    guids: list[int] = []
    for path in kernel_files.entries(folder, "infiniband/*/ports/*/gids/0"):
        guid = pci.guid_of(kernel_files.text(path))
        if guid and guid not in guids:
            guids.append(guid)
    return tuple(guids)
