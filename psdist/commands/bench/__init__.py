"""``psdist bench``: the cost of an exchange, and the limit measured in the same run.

One module per benchmark. Each runs the real servers and workers on the ranks of its job and prints
medians with their spread; a training run imports nothing of this package. This module has
the shared parts: the raw MPI exchange for comparison, CPU time and bytes of the hosts, and figures
as text.

    exchange(comm, pairs, server_ranks)        # on every worker, and
    echo(comm, memories, worker_ranks)         # on every server

The lowest worker of each host reads the CPU time in /proc, which counts a process with all its
threads, in user and kernel mode, in ticks of 10 ms. Hosts without a worker are left out.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from psdist.protocol.roles import Roles

if TYPE_CHECKING:  # at run time only inside functions: importing it starts MPI
    from mpi4py import MPI

_RAW_TAG = 7


def exchange(
    comm: MPI.Comm,
    pairs: list[list[tuple[memoryview, memoryview]]],
    server_ranks: tuple[int, ...],
) -> float:
    """Send the first and receive into the second of each server's pairs; the seconds it took."""
    from mpi4py import MPI

    before_s = time.perf_counter()
    requests = []
    for rank, parts in zip(server_ranks, pairs, strict=True):
        for _, into in parts:
            requests.append(comm.Irecv([into, MPI.BYTE], source=rank, tag=_RAW_TAG))
        for data, _ in parts:
            requests.append(comm.Isend([data, MPI.BYTE], dest=rank, tag=_RAW_TAG))
    MPI.Request.Waitall(requests)
    return time.perf_counter() - before_s


def echo(comm: MPI.Comm, memories: list[list[memoryview]], worker_ranks: tuple[int, ...]) -> None:
    """Receive every worker's messages and send each back as soon as it is here."""
    from mpi4py import MPI

    arriving = []
    whose: list[tuple[int, memoryview]] = []
    for rank, parts in zip(worker_ranks, memories, strict=True):
        for memory in parts:
            arriving.append(comm.Irecv([memory, MPI.BYTE], source=rank, tag=_RAW_TAG))
            whose.append((rank, memory))
    leaving = []
    for _ in arriving:
        index = MPI.Request.Waitany(arriving)
        rank, memory = whose[index]
        leaving.append(comm.Isend([memory, MPI.BYTE], dest=rank, tag=_RAW_TAG))
    MPI.Request.Waitall(leaving)


def size_text(num_bytes: int) -> str:
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor and num_bytes % factor == 0:
            return f"{num_bytes // factor} {unit}"
    return f"{num_bytes} B"


def time_text(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:.0f} us"


def quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    if len(seconds) < 2:
        return seconds[0], seconds[0], seconds[0]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, middle, high


def measured_on(mpi: str) -> dict[str, str]:
    """Return the first facts of every result: date, machine, and the MPI library by its text."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "mpi": mpi.split(",")[0].strip("\0 \n"),
    }


def crowd_words(ranks: int, cores: int) -> str:
    """Return how many ranks share how many cores, and what follows of that."""
    crowded = ": they take turns on them, so only ratios count" if ranks > cores else ""
    return f"{ranks} ranks share {cores} cores{crowded}"


def show(table: Table, *, width: int) -> None:
    """Print a table, ``width`` columns wide into a pipe, which has no width of its own."""
    Console(width=None if sys.stdout.isatty() else width).print(table)


def write_result(path: Path | None, result: object) -> None:
    """Write the figures as JSON, if a file is named."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written to {path}")


_USER, _SYSTEM = 13, 14
"""Fields of /proc/PID/stat, from 0 (proc(5): utime, stime)."""


class HostCpu:
    def __init__(self, roles: Roles, rank: int) -> None:
        host = roles.places[rank].host
        self._pids: list[int] = []
        if rank == min(each for each in roles.worker_ranks if roles.places[each].host == host):
            self._pids = [place.pid for place in roles.places if place.host == host]

    def seconds(self) -> float:
        """Return the CPU time since these processes began; 0 if another rank counts it."""
        ticks = sum(ticks_of(Path(f"/proc/{pid}/stat").read_text("ascii", "replace"))
                    for pid in self._pids)  # fmt: skip
        return ticks / os.sysconf("SC_CLK_TCK")


def ticks_of(stat: str) -> int:
    """Return the CPU ticks in the text of /proc/PID/stat. The command's name may have spaces."""
    fields = ["pid", "name", *stat.rpartition(")")[2].split()]
    return int(fields[_USER]) + int(fields[_SYSTEM])


def sees_all(roles: Roles) -> bool:
    """Whether a worker is on every host."""
    seen = {roles.places[rank].host for rank in roles.worker_ranks}
    return seen >= {place.host for place in roles.places}


class Counts(NamedTuple):
    num_bytes: int = 0
    """With headers, but what Ethernet adds on the wire."""
    packets: int = 0

    def __sub__(self, earlier: Counts) -> Counts:
        return Counts(self.num_bytes - earlier.num_bytes, self.packets - earlier.packets)


def sent(text: str | None = None) -> Counts:
    """Return the counts of all interfaces except loopback; zero if the kernel has none. Benchmarks
    take differences. ``text``: the contents of /proc/net/dev."""
    num_bytes = packets = 0
    for _, columns in _interfaces(text):
        num_bytes += columns[8]
        packets += columns[9]
    return Counts(num_bytes, packets)


def carried(text: str | None = None) -> dict[str, tuple[int, int]]:
    """Return the bytes that each interface except loopback has sent and received; ``text`` as in
    :func:`sent`."""
    return {name: (columns[8], columns[0]) for name, columns in _interfaces(text)}


def _interfaces(text: str | None) -> Iterator[tuple[str, list[int]]]:
    if text is None:
        try:
            text = Path("/proc/net/dev").read_text(encoding="ascii")
        except OSError:
            return
    for line in text.splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() != "lo":
            yield name.strip(), [int(each) for each in counts.split()]
