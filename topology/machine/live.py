"""The machine that this process runs on, as far as it may use it, and binding to it.

machine = this_machine()                         # from lstopo, else from /sys
machine.name, machine.cores, machine.notes
bind((4, 5, 6, 7))       # before torch starts its threads: threads get the same cores
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from psdist.errors import PlacementError
from psdist.topology.machine import Machine, cards, flat_machine, sysfs
from psdist.topology.machine import hwloc as hwloc_xml
from psdist.topology.machine.hwloc.elements import MAX_BYTES
from psdist.topology.text import HOST_NAME

LSTOPO_TIMEOUT_S: Final = 5.0

_PROGRAMS: Final = ("lstopo", "lstopo-no-graphics")
# These would start the GPUs' compute runtimes, once in each rank: seconds. NVML and RSMI stay;
# they report names, UUIDs and links.
_COMPONENTS: Final = "-opencl,-cuda,-levelzero,-gl"


def this_machine(
    *, affinity: Iterable[int] | None = None, use_lstopo: bool = True, root: Path = Path("/")
) -> Machine:
    """This host, restricted to ``affinity`` (of this process if None); named as the host is.

    lstopo first, for it reports GPUs' UUIDs and links, HBM, and the numbers that Open MPI counts;
    it takes 10 to 90 ms. Where it is missing, fails, or takes more than ``LSTOPO_TIMEOUT_S``, /sys
    below ``root`` answers, and where that says nothing, each PU counts as a core; with notes.
    Never raises for what a machine lacks: PUs of the affinity that the answer does not know make
    it wrong, and then the next source is asked.
    """
    usable = frozenset(os.sched_getaffinity(0) if affinity is None else affinity)
    notes: list[str] = []
    machine = _from_lstopo(notes) if use_lstopo else None
    if machine is None or not usable <= machine.cpus:
        if machine is not None:
            notes.append("lstopo does not know all PUs of this process: asked /sys instead")
        machine = _from_sysfs(root, notes)
    if machine is None or not usable <= machine.cpus:
        machine = flat_machine(usable)
        notes.append("nothing tells of the processors: each PU counts as a core")
    machine = machine.restricted(usable)
    return replace(
        machine,
        name=_host_name(),
        devices=tuple(cards.with_port_speed(each, root) for each in machine.devices),
        notes=(*notes, *machine.notes),
    )


def _host_name() -> str:
    name = socket.gethostname()
    return name if HOST_NAME.fullmatch(name) else ""


def _from_lstopo(notes: list[str]) -> Machine | None:
    for name in _PROGRAMS:
        program = shutil.which(name)
        if program is None:
            continue
        try:
            return hwloc_xml.parse(_run(program), where=name)
        except PlacementError as error:
            notes.append(str(error))
    return None


def _run(program: str) -> bytes:
    """lstopo's XML. Raises PlacementError where it fails, hangs or writes too much."""
    # HWLOC_XMLFILE and similar variables of the user would make it describe another machine.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HWLOC_")}
    environment["HWLOC_COMPONENTS"] = _COMPONENTS
    name = Path(program).name
    try:
        # A file and not a pipe: what is too much is then never in memory.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                [program, "--of", "xml"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                env=environment,
                timeout=LSTOPO_TIMEOUT_S,
                check=False,
            )
            if done.returncode == 0:
                output.seek(0)
                return output.read(MAX_BYTES + 1)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"no answer in {LSTOPO_TIMEOUT_S:g} s"
        if isinstance(error, OSError):
            reason = error.strerror or "cannot be started"
        raise PlacementError(f"{name}: {reason}; /sys answers instead") from None
    raise PlacementError(f"{name}: exit status {done.returncode}; /sys answers instead")


def _from_sysfs(root: Path, notes: list[str]) -> Machine | None:
    try:
        return sysfs.read_machine(root)
    except PlacementError as error:
        notes.append(str(error))
        return None


def bind(cpus: Iterable[int]) -> frozenset[int]:
    """Bind all threads of this process to ``cpus`` (OS numbers); what this thread then has.

    The kernel may allow less, or refuse: the caller compares. Never widens beyond what the kernel
    allows the process's cgroup.
    """
    wanted = set(cpus)
    if wanted:
        for thread in _threads():
            with suppress(OSError):  # a thread that has ended, or PUs that are not ours
                os.sched_setaffinity(thread, wanted)
    return frozenset(os.sched_getaffinity(0))


def _threads() -> list[int]:
    """This thread first; MPI has started others by now."""
    try:
        names = [path.name for path in Path("/proc/self/task").iterdir()]
    except OSError:
        names = []
    return [0, *(int(name) for name in names if name.isdecimal())]
