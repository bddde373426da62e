"""How much of the model fits below the tree's links in a given time, and the bound that this gives.

    caps = FlowTree.of(problem).caps(0.5)                     # bytes below each edge within 0.5 s
    lower_bound_s(problem)            # no placement of problem.num_servers servers is faster

The tree is hung up at its *centre*, the vertex below which no edge has more than half of the
groups. Every byte on the far side of an edge then adds to its load: time_e = a_e + c_e m_e with c_e
>= 0. "No edge takes longer than t" is a cap on the mass below each edge, m_e <= (t - a_e) / c_e,
and caps on nested sets can be filled greedily, so everything here is exact
(docs/guides/placement.md has the proofs): the optimum of the linear program, without loading scipy
where a job starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from psdist.topology.solver import Problem, subtree_sums

TOLERANCE = 1e-12
"""Part of the model that rounding may leave over."""
PRECISION = 1e-10
"""Relative: a search over times stops when it cannot gain more than this."""


@dataclass(frozen=True, kw_only=True)
class FlowTree:
    """The problem's tree, hung up at the centre of its groups; vertices keep their numbers."""

    order: tuple[int, ...]
    """All vertices, each after the one above it; the centre first."""
    up: tuple[int, ...]
    """The vertex above; -1 at the centre."""
    offset_s: tuple[float, ...]
    """a_e of the edge above each vertex: its time with no mass on the far side."""
    slope_s: tuple[float, ...]
    """c_e: seconds for each byte on the far side; 0 where mass does not matter."""
    path_s: tuple[float, ...]
    """Sum of c_e from each vertex to the centre: what a byte there adds to the sum of times."""
    model_bytes: float

    @classmethod
    def of(cls, problem: Problem) -> FlowTree:
        num = len(problem.parent)
        inside = subtree_sums(problem, problem.groups)
        num_groups = inside[0]
        # Vertices come after their parents, so the last heavy one is the lowest of the path.
        centre = max(v for v in range(num) if v == 0 or inside[v] > num_groups / 2)
        up = list(problem.parent)
        far = list(inside)
        speed = list(problem.bytes_per_s)
        above, v = -1, centre
        while v != -1:  # turn round the edges between the old root and the centre
            up[v] = above
            if above != -1:
                far[v], speed[v] = num_groups - inside[above], problem.bytes_per_s[above]
            above, v = v, problem.parent[v]
        children: list[list[int]] = [[] for _ in range(num)]
        for v in range(num):
            if v != centre:
                children[up[v]].append(v)
        order = [centre]
        for v in order:
            order.extend(children[v])
        offset, slope, path = [0.0] * num, [0.0] * num, [0.0] * num
        for v in order[1:]:
            offset[v] = far[v] * problem.model_bytes / speed[v]
            slope[v] = max(0.0, num_groups - 2 * far[v]) / speed[v]
            path[v] = path[up[v]] + slope[v]
        return cls(
            order=tuple(order),
            up=tuple(up),
            offset_s=tuple(offset),
            slope_s=tuple(slope),
            path_s=tuple(path),
            model_bytes=problem.model_bytes,
        )

    @property
    def centre(self) -> int:
        return self.order[0]

    def caps(self, seconds: float) -> list[float]:
        """Bytes below each edge if it is to take ``seconds`` (at least every ``offset_s``)."""
        return [
            (seconds - offset) / slope if slope > 0 else math.inf
            for offset, slope in zip(self.offset_s, self.slope_s, strict=True)
        ]


def fastest_s(tree: FlowTree, own: Sequence[float]) -> float:
    """The least time in which vertices that take ``own`` bytes take the whole model together.

    ``own`` must sum to the model or more. The mass that fits is concave and piecewise linear in
    the time, so Newton's steps from below never overshoot and end after finitely many.
    """
    seconds = max(tree.offset_s)
    wanted = tree.model_bytes * (1 - TOLERANCE)
    while True:
        flow, growth = list(own), [0.0] * len(tree.up)
        for v in reversed(tree.order[1:]):
            held, faster, slope = flow[v], growth[v], tree.slope_s[v]
            if slope > 0:
                cap = (seconds - tree.offset_s[v]) / slope
                if cap < held:
                    held, faster = cap, 1 / slope
                elif cap == held:
                    faster = min(faster, 1 / slope)
            flow[tree.up[v]] += held
            growth[tree.up[v]] += faster
        missing = tree.model_bytes - flow[tree.centre]
        if flow[tree.centre] >= wanted or growth[tree.centre] <= 0:
            return seconds
        later = seconds + missing / growth[tree.centre]
        if later <= seconds:  # the rest is below what a float can add
            return seconds
        seconds = later


Preference = Callable[[int, int], tuple[int, ...]]
"""Orders (vertex, how many servers it has already) where sources bring the same; lower first."""


def best_sources(
    tree: FlowTree,
    caps: Sequence[float],
    sources: Sequence[Sequence[float]],
    *,
    limit: int,
    prefer: Preference,
) -> tuple[list[int], list[float]]:
    """The ``limit`` sources (or fewer) that together bring most mass under the caps.

    ``sources[v]`` are what each server at v may bring, in falling order. Returns their vertices,
    best first, and what each brings; the first k are the best k. Below every edge, the gain of one
    more source falls, so merging the subtrees' lists by gain is exact.
    """
    grain = tree.model_bytes * TOLERANCE
    lists: list[list[tuple[int, tuple[int, ...], int, float]]] = [[] for _ in tree.up]
    for v, brought in enumerate(sources):
        for count, num_bytes in enumerate(brought):
            # Whole grains, so that rounding does not hide that two sources bring the same.
            lists[v].append((-round(num_bytes / grain), prefer(v, count), v, num_bytes))
    for v in reversed(tree.order):
        items = lists[v]
        items.sort()
        del items[limit:]
        if v == tree.centre:
            break
        room = caps[v]
        above = lists[tree.up[v]]
        for item in items:
            if item[3] < room:
                above.append(item)
                room -= item[3]
            else:
                if room > grain:
                    above.append((-round(room / grain), item[1], item[2], room))
                break
        items.clear()
    chosen = [item for item in lists[tree.centre] if item[0] < 0]
    return [item[2] for item in chosen], [item[3] for item in chosen]


def even_masses(
    tree: FlowTree, caps: Sequence[float], counts: Sequence[int], max_bytes: Sequence[float]
) -> list[float]:
    """Bytes at each vertex, spread over ``counts`` servers as evenly as the caps allow.

    All servers fill up at one rate; those below an edge stop when its cap is reached. No other way
    to hold the model has a smaller maximum, then a smaller second one, and so on. If only part of
    the model fits, that part.
    """
    # Per vertex (level at which servers stop, how many stop there), by level.
    lists: list[list[tuple[float, int]]] = [[] for _ in tree.up]
    stop = [math.inf] * len(tree.up)
    for v in reversed(tree.order):
        items = lists[v]
        if counts[v]:
            items.append((max_bytes[v] / counts[v], counts[v]))
        items.sort()
        is_centre = v == tree.centre
        cap = tree.model_bytes if is_centre else caps[v]
        num, used = sum(count for _, count in items), 0.0
        for index, (level, count) in enumerate(items):
            if used + level * num >= cap:
                stop[v] = max(0.0, (cap - used) / num)
                items[index:] = [(stop[v], num)]
                break
            used += level * count
            num -= count
        if not is_centre:
            lists[tree.up[v]].extend(items)
            items.clear()
    held = [0.0] * len(tree.up)
    for v in tree.order:
        if v != tree.centre:
            stop[v] = min(stop[v], stop[tree.up[v]])
        if counts[v]:
            held[v] = min(max_bytes[v], stop[v] * counts[v])
    return held


def own_bytes(problem: Problem, vertices: Sequence[int]) -> list[float]:
    """Bytes each vertex can take: up to the whole model at ``vertices``, 0 elsewhere."""
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


def lower_bound_s(problem: Problem) -> float:
    """Lower bound on the seconds of one exchange, exact to 1e-10, with at most ``num_servers``
    places. :func:`placement.solve` reaches it, so it is the optimum."""
    tree = FlowTree.of(problem)
    divisible_s = fastest_s(tree, own_bytes(problem, problem.candidates))
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
    # Which mass fits grows with the time. Each round the places that are best for the time found so
    # far; in tens of thousands of problems at most 6 rounds, where halving an interval took 8.
    found = best_within([math.inf] * len(tree.up))
    while found is not None:
        seconds = found
        found = best_within(tree.caps(max(divisible_s, seconds * (1 - PRECISION))))
    return seconds
