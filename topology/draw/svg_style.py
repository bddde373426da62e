"""Colours and words of the picture of a plan: what each of its modules says in the same way.

Colours can be told apart by lightness alone: a server is dark, workers are light blue in two
shades, what is free is nearly white. The scale of loads is ColorBrewer's YlOrBr, which is safe for
colour-blind readers.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from psdist.topology.draw import (
    Place,
    Scene,
    counted,
    duration,
    machine_words,
    percent,
    short_pci,
    size,
    speed,
)
from psdist.topology.draw.svg_canvas import INK
from psdist.topology.plan import LinkLoad, PlannedRank
from psdist.topology.text.bitmap import format_list

Level = Literal["full", "boxes"]
"""Hosts with all that is in them, or one box each."""

SERVER, WORKER, FREE = "#1f3a5f", "#a9d0ee", "#eef1f5"
NEXT_WORKER = "#8dbfe6"
"""Every other worker has this colour, so that neighbouring workers are told apart."""
ON_SERVER, ON_WORKER = "#ffffff", "#12304d"
EDGE, FRAME = "#c3cad5", "#8791a3"
NIC = "#e4def2"
PACKAGE_FILL, NUMA_FILL, BAR = "#f3f5f8", "#ffffff", "#3b4558"
LOADS = ("#fee391", "#fec44f", "#fe9929", "#d95f0e", "#8c2d04")
"""By fifths of the worst link's time."""
NO_LOAD = "#dde1e8"

MAX_TITLE_LINES = 30


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float


def load_colour(scene: Scene, link: LinkLoad | None) -> str:
    if link is None or link.num_bytes < 1:
        return NO_LOAD
    return LOADS[min(len(LOADS) - 1, int(len(LOADS) * scene.share(link)))]


def on_load(colour: str) -> str:
    """The colour of words on that colour of a load."""
    return "#ffffff" if colour in LOADS[-2:] else INK


def load_title(scene: Scene, link: LinkLoad) -> str:
    return (
        f"{link.name}: {size(link.num_bytes)} each way in one exchange, "
        f"{duration(link.seconds)} at {speed(link.bytes_per_s)}, "
        f"{percent(scene.share(link))} of the worst link"
    )


def fills(place: Place) -> dict[int, str]:
    """The colour of each rank (by its number); neighbouring workers differ in shade."""
    found: dict[int, str] = {}
    num_workers: dict[int, int] = {}
    for each in place.ranks:
        if each.role == "server":
            found[each.rank] = SERVER
            continue
        before = num_workers.get(each.package, 0)
        found[each.rank] = NEXT_WORKER if before % 2 else WORKER
        num_workers[each.package] = before + 1
    return found


def ink(rank: PlannedRank) -> str:
    return ON_SERVER if rank.role == "server" else ON_WORKER


def rank_words(scene: Scene, rank: PlannedRank) -> str:
    if rank.role == "server":
        return f"server {rank.index}, {100 * scene.plan.weights[rank.index]:.1f} %"
    if rank.role == "spare":
        return f"spare {rank.index}"
    return f"worker {rank.index}, group {rank.group}"


def rank_title(scene: Scene, rank: PlannedRank) -> str:
    where = f"cores {format_list(rank.cores)}" if rank.cores else "not bound"
    devices = "".join(f", {each}" for each in (short_pci(rank.gpu), rank.nic) if each)
    holds = " of the model" if rank.role == "server" else ""
    return f"rank {rank.rank}: {rank_words(scene, rank)}{holds}, {where}{devices}"


def node_title(scene: Scene, place: Place) -> str:
    lines = [f"{place.node.name}: {machine_words(place.node.machine)}"]
    if place.link is not None:
        lines.append(load_title(scene, place.link))
    lines += (rank_title(scene, each) for each in place.ranks[:MAX_TITLE_LINES])
    if len(place.ranks) > MAX_TITLE_LINES:
        lines.append(f"and {counted(len(place.ranks) - MAX_TITLE_LINES, 'rank')} more")
    return "\n".join(lines)
