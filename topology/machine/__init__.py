"""One host: its processors with their places, memory, GPUs and network cards.

    machine = hwloc_xml.parse(text)
    mine = machine.restricted(os.sched_getaffinity(0))
    mine.cores[0].cpus, mine.cores[0].package, mine.nics[0].package
    unpack(pack(machine)) == machine            # between ranks

Here are the types, and the form in which a machine travels between ranks. ``live`` makes the
machine of this host and binds this process to PUs: ``hwloc`` reads lstopo's XML, ``sysfs`` (with
``kernel_files``) makes the same tree of /sys, which ``hwloc`` interprets; ``numa`` and ``pci`` have
facts of memory and links, ``cards`` and ``paths`` of network cards and links between devices,
``gpus`` which GPUs this process sees. lstopo is started and /sys read in this room and nowhere else
in the mapper. Knows no other hosts, no ranks and no roles: imports text and errors only.

Two numberings. **OS numbers** are what the kernel, Slurm and hydra call a PU; every ``cpus`` here
holds those. **Logical** numbers count in hwloc's order, 0, 1, 2 ... without gaps; Open MPI's
rankfiles take those, and indices into the tuples here (``package``, ``numa``, ``l3``) are logical.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, Final, Literal

from psdist.errors import PlacementError
from psdist.topology.machine.packed import (
    MANY,
    Budget,
    CoreCpus,
    Count,
    CpuSet,
    Index,
    MachineName,
    OsIndex,
    Speed,
    row_of,
)
from psdist.topology.text import bitmap, shown
from psdist.topology.text.models import CLOSED, MAX_CHARACTERS, Text, Truth, validated

UNKNOWN = -1
"""In place of an index: the source does not say."""
_FORMAT: Final = 1
_WHERE: Final = "packed machine"
_REMEDY: Final = "pack it again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """A core and its usable PUs (hardware threads)."""

    logical: Count
    """hwloc's logical number in the whole machine; restricting does not change it."""
    cpus: CoreCpus
    """OS numbers of its usable PUs, ascending; never empty."""
    package: Index
    numa: Index
    """The NUMA node of its ordinary memory (DRAM), or UNKNOWN."""
    l3: Index
    kind: Count = 0
    """Hybrid processors: 0 is the least powerful kind; all 0 where there is one kind only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    os_index: OsIndex
    cpus: CpuSet


@dataclass(frozen=True, kw_only=True, slots=True)
class NumaNode:
    os_index: OsIndex
    cpus: CpuSet
    """The PUs near it; several nodes may name the same ones (HBM next to DRAM)."""
    memory_bytes: Count
    is_dram: Truth
    """Ordinary memory; False for HBM, CXL or GPU memory that the system shows as a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU or a network card; one entry per PCI function, whatever its many names."""

    kind: Literal["gpu", "nic"]
    names: Annotated[tuple[Text, ...], MANY]
    """As the system calls it: ``("cuda0", "nvml0")``, ``("ib0", "mlx5_0")``."""
    pci: Text
    """``0000:3b:00.0`` in lower case, or "" where the source has none."""
    cpus: CpuSet | None
    """The usable PUs near it; None where the source does not say (not the same as "all")."""
    package: Index
    numa: Index
    uuid: Text = ""
    port_guids: Annotated[tuple[Count, ...], MANY] = ()
    """InfiniBand: the port GUIDs, by which a fabric's listing knows it."""
    bytes_per_s: Speed = 0.0
    """Speed of its PCI link in one direction; 0 if unknown."""
    port_bytes_per_s: Speed = 0.0
    """Speed of a network card's active ports together, in one direction; 0 if unknown."""
    bridges: Annotated[tuple[Text, ...], MANY] = ()
    """Names of the PCI bridges above it, the host's bridge first; () if unknown."""

    @property
    def name(self) -> str:
        return self.names[0] if self.names else self.pci

    @property
    def speed(self) -> float:
        """Bytes/s, one direction: what its ports and its bus let through; 0 unknown."""
        return min(filter(None, (self.bytes_per_s, self.port_bytes_per_s)), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLink:
    """A direct link between two GPUs (or GPU and processor: ``second`` is "")."""

    first: Text
    second: Text
    """PCI bus ids."""
    bytes_per_s: Speed


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One host. Only what is online and allowed is in it."""

    __pydantic_config__ = CLOSED

    name: MachineName
    """The host name that the source gives, or ""."""
    packages: Annotated[tuple[Annotated[Package, row_of(Package)], ...], MANY]
    dies: Annotated[tuple[CpuSet, ...], MANY]
    numa_nodes: Annotated[tuple[Annotated[NumaNode, row_of(NumaNode)], ...], MANY]
    l3_groups: Annotated[tuple[CpuSet, ...], MANY]
    cores: Annotated[tuple[Annotated[Core, row_of(Core)], ...], MANY]
    devices: Annotated[tuple[Annotated[Device, row_of(Device)], ...], MANY] = ()
    links: Annotated[tuple[Annotated[DeviceLink, row_of(DeviceLink)], ...], MANY] = ()
    notes: Annotated[tuple[Text, ...], MANY] = ()
    """Facts that were missing or guessed, a sentence each, for people."""

    @property
    def cpus(self) -> frozenset[int]:
        """OS numbers of all usable PUs."""
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def gpus(self) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.kind == "gpu")

    @property
    def nics(self) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.kind == "nic")

    @property
    def memory_bytes(self) -> int:
        """Ordinary memory of all NUMA nodes; 0 where the source does not say."""
        return sum(node.memory_bytes for node in self.numa_nodes if node.is_dram)

    def restricted(self, cpus: Iterable[int]) -> Machine:
        """The same machine with only these PUs (OS numbers); logical numbers stay as they are.

        For an XML made outside of the job, whose cgroup and affinity have less. PUs that the
        machine does not know are ignored. Packages and NUMA nodes stay, if need be without PUs.
        """
        kept = frozenset(cpus) & self.cpus
        cores = (
            replace(core, cpus=left)
            for core in self.cores
            if (left := tuple(cpu for cpu in core.cpus if cpu in kept))
        )
        return replace(
            self,
            packages=tuple(replace(each, cpus=each.cpus & kept) for each in self.packages),
            dies=tuple(die & kept for die in self.dies),
            numa_nodes=tuple(replace(node, cpus=node.cpus & kept) for node in self.numa_nodes),
            l3_groups=tuple(group & kept for group in self.l3_groups),
            cores=tuple(cores),
            devices=tuple(
                replace(device, cpus=None if device.cpus is None else device.cpus & kept)
                for device in self.devices
            ),
        )


def flat_machine(cpus: Iterable[int], *, name: str = "", note: str = "") -> Machine:
    """Return a machine known only by its PUs: each is a core, all in one package."""
    ordered = sorted(set(cpus))
    everything = frozenset(ordered)
    return Machine(
        name=name,
        packages=(Package(os_index=0, cpus=everything),),
        dies=(),
        numa_nodes=(NumaNode(os_index=0, cpus=everything, memory_bytes=0, is_dram=True),),
        l3_groups=(),
        cores=tuple(
            Core(logical=index, cpus=(cpu,), package=0, numa=0, l3=UNKNOWN)
            for index, cpu in enumerate(ordered)
        ),
        notes=(note,) if note else (),
    )


def pack(machine: Machine) -> dict[str, object]:
    """Return the machine for msgpack or JSON, to travel between ranks: only dicts, lists, strings,
    numbers, booleans and None. Sets of PUs are texts like ``0-3,8``, so that it takes a few kB."""
    packed: dict[str, object] = {"format": _FORMAT}
    for name in _names(Machine):
        value = getattr(machine, name)
        packed[name] = value if isinstance(value, str) else [_plain(each) for each in value]
    return packed


def unpack(data: object) -> Machine:
    """Return what :func:`pack` was given. Raises PlacementError, one line, for anything else."""
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        found = data.get("format") if isinstance(data, dict) else data
        raise PlacementError(
            f"{_WHERE}: format: {shown(found)} is not format {_FORMAT}; all ranks need the same "
            f"psdist: {_REMEDY}"
        )
    members = {key: value for key, value in data.items() if key != "format"}
    machine = validated(Machine, members, where=_WHERE, remedy=_REMEDY, context=Budget())
    _check(machine)
    return machine


def _plain(value: Any) -> object:
    """A member of a machine's tuple: a set of PUs, a note, or a row of fields."""
    if isinstance(value, frozenset):
        return bitmap.format_list(value)
    if isinstance(value, str):
        return value[:MAX_CHARACTERS]
    row = []
    for name in _names(value.__class__):
        each = getattr(value, name)
        if name == "cpus" and each is not None:
            each = bitmap.format_list(each)
        row.append(list(each) if isinstance(each, tuple) else each)
    return row


@cache
def _names(declared: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(declared))


def _check(machine: Machine) -> None:
    """Check members against each other: indices exist, and no PU is in two cores."""
    sizes = {
        "package": len(machine.packages),
        "numa": len(machine.numa_nodes),
        "l3": len(machine.l3_groups),
    }
    for name, items in (("cores", machine.cores), ("devices", machine.devices)):
        for position, each in enumerate(items):
            for level, size in sizes.items():
                index = getattr(each, level, -1)
                if index >= size:
                    raise _wrong(f"{name}[{position}].{level}", index, f"below {size}")
    for position, core in enumerate(machine.cores):
        if core.package < 0:
            raise _wrong(f"cores[{position}].package", core.package, "the package of a core")
    if sum(len(core.cpus) for core in machine.cores) != len(machine.cpus):
        raise PlacementError(f"{_WHERE}: cores share a PU: {_REMEDY}")


def _wrong(place: str, value: object, wanted: str) -> PlacementError:
    return PlacementError(f"{_WHERE}: {place} is {shown(value)}, not {wanted}: {_REMEDY}")
