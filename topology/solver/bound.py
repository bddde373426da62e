"""What no placement can beat: lower bounds on the time of one exchange.

Owns the bounds; docs/placement.md proves them. Places nothing.

    bound = lower_bound_s(problem)
    bound.seconds                     # no placement of problem.num_servers servers is faster

The bounds come from filling the tree (:mod:`psdist.topology.solver.filling`), which gives the
optimum of the linear program without a solver: scipy need not be loaded where a job starts. The
program itself, as a second opinion, is in tests/support/exact_placement.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from psdist.topology.solver.filling import TOLERANCE, FlowTree, best_sources, fastest_s
from psdist.topology.solver.problem import Problem

PRECISION = 1e-10
"""Relative: a search over times stops when it cannot gain more than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Lower bounds on the time of one exchange."""

    divisible_s: float
    """Servers wherever one may sit, as many as there is room for: the linear program."""
    seconds: float
    """At most ``num_servers`` places hold anything; at least ``divisible_s``. Reached by
    :func:`placement.solve`, so this is the optimum itself."""


def lower_bound_s(problem: Problem) -> Bound:
    """Lower bounds on the time of one exchange, exact to 1e-10."""
    tree = FlowTree.of(problem)
    divisible_s = fastest_s(tree, own_bytes(problem, problem.candidates))
    return Bound(divisible_s=divisible_s, seconds=_places_s(tree, problem, divisible_s))


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
