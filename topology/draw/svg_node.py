"""A host in the picture of a plan, in full or as one box.

Draws the frame and, as one box, what is inside; in full that is
:mod:`psdist.topology.draw.svg_node_full`. Links and racks are
:mod:`psdist.topology.draw.svg_racks`.

    width, height = node_size(place, "boxes")
    draw_node(canvas, scene, place, Box(x=0, y=0, width=width, height=height), "boxes")
"""

from __future__ import annotations

from psdist.topology.draw.drawing import Place, Scene, percent
from psdist.topology.draw.svg_canvas import INK, Canvas
from psdist.topology.draw.svg_node_full import draw_full, full_size
from psdist.topology.draw.svg_style import (
    FRAME,
    SERVER,
    Box,
    Level,
    load_colour,
    node_title,
    on_load,
)

BOX_WIDTH, BOX_HEIGHT = 46.0, 28.0
MAX_SQUARES = 3
"""Servers shown in a box; hovering tells all."""


def node_size(place: Place, level: Level) -> tuple[float, float]:
    return full_size(place) if level == "full" else (BOX_WIDTH, BOX_HEIGHT)


def draw_node(canvas: Canvas, scene: Scene, place: Place, box: Box, level: Level) -> None:
    if level == "boxes":
        _draw_box(canvas, scene, place, box)
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
    draw_full(canvas, scene, place, box)


def _draw_box(canvas: Canvas, scene: Scene, place: Place, box: Box) -> None:
    """The load of the link in words above the host's servers as squares."""
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
    if place.link is not None:
        canvas.text(
            box.x + box.width - 5,
            box.y + 13,
            percent(scene.share(place.link)),
            size=10,
            fill=on_load(load_colour(scene, place.link)),
            anchor="end",
            room=box.width - 8,
        )
    num_servers = sum(each.role == "server" for each in place.ranks)
    for index in range(min(MAX_SQUARES, num_servers)):
        canvas.rect(
            box.x + 5 + 8 * index,
            box.y + box.height - 10,
            6,
            6,
            fill=SERVER,
            stroke="#ffffff",
            stroke_width=0.8,
        )
