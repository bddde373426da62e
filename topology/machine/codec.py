"""A :class:`~psdist.topology.machine.machine.Machine` as plain lists and numbers, to travel between
ranks.

Owns that format, which msgpack and JSON both take; sets of PUs are lists like ``0-3,8``, so that a
machine is a few kB. What arrives is checked; nothing is repaired.

    unpack(msgpack.unpackb(msgpack.packb(pack(machine)))) == machine
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeVar

from psdist.errors import PlacementError
from psdist.topology.machine.machine import (
    UNKNOWN,
    Core,
    Device,
    DeviceLink,
    Machine,
    NumaNode,
    Package,
)
from psdist.topology.text import bitmap
from psdist.topology.text.untrusted import HOST_NAME, shown

_FORMAT: Final = 1
_MAX_ITEMS: Final = bitmap.MAX_CPUS
_MAX_TEXT: Final = 4096
_MAX_NUMBER: Final = (1 << 64) - 1
_MAX_MEMBERS: Final = 1_000_000

T = TypeVar("T")


def pack(machine: Machine) -> dict[str, object]:
    """Only dicts, lists, strings, numbers, booleans and None."""
    return {
        "format": _FORMAT,
        "name": machine.name,
        "packages": [[each.os_index, _list(each.cpus)] for each in machine.packages],
        "dies": [_list(die) for die in machine.dies],
        "numa_nodes": [
            [node.os_index, _list(node.cpus), node.memory_bytes, node.is_dram]
            for node in machine.numa_nodes
        ],
        "l3_groups": [_list(group) for group in machine.l3_groups],
        "cores": [
            [core.logical, _list(core.cpus), core.package, core.numa, core.l3, core.kind]
            for core in machine.cores
        ],
        "devices": [
            [
                device.kind,
                list(device.names),
                device.pci,
                None if device.cpus is None else _list(device.cpus),
                device.package,
                device.numa,
                device.uuid,
                list(device.port_guids),
                device.bytes_per_s,
            ]
            for device in machine.devices
        ],
        "links": [[link.first, link.second, link.bytes_per_s] for link in machine.links],
        "notes": [note[:_MAX_TEXT] for note in machine.notes],
    }


def unpack(data: object) -> Machine:
    """What :func:`pack` made. Raises PlacementError, one line, for anything else."""
    return _Unpacker().machine(data)


def _list(cpus: frozenset[int] | tuple[int, ...]) -> str:
    return bitmap.format_list(cpus)


class _Unpacker:
    def __init__(self) -> None:
        self.where = "format"
        self.num_members = 0
        self.sizes = {"package": 0, "numa": 0, "l3": 0}

    def machine(self, data: object) -> Machine:
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            found = data.get("format") if isinstance(data, dict) else data
            raise self.wrong(found, f"format {_FORMAT}; all ranks need the same psdist")
        name = self.field(data, "name", self.text)
        if name and not HOST_NAME.fullmatch(name):
            raise self.wrong(name, "a host name")
        packages = self.rows(data, "packages", 2, self.package)
        numa_nodes = self.rows(data, "numa_nodes", 4, self.numa_node)
        l3_groups = self.items(data, "l3_groups", self.cpus)
        self.sizes = {"package": len(packages), "numa": len(numa_nodes), "l3": len(l3_groups)}
        machine = Machine(
            name=name,
            packages=packages,
            dies=self.items(data, "dies", self.cpus),
            numa_nodes=numa_nodes,
            l3_groups=l3_groups,
            cores=self.rows(data, "cores", 6, self.core),
            devices=self.rows(data, "devices", 9, self.device),
            links=self.rows(data, "links", 3, self.link),
            notes=self.items(data, "notes", self.text),
        )
        if sum(len(core.cpus) for core in machine.cores) != len(machine.cpus):
            raise self.wrong("cores", "cores that share no PU")
        return machine

    def wrong(self, value: object, expected: str) -> PlacementError:
        return PlacementError(
            f"packed machine: {self.where}: {shown(value)} is not {expected}; pack it again"
        )

    def field(self, data: dict[object, object], name: str, read: Callable[[object], T]) -> T:
        self.where = name
        return read(data.get(name))

    def items(
        self, data: dict[object, object], name: str, read: Callable[[object], T]
    ) -> tuple[T, ...]:
        self.where = name
        return tuple(read(item) for item in self.sequence(data.get(name)))

    def rows(
        self,
        data: dict[object, object],
        name: str,
        size: int,
        read: Callable[[Sequence[object]], T],
    ) -> tuple[T, ...]:
        def row(item: object) -> T:
            fields = self.sequence(item)
            if len(fields) != size:
                raise self.wrong(item, f"{size} fields")
            return read(fields)

        return self.items(data, name, row)

    def sequence(self, value: object) -> Sequence[object]:
        if not isinstance(value, list | tuple) or len(value) > _MAX_ITEMS:
            raise self.wrong(value, f"a list of at most {_MAX_ITEMS:,}")
        return value

    def text(self, value: object) -> str:
        if not isinstance(value, str) or len(value) > _MAX_TEXT or not value.isprintable():
            raise self.wrong(value, f"one line of at most {_MAX_TEXT:,} characters")
        return value

    def number(self, value: object, *, least: int = 0, most: int = _MAX_NUMBER) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(value, f"a whole number from {least} to {most}")
        return value

    def speed(self, value: object) -> float:
        # Also refuses NaN, which compares as false.
        if not isinstance(value, float | int) or isinstance(value, bool) or not 0 <= value < 1e18:
            raise self.wrong(value, "a number of bytes a second")
        return float(value)

    def index(self, value: object, level: str) -> int:
        return self.number(value, least=UNKNOWN, most=self.sizes[level] - 1)

    def cpus(self, value: object) -> frozenset[int]:
        if not isinstance(value, str):
            raise self.wrong(value, "a list of PUs like 0-3,8")
        try:
            found = bitmap.parse_list(value)
        except PlacementError as error:
            raise PlacementError(f"packed machine: {self.where}: {error}") from None
        self.num_members += len(found)
        if self.num_members > _MAX_MEMBERS:
            raise self.wrong(value, f"one of sets with at most {_MAX_MEMBERS:,} PUs together")
        return found

    def package(self, fields: Sequence[object]) -> Package:
        return Package(os_index=self.number(fields[0], least=UNKNOWN), cpus=self.cpus(fields[1]))

    def numa_node(self, fields: Sequence[object]) -> NumaNode:
        if not isinstance(fields[3], bool):
            raise self.wrong(fields[3], "true or false")
        return NumaNode(
            os_index=self.number(fields[0], least=UNKNOWN),
            cpus=self.cpus(fields[1]),
            memory_bytes=self.number(fields[2]),
            is_dram=fields[3],
        )

    def core(self, fields: Sequence[object]) -> Core:
        cpus = tuple(sorted(self.cpus(fields[1])))
        package = self.index(fields[2], "package")
        if not cpus or package == UNKNOWN:
            raise self.wrong(fields[1] if not cpus else package, "the PUs and package of a core")
        return Core(
            logical=self.number(fields[0], most=_MAX_ITEMS),
            cpus=cpus,
            package=package,
            numa=self.index(fields[3], "numa"),
            l3=self.index(fields[4], "l3"),
            kind=self.number(fields[5], most=_MAX_ITEMS),
        )

    def device(self, fields: Sequence[object]) -> Device:
        return Device(
            kind=self.device_kind(fields[0]),
            names=tuple(self.text(name) for name in self.sequence(fields[1])),
            pci=self.text(fields[2]),
            cpus=None if fields[3] is None else self.cpus(fields[3]),
            package=self.index(fields[4], "package"),
            numa=self.index(fields[5], "numa"),
            uuid=self.text(fields[6]),
            port_guids=tuple(self.number(guid) for guid in self.sequence(fields[7])),
            bytes_per_s=self.speed(fields[8]),
        )

    def device_kind(self, value: object) -> Literal["gpu", "nic"]:
        if value == "gpu":
            return "gpu"
        if value == "nic":
            return "nic"
        raise self.wrong(value, "gpu or nic")

    def link(self, fields: Sequence[object]) -> DeviceLink:
        return DeviceLink(
            first=self.text(fields[0]),
            second=self.text(fields[1]),
            bytes_per_s=self.speed(fields[2]),
        )
