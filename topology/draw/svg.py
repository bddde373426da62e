"""A plan as a picture: racks, hosts, sockets, cores, GPUs and NICs, who sits where, link loads.

    Path("plan.svg").write_text(draw_svg.picture(plan, cluster), encoding="utf-8")

Here is the page: title, legend and notes. Up to 16 hosts are drawn in full, more as one box each,
coloured by the load of their link. Hovering shows details.
"""

from __future__ import annotations

from psdist.topology.draw import (
    Scene,
    bound_words,
    counted,
    duration,
    gain_words,
    limit_words,
    roles_words,
    size,
    worst_words,
)
from psdist.topology.draw.svg_canvas import INK, MUTED, Canvas, text_width, wrapped
from psdist.topology.draw.svg_node_full import has_inner_nodes
from psdist.topology.draw.svg_racks import Racks
from psdist.topology.draw.svg_style import (
    BAR,
    EDGE,
    FRAME,
    FREE,
    LOADS,
    NEXT_WORKER,
    NIC,
    NO_LOAD,
    NUMA_FILL,
    PACKAGE_FILL,
    SERVER,
    WORKER,
    Level,
    on_load,
)
from psdist.topology.network import Cluster
from psdist.topology.plan import Plan

MAX_FULL = 16
MAX_NOTES = 12
MARGIN, MIN_WIDTH = 28.0, 900.0
TITLE_SIZES = (22.0, 20.0, 18.0)


def picture(plan: Plan, cluster: Cluster) -> str:
    """A standalone SVG document.

    Raises PlacementError where the plan has a host that the cluster does not have.
    """
    scene = Scene.of(plan, cluster)
    level: Level = "full" if len(cluster.nodes) <= MAX_FULL else "boxes"
    canvas = Canvas()
    drawing = Racks(canvas, scene, level)
    width = max(MIN_WIDTH, drawing.width + 2 * MARGIN)
    title = _title(scene)
    y = _draw_title(canvas, scene, title, width)
    y = _draw_legend(canvas, scene, level, y, width)
    drawing.draw(MARGIN + (width - 2 * MARGIN - drawing.width) / 2, y)
    y = _draw_notes(canvas, scene, y + drawing.height + 24, width)
    return canvas.document(width, y + MARGIN - 12, title=title)


def _title(scene: Scene) -> str:
    plan = scene.plan
    return (
        f"One exchange takes {duration(plan.exchange_s)} ({plan.limit}): "
        f"{roles_words(plan.ranks)} on "
        f"{counted(len(plan.hosts), 'node')}"
    )


def _draw_title(canvas: Canvas, scene: Scene, title: str, width: float) -> float:
    """Returns where the next thing begins, as all these do."""
    plan, room = scene.plan, width - 2 * MARGIN
    y = MARGIN + 16
    fitting = (each for each in TITLE_SIZES if text_width(title, each, bold=True) <= room)
    title_size = next(fitting, TITLE_SIZES[-1])
    first, *rest = wrapped(title, title_size * 1.1, room)  # bold
    canvas.text(MARGIN, y, first, size=title_size, bold=True, room=room)
    for line in rest:
        y += title_size + 6
        canvas.text(MARGIN, y, line, size=title_size, bold=True, room=room)
    gains = "; ".join(gain_words(plan))
    paragraphs = [
        f"Predicted for a push and a pull of {size(plan.model_bytes)}: {bound_words(plan)}.",
        *([f"Placed otherwise: {gains}."] if gains else []),
        f"What takes longest: {limit_words(plan)}.",
        f"Worst link: {worst_words(scene)}.",
    ]
    y += 8
    for paragraph in paragraphs:
        for line in wrapped(paragraph, 13, room):
            y += 19
            canvas.text(MARGIN, y, line, size=13, fill=MUTED)
    return y + 16


def _draw_legend(canvas: Canvas, scene: Scene, level: Level, y: float, width: float) -> float:
    """Draw swatches, each followed by its words; a line takes all that fit."""
    x, height = MARGIN, 14.0

    def room_for(words: str, swatch: float) -> None:
        nonlocal x, y
        if x + swatch + 6 + text_width(words, 11) > width - MARGIN:
            x, y = MARGIN, y + 24

    def entry(
        words: str,
        fill: str,
        *,
        swatch: float = 16,
        stroke: str = "",
        radius: float = 2,
        dashed: bool = False,
    ) -> None:
        nonlocal x
        room_for(words, swatch)
        canvas.rect(x, y, swatch, height, fill=fill, stroke=stroke, radius=radius, dashed=dashed)
        canvas.text(x + swatch + 6, y + 11, words, size=11)
        x += swatch + 6 + text_width(words, 11) + 10

    entry("switch", BAR)
    if level == "boxes":
        entry("a server (at most 3 shown)", SERVER, swatch=14)
    else:
        entry("server", SERVER)
        entry("worker", WORKER)
        entry("the next worker", NEXT_WORKER)
        entry("free core", FREE, stroke=EDGE)
        entry("package", PACKAGE_FILL, stroke=EDGE)
        if any(has_inner_nodes(place) for place in scene.nodes):
            entry("NUMA node in it", NUMA_FILL, stroke=EDGE)
        entry("GPU, as its worker", WORKER, stroke=FRAME)
        entry("network card", NIC, stroke=FRAME, radius=7, swatch=20)
        if any(
            not place.users(each) for place in scene.nodes for each in place.node.machine.devices
        ):
            entry("not used", "#ffffff", stroke=FRAME, dashed=True)
        x, y = MARGIN - 6, y + 24
    words = "a node, by the time of its link:" if level == "boxes" else "time of a link:"
    x += 6
    room_for(words, 5 * 40)
    canvas.text(x, y + 11, words, size=11)
    x += text_width(words, 11) + 8
    step = 100 // len(LOADS)
    for index, colour in enumerate(LOADS):
        canvas.rect(x, y, 40, height, fill=colour)
        label = f"{index * step}-{(index + 1) * step}"
        canvas.text(x + 20, y + 11, label, size=10, anchor="middle", fill=on_load(colour))
        x += 40
    x += 6
    words = "% of the worst"
    canvas.text(x, y + 11, words, size=11)
    x += text_width(words, 11) + 8
    if any(link.num_bytes < 1 for link in scene.plan.links):
        entry("none", NO_LOAD)
    room_for("the worst link", 16)
    canvas.rect(x, y, 16, height, fill=LOADS[-1], stroke=INK, stroke_width=3)
    canvas.text(x + 24, y + 11, "the worst link", size=11)
    return y + height + 22


def _draw_notes(canvas: Canvas, scene: Scene, y: float, width: float) -> float:
    plan = scene.plan
    notes = [
        f"Servers placed by: {plan.placement}. Tree of switches from: {plan.source}.",
        *plan.notes[:MAX_NOTES],
    ]
    if len(plan.notes) > MAX_NOTES:
        notes.append(f"and {counted(len(plan.notes) - MAX_NOTES, 'note')} more")
    for note in notes:
        for line in wrapped(note, 11, width - 2 * MARGIN):
            canvas.text(MARGIN, y, line, size=11, fill=MUTED)
            y += 16
    return y
