"""How devices of a host reach each other: over NVLink, PCI bridges or the sockets' interconnect.

    Paths(machine).word(gpu, other)     # NV6, XGMI, PIX, PXB, PHB, NODE, SYS, or ? for not known

The words are those of ``nvidia-smi topo -m``. Links are those of hwloc's bandwidth matrices, and
GPUs that share switches (NVSwitch) count as linked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final

from psdist.topology.machine import UNKNOWN, Device, Machine

# Bandwidth of one NVLink, in one direction, by generation.
_LINK_SPEEDS: Final = (25e9, 20e9, 26.5625e9)
PCI_BYTES_PER_S: Final = 12e9
"""Assumed bandwidth of a PCI path without other information."""

LEGEND: Final = {
    "X": "itself",
    "NV": "NVLinks between the two, or to the switches that they share, by their bandwidth",
    "XGMI": "linked by AMD's Infinity Fabric",
    "PIX": "over one PCI bridge at most",
    "PXB": "over several PCI bridges, not the host's",
    "PHB": "over the PCI bridge of the host",
    "NODE": "between PCI bridges of one NUMA node",
    "SYS": "between NUMA nodes",
    "?": "the source does not say",
}


class Paths:
    """Between the devices of one machine."""

    def __init__(self, machine: Machine) -> None:
        self._speeds = {
            frozenset((link.first, link.second)): link.bytes_per_s
            for link in machine.links
            if link.second
        }
        self._link_speed = next((each for each in _LINK_SPEEDS if self._are_multiples(each)), 0.0)

    def _are_multiples(self, speed: float) -> bool:
        counts = [each / speed for each in self._speeds.values()]
        return all(abs(each - round(each)) < 0.02 for each in counts)

    def linked_bytes_per_s(self, one: Device, other: Device) -> float:
        """Bandwidth of the direct links between two GPUs, one direction; 0 if there are none."""
        return self._speeds.get(frozenset((one.pci, other.pci)), 0.0)

    def word(self, one: Device, other: Device) -> str:
        """How two different devices reach each other."""
        linked = self.linked_bytes_per_s(one, other)
        if linked and any(name.startswith("rsmi") for name in one.names):
            return "XGMI"
        if linked:
            return f"NV{round(linked / self._link_speed)}" if self._link_speed else "NV"
        common = 0
        for mine, its in zip(one.bridges, other.bridges, strict=False):
            if mine != its:
                break
            common += 1
        deeper = max(len(one.bridges), len(other.bridges)) - common
        if common > 1:
            return "PIX" if deeper <= 1 else "PXB"
        if common == 1:
            return "PIX" if deeper == 0 else "PHB"
        if UNKNOWN in (one.numa, other.numa):
            known = UNKNOWN not in (one.package, other.package)
            return "SYS" if known and one.package != other.package else "?"
        return "NODE" if one.numa == other.numa else "SYS"

    def joined(self, gpus: Sequence[Device], number: int) -> list[Device]:
        """Return ``number`` of ``gpus``, in their order, with the fastest slowest link between two.

        They are evenly spread over ``gpus`` if no choice has faster links.
        """
        best = [gpus[turn * len(gpus) // number] for turn in range(number)]
        if number < 2 or not self._speeds:
            return best
        fastest = max(self._speeds.values())
        slowest = min(self.linked_bytes_per_s(*pair) for pair in combinations(best, 2))
        for first in gpus:
            if slowest >= fastest:
                break
            chosen, reached = [first], fastest
            speeds = {gpu.pci: self.linked_bytes_per_s(first, gpu) for gpu in gpus if gpu != first}
            by_pci = {gpu.pci: gpu for gpu in gpus}
            while len(chosen) < number:
                name = max(speeds, key=speeds.__getitem__)
                reached = min(reached, speeds.pop(name))
                chosen.append(by_pci[name])
                for other in speeds:
                    speed = self.linked_bytes_per_s(by_pci[other], by_pci[name])
                    speeds[other] = min(speeds[other], speed)
            if reached > slowest:
                best, slowest = [gpu for gpu in gpus if gpu in chosen], reached
        return best

    def ring_bytes_per_s(self, gpus: Sequence[Device]) -> float:
        """Bandwidth of a ring through all of ``gpus``, one direction: the slowest part of the
        widest ring, over links where they join all GPUs, else over PCI."""
        joined, widest = {gpus[0].pci}, float("inf")
        while len(joined) < len({gpu.pci for gpu in gpus}):
            speed, name = max(
                (self._speeds.get(frozenset((gpu.pci, name)), 0.0), gpu.pci)
                for gpu in gpus
                if gpu.pci not in joined
                for name in joined
            )
            if not speed:
                buses = [gpu.bytes_per_s or PCI_BYTES_PER_S for gpu in gpus]
                return min(PCI_BYTES_PER_S, *buses)
            joined.add(name)
            widest = min(widest, speed)
        return widest
