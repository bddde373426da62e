"""The seats of a job: role, group, cores and GPU of every rank, and the cost of an exchange.

    plan = decode(Path("plan.json").read_bytes(), where="plan.json")
    plan.ranks[3].host, plan.ranks[3].role, plan.cost_s / plan.bound_s
    assert decode(encode(plan), where="plan.json") == plan

Here is the type that goes to all ranks, and its JSON: what ``psdist plan --emit json`` writes and
``psdist run --placement FILE`` reads. Files are not trusted. ``planning`` makes a
plan, with ``serving_hosts`` for the hosts that serve and ``seating`` for seats on a host. Pure.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Annotated, Final, Literal, NoReturn, TypeAlias

from pydantic import Field

from psdist.errors import PlacementError
from psdist.topology.text import decoded, shown
from psdist.topology.text.models import (
    CLOSED,
    EACH_ONCE,
    FIRST_FAULT,
    TABLE,
    Amount,
    HostName,
    Text,
    Whole,
    check_format,
    validated,
)
from psdist.topology.text.strict_json import Limits, parse

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
    """Group of a worker; -1 for all other ranks."""
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
        """Time of the exchange."""
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
    """No placement of the same number of servers is faster (proved, docs/guides/placement.md); in a
    running job, also none that makes other ranks serve. 0 where nothing is proved."""
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
    def link_bytes_per_s(self) -> float:
        """Speed of the slowest host's link that an exchange uses; inf if none does."""
        speeds = (link.bytes_per_s for link in self.links if link.kind == "node")
        return min(speeds, default=math.inf)

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
        """Return the slowest part; links if others are equally slow."""
        if self.cost_s == self.exchange_s:
            return "links"
        return "servers" if self.servers_s == self.exchange_s else "network cards"

    @property
    def has_equal_parts(self) -> bool:
        """True if all servers hold the same share."""
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


WEIGHTS_TOLERANCE: Final = 1e-6
"""Maximum distance of the sum of the weights from 1: rounding, also in a file typed by a user."""
REMEDY: Final = "correct it or make the plan again"
FORMAT: Final = "psdist plan"
VERSION: Final = 2
MAX_BYTES: Final = 32 << 20
"""10,000 ranks with 192 cores of two threads each."""
# A rank has six brackets, the others are for the links; its cores lie three deep.
LIMITS: Final = Limits(depth=8, brackets=10 * MAX_RANKS, commas=6_000_000)
_PLAN_KEYS = tuple(field.name for field in fields(Plan))
_RANK_KEYS = tuple(field.name for field in fields(PlannedRank))
_LINK_KEYS = tuple(field.name for field in fields(LinkLoad))
# One to a line; everything else of a plan is short.
_LONG_LISTS = ("ranks", "links")


def check(plan: Plan, *, where: str) -> None:
    """Raise PlacementError, one line that begins with ``where``, unless the plan is sound.

    Whether it fits the machines of a cluster is for :mod:`psdist.topology.emit`.

    Sound: ranks 0, 1, 2 ... in order; servers, workers and spares numbered in rank order, at least
    one of the first two; groups without gaps; a weight for each server, with sum 1; as many cores
    as CPUs or none; links whose time is finite.
    """
    counts = Counter[str]()
    for position, each in enumerate(plan.ranks):
        element = f"the rank of ranks[{position}]"
        if each.rank != position:
            refuse(where, element, each.rank, f"{position}: 0, 1, 2 ... are needed, each once")
        _check_rank(each, counts[each.role], where)
        counts[each.role] += 1
    for role in ("server", "worker"):
        if not counts[role]:
            refuse(where, f"the number of {role}s", 0, "at least 1")
    groups = {each.group for each in plan.ranks if each.role == "worker"}
    if groups != set(range(len(groups))):
        missing = min(set(range(len(groups))) - groups)
        refuse(where, f"the number of workers in group {missing}", 0, "at least 1: no gaps")
    num_servers = counts["server"]
    if len(plan.weights) != num_servers:
        refuse(where, "the number of weights", len(plan.weights), f"{num_servers}, one a server")
    total = math.fsum(plan.weights)
    if abs(total - 1) > WEIGHTS_TOLERANCE:
        refuse(where, "the sum of the weights", total, "1")
    for position, link in enumerate(plan.links):
        if not math.isfinite(link.seconds):
            refuse(where, f"links[{position}].bytes_per_s", link.bytes_per_s, "a link's speed")


def _check_rank(each: PlannedRank, index: int, where: str) -> None:
    name = f"rank {each.rank}"
    if each.index != index:
        refuse(where, f"{name}: index", each.index, f"{index}: {each.role}s count in rank order")
    if (each.group < 0) is (each.role == "worker") or each.group < -1:
        refuse(where, f"{name}: group", each.group, "0 or more for a worker, -1 for all others")
    if bool(each.cores) != bool(each.cpus):
        wanted = f"{len(each.cores)} cores with the cpus of each, or none of both"
        refuse(where, f"{name}: number of cpus", len(each.cpus), wanted)


def refuse(where: str, element: str, value: object, wanted: str) -> NoReturn:
    """Raise PlacementError: ``element`` of ``where`` is this value, and what it should be."""
    raise PlacementError(f"{where}: {element} is {shown(value)}, not {wanted}: {REMEDY}")


def encode(plan: Plan) -> bytes:
    """The plan as JSON, ASCII, a line for each rank and link, keys always in the same order.

    Raises PlacementError for a plan that ``decode`` would refuse.
    """
    check(validated(Plan, plan, where="plan", remedy=REMEDY), where="plan")
    lines = [_member("format", FORMAT), _member("version", VERSION)]
    for key in _PLAN_KEYS:
        value = getattr(plan, key)
        if key in _LONG_LISTS and value:
            names = _RANK_KEYS if key == "ranks" else _LINK_KEYS
            entries = (json.dumps({name: getattr(each, name) for name in names}) for each in value)
            lines.append(f"  {json.dumps(key)}: [\n    " + ",\n    ".join(entries) + "\n  ]")
        else:
            lines.append(_member(key, value))
    data = ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")
    if len(data) > MAX_BYTES:
        raise PlacementError(
            f"plan: {len(plan.ranks):,} ranks and their cores take {len(data):,} bytes, more than "
            f"{MAX_BYTES:,}: start fewer ranks"
        )
    return data


def decode(data: bytes, *, where: str) -> Plan:
    """The plan that ``data`` is; ``where`` names it in messages, such as the path of its file.

    Ranks may be in any order. Raises PlacementError for anything but a whole and sound plan:
    members of another type, keys that are unknown, missing or there twice, what :func:`check`
    refuses, more than 32 MiB.
    """
    text = decoded(data, where=where, max_bytes=MAX_BYTES)
    content = parse(text, where=where, made_by="psdist plan", limits=LIMITS)
    members = check_format(content, FORMAT, VERSION, where=where, remedy=REMEDY)
    found = validated(Plan, members, where=where, remedy=REMEDY)
    plan = replace(found, ranks=tuple(sorted(found.ranks, key=lambda each: each.rank)))
    check(plan, where=where)
    return plan


def _member(key: str, value: object) -> str:
    return f"  {json.dumps(key)}: {json.dumps(value)}"
