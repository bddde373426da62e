"""Copies between a host and its GPUs, over pinned memory.

    devices = visible()                      # {"0000:3b:00.0": 0}; torch is loaded only if it may
    speeds = measure(0, num_bytes=64 << 20)  # to the GPU, and back

A GPU that several ranks see has one name for all of them: its PCI bus id, or its UUID where this
torch tells no bus id. Of the slices of one GPU one is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from psdist.commands.probe.flow import REPEATS
from psdist.topology.machine.gpus import torch_bus_id
from psdist.topology.network.catalogue import Speed

# Of the drivers of NVIDIA, AMD and of Windows' Linux: where none is there, no torch sees a GPU.
_DRIVERS: Final = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_WARM_UP: Final = 2


def visible() -> dict[str, int]:
    """torch's number of each GPU that this process sees, by the GPU's name."""
    if not any(Path(driver).exists() for driver in _DRIVERS):
        return {}
    import torch

    found: dict[str, int] = {}
    for number in range(torch.cuda.device_count()):
        found[_name(torch.cuda.get_device_properties(number), number)] = number
    return found


def measure(number: int, *, num_bytes: int) -> tuple[Speed, Speed]:
    """Speeds of copies to torch's GPU ``number`` and back: medians, latency of 8 bytes."""
    import torch

    device = torch.device("cuda", number)
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)

    def seconds(copy: Callable[[], Any]) -> float:
        times = []
        for _ in range(_WARM_UP + REPEATS):
            torch.cuda.synchronize(device)
            before_s = time.perf_counter()
            copy()
            torch.cuda.synchronize(device)
            times.append(time.perf_counter() - before_s)
        return statistics.median(times[_WARM_UP:])

    def speed(into: torch.Tensor, source: torch.Tensor) -> Speed:
        return Speed(
            latency_s=seconds(lambda: into[:8].copy_(source[:8], non_blocking=True)),
            bytes_per_s=num_bytes / seconds(lambda: into.copy_(source, non_blocking=True)),
            is_lower_bound=False,
        )

    return speed(there, host), speed(host, there)


def _name(properties: Any, number: int) -> str:
    return torch_bus_id(properties) or str(getattr(properties, "uuid", "")) or f"gpu{number}"
