"""Which GPUs a process can see: from the driver's files and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from psdist.topology.machine.gpus import torch_bus_id, visible_gpus

BUSES = ("0000:3b:00.0", "0000:86:00.0", "0000:af:00.0")


def driver(folder: Path, *, models: tuple[str, ...] = ("H200", "H200", "H200")) -> Path:
    for index, (bus, model) in enumerate(zip(BUSES, models, strict=True)):
        (folder / bus).mkdir()
        (folder / bus / "information").write_text(
            f"Model: \t\t {model}\nIRQ:   \t\t 10\nGPU UUID: \t GPU-{index}000\n"
            f"Bus Location: \t {bus}\nDevice Minor: \t {index}\n"
        )
    return folder


def seen(folder: Path, setting: str | None, **more: str) -> tuple[str, ...] | None:
    environment = dict(more)
    if setting is not None:
        environment["CUDA_VISIBLE_DEVICES"] = setting
    return visible_gpus(
        environment, driver=folder, can_open=lambda device: device.name != "nvidia1"
    )


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, (BUSES[0], BUSES[2])),
        ("", ()),
        ("-1", ()),
        ("1", (BUSES[2],)),
        ("1,0", (BUSES[0], BUSES[2])),
        ("0,7,1", (BUSES[0],)),
        ("GPU-2", (BUSES[2],)),
        ("GPU-1000", ()),
        ("MIG-1", None),
    ],
)
def test_the_setting_chooses_among_the_gpus_that_the_cgroup_lets_through(
    tmp_path: Path, setting: str | None, expected: tuple[str, ...] | None
) -> None:
    assert seen(driver(tmp_path), setting) == expected


def test_numbers_mean_nothing_among_different_models_unless_cuda_counts_by_bus(
    tmp_path: Path,
) -> None:
    mixed = driver(tmp_path, models=("T4", "H200", "H200"))
    assert seen(mixed, "0") is None
    assert seen(mixed, "0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == (BUSES[0],)


def test_no_driver_is_not_the_same_as_no_gpu(tmp_path: Path) -> None:
    assert visible_gpus({}, driver=tmp_path / "nvidia") is None
    assert visible_gpus({}, driver=tmp_path) == ()


def test_torchs_device_is_known_by_its_bus_id() -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert torch_bus_id(properties) == BUSES[0]
    assert torch_bus_id(SimpleNamespace()) == ""
