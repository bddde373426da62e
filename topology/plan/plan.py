"""A plan: which rank sits where, in which role, on which cores, and what that costs the network.

The outcome of :mod:`psdist.topology.plan.planning`, and what emitters, drawings, roles and the
check after the start all read. As JSON it is what ``psdist plan --emit json`` writes and what
``psdist run --placement FILE`` reads.

    plan = decode(Path("plan.json").read_bytes())
    plan.ranks[3].host, plan.ranks[3].role, plan.cost_s / plan.bound_s
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field

from psdist.topology.text.models import (
    CLOSED,
    EACH_ONCE,
    FIRST_FAULT,
    TABLE,
    Amount,
    HostName,
    Text,
    Whole,
)

Grouping: TypeAlias = Literal["node", "socket", "numa", "rank", "rack", "auto"] | int
"""Which workers are a group: those of a host or a part of it, of a rack, or of so many hosts."""
MAX_RANKS: Final = 1 << 16
MAX_CPU: Final = 1 << 16

_Cpus: TypeAlias = Annotated[
    tuple[Annotated[Whole, Field(ge=0, lt=MAX_CPU)], ...], FIRST_FAULT, EACH_ONCE
]
_Place: TypeAlias = Annotated[Whole, Field(ge=-1, lt=MAX_CPU)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRank:
    __pydantic_config__ = CLOSED

    rank: Whole
    host: HostName
    role: Literal["server", "worker", "spare"]
    index: Whole
    """Its number among those of its role."""
    group: Whole
    """Of a worker; -1 for all others."""
    cores: _Cpus
    """Logical core numbers on its host; () where it is not to be bound."""
    cpus: _Cpus
    """OS numbers of the PUs of those cores: what it binds itself to; () where it is not bound."""
    package: _Place
    """Logical package of its cores; -1 where they are several, or unknown."""
    numa: _Place
    gpu: Text
    """PCI bus id of the worker's GPU, or ""."""
    nic: Text
    """Name of the nearest network card, or ""."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkLoad:
    """One link of the tree and what one exchange (a push and its pull) sends over it."""

    __pydantic_config__ = CLOSED

    name: Text
    """``n3``: the link of that node; ``rack1``: the uplinks of that switch."""
    kind: Literal["node", "switch"]
    num_bytes: Amount
    """In each direction."""
    bytes_per_s: Annotated[Amount, Field(gt=0)]
    group_bytes: Amount = 0.0
    """In each direction: what groups of several hosts send over it to reduce gradients, before the
    exchange, and to hand parameters round, after it."""

    @property
    def seconds(self) -> float:
        """Of the exchange."""
        return self.num_bytes / self.bytes_per_s

    @property
    def group_seconds(self) -> float:
        return self.group_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Plan:
    __pydantic_config__ = CLOSED

    ranks: Annotated[tuple[PlannedRank, ...], FIRST_FAULT, Field(max_length=MAX_RANKS)]
    """In rank order."""
    weights: Annotated[tuple[Amount, ...], FIRST_FAULT]
    """Share of the model's bytes for each server; they sum to 1."""
    links: Annotated[tuple[LinkLoad, ...], FIRST_FAULT]
    model_bytes: Amount
    placement: Text
    """``auto``, ``block``, ``cyclic``: how the servers were placed."""
    cost_s: Amount
    """Predicted time that one exchange needs on the slowest link."""
    bound_s: Amount
    """No placement of as many servers is faster (proved, docs/placement.md): in a job none that
    makes other ranks serve either. 0 where nothing is proved."""
    compared: Annotated[dict[Text, Amount], TABLE]
    """Seconds of an exchange, judged as this one is, placed otherwise: ``block``, ``cyclic``."""
    source: Text
    """Where the tree of switches comes from."""
    notes: Annotated[tuple[Text, ...], FIRST_FAULT] = ()
    servers_s: Amount = 0.0
    """Predicted time in which the busiest server applies what one exchange brings it."""
    cards_s: Amount = 0.0
    """The same of the busiest network card, as far as its speed is known; 0: not known."""
    groups_s: Amount = 0.0
    """Predicted time in which the slowest group reduces on its host, between its GPUs, and between
    its hosts, before an exchange and after it; not part of the exchange. 0 where that is not
    known."""

    @property
    def exchange_s(self) -> float:
        """Predicted time of one exchange: of the slowest of links, servers and network cards."""
        return max(self.cost_s, self.servers_s, self.cards_s)

    @property
    def whole_s(self) -> float:
        """Predicted time of an exchange and of what groups do before and after it."""
        return self.exchange_s + self.groups_s

    @property
    def limit(self) -> Literal["links", "servers", "network cards"]:
        """What is slowest; links where others are as slow."""
        if self.cost_s == self.exchange_s:
            return "links"
        return "servers" if self.servers_s == self.exchange_s else "network cards"

    @property
    def has_equal_parts(self) -> bool:
        """Whether each server holds as much as every other one."""
        return max(self.weights) < 1.0005 * min(self.weights)

    @property
    def is_at_bound(self) -> bool:
        """Whether it is proved to be the fastest; up to 0.05 % is the solver's rounding."""
        return 0 < self.cost_s < 1.0005 * self.bound_s

    @property
    def server_ranks(self) -> tuple[int, ...]:
        return tuple(each.rank for each in self.ranks if each.role == "server")

    @property
    def worker_ranks(self) -> tuple[int, ...]:
        return tuple(each.rank for each in self.ranks if each.role == "worker")

    @property
    def spare_ranks(self) -> tuple[int, ...]:
        return tuple(each.rank for each in self.ranks if each.role == "spare")

    @property
    def hosts(self) -> tuple[str, ...]:
        """In the order of their first ranks."""
        return tuple(dict.fromkeys(each.host for each in self.ranks))

    @property
    def worst_link(self) -> LinkLoad | None:
        return max(self.links, key=lambda link: link.seconds, default=None)
