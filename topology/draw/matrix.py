"""The devices of each host and how they reach each other, as ``nvidia-smi topo -m`` shows it.

    print(matrix.tables(plan, cluster, width=100))

A table for each host, once for hosts that are alike: GPUs and network cards against each other, the
cores and NUMA node near each, and the ranks that use it. A table that is too wide continues below.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

from psdist.topology.draw import Place, Scene, counted, names, plain, short_pci, shortened
from psdist.topology.machine import UNKNOWN, Device, Machine
from psdist.topology.machine.paths import LEGEND, Paths
from psdist.topology.network import Cluster
from psdist.topology.plan import Plan, PlannedRank
from psdist.topology.text.bitmap import format_list

MAX_DEVICES: Final = 64
"""Rows and columns; what is more is said."""
MAX_TABLES: Final = 20
_MAX_NAME: Final = 16
_MAX_LIST: Final = 24
_GAP: Final = "  "


def tables(plan: Plan, cluster: Cluster, *, width: int = 100) -> str:
    """Raises PlacementError where the plan has a host that the cluster does not have."""
    scene = Scene.of(plan, cluster)
    alike: dict[object, list[Place]] = {}
    for place in scene.nodes:
        alike.setdefault(_key(place), []).append(place)
    used: set[str] = set()
    blocks = [_host(places, width, used) for places in list(alike.values())[:MAX_TABLES]]
    if len(alike) > MAX_TABLES:
        blocks.append([f"... and {counted(len(alike) - MAX_TABLES, 'other host')}"])
    if used:
        blocks.append(_legend(used, width))
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _key(place: Place) -> object:
    first = min((each.rank for each in place.ranks), default=0)
    seats = tuple(
        (each.rank - first, each.role, each.cores, each.gpu, each.nic) for each in place.ranks
    )
    machine = place.node.machine
    return (machine.devices, machine.links, machine.cores, seats)


def _host(places: Sequence[Place], width: int, used: set[str]) -> list[str]:
    place = places[0]
    others = f"; alike: {names([each.node.name for each in places[1:]])}" if places[1:] else ""
    machine = place.node.machine
    gpus, cards = machine.gpus, machine.nics
    shown = [*gpus, *cards][:MAX_DEVICES]
    hidden = len(gpus) + len(cards) - len(shown)
    lines = [shortened(plain(f"{place.node.name}{others}"), width)]
    if shown:
        lines += _table(place, shown, width, used)
    else:
        lines.append("no GPU and no network card is known here")
    if hidden > 0:
        lines.append(f"and {counted(hidden, 'device')} more")
    lines += _names(shown, width)
    without = [each for each in place.ranks if not each.gpu and not each.nic]
    lines += [
        shortened(f"{_rank(each)} on {_cores(each.cores)}, without GPU and card", width)
        for each in without[:MAX_DEVICES]
    ]
    return lines


def _table(place: Place, shown: Sequence[Device], width: int, used: set[str]) -> list[str]:
    machine = place.node.machine
    paths = Paths(machine)
    labels = _labels(shown)
    columns: list[list[str]] = []
    for column, other in enumerate(shown):
        words = ["X" if one is other else paths.word(one, other) for one in shown]
        used.update(words)
        columns.append([labels[column], *words])
    ends = [
        ["cores", *(_cores_near(machine, each) for each in shown)],
        ["NUMA", *(_numa(machine, each) for each in shown)],
        ["ranks", *(_users(place, each) for each in shown)],
    ]
    head = ["", *labels]
    room = width - max(map(len, head)) - len(_GAP)
    lines: list[str] = []
    for block in _blocks([*([column] for column in columns), ends], room):
        if lines:
            lines.append("")
        widths = [max(map(len, column)) for column in (head, *block)]
        for row in range(len(head)):
            cells = (column[row] for column in (head, *block))
            text = _GAP.join(cell.ljust(size) for cell, size in zip(cells, widths, strict=True))
            lines.append(shortened(text.rstrip(), width))
    return lines


def _blocks(parts: Iterable[list[list[str]]], room: int) -> Iterable[list[list[str]]]:
    """As many parts side by side as there is room for, at least one; a part is some columns."""
    block: list[list[str]] = []
    taken = 0
    for part in parts:
        size = sum(max(map(len, column)) + len(_GAP) for column in part)
        if block and taken + size > room + len(_GAP):
            yield block
            block, taken = [], 0
        block += part
        taken += size
    if block:
        yield block


def _labels(shown: Sequence[Device]) -> list[str]:
    """``GPU0``, ``NIC0`` ..., in the order of the rows."""
    counts = {"gpu": 0, "nic": 0}
    labels = []
    for each in shown:
        labels.append(f"{each.kind.upper()}{counts[each.kind]}")
        counts[each.kind] += 1
    return labels


def _names(shown: Sequence[Device], width: int) -> list[str]:
    """Which device each label is."""
    entries = []
    for label, each in zip(_labels(shown), shown, strict=True):
        parts = [shortened(plain(each.name), _MAX_NAME)] if each.names else []
        parts += [short_pci(each.pci)] if each.pci else []
        entries.append(f"{label} {' '.join(parts)}".replace(" ", "\0"))
    lines = textwrap.wrap(", ".join(entries), width, break_long_words=False)
    return [line.replace("\0", " ") for line in lines]


def _cores_near(machine: Machine, device: Device) -> str:
    if device.cpus is None:
        return "?"
    near = [core.logical for core in machine.cores if device.cpus.intersection(core.cpus)]
    return shortened(format_list(near), _MAX_LIST) or "none"


def _numa(machine: Machine, device: Device) -> str:
    if device.numa == UNKNOWN:
        return "?"
    os_index = machine.numa_nodes[device.numa].os_index
    return str(device.numa if os_index == UNKNOWN else os_index)


def _users(place: Place, device: Device) -> str:
    """Return the ranks that compute on the GPU or send over the card; servers with an s."""
    found = place.users(device)
    workers = format_list(each.rank for each in found if each.role == "worker")
    servers = format_list(each.rank for each in found if each.role == "server")
    parts = [workers, f"s{servers}" if servers else ""]
    return shortened(" ".join(part for part in parts if part), _MAX_LIST) or "-"


def _rank(each: PlannedRank) -> str:
    return f"rank {each.rank} ({each.role} {each.index})"


def _cores(cores: Sequence[int]) -> str:
    return f"cores {shortened(format_list(cores), _MAX_LIST)}" if cores else "no cores of its own"


def _legend(used: set[str], width: int) -> list[str]:
    kinds = {"NV" if re.fullmatch("NV[0-9]*", word) else word for word in used}
    entries = [
        ("NVn" if word == "NV" else word, f"{'n ' if word == 'NV' else ''}{meaning}")
        for word, meaning in LEGEND.items()
        if word in kinds
    ]
    entries += [
        ("cores", "logical numbers, as in the plan"),
        ("ranks", "that compute or send there; s: of servers"),
    ]
    lines: list[str] = []
    for word, meaning in entries:
        lines += textwrap.wrap(
            meaning, width, initial_indent=f"  {word:<6}", subsequent_indent=" " * 8
        )
    return lines
