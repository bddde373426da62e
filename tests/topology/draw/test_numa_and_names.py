"""Pictures: NUMA nodes as boxes, names cut in the middle, speeds of links, colours explained."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from psdist.topology.draw import middle_cut, svg_canvas
from psdist.topology.draw import svg as draw_svg
from psdist.topology.draw import text as draw_text
from psdist.topology.machine import hwloc as hwloc_xml
from psdist.topology.network import Cluster, one_rack
from psdist.topology.plan import Plan
from psdist.topology.plan.planning import PlanRequest, plan_ahead
from tests.support.machine_files import machine_file, real
from tests.topology.draw.test_drawing import cluster, planned, words_of

SVG = "{http://www.w3.org/2000/svg}"


def planned_on(name: str, *, workers: int, hosts: int = 2) -> tuple[Plan, Cluster]:
    machine = hwloc_xml.read(machine_file(name))
    where = one_rack([f"n{index + 1}" for index in range(hosts)], machine)
    return plan_ahead(where, PlanRequest(), workers=[workers] * hosts), where


@pytest.mark.parametrize(
    ("name", "workers", "nodes"),
    [("four-quarters.xml", 2, 4), *real(("eas-tioga.xml", 8, 4), ("epyc-corona.xml", 4, 8))],
)
def test_each_numa_node_of_a_package_is_a_box_with_its_ranks(
    name: str, workers: int, nodes: int
) -> None:
    plan, where = planned_on(name, workers=workers)
    words = words_of(draw_svg.picture(plan, where))
    headings = [word for word in words if re.match(r"NUMA [0-9]+.*: [0-9]+ of", word)]
    assert len(headings) == nodes * len(where.nodes)
    assert "NUMA node in it" in words
    for each in plan.ranks:
        assert words.count(f"rank {each.rank}") >= 1
    assert {gpu.pci.removeprefix("0000:") for gpu in where.nodes[0].machine.gpus} <= {
        word.removeprefix("GPU ") for word in words
    }


@pytest.mark.parametrize("name", ["four-quarters.xml", *real("eas-tioga.xml", "epyc-corona.xml")])
def test_boxes_lie_in_boxes_and_do_not_overlap(name: str) -> None:
    plan, where = planned_on(name, workers=4)
    rects = [
        tuple(float(each.get(key, "0")) for key in ("x", "y", "width", "height"))
        for each in ElementTree.fromstring(draw_svg.picture(plan, where)).iter(f"{SVG}rect")
        if each.get("stroke") and each.get("y") and float(each.get("width", "0")) > 100
    ]
    for index, (x, y, width, height) in enumerate(rects):
        for left, top, wide, high in rects[:index]:
            apart = x >= left + wide or left >= x + width or y >= top + high or top >= y + height
            inside = (
                left <= x and top <= y and x + width <= left + wide and y + height <= top + high
            )
            assert apart or inside


def test_a_package_that_is_one_numa_node_says_so() -> None:
    where = cluster(1, 2)
    words = words_of(draw_svg.picture(planned(where), where))
    assert any(word.startswith("package 1, NUMA 1: ") for word in words)
    assert "NUMA node in it" not in words


def test_every_link_says_how_fast_it_is() -> None:
    where = cluster(2, 2)
    words = words_of(draw_svg.picture(planned(where), where))
    assert sum(" at 12 GB/s" in word for word in words) == 4
    assert sum(" at 6 GB/s" in word for word in words) == 2
    boxes = cluster(2, 16)
    words = words_of(draw_svg.picture(planned(boxes), boxes))
    assert "n[1-16], 12 GB/s each" in words
    assert sum("48 GB/s" in word for word in words) == 2  # the worst one's in the heading


@pytest.mark.parametrize("where", [cluster(2, 2), cluster(4, 16)], ids=["full", "boxes"])
def test_every_colour_of_the_picture_is_in_its_legend(where: Cluster) -> None:
    document = ElementTree.fromstring(draw_svg.picture(planned(where), where))
    fills = [each.get("fill", "") for each in document.iter(f"{SVG}rect")]
    legend, drawn = fills[1:], set()
    first = next(index for index, each in enumerate(legend) if index > 3 and each == fills[1])
    legend, drawn = legend[:first], set(legend[first:])
    told_by_words = {"#1d2433", "#7d889c", "#f6f7f9", "#ffffff"}  # pill, bar's line, rack, paper
    assert drawn - told_by_words <= set(legend)


LONG = "a-very-long-name-of-a-host-in-rack-seventeen-"


def test_long_names_keep_their_ends() -> None:
    machine = hwloc_xml.read(machine_file("four-quarters.xml"))
    where = one_rack([f"{LONG}{index}" for index in (1, 2)], machine)
    plan = plan_ahead(where, PlanRequest(), workers=[2, 2])
    words = words_of(draw_svg.picture(plan, where))
    for ending in ("seventeen-1", "seventeen-2"):
        assert any(word.startswith("a-very") and word.endswith(ending) for word in words)
        for width in (60, 80, 120, 200):
            lines = draw_text.tree(plan, where, width=width).splitlines()
            assert max(map(len, lines)) <= width
            assert any(f"{ending[-4:]} " in line for line in lines if "─ a" in line)


@pytest.mark.parametrize("room", range(60))
def test_a_name_is_cut_to_its_room(room: int) -> None:
    name = LONG + "123"
    assert len(middle_cut(name, room)) == min(room, len(name))
    cut = svg_canvas.middle_cut(name, 10, room * 6)
    assert svg_canvas.text_width(cut, 10) <= room * 6
    if room > 6:
        assert middle_cut(name, room).endswith(name[-2:])


def test_the_title_is_whole() -> None:
    where = cluster(4, 16)
    plan = planned(where, workers=7)
    plan = replace(plan, servers_s=2 * plan.cost_s)
    words = words_of(draw_svg.picture(plan, where))
    title = " ".join(words[:2])
    assert title.startswith("One exchange takes")
    assert "64 nodes" in title
