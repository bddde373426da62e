"""Which of the host's NVIDIA GPUs this process can see, by PCI bus id, without loading CUDA.

    visible_gpus(os.environ)        # ("0000:3b:00.0",), () for none, None if unknown

The driver's files say what there is and whether a cgroup lets this process open it;
``CUDA_VISIBLE_DEVICES`` says what the user lets it use. Order never matters here: torch's devices
are found by bus id (:func:`psdist.topology.machine.gpus.torch_bus_id`), never by index.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_DRIVER: Final = Path("/proc/driver/nvidia/gpus")
_BUS_ID: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_MAX_BYTES: Final = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gpu:
    pci: str
    model: str
    uuid: str
    minor: str


def visible_gpus(
    environment: Mapping[str, str],
    *,
    driver: Path = _DRIVER,
    can_open: Callable[[Path], bool] | None = None,
) -> tuple[str, ...] | None:
    """PCI bus ids in ascending order; None where the driver or the setting cannot be understood.

    ``CUDA_VISIBLE_DEVICES`` may hold UUIDs (or their beginnings) or numbers. A number means a GPU
    only where all are of one model or CUDA_DEVICE_ORDER=PCI_BUS_ID: CUDA's own order is "fastest
    first", an order that only CUDA can compute. MIG slices are not whole GPUs: None.
    """
    found = _driver_gpus(driver)
    if found is None:
        return None
    may_open = can_open or _can_open
    usable = [gpu for gpu in found if may_open(Path(f"/dev/nvidia{gpu.minor}"))]
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return tuple(gpu.pci for gpu in usable)
    order_is_known = (
        len({gpu.model for gpu in usable}) <= 1
        or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    )
    chosen: list[str] = []
    for word in (part.strip() for part in setting.split(",")):
        if word.isdecimal():
            if not order_is_known:
                return None
            index = int(word[:9])
            match = usable[index : index + 1]
        elif word.startswith("GPU-"):
            match = [gpu for gpu in usable if gpu.uuid.startswith(word)]
        elif word.startswith("MIG-"):
            return None
        else:
            match = []
        if len(match) != 1:
            break  # CUDA, too, stops at the first entry that is no device
        chosen.append(match[0].pci)
    return tuple(sorted(chosen))


def torch_bus_id(properties: Any) -> str:
    """The bus id of ``torch.cuda.get_device_properties(i)``, or "" where this torch has none."""
    try:
        domain, bus, device = (
            int(properties.pci_domain_id),
            int(properties.pci_bus_id),
            int(properties.pci_device_id),
        )
    except AttributeError:
        return ""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _driver_gpus(driver: Path) -> list[_Gpu] | None:
    try:
        folders = sorted(driver.iterdir())
    except OSError:
        return None
    found: list[_Gpu] = []
    for folder in folders:
        pci = folder.name.lower()
        if not _BUS_ID.fullmatch(pci):
            continue
        try:
            with (folder / "information").open("rb") as file:
                text = file.read(_MAX_BYTES).decode("utf-8", "replace")
        except OSError:
            return None
        pairs = (line.partition(":") for line in text.splitlines())
        facts = {key.strip(): value.strip() for key, _, value in pairs}
        found.append(
            _Gpu(
                pci=pci,
                model=facts.get("Model", ""),
                uuid=facts.get("GPU UUID", ""),
                minor=facts.get("Device Minor", ""),
            )
        )
    return found


def _can_open(device: Path) -> bool:
    """Whether the cgroup lets us: the file's own mode does not tell."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True
