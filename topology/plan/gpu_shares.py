"""Which worker of a host gets which GPU. Pure.

share_out(machine, ["server", "worker"], None, None, are_one_group=True)    # [None, Device]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from psdist.topology.machine import UNKNOWN, Device, Machine
from psdist.topology.machine.paths import Paths

Role: TypeAlias = Literal["server", "worker"]

# Names that a compute runtime gives to its GPUs, and to no other.
_COMPUTE_NAMES = ("cuda", "nvml", "rsmi", "opencl", "ze")


def compute_gpus(machine: Machine) -> tuple[Device, ...]:
    """The GPUs that a worker could use, in PCI order: those that a compute runtime has named.

    Where none is named (no runtime was asked), all of them.
    """
    named = [
        gpu for gpu in machine.gpus if any(name.startswith(_COMPUTE_NAMES) for name in gpu.names)
    ]
    return tuple(sorted(named or machine.gpus, key=lambda gpu: gpu.pci))


def package_of(machine: Machine, mask: Iterable[int]) -> int:
    """The package that holds most of ``mask`` (OS numbers), lowest on a tie; UNKNOWN if none."""
    wanted = frozenset(mask)
    return _most(core.package for core in machine.cores for cpu in core.cpus if cpu in wanted)


def share_out(
    machine: Machine,
    roles: Sequence[Role],
    visible: Sequence[Sequence[str]] | None,
    masks: Sequence[frozenset[int]] | None,
    *,
    are_one_group: bool,
) -> list[Device | None]:
    """A GPU for each worker: its own where there are enough, else shared evenly.

    Where not all are needed, workers that ``are_one_group`` get those that faster links join;
    others get them spread over the host. ``visible`` and ``masks`` are what each rank sees and may
    use.
    """
    known = {gpu.pci: gpu for gpu in machine.gpus if gpu.pci}
    everybodys = [gpu.pci for gpu in compute_gpus(machine) if gpu.pci]
    workers = [index for index, role in enumerate(roles) if role == "worker"]
    owners: Counter[str] = Counter()
    found: list[Device | None] = [None] * len(roles)
    joined: list[str] = []
    same = visible is None or len({frozenset(visible[index]) for index in workers}) == 1
    if are_one_group and masks is None and same and workers:
        seen = (
            everybodys if visible is None else [pci for pci in visible[workers[0]] if pci in known]
        )
        if len(workers) < len(seen):
            chosen = Paths(machine).joined([known[pci] for pci in seen], len(workers))
            joined = [gpu.pci for gpu in chosen]
    for turn, index in enumerate(workers):
        seen = everybodys if visible is None else [pci for pci in visible[index] if pci in known]
        if not seen:
            continue
        # Evenly over the list, so that two workers of a host with eight GPUs sit on two sockets.
        wanted = joined[turn] if joined else seen[turn * len(seen) // len(workers)]
        home = package_of(machine, masks[index]) if masks is not None else UNKNOWN

        most = -(-len(workers) // len(seen))  # neighbours share: no GPU has more than others must

        def cost(
            pci: str, home: int = home, wanted: str = wanted, most: int = most
        ) -> tuple[bool, bool, bool, int, str]:
            is_far = home != UNKNOWN and known[pci].package not in (UNKNOWN, home)
            return (is_far, owners[pci] >= most, pci != wanted, owners[pci], pci)

        best = min(seen, key=cost)
        owners[best] += 1
        found[index] = known[best]
    return found


def _most(values: Iterable[int]) -> int:
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value), default=UNKNOWN)
