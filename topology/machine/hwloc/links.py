"""Direct links between GPUs, from the bandwidth matrices in lstopo's XML (NVLink, XGMI).

Owns those matrices; hwloc 1 has none. What cannot be read is left out with a note.

    read_links(document, devices, notes)[0].bytes_per_s

NVSwitches have no place among devices. GPUs that share switches count as linked, by the sum over
the switches of the slower of the two ways. GPUs on different switches do, too: where a host has two
boards of them (DGX-2), trunks join the boards at full speed, which the driver does not report.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from typing import Final

from psdist.topology.machine import pci
from psdist.topology.machine.hwloc.elements import Distances, Document
from psdist.topology.machine.machine import Device, DeviceLink

_MAX_OBJECTS: Final = 256
_BYTES_PER_S: Final = 1e6
"""The unit of hwloc's matrices is MB/s."""
_INDEX: Final = re.compile(r"(?:([A-Za-z0-9]{1,16}):)?([0-9]{1,20})")
_VALUE: Final = re.compile(r"[0-9]{1,12}")
_SWITCH: Final = "switch"
_PROCESSOR: Final = ""


def read_links(
    document: Document, devices: Sequence[Device], notes: list[str]
) -> tuple[DeviceLink, ...]:
    """One link per pair of GPUs, or GPU and processor, however many matrices name the pair."""
    gpus = {device.pci for device in devices if device.kind == "gpu" and device.pci}
    if not document.distances or not gpus:
        return ()
    names = _names(document, gpus)
    found: dict[tuple[str, str], float] = {}
    for distances in document.distances:
        matrix = _matrix(distances)
        if matrix is None:
            notes.append(f"its matrix {distances.name} cannot be read and was left out")
            continue
        ends = [names.get(match[2], "?") for match in matrix[0]]
        for pair, speed in _pairs(ends, matrix[1], gpus):
            found[pair] = max(found.get(pair, 0.0), speed)
    return tuple(
        DeviceLink(first=first, second=second, bytes_per_s=speed * _BYTES_PER_S)
        for (first, second), speed in found.items()
    )


def _names(document: Document, gpus: set[str]) -> dict[str, str]:
    """gp_index to the bus id of its GPU, to "" for a processor, or to ``switch``."""
    names: dict[str, str] = {}
    waiting = [(document.root, "")]
    while waiting:
        element, bus = waiting.pop()
        if element.kind == "PCIDev":
            bus = pci.bus_id(element.attributes.get("pci_busid", ""))
            names[element.gp_index] = bus if bus in gpus else _SWITCH
        elif element.kind == "OSDev":
            if bus in gpus:
                names[element.gp_index] = bus
        elif element.kind in ("Package", "NUMANode", "Machine"):
            names[element.gp_index] = _PROCESSOR
        waiting.extend((child, bus) for child in element.children)
    return names


def _matrix(distances: Distances) -> tuple[list[re.Match[str]], list[list[int]]] | None:
    # hwloc cuts the text into elements at ends of words only.
    words = " ".join(distances.indexes).split()
    numbers = " ".join(distances.values).split()
    size = len(words)
    if not 0 < size <= _MAX_OBJECTS or len(numbers) != size * size:
        return None
    indexes = [match for word in words if (match := _INDEX.fullmatch(word))]
    if len(indexes) != size or not all(_VALUE.fullmatch(each) for each in numbers):
        return None
    values = [int(each) for each in numbers]
    return indexes, [values[start : start + size] for start in range(0, size * size, size)]


def _pairs(
    ends: Sequence[str], rows: Sequence[Sequence[int]], gpus: set[str]
) -> list[tuple[tuple[str, str], float]]:
    own = [index for index, end in enumerate(ends) if end in gpus]
    switches = [index for index, end in enumerate(ends) if end == _SWITCH]
    pairs: list[tuple[tuple[str, str], float]] = []
    for one, other in combinations(own, 2):
        direct = max(rows[one][other], rows[other][one])
        switched = sum(
            min(rows[one][switch], rows[switch][other], rows[other][switch]) for switch in switches
        ) or min(sum(rows[end][switch] for switch in switches) for end in (one, other))
        if ends[one] != ends[other] and direct + switched > 0:
            pair = (min(ends[one], ends[other]), max(ends[one], ends[other]))
            pairs.append((pair, float(direct + switched)))
    for one in own:
        speed = max((rows[one][at] for at, end in enumerate(ends) if end == _PROCESSOR), default=0)
        if speed > 0:
            pairs.append(((ends[one], _PROCESSOR), float(speed)))
    return pairs
