"""The stable ids that servers and workers are known by; never MPI ranks.

server_id(0)                  # the registrar
worker_id(3)
describe_peer(worker_id(3))   # "worker 3"
"""

from __future__ import annotations

_WORKER_BASE = 1 << 20


def server_id(server: int) -> int:
    """The stable id of server number ``server`` (0 is the registrar)."""
    return server


def worker_id(worker: int) -> int:
    """The stable id of worker number ``worker``."""
    return _WORKER_BASE + worker


def is_worker(peer: int) -> bool:
    return peer >= _WORKER_BASE


def worker_of(peer: int) -> int:
    """Inverse of :func:`worker_id`."""
    return peer - _WORKER_BASE


def describe_peer(peer: int) -> str:
    return f"worker {worker_of(peer)}" if is_worker(peer) else f"server {peer}"


REGISTRAR = server_id(0)
"""The server that also knows who has come to a collective, who is done, and who writes files."""
