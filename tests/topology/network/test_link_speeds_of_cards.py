"""Links of which no source tells the speed: what the hosts' network cards say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psdist.topology.machine import Device, Machine, flat_machine
from psdist.topology.machine import hwloc as hwloc_xml
from psdist.topology.network import DEFAULT_LINK_BYTES_PER_S, rack_table
from psdist.topology.network.sources import build_cluster
from tests.support.machine_files import machine_file, real


def card(name: str, *, bus: float = 0.0, port: float = 0.0) -> Device:
    return Device(
        kind="nic",
        names=(name,),
        pci="",
        cpus=None,
        package=-1,
        numa=-1,
        bytes_per_s=bus,
        port_bytes_per_s=port,
    )


def with_cards(*cards: Device) -> Machine:
    return replace(flat_machine(range(4)), devices=cards)


@pytest.mark.parametrize(
    ("cards", "expected", "words"),
    [
        ((card("mlx5_0", bus=31.5e9, port=25e9),), 25e9, "25 GB/s, its network card, by its ports"),
        (
            (card("mlx5_0", bus=15.75e9, port=25e9), card("mlx5_1", bus=15.75e9, port=25e9)),
            31.5e9,
            "31.5 GB/s, its 2 network cards, by its ports",
        ),
        (
            (card("hsi0", bus=31.5e9), card("eth0", port=1.25e9)),
            31.5e9,
            "31.5 GB/s, its network card, by the PCI bus, so at most",
        ),
        (
            (card("eth0", port=1.25e9), card("eth1", port=12.5e9)),
            12.5e9,
            "12.5 GB/s, its network card, by its ports",
        ),
        ((card("mlx5_0", port=25e9), card("mlx5_1")), DEFAULT_LINK_BYTES_PER_S, "by default"),
        ((), DEFAULT_LINK_BYTES_PER_S, "by default"),
    ],
)
def test_a_link_is_as_fast_as_the_cards_of_its_host(
    cards: tuple[Device, ...], expected: float, words: str
) -> None:
    cluster = build_cluster(["n1", "n2"], with_cards(*cards), tree=None)
    assert [node.bytes_per_s for node in cluster.nodes] == [expected, expected]
    assert any(words in note for note in cluster.notes)


def test_a_speed_that_is_given_counts_before_the_cards() -> None:
    machine = with_cards(card("mlx5_0", port=25e9))
    cluster = build_cluster(["n1", "n2"], machine, tree=None, default_bytes_per_s=1e9)
    assert {node.bytes_per_s for node in cluster.nodes} == {1e9}


@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        ((card("mlx5_0", port=25e9),), 25e9),
        ((card("mlx5_0", port=25e9), card("mlx5_1", port=25e9)), 50e9),
        ((card("mlx5_0", port=25e9), card("mlx5_1")), 150e9),  # who knows
        ((card("eth0", port=25e9),), 150e9),  # several may be joined to one link
    ],
)
def test_a_link_that_switches_tell_carries_no_more_than_the_cards_of_its_host(
    cards: tuple[Device, ...], expected: float
) -> None:
    table = '[[switch]]\nname = "s"\nnodes = "n[1-2]"\nlink = "150GB"\n'
    tree = rack_table.parse(table, where="racks.toml")
    cluster = build_cluster(["n1", "n2"], with_cards(*cards), tree=tree)
    assert {node.bytes_per_s for node in cluster.nodes} == {expected}
    told = any("the 150 GB/s that the switches tell" in note for note in cluster.notes)
    assert told == (expected < 150e9)


def test_hosts_with_other_cards_have_other_links() -> None:
    machines = {"n1": with_cards(card("ib0", port=25e9)), "n2": with_cards(card("ib0", port=5e9))}
    cluster = build_cluster(["n1", "n2"], machines, tree=None)
    assert [node.bytes_per_s for node in cluster.nodes] == [25e9, 5e9]
    assert sum("not known" in note for note in cluster.notes) == 2


@pytest.mark.parametrize("name", real("eas-tioga.xml"))
def test_tiogas_four_slingshot_cards_count_and_its_ethernet_card_does_not(name: str) -> None:
    machine = hwloc_xml.read(machine_file(name))
    cluster = build_cluster(["n1", "n2"], machine, tree=None)
    assert cluster.nodes[0].bytes_per_s == pytest.approx(4 * 31.5e9, rel=1e-3)
