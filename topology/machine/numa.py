"""NUMA nodes: which of them is ordinary memory (DRAM), and which one is a PU's own. Pure.

nodes = ordinary([MemoryNode(os_index=0, cpus=cpus, memory_bytes=96 << 30),
                  MemoryNode(os_index=4, cpus=cpus, memory_bytes=16 << 30, subtype="MCDRAM")])
[node.is_dram for node in nodes]        # [True, False]
nearest(nodes)[0]                       # 0: index of the node of PU 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psdist.topology.machine import UNKNOWN, NumaNode

_HBM_FACTOR = 2
"""Memory that is more than twice as fast as its neighbour is HBM; hwloc's own guess."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNode:
    """A NUMA node with all that tells what kind of memory it is."""

    os_index: int
    cpus: frozenset[int]
    memory_bytes: int
    subtype: str = ""
    """hwloc's word: ``DRAM``, ``HBM``, ``MCDRAM``, ``GPUMemory`` ...; "" where it has none."""
    is_special: bool = False
    """Bound to a driver (DAX): persistent, CXL or set aside for one purpose."""
    bandwidth: int = 0
    """In any unit, the same for all; 0 unknown."""


def ordinary(found: Sequence[MemoryNode]) -> tuple[NumaNode, ...]:
    """The same nodes in the same order, each marked as ordinary memory or not.

    A subtype decides if there is one. The other nodes that share their PUs are ranked:
    by bandwidth where all have it, else by size; one is ordinary, and for a node of its own that
    is decided by whether it has PUs at all (on a device or beyond a link it has none).
    """
    sharing: dict[frozenset[int], list[int]] = {}
    for index, node in enumerate(found):
        if not node.subtype and not node.is_special:
            sharing.setdefault(node.cpus, []).append(index)
    dram = {index for index, node in enumerate(found) if node.subtype == "DRAM"}
    named = {found[index].cpus for index in dram}
    dram |= {
        _pick(found, candidates)
        for cpus, candidates in sharing.items()
        if cpus and cpus not in named
    }
    return tuple(
        NumaNode(
            os_index=node.os_index,
            cpus=node.cpus,
            memory_bytes=node.memory_bytes,
            is_dram=index in dram,
        )
        for index, node in enumerate(found)
    )


def _pick(found: Sequence[MemoryNode], candidates: Sequence[int]) -> int:
    speeds = sorted(((found[each].bandwidth, each) for each in candidates), reverse=True)
    if len(candidates) > 1 and speeds[-1][0] > 0 and speeds[0][0] != speeds[1][0]:
        is_hbm = speeds[0][0] > _HBM_FACTOR * speeds[1][0]
        return speeds[1 if is_hbm else 0][1]
    return max(candidates, key=lambda each: (found[each].memory_bytes, -found[each].os_index))


def nearest(nodes: Sequence[NumaNode]) -> dict[int, int]:
    """PU to the index of the ordinary node with the fewest PUs that has it; others are absent."""
    own: dict[int, int] = {}
    order = sorted(range(len(nodes)), key=lambda index: (-len(nodes[index].cpus), -index))
    for index in order:
        if nodes[index].is_dram:
            own.update(dict.fromkeys(nodes[index].cpus, index))
    return own


def node_of(cpus: frozenset[int], own: dict[int, int]) -> int:
    """The one node of all these PUs by :func:`nearest`; UNKNOWN for none or several."""
    found = {own.get(cpu, UNKNOWN) for cpu in cpus}
    return found.pop() if len(found) == 1 else UNKNOWN
