"""Racks, hosts and links in the picture of a plan: boxes in boxes, strokes that lead to them.

    racks = Racks(canvas, scene, "boxes")
    racks.draw(x, y)                        # racks.width, racks.height

A switch is a bar; its children are in rows below. The bar continues as a thin line to further
rows. A link is a stroke down from the bar, coloured by its load and labelled with it. The code has
no recursion: trees may be very deep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from psdist.topology.draw import (
    Place,
    Scene,
    counted,
    duration,
    names,
    percent,
    size,
    speed,
)
from psdist.topology.draw.svg_canvas import INK, Canvas, text_width
from psdist.topology.draw.svg_node_full import draw_full, full_size
from psdist.topology.draw.svg_style import (
    BAR,
    EDGE,
    FRAME,
    NO_LOAD,
    SERVER,
    Box,
    Level,
    load_colour,
    load_title,
    node_title,
    on_load,
)
from psdist.topology.plan import LinkLoad

MAX_NESTED = 6
"""Boxes in boxes; what is deeper is drawn in the box at this depth."""
SHAPE, RACK_SHAPE = 1.5, 1.2
"""Width over height aimed at, of the whole picture and of a rack."""
STROKE_INSET = 20.0
"""From the left edge of a rack or node to the stroke that leads to it."""
BRANCH = "#7d889c"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Style:
    """Sizes of what depends on the level of detail."""

    bar: float
    """Height of a switch's bar."""
    link: float
    """Height of the stroke from a bar down to a node; 0: not drawn."""
    uplink: float
    stroke: float
    words: float
    """Font size of a load."""
    gap: float
    """Space between nodes, and between neighbouring racks."""
    rack_gap: float
    pad: float


_STYLES: dict[Level, _Style] = {
    "full": _Style(bar=26, link=34, uplink=36, stroke=10, words=11.5, gap=18, rack_gap=18, pad=14),
    "boxes": _Style(bar=22, link=0, uplink=30, stroke=8, words=11, gap=4, rack_gap=14, pad=10),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grid:
    """How the children of a switch stand: equal cells in rows."""

    columns: int
    rows: int
    cell_width: float
    cell_height: float
    pitch: float
    """From a cell's left edge to that of the next."""
    width: float
    """Width of the whole box of the switch."""
    height: float


class Racks:
    """The boxes of the switches: measured from the leaves up, then drawn from the root down."""

    def __init__(self, canvas: Canvas, scene: Scene, level: Level) -> None:
        self._canvas = canvas
        self._scene = scene
        self._level: Level = level
        self._style = _STYLES[level]
        self._switches, self._nodes = _flattened(scene)
        self._grids: dict[int, _Grid] = {}
        for switch in reversed([each for each in scene.order if each in self._switches]):
            self._grids[switch] = self._measured(switch)
        self._root = scene.order[0] if scene.order else -1

    @property
    def width(self) -> float:
        return self._grids[self._root].width if self._grids else 0.0

    @property
    def height(self) -> float:
        return self._grids[self._root].height if self._grids else 0.0

    def draw(self, x: float, y: float) -> None:
        waiting = [(self._root, x, y, 0)] if self._grids else []
        while waiting:
            switch, x, y, depth = waiting.pop()
            grid = self._grids[switch]
            self._draw_box(switch, Box(x, y, grid.width, grid.height), depth)
            for index, (child, is_switch) in enumerate(self._children(switch)):
                row, column = divmod(index, grid.columns)
                left = x + self._inset(switch, grid.rows) + column * grid.pitch
                link = self._link_height(switch)
                top = y + self._style.bar + link + row * (grid.cell_height + self._row_gap(switch))
                if not link:
                    top += self._style.pad
                if is_switch:
                    self._draw_link(self._scene.uplinks[child], left, top, link, grid.cell_width)
                    waiting.append((child, left, top, depth + 1))
                else:
                    place = self._scene.nodes[child]
                    if link:
                        self._draw_link(place.link, left, top, link, grid.cell_width)
                    cell = Box(left, top, grid.cell_width, grid.cell_height)
                    draw_node(self._canvas, self._scene, place, cell, self._level)

    def _children(self, switch: int) -> list[tuple[int, bool]]:
        return [(child, True) for child in self._switches[switch]] + [
            (node, False) for node in self._nodes[switch]
        ]

    def _link_height(self, switch: int) -> float:
        """Height of the strokes below a bar: that of the highest one in the box."""
        return self._style.uplink if self._switches[switch] else self._style.link

    def _row_gap(self, switch: int) -> float:
        """Between rows there is a bar's thin continuation and the strokes below it."""
        link = self._link_height(switch)
        return link + self._style.rack_gap + 2 if link else self._style.gap

    def _inset(self, switch: int, rows: int) -> float:
        """Left of the cells: room for the line that leads the bar on to further rows."""
        return self._style.pad + (8 if rows > 1 and self._link_height(switch) else 0)

    def _measured(self, switch: int) -> _Grid:
        children = self._children(switch)
        sizes = [
            (self._grids[child].width, self._grids[child].height)
            if is_switch
            else node_size(self._scene, self._scene.nodes[child], self._level)
            for child, is_switch in children
        ]
        cell_width = max(width for width, _ in sizes)
        cell_height = max(height for _, height in sizes)
        style, number = self._style, len(children)
        link, row_gap = self._link_height(switch), self._row_gap(switch)
        shape = SHAPE if self._switches[switch] else RACK_SHAPE
        gap = style.rack_gap if self._switches[switch] else style.gap

        def grid(columns: int) -> _Grid:
            rows = -(-number // columns)
            return _Grid(
                columns=columns,
                rows=rows,
                cell_width=cell_width,
                cell_height=cell_height,
                pitch=cell_width + gap,
                width=self._inset(switch, rows) + style.pad + columns * (cell_width + gap) - gap,
                height=style.bar
                + (link or style.pad)
                + rows * (cell_height + row_gap)
                - row_gap
                + style.pad,
            )

        def badness(grid: _Grid) -> float:
            empty = grid.columns * grid.rows - number
            return abs(math.log(grid.width / grid.height / shape)) + 4 * empty / number

        most = min(number, 4 * math.isqrt(number) + 4)
        return min((grid(columns) for columns in range(1, most + 1)), key=badness)

    def _draw_box(self, switch: int, box: Box, depth: int) -> None:
        canvas, scene, style = self._canvas, self._scene, self._style
        grid = self._grids[switch]
        canvas.rect(*box, fill="#f6f7f9" if depth % 2 else "#ffffff", stroke=EDGE, radius=6)
        link = self._link_height(switch)
        if grid.rows > 1 and link:
            step = grid.cell_height + self._row_gap(switch)
            trunk_x = box.x + style.pad / 2 + 1
            last = box.y + style.bar + (grid.rows - 1) * step
            canvas.rect(trunk_x, box.y + 4, 3, last - box.y - 4, fill=BRANCH)
            for row in range(1, grid.rows):
                columns = min(grid.columns, len(self._children(switch)) - row * grid.columns)
                end = box.x + self._inset(switch, grid.rows) + (columns - 1) * grid.pitch
                y = box.y + style.bar + row * step - 3
                width = end + STROKE_INSET + style.stroke - trunk_x
                canvas.rect(trunk_x, y, width, 3, fill=BRANCH)
        canvas.rect(box.x, box.y, box.width, style.bar, fill=BAR, radius=5)
        name = scene.cluster.switches[switch].name
        nodes, num_switches = self._nodes[switch], len(self._switches[switch])
        amounts = ", ".join(
            words
            for words in (counted(num_switches, "switch", "switches"), counted(len(nodes), "node"))
            if not words.startswith("0 ")
        )
        options = [amounts]
        if self._level == "boxes" and not num_switches:  # the boxes of the nodes hold no names
            amounts = names([scene.nodes[index].node.name for index in nodes])
            speeds = {speed(scene.nodes[index].node.bytes_per_s) for index in nodes}
            each = f", {speeds.pop()} each" if len(speeds) == 1 else ""
            options = [amounts + each, amounts]
        base = box.y + style.bar / 2 + 4.5
        size_name, size_rest = style.words + 1.5, style.words
        room = box.width - 24
        most = max(0.5 * room, room - text_width(name, size_name, bold=True) - 12)
        amounts = next((each for each in options if text_width(each, size_rest) < most), "")
        room -= text_width(amounts, size_rest) + 12 if amounts else 0
        canvas.text(
            box.x + 12,
            base,
            name,
            size=size_name,
            fill="#ffffff",
            bold=True,
            room=room,
            is_name=True,
        )
        if amounts:
            right = box.x + box.width - 12
            canvas.text(right, base, amounts, size=size_rest, fill="#dfe3ea", anchor="end")

    def _draw_link(
        self, link: LinkLoad | None, x: float, y: float, height: float, room: float
    ) -> None:
        """Draw the stroke ending at (x, y), the top of the lower element, labelled with its
        load."""
        canvas, scene, style = self._canvas, self._scene, self._style
        is_worst = scene.is_worst(link)
        left, top = x + STROKE_INSET, y - height
        if link is None:
            canvas.rect(left, top, style.stroke, height, fill=NO_LOAD)
            return
        canvas.rect(
            left,
            top,
            style.stroke,
            height,
            fill=load_colour(scene, link),
            stroke=INK if is_worst else "#6b5a3a",
            stroke_width=3 if is_worst else 0.6,
            title=load_title(scene, link),
        )
        share = percent(scene.share(link))
        short = f"{duration(link.seconds)} · {share}"
        longest = f"{size(link.num_bytes)} at {speed(link.bytes_per_s)}: {short}"
        prefix = "worst link: " if is_worst else ""
        label_x = left + style.stroke + 8
        available = x + room - label_x - 6
        with_speed = f"{duration(link.seconds)} at {speed(link.bytes_per_s)} · {share}"
        options = [*(prefix + each for each in (longest, with_speed, short)), short]
        words = next(
            (each for each in options if text_width(each, style.words, bold=is_worst) <= available),
            options[-1],
        )
        base = y - height / 2 + 4
        if not is_worst:
            canvas.text(label_x, base, words, size=style.words, room=available)
            return
        width = min(available, text_width(words, style.words, bold=True) + 8)
        height_of_pill = style.words + 7
        canvas.rect(
            label_x - 2, base - style.words - 1.5, width, height_of_pill, fill=INK, radius=4
        )
        canvas.text(
            label_x - 2 + width / 2,
            base,
            words,
            size=style.words,
            fill="#ffffff",
            anchor="middle",
            bold=True,
            room=available,
        )


def _flattened(scene: Scene) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Switches and nodes under each switch that is drawn: none deeper than MAX_NESTED."""
    switches: dict[int, list[int]] = {}
    nodes: dict[int, list[int]] = {}
    drawn_as: dict[int, int] = {}
    depths: dict[int, int] = {}
    for switch in scene.order:
        parent = scene.cluster.switches[switch].parent
        depths[switch] = depths[parent] + 1 if parent >= 0 else 0
        if depths[switch] <= MAX_NESTED:
            drawn_as[switch] = switch
            switches[switch], nodes[switch] = [], []
            if parent >= 0:
                switches[parent].append(switch)
        else:
            drawn_as[switch] = drawn_as[parent]
        nodes[drawn_as[switch]] += scene.nodes_under[switch]
    return switches, nodes


BOX_WIDTH, BOX_HEIGHT = 46.0, 28.0
MAX_SQUARES = 3
"""Servers shown in a box; hovering tells all."""


def node_size(scene: Scene, place: Place, level: Level) -> tuple[float, float]:
    return full_size(scene, place) if level == "full" else (BOX_WIDTH, BOX_HEIGHT)


def draw_node(canvas: Canvas, scene: Scene, place: Place, box: Box, level: Level) -> None:
    if level == "boxes":
        _draw_box(canvas, scene, place, box)
        return
    is_worst = scene.is_worst(place.link)
    canvas.rect(
        *box,
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
        *box,
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
