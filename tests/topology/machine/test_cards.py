"""Network cards: how fast they are, and which of them a rank may be confined to."""

from __future__ import annotations

from pathlib import Path

import pytest

from psdist.topology.machine import cards, live, sysfs
from psdist.topology.machine import hwloc as hwloc_xml
from tests.support.machine_files import machine_file, real
from tests.support.sys_files import Root, hca, two_sockets


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return two_sockets(Root(tmp_path))


def two_cards(root: Root, **second: str) -> Root:
    hca(root, "0000:3b:00.0", "mlx5_0", node=0)
    hca(root, "0000:af:00.0", "mlx5_1", node=1, **second)
    return root


def test_a_cards_speed_is_its_ports_where_the_bus_lets_it_through(root: Root) -> None:
    two_cards(root, current_link_speed="", rate="200 Gb/sec (4X HDR)")
    bus = "sys/bus/pci/devices/0000:af:00.0"
    root.write(f"{bus}/current_link_speed", "8.0 GT/s PCIe")
    root.write(f"{bus}/current_link_width", "16")
    first, second = sysfs.read_machine(root.path).nics
    assert first.speed == first.port_bytes_per_s == 12.5e9
    assert second.port_bytes_per_s == 25e9
    assert second.speed == pytest.approx(15.75e9, rel=1e-3)


@pytest.mark.parametrize(
    ("speed", "expected"), [("100000", 12.5e9), ("-1", 0.0), ("0", 0.0), ("x", 0.0)]
)
def test_an_ethernet_cards_speed_is_what_its_interface_says(
    root: Root, speed: str, expected: float
) -> None:
    folder = root.device("0000:01:00.0", "0x020000", "0x8086", node=0)
    root.write(f"{folder}/net/eth0/speed", speed)
    (card,) = sysfs.read_machine(root.path).nics
    assert card.speed == expected


def test_a_port_that_is_down_brings_nothing(root: Root) -> None:
    two_cards(root, state="1: DOWN")
    assert [card.port_bytes_per_s for card in sysfs.read_machine(root.path).nics] == [12.5e9, 0.0]
    assert [port.device for port in cards.read_ports(root.path)] == ["mlx5_0"]


def test_speeds_of_ports_are_read_beside_lstopos_answer(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_cards(root)
    bare = sysfs.read_machine(two_sockets(Root(root.path)).path)
    without = [live.replace(each, port_bytes_per_s=0.0) for each in bare.devices]
    monkeypatch.setattr(
        live, "_from_lstopo", lambda _notes: live.replace(bare, devices=tuple(without))
    )
    found = live.this_machine(affinity=bare.cpus, root=root.path)
    assert [card.speed for card in found.nics] == [12.5e9, 12.5e9]


def test_a_hosts_link_is_what_all_cards_of_its_fabric_bring(root: Root) -> None:
    folder = root.device("0000:01:00.0", "0x020000", "0x8086", node=0)
    root.write(f"{folder}/net/eth0/speed", "400000")
    assert cards.link_bytes_per_s(sysfs.read_machine(root.path)) == 50e9
    two_cards(root)
    assert cards.link_bytes_per_s(sysfs.read_machine(root.path)) == 25e9


def test_a_card_of_unknown_speed_leaves_the_hosts_link_unknown(root: Root) -> None:
    two_cards(root, rate="unknown")
    assert cards.link_bytes_per_s(sysfs.read_machine(root.path)) == 0


@pytest.mark.parametrize("name", real("cts1-pascal.xml"))
def test_an_export_tells_of_a_cards_bus(name: str) -> None:
    machine = hwloc_xml.read(machine_file(name))
    (card,) = cards.fabric_cards(machine)
    assert cards.link_bytes_per_s(machine) == card.speed == card.bytes_per_s > 1e9


def test_cards_of_one_subnet_may_be_chosen_between(root: Root) -> None:
    ports = cards.read_ports(two_cards(root).path)
    chosen = cards.selectable(sysfs.read_machine(root.path), ports)
    assert [card.name for card in chosen] == ["mlx5_0", "mlx5_1"]
    assert cards.variables(chosen[1:], ports) == {
        "UCX_NET_DEVICES": "mlx5_1:1",
        "OMPI_MCA_btl_openib_if_include": "mlx5_1:1",
        "FI_VERBS_DEVICE_NAME": "mlx5_1",
        "NCCL_IB_HCA": "=mlx5_1:1",
    }
    assert set(cards.variables(chosen[:1], ports)) <= set(cards.VARIABLES)
    assert cards.variables(chosen, ports) == {
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1",
        "OMPI_MCA_btl_openib_if_include": "mlx5_0:1,mlx5_1:1",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
    }


@pytest.mark.parametrize(
    "second",
    [
        {"gid": "fe80:0000:0000:0001"},
        {"gids/0": "nonsense"},
        {"link_layer": "Ethernet"},
        {"state": "2: INIT"},
    ],
    ids=["another subnet", "no gid", "RoCE", "not up"],
)
def test_cards_that_may_not_reach_each_other_are_left_to_mpi(
    root: Root, second: dict[str, str]
) -> None:
    two_cards(root, **second)
    machine = sysfs.read_machine(root.path)
    assert cards.selectable(machine, cards.read_ports(root.path)) == ()


def test_omni_path_is_left_to_its_library(root: Root) -> None:
    hca(root, "0000:3b:00.0", "hfi1_0", node=0)
    hca(root, "0000:af:00.0", "hfi1_1", node=1)
    machine = sysfs.read_machine(root.path)
    assert cards.selectable(machine, cards.read_ports(root.path)) == ()


def test_slingshot_cards_are_known_by_what_libfabric_calls_them(root: Root) -> None:
    for index, bus in enumerate(("0000:3b:00.0", "0000:af:00.0")):
        folder = root.device(bus, "0x020000", "0x17db", node=index)
        root.write(f"{folder}/net/hsn{index}/speed", "200000")
        device = root.path / "sys/class/cxi" / f"cxi{index}"
        device.mkdir(parents=True)
        (device / "device").symlink_to(root.path / folder)
    ports = cards.read_ports(root.path)
    chosen = cards.selectable(sysfs.read_machine(root.path), ports)
    assert [card.name for card in chosen] == ["hsn0", "hsn1"]
    assert cards.variables(chosen[1:], ports) == {"FI_CXI_DEVICE_NAME": "cxi1"}
    assert cards.variables(chosen, ports) == {"FI_CXI_DEVICE_NAME": "cxi0,cxi1"}


def test_without_fabric_devices_there_is_nothing_to_choose(root: Root) -> None:
    assert cards.read_ports(root.path) == ()
    assert cards.selectable(sysfs.read_machine(root.path), ()) == ()
