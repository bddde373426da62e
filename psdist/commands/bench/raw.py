"""The raw MPI exchange that figures stand beside, and figures as text.

exchange(comm, pairs, server_ranks)        # on every worker, beside
echo(comm, memories, worker_ranks)         # on every server
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
