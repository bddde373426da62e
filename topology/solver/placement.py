"""Where servers sit and how much of the model each holds; proofs are in docs/guides/placement.md.

    solution = solve(problem)
    solution.servers_at, solution.server_bytes, solution.cost_s / solution.bound_s

The objective, one after the other: the slowest link; the servers' loads, as even as that allows;
the time of all links together.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from psdist.errors import PlacementError
from psdist.topology.solver import Problem, Solution, cost_s
from psdist.topology.solver.filling import (
    TOLERANCE,
    FlowTree,
    Preference,
    best_sources,
    even_masses,
    lower_bound_s,
    nearest_first,
    vertex_sources,
)

__all__ = [
    "Problem",
    "Solution",
    "block",
    "choose_num_servers",
    "cyclic",
    "solve",
    "solve_with_servers",
]

SLACK = 1e-10
"""Relative: times within this of the optimum count as the optimum, so that rounding in the first
objective does not decide over the second."""

MOST_ENUMERATED = 300
"""Maximum ways to put servers on vertices for which all are compared (about 30 ms)."""

ENOUGH, MOST_HALVINGS = 0.02, 8
"""How near to the best masses for links and servers together is near enough; rounds at most."""

CHEAPER_BY = 0.05
"""A smaller number of servers is chosen if the exchange takes no more than this much longer."""


def solve(problem: Problem, *, allowed_s: float = 0.0) -> Solution:
    """The best places and masses; the model may be cut anywhere. Up to ``allowed_s`` one time of
    the slowest link is as good as another: something else takes as long.

    The slowest link and the most loaded server are optimal; the sum of times exactly so up to
    MOST_ENUMERATED ways to place the servers, and by preference in larger problems. The order of
    magnitude: 0.1 s for 1,024 nodes.
    """
    tree = FlowTree.of(problem)
    bound_s = lower_bound_s(problem)
    caps = tree.caps(max(bound_s * (1 + SLACK), allowed_s))
    counts = _even_counts(tree, caps, problem)
    masses = even_masses(tree, caps, counts, problem.max_bytes)
    best = _key(tree, problem, counts, masses)
    for other in _all_counts(problem):
        held = even_masses(tree, caps, other, problem.max_bytes)
        if math.fsum(held) >= problem.model_bytes * (1 - TOLERANCE):
            key = _key(tree, problem, other, held)
            if key < best:
                counts, masses, best = other, held, key
    # Rounding may have left a last trillionth over.
    scale = problem.model_bytes / math.fsum(masses)
    masses = [held * scale for held in masses]
    servers_at = tuple(v for v, count in enumerate(counts) for _ in range(count))
    return Solution(
        servers_at=servers_at,
        server_bytes=tuple(masses[v] / counts[v] for v in servers_at),
        bytes_at=tuple(masses),
        cost_s=cost_s(problem, masses),
        bound_s=bound_s,
    )


def solve_with_servers(problem: Problem, *, apply_bytes_per_s: Sequence[float]) -> Solution:
    """Solve for the slowest of links and servers: links may take up to the time of the servers.

    ``apply_bytes_per_s[v]`` are the pushed bytes that a server at v applies in a second. Where all
    are as fast, it is within 2 % of the best masses; else never slower than ``solve``'s.
    """
    best = solve(problem)
    num_groups = math.fsum(problem.groups)

    def servers_s(solution: Solution) -> float:
        return num_groups * max(
            held / apply_bytes_per_s[v]
            for v, held in zip(solution.servers_at, solution.server_bytes, strict=True)
        )

    def exchange_s(solution: Solution) -> float:
        return max(solution.cost_s, servers_s(solution))

    # No more than all of the fastest servers together apply.
    rates = sorted(
        (apply_bytes_per_s[v] for v in problem.candidates for _ in range(problem.capacity[v])),
        reverse=True,
    )
    together = math.fsum(rates[: problem.num_servers])
    low = max(best.cost_s, num_groups * problem.model_bytes / together)
    high = servers_s(best)
    if high <= low * (1 + ENOUGH):
        return best
    allowed_s = low
    for _ in range(MOST_HALVINGS):
        found = solve(problem, allowed_s=allowed_s * (1 + SLACK))
        if exchange_s(found) < exchange_s(best):
            best = found
        if servers_s(found) <= allowed_s * (1 + SLACK):
            high = allowed_s
        else:
            low = allowed_s
        if high <= low * (1 + ENOUGH) or exchange_s(best) <= low * (1 + ENOUGH):
            break
        allowed_s = math.sqrt(low * high)
    return best


def _key(
    tree: FlowTree,
    problem: Problem,
    counts: Sequence[int],
    masses: Sequence[float],
) -> tuple[int, ...]:
    """Orders solutions within the optimal time; whole numbers, so that rounding decides nothing."""
    most = max(held / count for held, count in zip(masses, counts, strict=True) if count)
    farthest = max(tree.path_s) or 1.0
    path = math.fsum(
        held / problem.model_bytes * (each / farthest)
        for held, each in zip(masses, tree.path_s, strict=True)
    )
    crowding = sum(count * count for count in counts)
    return round(most / problem.model_bytes * 1e9), round(path * 1e9), crowding


def _even_counts(tree: FlowTree, caps: Sequence[float], problem: Problem) -> list[int]:
    """Servers at each vertex such that the most loaded one holds least.

    Whether the model fits under the caps with no server above z grows with z, and which servers
    then bring most is exact (:func:`filling.best_sources`).
    """
    rank = nearest_first(tree)

    def prefer(v: int, count: int) -> tuple[int, ...]:
        return rank[v], count, v

    def best_for(most: float) -> tuple[list[int], bool]:
        """The servers that bring most if none holds more than that; do they hold the model?"""
        sources: list[list[float]] = [[] for _ in tree.up]
        for v in problem.candidates:
            room = min(problem.max_bytes[v], caps[v] if v != tree.centre else math.inf)
            for _ in range(min(problem.capacity[v], problem.num_servers)):
                if room <= 0:
                    break
                sources[v].append(min(most, room))
                room -= most
        places, masses = best_sources(tree, caps, sources, limit=problem.num_servers, prefer=prefer)
        counts = [0] * len(tree.up)
        for v in places:
            counts[v] += 1
        return counts, math.fsum(masses) >= problem.model_bytes * (1 - TOLERANCE)

    def most_loaded(counts: Sequence[int]) -> float:
        masses = even_masses(tree, caps, counts, problem.max_bytes)
        return max(held / count for held, count in zip(masses, counts, strict=True) if count)

    low = problem.model_bytes / problem.num_servers
    best, suffices = best_for(low * (1 + SLACK))
    if not suffices:
        best, _ = best_for(problem.model_bytes)
        high = most_loaded(best)
        while high > low * (1 + SLACK):
            # Usually the servers found are the best ones already: ask that before halving.
            for most in (max(low, high * (1 - SLACK)), (low + high) / 2):
                counts, suffices = best_for(most)
                if suffices:
                    best, high = counts, min(most, most_loaded(counts))
                else:
                    low = max(low, most)
    return _with_spare_servers(tree, caps, problem, best, prefer)


def _with_spare_servers(
    tree: FlowTree,
    caps: Sequence[float],
    problem: Problem,
    counts: list[int],
    prefer: Preference,
) -> list[int]:
    """Servers that bring no more mass help those that hold most."""
    spare = problem.num_servers - sum(counts)
    if not spare:
        return counts
    masses = even_masses(tree, caps, counts, problem.max_bytes)
    counts = list(counts)

    def entry(v: int) -> tuple[float, tuple[int, ...], int]:
        return -masses[v] / max(1, counts[v]), prefer(v, counts[v]), v

    waiting = [entry(v) for v in problem.candidates if counts[v] < problem.capacity[v]]
    heapq.heapify(waiting)
    for _ in range(spare):
        v = heapq.heappop(waiting)[2]
        counts[v] += 1
        if counts[v] < problem.capacity[v]:
            heapq.heappush(waiting, entry(v))
    return counts


def _all_counts(problem: Problem) -> Iterator[list[int]]:
    """All ways to place the servers where they are few; none otherwise."""
    num_servers, candidates = problem.num_servers, problem.candidates
    dividers = len(candidates) - 1
    if math.comb(num_servers + dividers, dividers) > MOST_ENUMERATED:
        return
    for cuts in itertools.combinations(range(num_servers + dividers), dividers):
        ends = (-1, *cuts, num_servers + dividers)
        counts = [0] * len(problem.parent)
        for index, v in enumerate(candidates):
            counts[v] = ends[index + 1] - ends[index] - 1
        if all(count <= places for count, places in zip(counts, problem.capacity, strict=True)):
            yield counts


def choose_num_servers(problem: Problem, *, max_servers: int) -> int:
    """The least number of servers, at most one a vertex, whose exchange takes at most 5 % longer
    than the fastest with up to ``max_servers``. ``problem.num_servers`` has no influence.

    Raises PlacementError if ``max_servers`` is below 1, or their memory too little.
    """
    if max_servers < 1:
        raise PlacementError(f"placement: at most {max_servers!r} servers; allow 1 or more")
    most = min(max_servers, len(problem.candidates))
    problem = replace(problem, num_servers=most)
    tree = FlowTree.of(problem)
    rank = nearest_first(tree)
    _, masses = best_sources(
        tree,
        tree.caps(lower_bound_s(problem) * (1 + CHEAPER_BY)),
        vertex_sources(problem),
        limit=most,
        prefer=lambda v, count: (rank[v], count, v),
    )
    wanted = problem.model_bytes * (1 - TOLERANCE)
    reached = itertools.accumulate(masses)
    return next((num for num, held in enumerate(reached, start=1) if held >= wanted), most)


def block(problem: Problem) -> tuple[int, ...]:
    """The vertex of each server if vertices are filled up one after the other."""
    slots = (v for v in problem.candidates for _ in range(problem.capacity[v]))
    return tuple(itertools.islice(slots, problem.num_servers))


def cyclic(problem: Problem) -> tuple[int, ...]:
    """The vertex of each server if they are dealt out, one a vertex, round and round."""
    slots = sorted((turn, v) for v in problem.candidates for turn in range(problem.capacity[v]))
    return tuple(v for _, v in slots[: problem.num_servers])
