"""What /sys tells about the processor, for the cores that this process may use.

The first stone of the topology layer: the socket, for ``group = "socket"``. It reads files and
decides nothing.

    package_of_affinity()   # 0, or -1 where /sys does not say
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def package_of_affinity(cpus: Path = _CPUS, affinity: set[int] | None = None) -> int:
    """The package (socket) that holds most of ``affinity``, lowest number on a tie; -1 unknown."""
    packages: Counter[int] = Counter()
    for cpu in sorted(os.sched_getaffinity(0) if affinity is None else affinity):
        try:
            text = (cpus / f"cpu{cpu}" / "topology" / "physical_package_id").read_text("ascii")
            packages[int(text)] += 1
        except (OSError, ValueError):
            continue
    if not packages:
        return -1
    return min(packages, key=lambda package: (-packages[package], package))
