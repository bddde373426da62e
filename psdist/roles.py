"""Who does what: ranks -> servers, workers and groups, and the stable ids they are known by.

A rule that every rank applies to the same table of places, so that nothing but the table needs to
travel. The rule here knows hosts and sockets only; a plan from ``psdist.topology`` will take the
place of :func:`assign` and give the same :class:`Roles`.

    roles = assign(places, servers="auto", group="node")
    roles.peer_of_rank[3]         # stable id of rank 3, see server_id and worker_id
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from psdist.errors import LaunchError

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank runs: ``cores`` are those it may use, ``socket`` is their package or -1."""

    rank: int
    host: str
    pid: int
    socket: int
    cores: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The outcome: everything is indexed by server number, worker number or group number."""

    places: tuple[Place, ...]
    server_ranks: tuple[int, ...]
    worker_ranks: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    """Worker numbers of each group, ascending; the first is the group's leader."""

    @property
    def num_servers(self) -> int:
        return len(self.server_ranks)

    @property
    def num_workers(self) -> int:
        return len(self.worker_ranks)

    @cached_property
    def rank_of_peer(self) -> dict[int, int]:
        table = {server_id(i): rank for i, rank in enumerate(self.server_ranks)}
        table.update({worker_id(i): rank for i, rank in enumerate(self.worker_ranks)})
        return table

    @cached_property
    def peer_of_rank(self) -> dict[int, int]:
        return {rank: peer for peer, rank in self.rank_of_peer.items()}

    @cached_property
    def group_of_worker(self) -> tuple[int, ...]:
        table = [0] * self.num_workers
        for group, workers in enumerate(self.groups):
            for worker in workers:
                table[worker] = group
        return tuple(table)

    def describe_group(self, group: int) -> str:
        """For messages to people: "group 2 (workers 4, 5 on n3)"."""
        workers = self.groups[group]
        hosts = sorted({self.places[self.worker_ranks[worker]].host for worker in workers})
        plural = "s" if len(workers) > 1 else ""
        numbers = ", ".join(str(worker) for worker in workers)
        return f"group {group} (worker{plural} {numbers} on {', '.join(hosts)})"

    def describe_rank(self, rank: int) -> str:
        """For messages to people: "worker 1 (rank 3 on n2)"."""
        role = describe_peer(self.peer_of_rank[rank])
        return f"{role} (rank {rank} on {self.places[rank].host})"


def assign(
    places: Sequence[Place],
    *,
    servers: int | Literal["auto"],
    group: Literal["node", "socket", "rank"],
) -> Roles:
    """Roles for ``places`` (one per rank, in rank order; at least two).

    ``servers="auto"``: one per node, but never more than half of the ranks. Servers are spread
    evenly over the nodes and take the first ranks there, so rank 0 is server 0. Raises
    :class:`LaunchError` where the numbers do not fit.
    """
    nodes: dict[str, list[int]] = {}
    for place in places:
        nodes.setdefault(place.host, []).append(place.rank)
    num_ranks = len(places)
    count = min(len(nodes), max(1, num_ranks // 2)) if servers == "auto" else servers
    if count > num_ranks - 1:
        raise LaunchError(
            f"servers = {count} with {num_ranks} ranks: at least one rank must be a worker, so "
            f"at most {num_ranks - 1} can be servers; start more ranks or ask for fewer servers"
        )
    server_ranks = _spread(list(nodes.values()), count)
    serving = set(server_ranks)
    worker_ranks = tuple(place.rank for place in places if place.rank not in serving)
    members: dict[tuple[str, int], list[int]] = {}
    for worker, rank in enumerate(worker_ranks):
        place = places[rank]
        key = {
            "node": (place.host, 0),
            "socket": (place.host, place.socket),
            "rank": (place.host, rank),
        }[group]
        members.setdefault(key, []).append(worker)
    return Roles(
        places=tuple(places),
        server_ranks=server_ranks,
        worker_ranks=worker_ranks,
        groups=tuple(tuple(workers) for workers in members.values()),
    )


def _spread(nodes: Sequence[Sequence[int]], count: int) -> tuple[int, ...]:
    """``count`` ranks, evenly over the nodes, the first ranks of each."""
    taken = [0] * len(nodes)
    left = count
    while left:
        free = [index for index, ranks in enumerate(nodes) if taken[index] < len(ranks)]
        # A last round with fewer servers than nodes takes every k-th node, not the first few.
        some = free if left >= len(free) else [free[i * len(free) // left] for i in range(left)]
        for index in some:
            taken[index] += 1
        left -= len(some)
    chosen = [ranks[i] for index, ranks in enumerate(nodes) for i in range(taken[index])]
    return tuple(sorted(chosen))
