"""Roles of ranks: ranks -> servers, workers and groups.

    roles.peer_of_rank[3]         # stable id of rank 3, see psdist.protocol.ids
    roles.groups[0]               # worker numbers of group 0, its leader first

:mod:`psdist.topology.plan.planning` decides the seats; every rank derives its roles from the same
plan (:mod:`psdist.ranks.seats.placing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from psdist.protocol.ids import (
    describe_peer,
    is_spare,
    is_worker,
    server_id,
    spare_id,
    worker_id,
    worker_of,
)


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
    nic: str = ""
    """The network cards that its MPI is confined to, with commas; "" where MPI chooses."""


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
    spare_ranks: tuple[int, ...] = ()
    """Ranks that wait to take the place of a failed server."""
    num_substitutes: int = 0
    """Number of spare workers: the last ones, each a group of its own. They join when others have
    failed. With ``spare_ranks`` these are the same ranks, which wait for either."""

    @property
    def shard_weights(self) -> tuple[float, ...]:
        """Weights that the sharder aims at, one per server."""
        return self.weights or (1.0,) * self.num_servers

    @property
    def num_servers(self) -> int:
        return len(self.server_ranks)

    @property
    def num_workers(self) -> int:
        """Number of workers, including substitutes."""
        return len(self.worker_ranks)

    @property
    def num_beginning(self) -> int:
        """Workers that begin the job; as many parts the data has."""
        return self.num_workers - self.num_substitutes

    @property
    def num_groups_beginning(self) -> int:
        return len(self.groups) - self.num_substitutes

    def is_substitute(self, peer: int) -> bool:
        """True if the peer with this id is a spare that takes a failed worker's place."""
        return is_worker(peer) and worker_of(peer) >= self.num_beginning

    @property
    def waiting_ranks(self) -> frozenset[int]:
        """Spares of either kind: they take no core from others while they wait."""
        return frozenset(self.spare_ranks + self.worker_ranks[self.num_beginning :])

    @property
    def num_spares(self) -> int:
        return len(self.spare_ranks)

    @property
    def has_shared_spares(self) -> bool:
        """Whether spares take the places of servers and of workers."""
        return bool(self.spare_ranks and self.num_substitutes)

    def worker_of_spare(self, spare: int) -> int:
        """The number that it has as a worker, where spares are for either."""
        return self.num_beginning + spare

    @property
    def waits_as(self) -> dict[int, int]:
        """By worker that may join later: the id under which it waits."""
        if self.has_shared_spares:
            return {
                self.worker_of_spare(spare): spare_id(spare)
                for spare in range(self.num_substitutes)
            }
        return {worker: worker_id(worker) for worker in range(self.num_beginning, self.num_workers)}

    @cached_property
    def rank_of_peer(self) -> dict[int, int]:
        """Rank by stable id: a spare that may become a worker has two ids."""
        table = {server_id(i): rank for i, rank in enumerate(self.server_ranks)}
        table.update({worker_id(i): rank for i, rank in enumerate(self.worker_ranks)})
        table.update({spare_id(i): rank for i, rank in enumerate(self.spare_ranks)})
        return table

    @cached_property
    def peer_of_rank(self) -> dict[int, int]:
        """Stable id of each rank at the start."""
        return {rank: peers[0] for rank, peers in self.peers_of_rank.items()}

    @cached_property
    def peers_of_rank(self) -> dict[int, tuple[int, ...]]:
        """All ids of each rank, the first of them at the start."""
        table: dict[int, tuple[int, ...]] = {}
        for peer, rank in self.rank_of_peer.items():
            others = table.get(rank, ())
            table[rank] = (peer, *others) if is_spare(peer) else (*others, peer)
        return table

    @cached_property
    def group_of_worker(self) -> tuple[int, ...]:
        table = [0] * self.num_workers
        for group, workers in enumerate(self.groups):
            for worker in workers:
                table[worker] = group
        return tuple(table)

    def local_index(self, worker: int) -> int:
        """The index of ``worker`` among the workers of its host, in worker order."""
        host = self.places[self.worker_ranks[worker]].host
        return sum(self.places[rank].host == host for rank in self.worker_ranks[:worker])

    def num_workers_beside(self, rank: int) -> int:
        """The number of workers on the host of ``rank``, itself included if it is a worker."""
        host = self.places[rank].host
        return sum(self.places[each].host == host for each in self.worker_ranks)

    def hosts_of_group(self, group: int) -> tuple[str, ...]:
        """The host of each of its workers."""
        return tuple(self.places[self.worker_ranks[each]].host for each in self.groups[group])

    def describe_group(self, group: int) -> str:
        """For messages to people: "group 2 (workers 4, 5 on n3)"."""
        if not 0 <= group < len(self.groups):
            return f"group {group} (which is not one of this run)"
        workers = self.groups[group]
        hosts = sorted({self.places[self.worker_ranks[worker]].host for worker in workers})
        plural = "s" if len(workers) > 1 else ""
        numbers = ", ".join(str(worker) for worker in workers)
        return f"group {group} (worker{plural} {numbers} on {', '.join(hosts)})"

    def describe_rank(self, rank: int) -> str:
        """For messages to people: "worker 1 (rank 3 on n2)"."""
        return self.describe(self.peer_of_rank[rank])

    def describe(self, peer: int) -> str:
        """The same of who has this id."""
        rank = self.rank_of_peer[peer]
        role = describe_peer(peer) + ", a spare" * self.is_substitute(peer)
        return f"{role} (rank {rank} on {self.places[rank].host})"
