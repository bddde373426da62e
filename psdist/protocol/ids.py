"""The stable ids that servers, workers and spares are known by; never MPI ranks.

server_id(0)                  # the coordinator
worker_id(3)
spare_id(1)                   # below those of workers: it may take a server's place
describe_peer(worker_id(3))   # "worker 3"
"""

from __future__ import annotations

from collections.abc import Iterable

_SPARE_BASE = 1 << 19
_WORKER_BASE = 1 << 20
_NAMED_AT_MOST = 8


def server_id(server: int) -> int:
    """The stable id of server number ``server`` (0 is the coordinator)."""
    return server


def worker_id(worker: int) -> int:
    """The stable id of worker number ``worker``."""
    return _WORKER_BASE + worker


def spare_id(spare: int) -> int:
    """The stable id of spare number ``spare``, which it keeps in any place it takes."""
    return _SPARE_BASE + spare


def is_spare(peer: int) -> bool:
    return _SPARE_BASE <= peer < _WORKER_BASE


def spare_of(peer: int) -> int:
    """Inverse of :func:`spare_id`."""
    return peer - _SPARE_BASE


def is_worker(peer: int) -> bool:
    return peer >= _WORKER_BASE


def worker_of(peer: int) -> int:
    """Inverse of :func:`worker_id`."""
    return peer - _WORKER_BASE


def describe_peer(peer: int) -> str:
    if is_worker(peer):
        return f"worker {worker_of(peer)}"
    return f"spare {spare_of(peer)}" if is_spare(peer) else f"server {peer}"


def describe_workers(workers: Iterable[int]) -> str:
    """``worker 3``, or ``workers 0, 1, 2`` and how many more."""
    numbers = sorted(workers)
    shown = ", ".join(str(worker) for worker in numbers[:_NAMED_AT_MOST])
    more = len(numbers) - _NAMED_AT_MOST
    return f"worker{'s' * (len(numbers) > 1)} {shown}{f' and {more} more' if more > 0 else ''}"


COORDINATOR = server_id(0)
"""The server that also knows who has come to a collective, who is done, and who writes files."""
