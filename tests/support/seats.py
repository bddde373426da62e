"""Requirements on the seats of a host, as a list of those that are not met.

    complaints(machine, ["server", "worker"], seat(machine, ["server", "worker"]))     # []

In the order of precedence: a worker begins in its GPU's NUMA node; no share crosses a package that
it would fit in; workers' cores differ by at most one; no GPU twice while another one is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from psdist.topology.machine import UNKNOWN, Machine
from psdist.topology.plan.gpu_shares import Role, compute_gpus
from psdist.topology.plan.seating import Seat


def complaints(machine: Machine, roles: Sequence[Role], seats: Sequence[Seat]) -> list[str]:
    cores = {core.logical: core for core in machine.cores}
    gpus = {gpu.pci: gpu for gpu in machine.gpus}
    packages = Counter(core.package for core in machine.cores)
    nodes = Counter(core.numa for core in machine.cores)
    owners = Counter(each.gpu for each in seats if each.gpu)
    workers = [index for index, role in enumerate(roles) if role == "worker"]
    found: list[str] = []
    taken = Counter(core for each in seats for core in each.cores)
    found += [f"core {core} is given {count} times" for core, count in taken.items() if count > 1]
    beside = Counter(gpus[seats[index].gpu].numa for index in workers if seats[index].gpu)
    for index, each in enumerate(seats):
        name = f"{roles[index]} {index}"
        if not each.cores:
            found.append(f"{name} has no core")
            continue
        if roles[index] == "worker" and each.gpu and (home := gpus[each.gpu].numa) != UNKNOWN:
            is_full = beside[home] > nodes[home]
            if cores[each.cores[0]].numa != home and not is_full:
                found.append(f"{name} begins in node {cores[each.cores[0]].numa}, not {home}")
        across = {cores[core].package for core in each.cores}
        if len(across) > 1 and len(each.cores) <= max(packages.values()):
            found.append(f"{name} crosses packages {sorted(across)}")
    shares = [len(seats[index].cores) for index in workers]
    if shares and max(shares) - min(shares) > 1:
        found.append(f"workers have {min(shares)} to {max(shares)} cores")
    free = [gpu.pci for gpu in compute_gpus(machine) if gpu.pci and gpu.pci not in owners]
    found += [f"GPU {pci} twice, {free[0]} free" for pci in owners if owners[pci] > 1 and free]
    return found
