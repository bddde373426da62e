"""Made-up trees of /sys in a folder, for tests that read machines and network cards out of them.

root = Root(tmp_path)
two_sockets(root)
root.device("0000:3b:00.0", "0x020700", "0x15b3", node=0)
sysfs.read_machine(root.path)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from psdist.topology.text import bitmap

CPU = "sys/devices/system/cpu"


def bitmap_of(cpus: Iterable[int]) -> str:
    """A bitmap as hwloc writes it; ``0x0`` for the empty set."""
    mask = bitmap.mask_of(cpus)
    if not mask:
        return "0x0"
    groups: list[str] = []
    while mask:
        groups.append(f"0x{mask & 0xFFFFFFFF:08x}")
        mask >>= 32
    return ",".join(reversed(groups))


@dataclass
class Root:
    """A folder with the files of /sys and /proc that the kernel would have."""

    path: Path

    def write(self, name: str, text: object) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")

    def write_set(self, name: str, cpus: Iterable[int]) -> None:
        """Write a set as the kernel does: as a mask and as a list."""
        cpus = sorted(cpus)
        text = bitmap_of(cpus).replace("0x", "") or "0"
        self.write(name, text)
        self.write(name.replace("_map", "") + "_list", bitmap.format_list(cpus))

    def cpu(
        self, cpu: int, *, package: int, die: int = 0, core: Iterable[int], l3: Iterable[int]
    ) -> None:
        folder = f"{CPU}/cpu{cpu}"
        self.write(f"{folder}/topology/physical_package_id", package)
        self.write(f"{folder}/topology/die_id", die)
        self.write(f"{folder}/topology/core_id", min(core))
        self.write_set(f"{folder}/topology/core_cpus", core)
        self.write_set(f"{folder}/topology/thread_siblings", core)
        for index, (level, kind, shared) in enumerate(
            ((1, "Data", core), (1, "Instruction", core), (2, "Unified", core), (3, "Unified", l3))
        ):
            cache = f"{folder}/cache/index{index}"
            self.write(f"{cache}/level", level)
            self.write(f"{cache}/type", kind)
            self.write(f"{cache}/size", "1024K")
            shared = sorted(shared)
            self.write(f"{cache}/shared_cpu_map", bitmap_of(shared).replace("0x", ""))
            self.write(f"{cache}/shared_cpu_list", bitmap.format_list(shared))

    def packages(self, groups: dict[tuple[int, int], Iterable[int]]) -> None:
        """(package, die) to PUs: after all ``cpu``."""
        for package in {package for package, _ in groups}:
            whole = [cpu for (each, _), cpus in groups.items() if each == package for cpu in cpus]
            for (each, _), cpus in groups.items():
                if each != package:
                    continue
                for cpu in cpus:
                    folder = f"{CPU}/cpu{cpu}/topology"
                    for name in ("package_cpus", "core_siblings"):
                        self.write_set(f"{folder}/{name}", whole)
                    self.write_set(f"{folder}/die_cpus", cpus)

    def online(self, cpus: Iterable[int]) -> None:
        for name in ("online", "possible", "present"):
            self.write(f"{CPU}/{name}", bitmap.format_list(cpus))

    def node(self, number: int, cpus: Iterable[int], *, gib: int = 1) -> None:
        folder = f"sys/devices/system/node/node{number}"
        cpus = sorted(cpus)
        self.write(f"{folder}/cpumap", bitmap_of(cpus).replace("0x", ""))
        self.write(f"{folder}/cpulist", bitmap.format_list(cpus))
        self.write(f"{folder}/meminfo", f"Node {number} MemTotal:  {gib << 20} kB")

    def device(
        self, bus: str, pci_class: str, vendor: str, *, node: int = -1, near: str = "", **more: str
    ) -> str:
        folder = f"sys/bus/pci/devices/{bus}"
        self.write(f"{folder}/class", pci_class)
        self.write(f"{folder}/vendor", vendor)
        self.write(f"{folder}/device", "0x1234")
        self.write(f"{folder}/numa_node", node)
        self.write(f"{folder}/local_cpulist", near)
        for name, text in more.items():
            self.write(f"{folder}/{name}", text)
        return folder


def two_sockets(root: Root, *, num_cores: int = 4, is_interleaved: bool = False) -> Root:
    """Two packages of two L3 each, two threads a core; PU n and n + 8 share a core."""
    num_all = 2 * num_cores
    groups: dict[tuple[int, int], list[int]] = {}
    for core in range(num_all):
        package = core % 2 if is_interleaved else core // num_cores
        inside = core // 2 if is_interleaved else core % num_cores
        groups.setdefault((package, inside // (num_cores // 2)), []).append(core)
    for (package, _), cores in groups.items():
        l3 = [cpu for core in cores for cpu in (core, core + num_all)]
        for core in cores:
            for cpu in (core, core + num_all):
                root.cpu(cpu, package=package, core=(core, core + num_all), l3=l3)
    for package in (0, 1):
        cpus = [
            cpu
            for (each, _), cores in groups.items()
            if each == package
            for core in cores
            for cpu in (core, core + num_all)
        ]
        root.packages({(package, 0): cpus})
        root.node(package, cpus, gib=4)
    root.online(range(2 * num_all))
    root.write("proc/sys/kernel/hostname", "n7")
    return root


def hca(
    root: Root, bus: str, name: str, *, node: int, gid: str = "fe80:0000:0000:0000", **ports: str
) -> None:
    """An InfiniBand card with one port; ``state``, ``rate`` and ``link_layer`` in ``ports``."""
    near = (root.path / f"sys/devices/system/node/node{node}/cpulist").read_text("utf-8").strip()
    folder = root.device(bus, "0x020700", "0x15b3", node=node, near=near)
    found = {
        "state": "4: ACTIVE",
        "rate": "100 Gb/sec (4X EDR)",
        "link_layer": "InfiniBand",
        "gids/0": f"{gid}:0000:0000:0000:{int(bus[5:7], 16):04x}",
        **ports,
    }
    for file, text in found.items():
        root.write(f"{folder}/infiniband/{name}/ports/1/{file}", text)
    link = root.path / "sys/class/infiniband" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(root.path / folder / "infiniband" / name)
    device = root.path / folder / "infiniband" / name / "device"
    device.symlink_to(root.path / folder)
