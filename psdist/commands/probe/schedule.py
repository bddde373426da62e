"""The schedule of exchanges: every rank makes the same list of steps from the same facts. Pure.

    for step in schedule(ranks, racks):
        step.kind, step.pairs        # "rack", ((0, 4), ...): ranks that exchange at the same time

* In a node: two ranks bound to one socket, and two bound to different sockets; all nodes at once.
* Between nodes one rank of each takes part. Up to ``ALL_PAIRS`` nodes all pairs are measured;
  beyond, neighbours at distances 1, 2, 4, 8 ... in each rack and of racks, one pair of nodes each.
* Pairs of one step share nothing but switches: inside racks no node is in two of them, across racks
  no rack is, so that one pair has the uplink to itself.
* Uplinks, a rack at a time: all its nodes with as many of other racks, taken from each in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from psdist.topology.network.catalogue import Kind

ALL_PAIRS = 16

StepKind: TypeAlias = Kind | Literal["uplink"]
_Numbers: TypeAlias = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    rank: int
    host: str
    packages: Mapping[int, frozenset[int]]
    """The CPUs that it may use, by package (-1: /sys does not say)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Pairs of ranks that exchange at the same time."""

    kind: StepKind
    pairs: tuple[_Numbers, ...]
    cpus: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """CPUs that a rank binds itself to meanwhile; other ranks keep theirs."""
    packages: Mapping[int, int] = field(default_factory=dict)
    """The packages of those CPUs, by rank."""
    racks: frozenset[str] = frozenset()
    """Kind uplink: those whose nodes all take part."""


def schedule(ranks: Sequence[RankFacts], racks: Mapping[str, str]) -> list[Step]:
    """All steps for these ranks. ``racks`` has the rack of each host; "" is none, at the root."""
    members: dict[str, list[RankFacts]] = defaultdict(list)
    for each in ranks:
        members[each.host].append(each)
    leaders = [here[0].rank for here in members.values()]
    rack_of = [racks[host] for host in members]
    inside = [_inside("core", members.values()), _inside("socket", members.values())]
    steps = [step for step in inside if step is not None]
    for pairs in _rounds(_rack_pairs(rack_of), range(len(leaders))):
        steps.append(Step(kind="node", pairs=_as_ranks(pairs, leaders)))
    for pairs in _rounds(_crossing_pairs(rack_of), rack_of):
        steps.append(Step(kind="rack", pairs=_as_ranks(pairs, leaders)))
    uplinks: dict[tuple[_Numbers, ...], frozenset[str]] = {}
    for rack in dict.fromkeys(rack_of):
        load = _uplink_pairs(rack, rack_of)
        if rack and load:
            # Two racks of one size load both uplinks with the same pairs.
            uplinks[load] = uplinks.get(load, frozenset()) | {rack}
    steps += [
        Step(kind="uplink", pairs=_as_ranks(load, leaders), racks=loaded)
        for load, loaded in uplinks.items()
    ]
    return steps


def neighbours(count: int) -> list[_Numbers]:
    """All pairs of ``count`` things up to ALL_PAIRS of them; else those 1, 2, 4, 8 ... apart."""
    if count <= ALL_PAIRS:
        distances = list(range(1, count))
        return [(at, at + far) for far in distances for at in range(count - far)]
    found: dict[_Numbers, None] = {}
    far = 1
    while far <= count // 2:
        for at in range(count):
            other = (at + far) % count
            found[min(at, other), max(at, other)] = None
        far *= 2
    return list(found)


def _inside(kind: Literal["core", "socket"], hosts: Iterable[Sequence[RankFacts]]) -> Step | None:
    pairs: list[_Numbers] = []
    cpus: dict[int, frozenset[int]] = {}
    packages: dict[int, int] = {}
    for ranks in hosts:
        found = [
            (a, first, b, second)
            for at, a in enumerate(ranks)
            for b in ranks[at + 1 :]
            for first in a.packages
            for second in b.packages
            if (first == second) == (kind == "core")
        ]
        if not found:
            continue
        # Rather two ranks that do not have to share one CPU.
        found.sort(key=lambda each: len(each[0].packages[each[1]] | each[2].packages[each[3]]) < 2)
        a, first, b, second = found[0]
        pairs.append((a.rank, b.rank))
        cpus |= {a.rank: a.packages[first], b.rank: b.packages[second]}
        packages |= {a.rank: first, b.rank: second}
    return Step(kind=kind, pairs=tuple(pairs), cpus=cpus, packages=packages) if pairs else None


def _rack_pairs(racks: Sequence[str]) -> list[_Numbers]:
    """Pairs of nodes with the same switch."""
    members = _members(racks)
    return [(nodes[a], nodes[b]) for nodes in members.values() for a, b in neighbours(len(nodes))]


def _crossing_pairs(racks: Sequence[str]) -> list[_Numbers]:
    """Pairs of nodes with different switches."""
    if len(racks) <= ALL_PAIRS:
        return [(a, b) for a, b in neighbours(len(racks)) if racks[a] != racks[b]]
    members = list(_members(racks).values())
    used = [0] * len(members)
    pairs = []
    for rack, other in neighbours(len(members)):
        pairs.append(
            (members[rack][used[rack] % len(members[rack])],
             members[other][used[other] % len(members[other])])
        )  # fmt: skip
        used[rack] += 1
        used[other] += 1
    return pairs


def _uplink_pairs(rack: str, racks: Sequence[str]) -> tuple[_Numbers, ...]:
    members = _members(racks)
    mine = members.pop(rack)
    others = [
        nodes[turn]
        for turn in range(max(map(len, members.values()), default=0))
        for nodes in members.values()
        if turn < len(nodes)
    ]
    return tuple(sorted((min(pair), max(pair)) for pair in zip(mine, others, strict=False)))


def _members(racks: Sequence[str]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = defaultdict(list)
    for node, rack in enumerate(racks):
        members[rack].append(node)
    return members


def _rounds(pairs: Sequence[_Numbers], resources: Sequence[Hashable]) -> list[list[_Numbers]]:
    """The pairs in as few rounds as come easily; no resource is in two pairs of a round."""
    rounds: list[list[_Numbers]] = []
    busy: list[set[Hashable]] = []
    for a, b in pairs:
        needed = {resources[a], resources[b]}
        at = next((at for at, taken in enumerate(busy) if not taken & needed), len(rounds))
        if at == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[at].append((a, b))
        busy[at] |= needed
    return rounds


def _as_ranks(pairs: Iterable[_Numbers], leaders: Sequence[int]) -> tuple[_Numbers, ...]:
    return tuple((leaders[a], leaders[b]) for a, b in pairs)
