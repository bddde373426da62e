"""Read this machine's processors, memory and devices from /sys, where lstopo is missing.

    package_of_affinity()   # 0, or -1 where /sys does not say
    read_machine().cores    # all that the cgroup allows; restrict it to the affinity

Cores are numbered as hwloc numbers them: it nests what contains what, and counts siblings by their
first PU.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from psdist.errors import PlacementError
from psdist.topology.machine import UNKNOWN, Core, Machine, NumaNode, Package, kernel_files
from psdist.topology.machine.numa import MemoryNode, nearest, node_of, ordinary
from psdist.topology.machine.sysfs_devices import Locate, Place, read_devices
from psdist.topology.text import HOST_NAME

_CPUS: Final = Path("/sys/devices/system/cpu")
_L3: Final = 3
_MAX_CACHES: Final = 16
# Intel's hybrid processors, the least powerful kind first.
_KINDS: Final = ("cpu_lowpower", "cpu_atom", "cpu_core")


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


@dataclass(kw_only=True, slots=True)
class _Sets:
    """Sets of PUs that are online, whether allowed or not; of each level disjoint ones."""

    packages: dict[int, frozenset[int]] = field(default_factory=dict)
    dies: list[frozenset[int]] = field(default_factory=list)
    l3s: list[frozenset[int]] = field(default_factory=list)
    other_caches: list[frozenset[int]] = field(default_factory=list)
    cores: list[frozenset[int]] = field(default_factory=list)


def read_machine(root: Path = Path("/")) -> Machine:
    """The machine below ``root``, of what is online and allowed by this process's cgroup.

    Raises PlacementError where /sys has no processors, or none that are allowed.
    """
    online = _online(root)
    allowed = allowed_cpus(root)
    usable = online if allowed is None else online & allowed
    if not usable:
        raise PlacementError(
            f"{root / 'sys/devices/system/cpu'}: no processor in it is online and allowed; give "
            "the machine as a file of lstopo --of xml"
        )
    notes: list[str] = []
    sets = _read_sets(root, online)
    nodes = _read_nodes(root, online)
    if not sets.packages:
        sets.packages = _made_up_packages(nodes, online, notes)
    key = _Nesting(sets, nodes)
    numa_nodes = ordinary(
        [
            replace(node, cpus=node.cpus & usable)
            for node in sorted(nodes, key=lambda node: (not node.cpus, key(node.cpus)))
        ]
    )
    packages = tuple(
        Package(os_index=os_index, cpus=cpus & usable)
        for os_index, cpus in sorted(sets.packages.items(), key=lambda item: key(item[1]))
        if cpus & usable
    )
    l3s = _usable(sets.l3s, usable, key)
    own_package = {cpu: index for index, each in enumerate(packages) for cpu in each.cpus}
    locate = _locator(usable, own_package, len(packages), numa_nodes)
    return Machine(
        name=_host_name(root),
        packages=packages,
        # As in hwloc: where every package is one die, that level says nothing.
        dies=_usable(sets.dies, usable, key) if len(sets.dies) > len(sets.packages) else (),
        numa_nodes=numa_nodes,
        l3_groups=l3s,
        cores=_cores(
            _usable(sets.cores, usable, key), own_package, numa_nodes, l3s, _kinds(root, usable)
        ),
        devices=read_devices(root, locate, notes),
        notes=tuple(notes),
    )


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


def _read_sets(root: Path, online: frozenset[int]) -> _Sets:
    sets = _Sets()
    packages: dict[int, set[int]] = {}
    dies: dict[tuple[int, int], set[int]] = {}
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
        sets.cores.append(core)
        seen |= core
        _read_caches(folder, online, sets)
    if sum(map(len, packages.values())) == len(online):
        sets.packages = {index: frozenset(cpus) for index, cpus in packages.items()}
    sets.dies = [frozenset(die) for die in dies.values()]
    return sets


def _read_caches(folder: Path, online: frozenset[int], sets: _Sets) -> None:
    for index in range(_MAX_CACHES):
        cache = folder / f"cache/index{index}"
        level = kernel_files.number(cache / "level")
        if level is None:
            return
        shared = kernel_files.cpu_list(cache / "shared_cpu_list")
        if shared is None or kernel_files.text(cache / "type") == "Instruction":
            continue
        shared &= online
        known = sets.l3s if level == _L3 else sets.other_caches
        if shared and shared not in known[-1:] and not any(shared & other for other in known):
            known.append(shared)


def _read_nodes(root: Path, online: frozenset[int]) -> list[MemoryNode]:
    """Return all nodes; one for everything where the kernel has none."""
    nodes: list[MemoryNode] = []
    for folder in kernel_files.entries(root / "sys/devices/system/node", "node[0-9]*"):
        cpus = kernel_files.cpu_list(folder / "cpulist")
        if cpus is not None and folder.name[4:].isdecimal():
            nodes.append(
                MemoryNode(
                    os_index=int(folder.name[4:]),
                    cpus=cpus & online,
                    memory_bytes=_memory_bytes(kernel_files.text(folder / "meminfo")),
                )
            )
    if not nodes:
        memory_bytes = _memory_bytes(kernel_files.text(root / "proc/meminfo"))
        nodes = [MemoryNode(os_index=0, cpus=online, memory_bytes=memory_bytes)]
    return sorted(nodes, key=lambda node: node.os_index)


def _memory_bytes(meminfo: str) -> int:
    for line in meminfo.splitlines():
        words = line.split()
        if "MemTotal:" in words and words[-1] == "kB" and words[-2].isdecimal():
            return int(words[-2][:15]) * 1024
    return 0


def _made_up_packages(
    nodes: Sequence[MemoryNode], online: frozenset[int], notes: list[str]
) -> dict[int, frozenset[int]]:
    parts = [node.cpus for node in nodes if node.cpus]
    if len(parts) > 1 and sum(map(len, parts)) == len(frozenset().union(*parts)) == len(online):
        notes.append("/sys names no packages: NUMA nodes count as packages")
        return {node.os_index: node.cpus for node in nodes if node.cpus}
    notes.append("/sys names no packages: the whole machine counts as one")
    return {0: online}


class _Nesting:
    """A key that sorts sets as hwloc's tree has them: by the first PU of all that contain them."""

    def __init__(self, sets: _Sets, nodes: Iterable[MemoryNode]) -> None:
        everything = {
            *sets.packages.values(),
            *sets.dies,
            *sets.l3s,
            *sets.other_caches,
            *sets.cores,
            *(node.cpus for node in nodes if node.cpus),
        }
        self._above: dict[int, list[frozenset[int]]] = {}
        for each in sorted(everything, key=lambda each: (-len(each), min(each))):
            for cpu in each:
                self._above.setdefault(cpu, []).append(each)

    def __call__(self, cpus: frozenset[int]) -> tuple[int, ...]:
        if not cpus:
            return ()
        first = min(cpus)
        return tuple(min(each) for each in self._above.get(first, ()) if len(each) >= len(cpus))


def _usable(
    sets: Iterable[frozenset[int]], usable: frozenset[int], key: _Nesting
) -> tuple[frozenset[int], ...]:
    return tuple(each & usable for each in sorted(sets, key=key) if each & usable)


def _kinds(root: Path, usable: frozenset[int]) -> dict[int, int]:
    """PU to the rank of its kind of core; empty where there is one kind only."""
    found = [kernel_files.cpu_list(root / "sys/devices" / name / "cpus") for name in _KINDS]
    kinds = [cpus for cpus in found if cpus]
    if not kinds:
        by_capacity: dict[int, set[int]] = {}
        for cpu in usable:
            path = root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity"
            by_capacity.setdefault(kernel_files.number(path) or 0, set()).add(cpu)
        kinds = [frozenset(by_capacity[capacity]) for capacity in sorted(by_capacity)]
    return {cpu: rank for rank, cpus in enumerate(kinds) for cpu in cpus}


def _cores(
    cores: Sequence[frozenset[int]],
    own_package: dict[int, int],
    numa_nodes: Sequence[NumaNode],
    l3s: Sequence[frozenset[int]],
    kinds: dict[int, int],
) -> tuple[Core, ...]:
    own_node = nearest(numa_nodes)
    own_l3 = {cpu: index for index, l3 in enumerate(l3s) for cpu in l3}
    return tuple(
        Core(
            logical=logical,
            cpus=tuple(sorted(cpus)),
            package=own_package[min(cpus)],
            numa=own_node.get(min(cpus), UNKNOWN),
            l3=own_l3.get(min(cpus), UNKNOWN),
            kind=kinds.get(min(cpus), 0),
        )
        for logical, cpus in enumerate(cores)
    )


def _locator(
    usable: frozenset[int],
    own_package: dict[int, int],
    num_packages: int,
    numa_nodes: Sequence[NumaNode],
) -> Locate:
    own_node = nearest(numa_nodes)
    node_index = {node.os_index: index for index, node in enumerate(numa_nodes) if node.is_dram}

    def locate(near: frozenset[int] | None, node: int) -> Place:
        """-1 for the node, with all PUs "near", is how the kernel says that it does not know."""
        if near is None and node in node_index:
            near = numa_nodes[node_index[node]].cpus
        is_silent = near is None or (node < 0 and near >= usable)
        if is_silent and num_packages > 1:
            return None, UNKNOWN, UNKNOWN
        cpus = usable if near is None else near & usable
        packages = {own_package[cpu] for cpu in cpus}
        return (
            cpus,
            packages.pop() if len(packages) == 1 else UNKNOWN,
            node_index.get(node, node_of(cpus, own_node)),
        )

    return locate


def _host_name(root: Path) -> str:
    text = kernel_files.text(root / "proc/sys/kernel/hostname")
    return text if HOST_NAME.fullmatch(text) else ""
