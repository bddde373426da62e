"""A plan: which rank sits where, in which role, on which cores, and what that costs the network.

The outcome of :mod:`psdist.topology.plan.planning`, and what emitters, drawings, roles and the
check after the start all read. As JSON it is what ``psdist plan --emit json`` writes and what
``psdist run --placement FILE`` reads.

    plan = decode(Path("plan.json").read_bytes())
    plan.ranks[3].host, plan.ranks[3].role, plan.cost_s / plan.bound_s
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRank:
    rank: int
    host: str
    role: Literal["server", "worker"]
    index: int
    """Its number among servers or among workers."""
    group: int
    """Of a worker; -1 for a server."""
    cores: tuple[int, ...]
    """Logical core numbers on its host; () where it is not to be bound."""
    cpus: tuple[int, ...]
    """OS numbers of the PUs of those cores: what it binds itself to; () where it is not bound."""
    package: int
    """Logical package of its cores; -1 where they are several, or unknown."""
    numa: int
    gpu: str
    """PCI bus id of the worker's GPU, or ""."""
    nic: str
    """Name of the nearest network card, or ""."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkLoad:
    """One link of the tree and what one exchange (a push and its pull) sends over it."""

    name: str
    """``n3``: the link of that node; ``rack1``: the uplinks of that switch."""
    kind: Literal["node", "switch"]
    num_bytes: float
    """In each direction."""
    bytes_per_s: float

    @property
    def seconds(self) -> float:
        return self.num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Plan:
    ranks: tuple[PlannedRank, ...]
    """In rank order."""
    weights: tuple[float, ...]
    """Share of the model's bytes for each server; they sum to 1."""
    links: tuple[LinkLoad, ...]
    model_bytes: float
    placement: str
    """``auto``, ``block``, ``cyclic``: how the servers were placed."""
    cost_s: float
    """Predicted time of one exchange: of the worst link."""
    bound_s: float
    """No placement of the servers, for these groups, can be faster (proved, see docs)."""
    compared: dict[str, float]
    """The same cost in seconds under other placements: ``block``, ``cyclic``."""
    source: str
    """Where the tree of switches comes from."""
    notes: tuple[str, ...] = ()

    @property
    def server_ranks(self) -> tuple[int, ...]:
        return tuple(each.rank for each in self.ranks if each.role == "server")

    @property
    def worker_ranks(self) -> tuple[int, ...]:
        return tuple(each.rank for each in self.ranks if each.role == "worker")

    @property
    def hosts(self) -> tuple[str, ...]:
        """In the order of their first ranks."""
        return tuple(dict.fromkeys(each.host for each in self.ranks))

    @property
    def worst_link(self) -> LinkLoad | None:
        return max(self.links, key=lambda link: link.seconds, default=None)
