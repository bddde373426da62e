"""The table of a host's devices: what is in it, on real machines and made-up ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psdist.topology.draw import matrix
from psdist.topology.machine import Machine, flat_machine
from psdist.topology.machine import hwloc as hwloc_xml
from psdist.topology.network import one_rack
from psdist.topology.plan.planning import PlanRequest, plan_ahead
from tests.support.machine_files import SHAPES, machine_file, real

WIDE = 1000


def tables(machine: Machine, *, workers: int = 2, hosts: int = 2, width: int = WIDE) -> str:
    cluster = one_rack([f"n{index + 1}" for index in range(hosts)], machine)
    plan = plan_ahead(cluster, PlanRequest(), workers=[workers] * hosts)
    return matrix.tables(plan, cluster, width=width)


def rows(text: str) -> dict[str, dict[str, str]]:
    """Of the first table, by row and column."""
    _, heading, *lines = text.splitlines()
    head = heading.split()
    number = sum(word.startswith(("GPU", "NIC")) for word in head)
    found = {}
    for line in lines[:number]:
        first, *cells = line.split(maxsplit=len(head))
        found[first] = dict(zip(head, cells, strict=True))
    return found


@pytest.mark.parametrize("name", ["nvlink-to-processors.xml", *real("power8gpudistances.v3.xml")])
def test_gpus_that_nvlinks_join_are_in_the_table_with_their_number(name: str) -> None:
    table = rows(tables(hwloc_xml.read(machine_file(name))))
    assert table["GPU0"]["GPU0"] == "X"
    assert table["GPU0"]["GPU1"] == table["GPU1"]["GPU0"] == "NV2"
    assert table["GPU0"]["GPU2"] == "SYS"
    assert [table[f"GPU{index}"]["ranks"] for index in (0, 1)] == ["1", "2"]


@pytest.mark.parametrize("name", real("nvidiaDGX2.v2.xml"))
def test_sixteen_gpus_behind_switches_have_six_links_each(name: str) -> None:
    table = rows(tables(hwloc_xml.read(machine_file(name)), workers=1))
    assert len(table) == 16
    assert {table["GPU0"][f"GPU{index}"] for index in range(1, 16)} == {"NV6"}
    assert [table[gpu]["NUMA"] for gpu in ("GPU0", "GPU15")] == ["0", "1"]


@pytest.mark.parametrize("name", real("eas-tioga.xml"))
def test_tiogas_gpus_have_a_card_each_pair_and_its_cores(name: str) -> None:
    table = rows(tables(hwloc_xml.read(machine_file(name)), workers=8))
    assert table["GPU0"]["GPU7"] == "XGMI"
    assert [table["GPU1"][f"NIC{index}"] for index in range(3)] == ["PHB", "NODE", "SYS"]
    assert table["GPU4"]["cores"] == "32-39"
    assert table["GPU4"]["NUMA"] == "2"


@pytest.mark.parametrize("name", [*SHAPES, *real("eas-tioga.xml", "nvidiaDGX2.v2.xml")])
@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_every_column_is_there(
    name: str, width: int
) -> None:
    machine = hwloc_xml.read(machine_file(name))
    text = tables(machine, workers=1, width=width)
    assert max(map(len, text.splitlines())) <= width
    words = set(text.split())
    labels = [f"GPU{index}" for index in range(len(machine.gpus))]
    labels += [f"NIC{index}" for index in range(len(machine.nics))]
    assert words.issuperset(labels)
    if labels:
        assert {"cores", "NUMA", "ranks"} <= words


def test_the_legend_has_every_word_of_the_table_and_no_other() -> None:
    text = tables(hwloc_xml.read(machine_file("nvlink-to-processors.xml")))
    legend = text[text.rindex("\n\n") :]
    assert [line.split()[0] for line in legend.strip().splitlines()] == [
        "X",
        "NVn",
        "SYS",
        "cores",
        "ranks",
    ]


def test_hosts_that_are_alike_have_one_table() -> None:
    machine = hwloc_xml.read(machine_file("nvlink-to-processors.xml"))
    text = tables(machine, hosts=3)
    assert text.startswith("n1; alike: n[2-3]\n")
    cluster = one_rack(["n1", "n2"], {"n1": machine, "n2": replace(machine, links=())})
    plan = plan_ahead(cluster, PlanRequest(), workers=[1, 1])
    text = matrix.tables(plan, cluster)
    assert "alike" not in text
    assert "\n\nn2\n" in text


def test_a_host_without_devices_says_so_and_where_its_ranks_are() -> None:
    text = tables(flat_machine(range(4)), workers=1)
    assert "no GPU and no network card is known here" in text
    assert "(worker 0) on cores" in text


def test_names_that_mean_harm_do_not_reach_the_terminal() -> None:
    machine = hwloc_xml.read(machine_file("nvlink-to-processors.xml"))
    first, *rest = machine.devices
    harmful = replace(machine, devices=(replace(first, names=("cuda\x1b[2J\u202e",)), *rest))
    assert all(" " <= char <= "~" or char == "\n" for char in tables(harmful))
