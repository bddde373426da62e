"""Loader processes end with the rank that has started them, also where that was killed.

torch's end with their parent. Those that a fork server starts have the server for one, and hold it
open as long as they live: when a rank is killed both would stay.

    options["worker_init_fn"] = ends_with_its_rank(options.get("worker_init_fn"))
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Final

_EVERY_S: Final = 1.0
_ENDED: Final = frozenset("ZX")
"""States of a process that runs no more, in /proc/PID/stat."""


def ends_with_its_rank(worker_init_fn: Callable[[int], None] | None) -> Callable[[int], None]:
    """``worker_init_fn`` of a loader that this process starts: its own, and the watch."""
    rank = os.getpid()
    return partial(_begin, rank, started_at(rank), worker_init_fn)


def _begin(
    rank: int, since: str, worker_init_fn: Callable[[int], None] | None, process: int
) -> None:
    Thread(target=_watch, args=(rank, since), name="rank-watch", daemon=True).start()
    if worker_init_fn is not None:
        worker_init_fn(process)


def _watch(rank: int, since: str) -> None:
    while started_at(rank) == since:
        time.sleep(_EVERY_S)
    os._exit(1)


def started_at(process: int) -> str:
    """When it has started, which tells it from a later one of its number; "" where it has ended, or
    where the system does not say."""
    try:
        told = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *fields = told.rpartition(")")[2].split()
    return "" if state in _ENDED else fields[18]
