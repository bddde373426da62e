"""Seats on every machine there is: what is not as wanted, in the order of what counts.

    python -m tests.benchmarks.placing.seats [SHAPES] [FILE.xml ...]

Every machine of tests/data/machines and ../shared/topologies with 1, 2, 4 and 8 workers, with and
without a server, as one group and as several; then so many shapes of `lstopo --input` (500) with
GPUs at random places, some of them linked. What is wanted is tests/support/seats.py's.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from psdist.topology.machine import Device, DeviceLink, Machine
from psdist.topology.machine import hwloc as hwloc_xml
from psdist.topology.plan.gpu_shares import Role
from psdist.topology.plan.seating import seat
from tests.support.machine_files import REAL_FOLDER, SHAPE_FOLDER
from tests.support.seats import complaints

WORKERS = (1, 2, 4, 8)


def judged(name: str, machine: Machine) -> tuple[int, int]:
    """(seatings, those with complaints), which are printed."""
    tried = wrong = 0
    for workers in WORKERS:
        for servers in (0, 1):
            roles: list[Role] = ["server"] * servers + ["worker"] * workers
            if len(machine.cores) < len(roles):
                continue
            for are_one_group in (False, True):
                for server_cores in (1, 3):
                    seats = seat(
                        machine, roles, server_cores=server_cores, are_one_group=are_one_group
                    )
                    found = complaints(machine, roles, seats)
                    tried += 1
                    wrong += bool(found)
                    for each in found:
                        print(f"{name}, {workers} workers, {servers} servers: {each}")
    return tried, wrong


def shape(rng: random.Random, program: str) -> tuple[str, Machine]:
    """A machine of `lstopo --input`, with GPUs at random NUMA nodes."""
    words = [f"pack:{rng.randint(1, 4)}", f"numa:{rng.randint(1, 4)}"]
    if rng.random() < 0.5:
        words.append(f"l3:{rng.randint(1, 2)}")
    words += [f"core:{rng.randint(1, 8)}", f"pu:{rng.randint(1, 2)}"]
    text = " ".join(words)
    command = [program, "--input", text, "--of", "xml"]
    data = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    machine = hwloc_xml.parse(data)
    gpus = []
    for index in range(rng.choice((0, 1, 2, 4, 8))):
        numa = rng.randrange(len(machine.numa_nodes))
        cpus = machine.numa_nodes[numa].cpus
        package = next(core.package for core in machine.cores if core.numa == numa)
        gpus.append(
            Device(
                kind="gpu",
                names=(f"cuda{index}",),
                pci=f"0000:{index + 1:02x}:00.0",
                cpus=cpus,
                package=package,
                numa=numa,
            )
        )
    links = tuple(
        DeviceLink(first=one.pci, second=other.pci, bytes_per_s=rng.choice((25e9, 50e9)))
        for position, one in enumerate(gpus)
        for other in gpus[:position]
        if rng.random() < 0.4
    )
    return f"{text} and {len(gpus)} GPUs", replace(machine, devices=tuple(gpus), links=links)


def main() -> None:
    numbers = [int(word) for word in sys.argv[1:] if word.isdecimal()]
    given = [Path(word) for word in sys.argv[1:] if not word.isdecimal()]
    files = given or [*sorted(SHAPE_FOLDER.glob("*.xml")), *sorted(REAL_FOLDER.glob("*.xml"))]
    for path in files:
        machine = hwloc_xml.read(path)
        tried, wrong = judged(path.name, machine)
        print(f"{path.name}: {len(machine.cores)} cores, {tried} seatings, {wrong} not as wanted")
    program = shutil.which("lstopo-no-graphics") or shutil.which("lstopo")
    num_shapes = numbers[0] if numbers else 500
    if program is None:
        print("lstopo is missing: no shapes")
        return
    rng = random.Random(5)
    counts = [judged(*shape(rng, program)) for _ in range(num_shapes)]
    print(
        f"{num_shapes} shapes: {sum(tried for tried, _ in counts)} seatings, "
        f"{sum(wrong for _, wrong in counts)} not as wanted"
    )


if __name__ == "__main__":
    main()
