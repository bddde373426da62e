"""The socket of a process, read from a tree like /sys/devices/system/cpu."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from psdist.topology.machine.sysfs import package_of_affinity


def cpus(folder: Path, packages: dict[int, str]) -> Path:
    for cpu, package in packages.items():
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(package)
    return folder


@pytest.mark.parametrize(
    ("affinity", "package"),
    [
        ({0, 1}, 0),
        ({2, 3}, 1),
        ({0, 2, 3}, 1),  # most of its cores
        ({0, 1, 2, 3}, 0),  # a tie: the lowest number
        ({3}, 1),
    ],
)
def test_the_socket_that_holds_most_cores_of_a_process_is_its_own(
    tmp_path: Path, affinity: set[int], package: int
) -> None:
    tree = cpus(tmp_path, {0: "0\n", 1: "0\n", 2: "1\n", 3: "1\n"})
    assert package_of_affinity(tree, affinity) == package


def test_cores_of_which_sys_says_nothing_do_not_count(tmp_path: Path) -> None:
    tree = cpus(tmp_path, {0: "1\n", 1: "", 2: "many\n"})
    assert package_of_affinity(tree, {0, 1, 2, 7}) == 1


def test_where_sys_says_nothing_at_all_the_socket_is_unknown(tmp_path: Path) -> None:
    assert package_of_affinity(tmp_path / "missing", {0, 1}) == -1


def test_without_an_affinity_it_is_that_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {5})
    assert package_of_affinity(cpus(tmp_path, {5: "3\n"})) == 3
