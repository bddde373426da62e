"""How devices of a host reach each other, in the words of nvidia-smi."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psdist.topology.machine import UNKNOWN, Device, DeviceLink, Machine, flat_machine
from psdist.topology.machine.paths import Paths


def device(
    bus: int, *, bridges: tuple[str, ...] = (), numa: int = 0, package: int = 0, name: str = "cuda"
) -> Device:
    return Device(
        kind="gpu",
        names=(f"{name}{bus}",),
        pci=f"0000:{bus:02x}:00.0",
        cpus=frozenset(),
        package=package,
        numa=numa,
        bridges=bridges,
    )


def linked(*speeds: tuple[int, int, float], gpus: tuple[Device, ...] = ()) -> Machine:
    links = tuple(
        DeviceLink(first=f"0000:{one:02x}:00.0", second=f"0000:{other:02x}:00.0", bytes_per_s=speed)
        for one, other, speed in speeds
    )
    return replace(flat_machine(range(4)), devices=gpus, links=links)


@pytest.mark.parametrize(
    ("one", "other", "word"),
    [
        (("host", "port", "a"), ("host", "port", "b"), "PIX"),
        (("host", "port", "a"), ("host", "port", "a"), "PIX"),
        (("host", "port", "x", "a"), ("host", "port", "y", "b"), "PXB"),
        (("host", "port a"), ("host", "port b"), "PHB"),
        (("host",), ("host",), "PIX"),
        (("host a", "port"), ("host b", "port"), "NODE"),
        ((), (), "NODE"),
    ],
)
def test_the_bridges_that_two_devices_share_tell_their_way(
    one: tuple[str, ...], other: tuple[str, ...], word: str
) -> None:
    first, second = device(1, bridges=one), device(2, bridges=other)
    assert Paths(linked()).word(first, second) == Paths(linked()).word(second, first) == word


@pytest.mark.parametrize(
    ("numa", "package", "word"),
    [(1, 0, "SYS"), (1, 1, "SYS"), (UNKNOWN, 1, "SYS"), (UNKNOWN, UNKNOWN, "?")],
)
def test_without_a_shared_bridge_the_numa_node_counts(numa: int, package: int, word: str) -> None:
    assert Paths(linked()).word(device(1), device(2, numa=numa, package=package)) == word


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        ((25e9, 50e9, 150e9), ["NV1", "NV2", "NV6"]),
        ((40e9, 20e9), ["NV2", "NV1"]),
        ((18 * 26.5625e9,), ["NV18"]),
        ((31e9, 7e9), ["NV", "NV"]),
    ],
)
def test_links_are_counted_by_their_bandwidth(speeds: tuple[float, ...], words: list[str]) -> None:
    machine = linked(*((0, index, speed) for index, speed in enumerate(speeds, start=1)))
    paths = Paths(machine)
    found = [paths.word(device(0), device(index)) for index in range(1, len(speeds) + 1)]
    assert found == words


def test_gpus_of_amd_are_not_said_to_have_nvlinks() -> None:
    one, other = device(0, name="rsmi"), device(1, name="rsmi")
    assert Paths(linked((0, 1, 100e9))).word(one, other) == "XGMI"


GPUS = tuple(device(index) for index in range(4))


def test_gpus_that_links_join_are_taken_together() -> None:
    paths = Paths(linked((0, 1, 40e9), (2, 3, 50e9), gpus=GPUS))
    assert paths.joined(GPUS, 2) == [GPUS[2], GPUS[3]]
    assert paths.joined(GPUS, 1) == [GPUS[0]]
    assert paths.joined(GPUS, 3) == [GPUS[0], GPUS[1], GPUS[2]]  # none joins three


def test_where_all_are_joined_or_none_is_gpus_are_spread() -> None:
    everybody = [(a, b, 150e9) for a in range(4) for b in range(a)]
    for machine in (linked(*everybody, gpus=GPUS), linked(gpus=GPUS)):
        assert Paths(machine).joined(GPUS, 2) == [GPUS[0], GPUS[2]]


def test_a_ring_is_as_fast_as_the_slowest_link_that_it_cannot_do_without() -> None:
    paths = Paths(linked((0, 1, 50e9), (1, 2, 25e9), (0, 2, 20e9), gpus=GPUS))
    assert paths.ring_bytes_per_s(GPUS[:3]) == 25e9
    assert paths.ring_bytes_per_s(GPUS[:2]) == 50e9
    assert paths.ring_bytes_per_s(GPUS) == 12e9  # the fourth is on PCI
