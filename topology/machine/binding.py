"""A rank binds itself to its cores: every thread that it has, and those that it will start.

    bind((4, 5, 6, 7))       # before torch starts its threads: they inherit it

The one place that changes anything; which cores is for :mod:`psdist.topology.plan.seating` to say.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


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
