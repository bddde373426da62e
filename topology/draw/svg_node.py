"""A host in the picture of a plan, at three levels of detail: in full, compact, and as one box.

Draws the frame and, compact or as one box, what is inside; in full that is
:mod:`psdist.topology.draw.svg_node_full`. Links and racks are
:mod:`psdist.topology.draw.svg_racks`.

    width, height = node_size(place, "compact")
    draw_node(canvas, scene, place, Box(x=0, y=0, width=width, height=height), "compact")
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from psdist.topology.draw.drawing import Place, Scene, roles_words
from psdist.topology.draw.svg_canvas import INK, MUTED, Canvas
from psdist.topology.draw.svg_node_full import draw_full, full_size
from psdist.topology.draw.svg_style import (
    EDGE,
    FRAME,
    FREE,
    NIC,
    SERVER,
    Box,
    Level,
    fills,
    load_colour,
    node_title,
    users,
)
from psdist.topology.plan.plan import PlannedRank

COMPACT_WIDTH, COMPACT_STRIP, COMPACT_DEVICE = 158.0, 16.0, 8.0
DENSE_WIDTH, DENSE_HEIGHT = 28.0, 20.0


def node_size(place: Place, level: Level) -> tuple[float, float]:
    if level == "dense":
        return DENSE_WIDTH, DENSE_HEIGHT
    if level == "compact":
        rows = -(-len(place.node.machine.packages) // 2)
        return COMPACT_WIDTH, 44 + rows * (COMPACT_STRIP + COMPACT_DEVICE + 8)
    return full_size(place)


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
        title=node_title(scene, place),
    )
    (draw_full if level == "full" else _draw_compact)(canvas, scene, place, box)


# Compact


def _draw_compact(canvas: Canvas, scene: Scene, place: Place, box: Box) -> None:
    del scene
    machine = place.node.machine
    x, room = box.x + 8, box.width - 16
    canvas.text(x, box.y + 16, place.node.name, size=12, bold=True, room=room)
    canvas.text(x, box.y + 30, roles_words(place.ranks), size=10, fill=MUTED, room=room)
    columns = min(2, max(1, len(machine.packages)))
    width = (room - (columns - 1) * 6) / columns
    taken, colours = place.rank_of_core(), fills(place)
    for index in range(len(machine.packages)):
        left = x + index % columns * (width + 6)
        top = box.y + 38 + index // columns * (COMPACT_STRIP + COMPACT_DEVICE + 8)
        cores = [core.logical for core in machine.cores if core.package == index]
        _draw_strip(
            canvas, cores, taken, colours, Box(x=left, y=top, width=width, height=COMPACT_STRIP)
        )
        beside = [each for each in machine.devices if each.package == index]
        for position, device in enumerate(beside[: int(width / (COMPACT_DEVICE + 3))]):
            ranks = users(place, device)
            is_gpu = device.kind == "gpu"
            canvas.rect(
                left + position * (COMPACT_DEVICE + 3) + 0.5,
                top + COMPACT_STRIP + 4,
                COMPACT_DEVICE,
                COMPACT_DEVICE,
                fill="#ffffff" if not ranks else colours[ranks[0].rank] if is_gpu else NIC,
                stroke=FRAME,
                radius=0 if is_gpu else COMPACT_DEVICE / 2,
                title=f"{device.name} {device.pci}",
            )


def _draw_strip(
    canvas: Canvas,
    cores: Sequence[int],
    taken: dict[int, PlannedRank],
    colours: dict[int, str],
    box: Box,
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
            fill=FREE if rank is None else colours[rank.rank],
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
        title=node_title(scene, place),
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
