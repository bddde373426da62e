"""What all ranks of a job have taken of their hosts' cores, also those that only wait.

Of each host its lowest worker looks, in /proc, which counts a process with all its threads, in user
and kernel mode, in ticks of 10 ms. A host on which nobody works is looked at by nobody.
"""

from __future__ import annotations

import os
from pathlib import Path

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
