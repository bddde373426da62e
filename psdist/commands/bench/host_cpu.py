"""CPU time of all ranks of a job, and what the interfaces of a host have sent.

The lowest worker of each host reads the CPU time in /proc, which counts a process with all its
threads, in user and kernel mode, in ticks of 10 ms. Hosts without a worker are left out.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from psdist.protocol.roles import Roles

_USER, _SYSTEM = 13, 14
"""Fields of /proc/PID/stat, from 0 (proc(5): utime, stime)."""


class HostCpu:
    def __init__(self, roles: Roles, rank: int) -> None:
        host = roles.places[rank].host
        self._pids: list[int] = []
        if rank == min(each for each in roles.worker_ranks if roles.places[each].host == host):
            self._pids = [place.pid for place in roles.places if place.host == host]

    def seconds(self) -> float:
        """Of CPU time, since these processes have begun; 0 where another rank looks."""
        ticks = sum(ticks_of(Path(f"/proc/{pid}/stat").read_text("ascii", "replace"))
                    for pid in self._pids)  # fmt: skip
        return ticks / os.sysconf("SC_CLK_TCK")


def ticks_of(stat: str) -> int:
    """Of the text of /proc/PID/stat. The command's name, in parentheses, may have spaces."""
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
    if text is None:
        try:
            text = Path("/proc/net/dev").read_text(encoding="ascii")
        except OSError:
            return Counts()
    num_bytes = packets = 0
    for line in text.splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() != "lo":
            columns = counts.split()
            num_bytes += int(columns[8])
            packets += int(columns[9])
    return Counts(num_bytes, packets)
