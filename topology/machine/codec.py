"""A :class:`~psdist.topology.machine.machine.Machine` as plain lists and numbers, to travel between
ranks.

Owns that format, which msgpack and JSON both take; sets of PUs are lists like ``0-3,8``, so that a
machine is a few kB. What arrives is checked; nothing is repaired.

    unpack(msgpack.unpackb(msgpack.packb(pack(machine)))) == machine
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, Final

from pydantic import TypeAdapter

from psdist.errors import PlacementError
from psdist.topology.machine.machine import Machine
from psdist.topology.machine.packed import Budget
from psdist.topology.text import bitmap
from psdist.topology.text.models import MAX_CHARACTERS, validated
from psdist.topology.text.untrusted import shown

_FORMAT: Final = 1
_WHERE: Final = "packed machine"
_REMEDY: Final = "pack it again"


def pack(machine: Machine) -> dict[str, object]:
    """Only dicts, lists, strings, numbers, booleans and None."""
    packed: dict[str, object] = {"format": _FORMAT}
    for name in _names(Machine):
        value = getattr(machine, name)
        packed[name] = value if isinstance(value, str) else [_plain(each) for each in value]
    return packed


def unpack(data: object) -> Machine:
    """What :func:`pack` made. Raises PlacementError, one line, for anything else."""
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        found = data.get("format") if isinstance(data, dict) else data
        raise PlacementError(
            f"{_WHERE}: format: {shown(found)} is not format {_FORMAT}; all ranks need the same "
            f"psdist: {_REMEDY}"
        )
    members = {key: value for key, value in data.items() if key != "format"}
    machine = validated(_adapter(), members, where=_WHERE, remedy=_REMEDY, context=Budget())
    _check(machine)
    return machine


@cache
def _adapter() -> TypeAdapter[Machine]:
    return TypeAdapter(Machine)


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
    """What several members say together: indices that exist, and no PU in two cores."""
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
