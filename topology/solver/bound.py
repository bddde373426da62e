"""What no placement can beat: lower bounds on the time of one exchange.

Owns the bounds; docs/placement.md proves them. Places nothing.

    bound = lower_bound_s(problem)
    bound.seconds                     # no placement of problem.num_servers servers is faster

The bounds come from filling the tree (:mod:`psdist.topology.solver.filling`), which gives the
optimum of the linear program without a solver: scipy need not be loaded where a job starts. The
program itself, as a second opinion, is in tests/support/exact_placement.py.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from psdist.errors import PlacementError
from psdist.topology.solver.filling import TOLERANCE, FlowTree, best_sources, fastest_s, most_mass
from psdist.topology.solver.problem import Problem

PRECISION = 1e-10
"""Relative: a search over times stops when it cannot gain more than this."""

MOST_SIZES = 64
"""The bound for uncut shards looks at about so many sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Lower bounds in seconds, each at least as strong as the one before it."""

    divisible_s: float
    """Servers wherever one may sit, shards of any size: the linear program."""
    places_s: float
    """At most ``num_servers`` places hold anything. Reached by :func:`placement.solve`, so for
    divisible shards this is the optimum itself."""
    shards_s: float
    """The given shards are not cut; equal to ``places_s`` where none are given."""

    @property
    def seconds(self) -> float:
        return self.shards_s


def lower_bound_s(problem: Problem, shard_bytes: Sequence[float] | None = None) -> Bound:
    """Lower bounds on the time of one exchange, exact to 1e-10.

    ``shard_bytes``: sizes of shards that are not to be cut, one a server. Raises PlacementError
    where they do not fit into memory.
    """
    if shard_bytes is not None:
        problem = for_shards(problem, shard_bytes)
    tree = FlowTree.of(problem)
    divisible_s = fastest_s(tree, own_bytes(problem, problem.candidates))
    places_s = _places_s(tree, problem, divisible_s)
    shards_s = places_s if shard_bytes is None else _shards_s(tree, problem, shard_bytes, places_s)
    return Bound(divisible_s=divisible_s, places_s=places_s, shards_s=shards_s)


def for_shards(problem: Problem, shard_bytes: Sequence[float]) -> Problem:
    """The problem whose model and number of servers are those of the given shards."""
    if not all(0 <= size < math.inf for size in shard_bytes):
        raise PlacementError(f"placement: shards of {list(shard_bytes)[:8]} bytes; 0 is the least")
    return replace(problem, model_bytes=math.fsum(shard_bytes), num_servers=len(shard_bytes))


def own_bytes(problem: Problem, vertices: Sequence[int]) -> list[float]:
    """What each vertex can take: up to the whole model at ``vertices``, nothing elsewhere."""
    own = [0.0] * len(problem.parent)
    for v in vertices:
        own[v] = min(problem.max_bytes[v], problem.model_bytes)
    return own


def vertex_sources(problem: Problem) -> list[list[float]]:
    """One source a vertex, for :func:`filling.best_sources`: several servers there are as one."""
    return [[held] if held else [] for held in own_bytes(problem, problem.candidates)]


def nearest_first(tree: FlowTree) -> list[int]:
    """Ranks of the vertices by what a byte there adds to the sum of times; equal ones share."""
    scale = max(tree.path_s) or 1.0
    near = [round(each / scale * 1e9) for each in tree.path_s]
    rank = {value: index for index, value in enumerate(sorted(set(near)))}
    return [rank[value] for value in near]


def _places_s(tree: FlowTree, problem: Problem, divisible_s: float) -> float:
    """The optimum over at most ``num_servers`` places: which mass fits grows with the time."""
    if problem.num_servers >= len(problem.candidates):
        return divisible_s
    sources, rank = vertex_sources(problem), nearest_first(tree)

    def best_within(caps: Sequence[float]) -> float | None:
        """The least time of the places that take most; None if that is not the whole model."""
        places, masses = best_sources(
            tree,
            caps,
            sources,
            limit=problem.num_servers,
            prefer=lambda v, count: (rank[v], count, v),
        )
        if math.fsum(masses) < problem.model_bytes * (1 - TOLERANCE):
            return None
        return fastest_s(tree, own_bytes(problem, places))

    found = best_within(tree.caps(divisible_s))
    if found is not None:
        return found
    # Each round the places that are best for the time found so far; in tens of thousands of
    # problems at most 6 rounds, where halving an interval took 8.
    found = best_within([math.inf] * len(tree.up))
    while found is not None:
        seconds = found
        found = best_within(tree.caps(max(divisible_s, seconds * (1 - PRECISION))))
    return seconds


def shards_within(sums: Sequence[float], num_bytes: float) -> float:
    """How many shards fit into so many bytes, smallest first; one that just fits does fit.

    ``sums`` are the bytes of the smallest, of the two smallest, and so on.
    """
    return float(bisect.bisect_right(sums, num_bytes * (1 + TOLERANCE)))


def least_s_for_all(
    tree: FlowTree, problem: Problem, sums: Sequence[float], at_least_s: float
) -> float:
    """The least time, from ``at_least_s`` on, in which no edge has more shards below it than fit
    there if they were the smallest; ``sums`` as in :func:`shards_within`. Exact if all are equal.
    """
    own = [
        min(float(places), shards_within(sums, room))
        for places, room in zip(problem.capacity, problem.max_bytes, strict=True)
    ]

    def all_fit(seconds: float) -> bool:
        caps = [shards_within(sums, cap) for cap in tree.caps(seconds)]
        return most_mass(tree, caps, own) >= len(sums)

    if math.fsum(own) < len(sums):
        raise PlacementError(
            f"placement: {len(sums)} shards of {sums[0]:.0f} bytes or more do not fit into the "
            f"memory of {len(problem.candidates)} places; cut them smaller, or add nodes or memory"
        )
    low = max(at_least_s, max(tree.offset_s))
    if all_fit(low):
        return low
    high = max(
        offset + slope * sums[-1] for offset, slope in zip(tree.offset_s, tree.slope_s, strict=True)
    )
    while low < (middle := (low + high) / 2) < high:
        if all_fit(middle):
            high = middle
        else:
            low = middle
    return high


def _shards_s(
    tree: FlowTree, problem: Problem, shard_bytes: Sequence[float], at_least_s: float
) -> float:
    """For several k: the k largest shards alone already need this long."""
    ordered = sorted((size for size in shard_bytes if size > 0), reverse=True)
    # Each k gives a bound; among thousands of shards, neighbours say nearly the same.
    step = math.ceil(len(ordered) / MOST_SIZES)
    best = at_least_s
    for k in sorted({1, *range(step, len(ordered), step), len(ordered)}):
        sums = list(itertools.accumulate(reversed(ordered[:k])))
        best = least_s_for_all(tree, problem, sums, best)
    return best
