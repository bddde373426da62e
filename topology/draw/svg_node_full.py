"""A host of the picture in full: packages and NUMA nodes with their cores, ranks, GPUs and NICs.

width, height = full_size(scene, place)
draw_full(canvas, scene, place, Box(0, 0, width, height))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psdist.topology.draw import (
    ACROSS,
    UNBOUND,
    Place,
    Scene,
    counted,
    machine_words,
    package_name,
    short_pci,
)
from psdist.topology.draw.svg_canvas import MUTED, Canvas, text_width
from psdist.topology.draw.svg_style import (
    EDGE,
    FRAME,
    FREE,
    NIC,
    NUMA_FILL,
    PACKAGE_FILL,
    Box,
    fills,
    ink,
    rank_title,
    rank_words,
)
from psdist.topology.machine import Device
from psdist.topology.plan import PlannedRank
from psdist.topology.text.bitmap import format_list

PACKAGE_WIDTH, PACKAGE_PAD, NODE_PAD, GAP = 190.0, 8.0, 10.0, 8.0
NODE_WIDTH = 2 * (NODE_PAD + PACKAGE_WIDTH) + GAP
CELL_HEIGHT, CHIP_HEIGHT = 18.0, 20.0
DEVICE_HEIGHT, ALONE_HEIGHT = 34.0, 20.0
NODE_HEADER, PACKAGE_HEADER = 28.0, 20.0
NOWHERE = "near no package that is known"
NO_NODE = "near no NUMA node of it"
MAX_DEVICES = 8
"""Maximum devices drawn per kind and package; further ones (virtual functions) are counted."""


def full_size(scene: Scene, place: Place) -> tuple[float, float]:
    return NODE_WIDTH, draw_full(Canvas(), scene, place, Box(0, 0, NODE_WIDTH, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A package with what is on it, or what is on no package that is known."""

    heading: str
    columns: int
    """2 where it is as wide as the node: of ranks; GPUs and NICs stand closer."""
    cores: tuple[int, ...] = ()
    ranks: tuple[PlannedRank, ...] = ()
    gpus: tuple[Device, ...] = ()
    nics: tuple[Device, ...] = ()
    inner: tuple[_Part, ...] = ()
    """Its NUMA nodes if it has several, and a last part for what is near no node."""
    is_inner: bool = False

    @property
    def per_row(self) -> int:
        """Cores in a row: the fewest that need at most 4 rows, or 8 rows of small cells."""
        num_cores = -(-len(self.cores) // self.columns)
        return self.columns * (8 if num_cores <= 32 else 16 if num_cores <= 128 else 32)


def _rows(place: Place) -> list[list[_Part]]:
    """Two packages a row, or one as wide as the node; the last row is outside all packages."""
    machine = place.node.machine
    parts = [_package(place, index) for index in range(len(machine.packages))]
    known = range(len(machine.packages))
    gpus = tuple(each for each in machine.gpus if each.package not in known)
    nics = tuple(each for each in machine.nics if each.package not in known)
    others = [
        _Part(heading=ACROSS, columns=2, ranks=place.across),
        _Part(heading=UNBOUND, columns=2, ranks=place.unbound),
        _Part(heading=NOWHERE, columns=2, gpus=gpus, nics=nics),
    ]
    rows = [parts[first : first + 2] for first in range(0, len(parts), 2)]
    rows += [[each] for each in others if each.ranks or each.gpus or each.nics]
    return rows or [others[:1]]


def has_inner_nodes(place: Place) -> bool:
    """Whether a package of it has several NUMA nodes."""
    packages = range(len(place.node.machine.packages))
    return any(len(_nodes_of(place, package)) > 1 for package in packages)


def _nodes_of(place: Place, package: int) -> list[int]:
    """The NUMA nodes of its cores."""
    cores = place.node.machine.cores
    return sorted({each.numa for each in cores if each.package == package and each.numa >= 0})


def _package(place: Place, index: int) -> _Part:
    machine = place.node.machine
    cores = tuple(core.logical for core in machine.cores if core.package == index)
    ranks = place.on_package(index)
    gpus = tuple(each for each in machine.gpus if each.package == index)
    nics = tuple(each for each in machine.nics if each.package == index)
    columns = 1 if len(machine.packages) > 1 else 2
    name = package_name(machine.packages[index], index)
    nodes = _nodes_of(place, index)
    heading = f"{name}: {_free(place, cores)}"
    if len(nodes) == 1:
        number = _free(place, cores).replace(" cores", "").replace(" core", "")
        heading = f"{name}, {_numa_name(place, nodes[0])}: {number}"
    if len(nodes) < 2:
        return _Part(
            heading=heading, columns=columns, cores=cores, ranks=ranks, gpus=gpus, nics=nics
        )
    numa = {core.logical: core.numa for core in machine.cores}
    begins = {each.rank: numa.get(each.cores[0], -1) if each.cores else -1 for each in ranks}
    inner = []
    for node in [*nodes, -1]:
        near = tuple(core for core in cores if numa[core] == node)
        of_node = _Part(
            heading=f"{_numa_name(place, node)}: {_free(place, near)}" if near else NO_NODE,
            columns=1,
            cores=near,
            ranks=tuple(each for each in ranks if begins[each.rank] == node),
            gpus=tuple(each for each in gpus if (each.numa if each.numa in nodes else -1) == node),
            nics=tuple(each for each in nics if (each.numa if each.numa in nodes else -1) == node),
            is_inner=True,
        )
        if of_node.cores or of_node.ranks or of_node.gpus or of_node.nics:
            inner.append(of_node)
    return _Part(heading=heading, columns=columns, inner=tuple(inner))


def _free(place: Place, cores: Sequence[int]) -> str:
    taken = place.rank_of_core()
    return f"{sum(core not in taken for core in cores)} of {counted(len(cores), 'core')} free"


def _numa_name(place: Place, node: int) -> str:
    """By its logical number, and the system's where that is another one."""
    os_index = place.node.machine.numa_nodes[node].os_index
    return f"NUMA {node}" + (f" (P#{os_index})" if os_index not in (node, -1) else "")


def draw_full(canvas: Canvas, scene: Scene, place: Place, box: Box) -> float:
    """Return the height; that of ``box`` has no influence."""
    words = machine_words(place.node.machine)
    room = box.width - 2 * NODE_PAD
    name_room = max(room - text_width(words, 10) - 10, 0.45 * room)
    canvas.text(
        box.x + NODE_PAD,
        box.y + 19,
        place.node.name,
        size=14,
        bold=True,
        room=name_room,
        is_name=True,
    )
    canvas.text(
        box.x + box.width - NODE_PAD,
        box.y + 19,
        words,
        size=10,
        fill=MUTED,
        anchor="end",
        room=room - min(name_room, text_width(place.node.name, 14, bold=True)) - 10,
    )
    top = box.y + NODE_HEADER
    for row in _rows(place):
        width = PACKAGE_WIDTH if row[0].columns == 1 else NODE_WIDTH - 2 * NODE_PAD
        top = _draw_row(canvas, scene, place, row, Box(box.x + NODE_PAD, top, width, 0))
    return top - GAP + NODE_PAD - box.y


def _draw_row(
    canvas: Canvas, scene: Scene, place: Place, row: Sequence[_Part], first: Box
) -> float:
    """Draw parts as wide as ``first``, and as high as the highest; return where the next row
    begins."""
    contents = [Canvas() for _ in row]
    boxes = [first._replace(x=first.x + at * (first.width + GAP)) for at in range(len(row))]
    ends = [
        _draw_part(content, scene, place, part, box)
        for content, part, box in zip(contents, row, boxes, strict=True)
    ]
    for content, part, box in zip(contents, row, boxes, strict=True):
        fill = NUMA_FILL if part.is_inner else PACKAGE_FILL
        canvas.rect(*box[:3], max(ends) - first.y, fill=fill, stroke=EDGE, radius=4)
        canvas.add(content)
    return max(ends) + GAP


def _draw_part(canvas: Canvas, scene: Scene, place: Place, part: _Part, box: Box) -> float:
    """Draw what is in the frame; return where that ends."""
    x, y, room = box.x + PACKAGE_PAD, box.y, box.width - 2 * PACKAGE_PAD
    canvas.text(x, y + 14, part.heading, size=10, fill=MUTED, room=room)
    y += PACKAGE_HEADER
    for at in range(0, len(part.inner), part.columns):
        row, width = part.inner[at : at + part.columns], (room + GAP) / part.columns - GAP
        y = _draw_row(canvas, scene, place, row, Box(x, y, width, 0))
    if part.inner:
        return y
    taken, colours = place.rank_of_core(), fills(place)
    pitch = room / part.per_row
    widest = max((text_width(str(each.rank), 9.5) for each in place.ranks), default=0.0)
    for position, core in enumerate(part.cores):
        rank = taken.get(core)
        left = x + position % part.per_row * pitch
        top = y + position // part.per_row * CELL_HEIGHT
        canvas.rect(
            left + 0.5,
            top,
            pitch - 1,
            CELL_HEIGHT - 2,
            fill=FREE if rank is None else colours[rank.rank],
            stroke=EDGE if rank is None else "",
            radius=2,
            title=f"core {core}: " + ("free" if rank is None else rank_title(scene, rank)),
        )
        if rank is not None and widest <= pitch - 2:
            canvas.text(
                left + pitch / 2,
                top + 11.5,
                str(rank.rank),
                size=9.5,
                fill=ink(rank),
                anchor="middle",
            )
    y += -(-len(part.cores) // part.per_row) * CELL_HEIGHT + 4
    chip_width = (room - (part.columns - 1) * 6) / part.columns
    for position, rank in enumerate(part.ranks):
        left = x + position % part.columns * (chip_width + 6)
        top = y + position // part.columns * (CHIP_HEIGHT + 3)
        _draw_rank(canvas, scene, rank, colours[rank.rank], (left, top, chip_width))
    y += -(-len(part.ranks) // part.columns) * (CHIP_HEIGHT + 3) + 3
    y = _draw_devices(canvas, place, part.gpus, part, (x, y, room))
    return _draw_devices(canvas, place, part.nics, part, (x, y, room)) + 3


def _draw_rank(
    canvas: Canvas, scene: Scene, rank: PlannedRank, fill: str, at: tuple[float, float, float]
) -> None:
    x, y, width = at
    title = rank_title(scene, rank)
    canvas.rect(x, y, width, CHIP_HEIGHT, fill=fill, radius=3, title=title)
    name = f"rank {rank.rank}"
    canvas.text(x + 6, y + 14, name, size=10.5, bold=True, fill=ink(rank))
    room = width - text_width(name, 10.5, bold=True) - 18
    words = rank_words(scene, rank)
    if text_width(words, 10.5) > room and rank.role == "worker":
        words = words.partition(",")[0]
    canvas.text(x + width - 6, y + 14, words, size=10.5, fill=ink(rank), anchor="end", room=room)


def _draw_devices(
    canvas: Canvas,
    place: Place,
    devices: Sequence[Device],
    part: _Part,
    at: tuple[float, float, float],
) -> float:
    """One alone and those of a NUMA node in a line each, otherwise side by side; returns where the
    next row begins."""
    x, y, room = at
    is_alone = len(devices) == 1 or part.is_inner
    per_row = 1 if is_alone else 2 * part.columns
    width = room / part.columns if is_alone else (room + 6) / per_row - 6
    height = ALONE_HEIGHT if is_alone else DEVICE_HEIGHT
    colours = fills(place)
    shown = devices if len(devices) <= MAX_DEVICES else devices[: MAX_DEVICES - 1]
    for index, device in enumerate(shown):
        ranks = place.users(device)
        is_gpu = device.kind == "gpu"
        left = x + index % per_row * (width + 6)
        top = y + index // per_row * (height + 4)
        name = (short_pci(device.pci) or device.name) if is_gpu else device.name
        words = f"{'GPU' if is_gpu else 'NIC'} {name}"
        words_room = 0.6 * width - 10 if is_alone else width - 12
        used_by, used_room = _used_by(ranks), width - 12
        if is_alone:
            used_room = width - 24 - min(words_room, text_width(words, 10, bold=True))
        if text_width(used_by, 9.5) > used_room:
            used_by = counted(len(ranks), "rank")
        canvas.rect(
            left,
            top,
            width,
            height,
            fill="#ffffff" if not ranks else colours[ranks[0].rank] if is_gpu else NIC,
            stroke=FRAME,
            radius=3 if is_gpu else 10,
            dashed=not ranks,
            title=f"{', '.join(device.names)} {device.pci}: {_used_by(ranks)}",
        )
        canvas.text(left + 7, top + 14, words, size=10, bold=True, room=words_room)
        x_used, y_used = (left + width - 8, top + 14) if is_alone else (left + 7, top + 27)
        anchor = "end" if is_alone else "start"
        canvas.text(x_used, y_used, used_by, size=9.5, anchor=anchor, room=used_room)
    if len(shown) < len(devices):
        left = x + len(shown) % per_row * (width + 6)
        top = y + len(shown) // per_row * (height + 4)
        more = f"and {len(devices) - len(shown)} more"
        canvas.text(
            left + 7, top + (14 if is_alone else 20), more, size=10, fill=MUTED, room=width - 12
        )
    return y + -(-min(MAX_DEVICES, len(devices)) // per_row) * (height + 4)


def _used_by(ranks: Sequence[PlannedRank]) -> str:
    if not ranks:
        return "not used"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_list(each.rank for each in ranks)}"
