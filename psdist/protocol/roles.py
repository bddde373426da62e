"""Who does what: ranks -> servers, workers and groups, and the stable ids they are known by.

Who sits where is decided by :mod:`psdist.topology.plan.planning`; every rank makes its roles out of
the same plan.

    roles = from_plan(places, plan)
    roles.peer_of_rank[3]         # stable id of rank 3, see server_id and worker_id
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from psdist.topology.plan.plan import Plan

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
    """Where a rank runs, and what of its host it may use and see."""

    rank: int
    host: str
    pid: int
    cores: tuple[int, ...]
    """OS numbers of the PUs that it may use."""
    gpus: tuple[str, ...] | None = None
    """PCI bus ids of the GPUs that it can see; None where it cannot tell."""
    kernel: str = ""
    """Boot id: hosts of different names with the same one share their processors."""
    switches: tuple[str, str] = ("", "")
    """SLURM_TOPOLOGY_ADDR and its pattern, where Slurm gave them."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The outcome: everything is indexed by server number, worker number or group number."""

    places: tuple[Place, ...]
    server_ranks: tuple[int, ...]
    worker_ranks: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    """Worker numbers of each group, ascending; the first is the group's leader."""
    weights: tuple[float, ...] = ()
    """Part of the model's bytes for each server; empty for equal parts."""

    @property
    def shard_weights(self) -> tuple[float, ...]:
        """What the sharder aims at: an entry for each server."""
        return self.weights or (1.0,) * self.num_servers

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


def from_plan(places: Sequence[Place], plan: Plan) -> Roles:
    """The roles that ``plan`` gives to ``places``, both with one entry per rank in rank order."""
    members: dict[int, list[int]] = {}
    for planned in plan.ranks:
        if planned.role == "worker":
            members.setdefault(planned.group, []).append(planned.index)
    return Roles(
        places=tuple(places),
        server_ranks=plan.server_ranks,
        worker_ranks=plan.worker_ranks,
        groups=tuple(tuple(members[group]) for group in sorted(members)),
        weights=plan.weights,
    )
