"""A host in the picture of a plan, at three levels of detail: in full, compact, and as one box.

Draws what is inside of a host's frame, and the frame; links and racks are
:mod:`psdist.topology.draw_svg`.

    width, height = node_size(place, "full")
    draw_node(canvas, scene, place, Box(x=0, y=0, width=width, height=height), "full")

Colours can be told apart by lightness alone: a server is dark, a worker light blue, what is free
nearly white. The scale of loads is ColorBrewer's YlOrBr, which is safe for colour-blind readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from psdist.topology.drawing import (
    Place,
    Scene,
    counted,
    duration,
    machine_words,
    package_name,
    percent,
    ranges,
    roles_words,
    short_pci,
    size,
    speed,
)
from psdist.topology.machine import Device
from psdist.topology.plan import LinkLoad, PlannedRank
from psdist.topology.svg_canvas import INK, MUTED, Canvas, text_width

Level = Literal["full", "compact", "dense"]

SERVER, WORKER, FREE = "#1f3a5f", "#a9d0ee", "#eef1f5"
NEXT_WORKER = "#8dbfe6"
"""Of every other worker, so that it is seen where one ends and the next begins."""
ON_SERVER, ON_WORKER = "#ffffff", "#12304d"
EDGE, FRAME = "#c3cad5", "#8791a3"
NIC = "#e4def2"
LOADS = ("#fee391", "#fec44f", "#fe9929", "#d95f0e", "#8c2d04")
"""By fifths of the worst link's time."""
NO_LOAD = "#dde1e8"

PACKAGE_WIDTH, PACKAGE_PAD, NODE_PAD, GAP = 190.0, 8.0, 10.0, 8.0
CELL_HEIGHT, CHIP_HEIGHT, DEVICE_HEIGHT = 18.0, 20.0, 34.0
NODE_HEADER, PACKAGE_HEADER = 28.0, 20.0
MAX_DEVICES = 8
"""Of a kind and package; what more there is (virtual functions) is only counted."""
COMPACT_WIDTH, COMPACT_STRIP, COMPACT_DEVICE = 158.0, 16.0, 8.0
DENSE_WIDTH, DENSE_HEIGHT = 28.0, 20.0
MAX_TITLE_LINES = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    x: float
    y: float
    width: float
    height: float


def load_colour(scene: Scene, link: LinkLoad | None) -> str:
    if link is None or link.num_bytes < 1:
        return NO_LOAD
    return LOADS[min(len(LOADS) - 1, int(len(LOADS) * scene.share(link)))]


def load_title(scene: Scene, link: LinkLoad) -> str:
    return (
        f"{link.name}: {size(link.num_bytes)} each way in one exchange, "
        f"{duration(link.seconds)} at {speed(link.bytes_per_s)}, "
        f"{percent(scene.share(link))} of the worst link"
    )


def node_size(place: Place, level: Level) -> tuple[float, float]:
    if level == "dense":
        return DENSE_WIDTH, DENSE_HEIGHT
    if level == "compact":
        rows = -(-len(place.node.machine.packages) // 2)
        return COMPACT_WIDTH, 44 + rows * (COMPACT_STRIP + COMPACT_DEVICE + 8)
    parts = _parts(place)
    columns = min(2, len(parts))
    width = columns * PACKAGE_WIDTH + (columns - 1) * GAP + 2 * NODE_PAD
    rows = -(-len(parts) // 2)
    height = rows * (max(map(_part_height, parts)) + GAP) - GAP
    return width, NODE_HEADER + height + NODE_PAD


def draw_node(canvas: Canvas, scene: Scene, place: Place, box: Box, level: Level) -> None:
    if level == "dense":
        _draw_dense(canvas, scene, place, box)
        return
    is_worst = scene.is_worst(place.link)
    canvas.rect(
        box.x,
        box.y,
        box.width,
        box.height,
        fill="#ffffff",
        stroke=INK if is_worst else FRAME,
        stroke_width=2.5 if is_worst else 1,
        radius=5,
        title=_node_title(scene, place),
    )
    (_draw_full if level == "full" else _draw_compact)(canvas, scene, place, box)


# In full


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A package with what is on it, or what is on no package that is known."""

    heading: str
    cores: tuple[int, ...]
    ranks: tuple[PlannedRank, ...]
    gpus: tuple[Device, ...]
    nics: tuple[Device, ...]

    @property
    def per_row(self) -> int:
        return 8 if len(self.cores) <= 32 else 16 if len(self.cores) <= 128 else 32


def _parts(place: Place) -> list[_Part]:
    machine = place.node.machine
    taken = place.rank_of_core()
    parts = []
    for index, package in enumerate(machine.packages):
        cores = tuple(core.logical for core in machine.cores if core.package == index)
        num_free = sum(core not in taken for core in cores)
        parts.append(
            _Part(
                heading=f"{package_name(package, index)}: {num_free} of "
                f"{counted(len(cores), 'core')} free",
                cores=cores,
                ranks=place.on_package(index),
                gpus=tuple(each for each in machine.gpus if each.package == index),
                nics=tuple(each for each in machine.nics if each.package == index),
            )
        )
    known = range(len(machine.packages))
    gpus = tuple(each for each in machine.gpus if each.package not in known)
    nics = tuple(each for each in machine.nics if each.package not in known)
    if place.elsewhere or gpus or nics or not parts:
        parts.append(
            _Part(
                heading="on no one package", cores=(), ranks=place.elsewhere, gpus=gpus, nics=nics
            )
        )
    return parts


def _part_height(part: _Part) -> float:
    rows_of_cells = -(-len(part.cores) // part.per_row)
    num_boxes = sum(-(-min(MAX_DEVICES, len(devices)) // 2) for devices in (part.gpus, part.nics))
    height = PACKAGE_HEADER + rows_of_cells * CELL_HEIGHT + 4
    height += len(part.ranks) * (CHIP_HEIGHT + 3) + num_boxes * (DEVICE_HEIGHT + 4)
    return height + 6


def _draw_full(canvas: Canvas, scene: Scene, place: Place, box: Box) -> None:
    words = machine_words(place.node.machine)
    room = box.width - 2 * NODE_PAD
    name_room = max(room - text_width(words, 10) - 10, 0.45 * room)
    canvas.text(box.x + NODE_PAD, box.y + 19, place.node.name, size=14, bold=True, room=name_room)
    canvas.text(
        box.x + box.width - NODE_PAD,
        box.y + 19,
        words,
        size=10,
        fill=MUTED,
        anchor="end",
        room=room - min(name_room, text_width(place.node.name, 14, bold=True)) - 10,
    )
    parts = _parts(place)
    height = max(map(_part_height, parts))
    for index, part in enumerate(parts):
        _draw_part(
            canvas,
            scene,
            place,
            part,
            Box(
                x=box.x + NODE_PAD + (index % 2) * (PACKAGE_WIDTH + GAP),
                y=box.y + NODE_HEADER + (index // 2) * (height + GAP),
                width=PACKAGE_WIDTH,
                height=height,
            ),
        )


def _draw_part(canvas: Canvas, scene: Scene, place: Place, part: _Part, box: Box) -> None:
    canvas.rect(box.x, box.y, box.width, box.height, fill="#fafbfc", stroke=EDGE, radius=4)
    x, y, room = box.x + PACKAGE_PAD, box.y, box.width - 2 * PACKAGE_PAD
    canvas.text(x, y + 14, part.heading, size=10, fill=MUTED, room=room)
    y += PACKAGE_HEADER
    taken = place.rank_of_core()
    pitch = room / part.per_row
    for position, core in enumerate(part.cores):
        rank = taken.get(core)
        left = x + position % part.per_row * pitch
        top = y + position // part.per_row * CELL_HEIGHT
        canvas.rect(
            left + 0.5,
            top,
            pitch - 1,
            CELL_HEIGHT - 2,
            fill=_fill(rank),
            stroke=EDGE if rank is None else "",
            radius=2,
            title=f"core {core}: " + ("free" if rank is None else _rank_title(scene, rank)),
        )
        if rank is not None and text_width(str(rank.rank), 9.5) <= pitch - 2:
            canvas.text(
                left + pitch / 2,
                top + 11.5,
                str(rank.rank),
                size=9.5,
                fill=_ink(rank),
                anchor="middle",
            )
    y += -(-len(part.cores) // part.per_row) * CELL_HEIGHT + 4
    for rank in part.ranks:
        canvas.rect(
            x,
            y,
            room,
            CHIP_HEIGHT,
            fill=_fill(rank),
            radius=3,
            title=_rank_title(scene, rank),
        )
        name = f"rank {rank.rank}"
        canvas.text(x + 6, y + 14, name, size=10.5, bold=True, fill=_ink(rank))
        used = text_width(name, 10.5, bold=True)
        canvas.text(
            x + room - 6,
            y + 14,
            _rank_words(scene, rank),
            size=10.5,
            fill=_ink(rank),
            anchor="end",
            room=room - used - 18,
        )
        y += CHIP_HEIGHT + 3
    y = _draw_devices(canvas, place, part.gpus, x, y + 3, room)
    _draw_devices(canvas, place, part.nics, x, y, room)


def _draw_devices(
    canvas: Canvas, place: Place, devices: Sequence[Device], x: float, y: float, room: float
) -> float:
    """Two a row; returns where the next row begins."""
    columns = 1 if len(devices) == 1 else 2
    width = (room - (columns - 1) * 6) / columns
    shown = devices if len(devices) <= MAX_DEVICES else devices[: MAX_DEVICES - 1]
    for index, device in enumerate(shown):
        users = _users(place, device)
        is_gpu = device.kind == "gpu"
        left = x + index % 2 * (width + 6)
        top = y + index // 2 * (DEVICE_HEIGHT + 4)
        name = (short_pci(device.pci) or device.name) if is_gpu else device.name
        numbers = ranges(each.rank for each in users)
        used_by = f"{'rank' if len(users) == 1 else 'ranks'} {numbers}" if users else "not used"
        canvas.rect(
            left,
            top,
            width,
            DEVICE_HEIGHT,
            fill="#ffffff" if not users else WORKER if is_gpu else NIC,
            stroke=FRAME,
            radius=3 if is_gpu else 10,
            dashed=not users,
            title=f"{', '.join(device.names)} {device.pci}: {used_by}",
        )
        word = "GPU" if is_gpu else "NIC"
        canvas.text(left + 7, top + 14, f"{word} {name}", size=10, bold=True, room=width - 12)
        canvas.text(left + 7, top + 27, used_by, size=9.5, room=width - 12)
    if len(shown) < len(devices):
        left = x + len(shown) % 2 * (width + 6)
        top = y + len(shown) // 2 * (DEVICE_HEIGHT + 4)
        words = f"and {len(devices) - len(shown)} more"
        canvas.text(left + 7, top + 20, words, size=10, fill=MUTED, room=width - 12)
    return y + -(-min(MAX_DEVICES, len(devices)) // 2) * (DEVICE_HEIGHT + 4)


# Compact


def _draw_compact(canvas: Canvas, scene: Scene, place: Place, box: Box) -> None:
    del scene
    machine = place.node.machine
    x, room = box.x + 8, box.width - 16
    canvas.text(x, box.y + 16, place.node.name, size=12, bold=True, room=room)
    canvas.text(x, box.y + 30, roles_words(place.ranks), size=10, fill=MUTED, room=room)
    columns = min(2, max(1, len(machine.packages)))
    width = (room - (columns - 1) * 6) / columns
    taken = place.rank_of_core()
    for index in range(len(machine.packages)):
        left = x + index % columns * (width + 6)
        top = box.y + 38 + index // columns * (COMPACT_STRIP + COMPACT_DEVICE + 8)
        cores = [core.logical for core in machine.cores if core.package == index]
        _draw_strip(canvas, cores, taken, Box(x=left, y=top, width=width, height=COMPACT_STRIP))
        beside = [each for each in machine.devices if each.package == index]
        for position, device in enumerate(beside[: int(width / (COMPACT_DEVICE + 3))]):
            is_used = bool(_users(place, device))
            is_gpu = device.kind == "gpu"
            canvas.rect(
                left + position * (COMPACT_DEVICE + 3) + 0.5,
                top + COMPACT_STRIP + 4,
                COMPACT_DEVICE,
                COMPACT_DEVICE,
                fill="#ffffff" if not is_used else WORKER if is_gpu else NIC,
                stroke=FRAME,
                radius=0 if is_gpu else COMPACT_DEVICE / 2,
                title=f"{device.name} {device.pci}",
            )


def _draw_strip(
    canvas: Canvas, cores: Sequence[int], taken: dict[int, PlannedRank], box: Box
) -> None:
    """Cores side by side as thin cells, one element for each rank's run of them."""
    if not cores:
        return
    pitch = box.width / len(cores)
    position = 0
    for rank, run in groupby(cores, key=taken.get):
        length = len(list(run))
        canvas.rect(
            box.x + position * pitch,
            box.y,
            length * pitch,
            box.height,
            fill=_fill(rank),
            title="free" if rank is None else f"rank {rank.rank}: {rank.role} {rank.index}",
        )
        position += length
    if pitch >= 3:
        canvas.ticks(
            (box.x + index * pitch for index in range(1, len(cores))),
            box.y,
            box.height,
            stroke="#ffffff",
        )
    canvas.rect(box.x, box.y, box.width, box.height, fill="none", stroke=EDGE)


# One box


def _draw_dense(canvas: Canvas, scene: Scene, place: Place, box: Box) -> None:
    is_worst = scene.is_worst(place.link)
    canvas.rect(
        box.x,
        box.y,
        box.width,
        box.height,
        fill=load_colour(scene, place.link),
        stroke=INK if is_worst else "#ffffff",
        stroke_width=3 if is_worst else 1,
        radius=2,
        title=_node_title(scene, place),
    )
    num_servers = sum(each.role == "server" for each in place.ranks)
    for index in range(min(3, num_servers)):
        canvas.rect(
            box.x + 4 + 7 * index,
            box.y + box.height - 9,
            5,
            5,
            fill=SERVER,
            stroke="#ffffff",
            stroke_width=0.8,
        )


# Words and colours


def _fill(rank: PlannedRank | None) -> str:
    if rank is None:
        return FREE
    if rank.role == "server":
        return SERVER
    return NEXT_WORKER if rank.index % 2 else WORKER


def _ink(rank: PlannedRank) -> str:
    return ON_SERVER if rank.role == "server" else ON_WORKER


def _users(place: Place, device: Device) -> list[PlannedRank]:
    if device.kind == "gpu":
        return [each for each in place.ranks if each.gpu and each.gpu == device.pci]
    return [each for each in place.ranks if each.nic and each.nic in device.names]


def _rank_words(scene: Scene, rank: PlannedRank) -> str:
    if rank.role == "server":
        return f"server {rank.index}, {100 * scene.plan.weights[rank.index]:.1f} %"
    return f"worker {rank.index}, group {rank.group}"


def _rank_title(scene: Scene, rank: PlannedRank) -> str:
    where = f"cores {ranges(rank.cores)}" if rank.cores else "not bound"
    devices = "".join(f", {each}" for each in (short_pci(rank.gpu), rank.nic) if each)
    holds = " of the model" if rank.role == "server" else ""
    return f"rank {rank.rank}: {_rank_words(scene, rank)}{holds}, {where}{devices}"


def _node_title(scene: Scene, place: Place) -> str:
    lines = [f"{place.node.name}: {machine_words(place.node.machine)}"]
    if place.link is not None:
        lines.append(load_title(scene, place.link))
    lines += (_rank_title(scene, each) for each in place.ranks[:MAX_TITLE_LINES])
    if len(place.ranks) > MAX_TITLE_LINES:
        lines.append(f"and {counted(len(place.ranks) - MAX_TITLE_LINES, 'rank')} more")
    return "\n".join(lines)
