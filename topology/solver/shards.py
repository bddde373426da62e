"""Where to put shards of given sizes that are not to be cut, one server for each.

Owns :func:`place_shards`: largest first, then moves and swaps that relieve the slowest link; all
assignments where they are few, and the optimum where all shards are equal. Shards that may be cut
are :func:`psdist.topology.solver.placement.solve`'s, which is exact and cheaper.

    solution = place_shards(problem, [3e9, 1e9, 1e9])
    solution.servers_at[0]          # the vertex of the 3 GB
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from psdist.errors import PlacementError
from psdist.topology.solver.bound import (
    for_shards,
    least_s_for_all,
    lower_bound_s,
    nearest_first,
    shards_within,
)
from psdist.topology.solver.filling import FlowTree, best_sources
from psdist.topology.solver.objective import bytes_per_vertex, cost_s, sum_s, worst_edge
from psdist.topology.solver.problem import Problem, Solution

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MOST_ENUMERATED = 5000
"""Assignments up to which all are tried: 6 shards on 4 vertices are 4,096 (10 ms) ..."""
MOST_DEEP = 12
"""... of so many shards: each is one more call on the stack, also on a single vertex."""

GAIN = 1e-12
"""Relative: a step that relieves a link by less is rounding."""


def place_shards(problem: Problem, shard_bytes: Sequence[float]) -> Solution:
    """Places for shards that are not cut: server i holds ``shard_bytes[i]``.

    The model's bytes and the number of servers follow from the shards. Optimal for equal shards
    and up to MOST_ENUMERATED assignments, near the bound otherwise. Raises PlacementError where no
    room is found.
    """
    problem = for_shards(problem, shard_bytes)
    bound_s = lower_bound_s(problem, shard_bytes).seconds
    tree = FlowTree.of(problem)
    num = len(shard_bytes)
    if num <= MOST_DEEP and len(problem.candidates) ** num <= MOST_ENUMERATED:
        places = _best_of_all(tree, problem, shard_bytes)
    elif max(shard_bytes) == min(shard_bytes):
        places = _equal(tree, problem, shard_bytes[0])
    else:
        places = _Search(tree, problem, shard_bytes).run(bound_s)
    if places is None:
        raise PlacementError(
            f"placement: no room found for {num} shards of up to "
            f"{max(shard_bytes):.0f} bytes in the memory of {len(problem.candidates)} places; "
            "cut them smaller, or add nodes or memory"
        )
    held = bytes_per_vertex(problem, places, shard_bytes)
    return Solution(
        servers_at=tuple(places),
        server_bytes=tuple(shard_bytes),
        bytes_at=tuple(held),
        cost_s=cost_s(problem, held),
        bound_s=bound_s,
        worst_edge=worst_edge(problem, held),
    )


def _equal(tree: FlowTree, problem: Problem, size: float) -> list[int]:
    """Equal shards are whole units, and caps in whole units are filled exactly."""
    num, rank = problem.num_servers, nearest_first(tree)
    sums = [size * (i + 1) for i in range(num)]
    seconds = least_s_for_all(tree, problem, sums, 0.0)
    sources = [
        [size] * min(places, int(shards_within(sums, room)))
        for places, room in zip(problem.capacity, problem.max_bytes, strict=True)
    ]
    found, _ = best_sources(
        tree,
        [shards_within(sums, cap) * size for cap in tree.caps(seconds)],
        sources,
        limit=num,
        prefer=lambda v, count: (rank[v], count, v),
    )
    return sorted(found)


def _best_of_all(
    tree: FlowTree, problem: Problem, shard_bytes: Sequence[float]
) -> list[int] | None:
    """Depth first, largest shard first. A partial placement is never faster when completed, since
    in the tree hung up at its centre every byte only adds."""
    order = sorted(range(len(shard_bytes)), key=lambda i: -shard_bytes[i])
    paths = {v: _path(tree, v) for v in problem.candidates}
    below, held, count = ([0.0] * len(tree.up) for _ in range(3))
    chosen: list[int] = []
    best: list[int] | None = None
    best_key = (math.inf, math.inf)

    def place(worst: float) -> None:
        nonlocal best, best_key
        if len(chosen) == len(order):
            key = worst, sum_s(problem, held)
            if (
                best is None
                or key < (best_key[0] * (1 - GAIN), 0)
                or (key[0] <= best_key[0] * (1 + GAIN) and key[1] < best_key[1] * (1 - GAIN))
            ):
                best, best_key = list(chosen), key
            return
        size = shard_bytes[order[len(chosen)]]
        for v, path in paths.items():
            if count[v] >= problem.capacity[v]:
                continue
            if held[v] + size > problem.max_bytes[v] * (1 + GAIN):
                continue
            slowest = worst
            for edge in path:
                below[edge] += size
                slowest = max(slowest, tree.offset_s[edge] + tree.slope_s[edge] * below[edge])
            if slowest <= best_key[0] * (1 + GAIN):
                chosen.append(v)
                held[v] += size
                count[v] += 1
                place(slowest)
                chosen.pop()
                held[v] -= size
                count[v] -= 1
            for edge in path:
                below[edge] -= size

    place(max(tree.offset_s))
    if best is None:
        return None
    places = [-1] * len(order)
    for shard, v in zip(order, best, strict=True):
        places[shard] = v
    return places


def _path(tree: FlowTree, v: int) -> list[int]:
    edges = []
    while v != tree.centre:
        edges.append(v)
        v = tree.up[v]
    return edges


class _Search:
    """Greedy, then moves and swaps. Arrays are in the tree's order, levels are slices of them."""

    def __init__(self, tree: FlowTree, problem: Problem, shard_bytes: Sequence[float]) -> None:
        import numpy as np

        self.np = np
        self.tree, self.problem = tree, problem
        self.sizes = np.array(shard_bytes, dtype=float)
        order = np.array(tree.order)
        self.order = order
        position = np.empty(len(order), dtype=np.int64)
        position[order] = np.arange(len(order))
        self.position = position
        self.up = position[np.array(tree.up)[order]]
        self.up[0] = 0
        depth = np.zeros(len(order), dtype=np.int64)
        for i, above in enumerate(self.up.tolist()[1:], start=1):
            depth[i] = depth[above] + 1
        starts = np.searchsorted(depth, np.arange(1, depth[-1] + 2))
        self.levels = [slice(*each) for each in itertools.pairwise(starts.tolist())]
        self.slope: Floats = np.array(tree.slope_s)[order]
        self.room: Floats = np.array(problem.max_bytes, dtype=float)[order] * (1 + GAIN)
        self.free = np.array(problem.capacity)[order]
        self.time: Floats = np.array(tree.offset_s)[order]
        self.place = np.full(len(self.sizes), -1, dtype=np.int64)
        # Among equally good vertices the one that loads the network least.
        self.near = np.argsort(np.array(nearest_first(tree))[order], kind="stable")

    def run(self, bound_s: float) -> list[int] | None:
        if not self.greedy():
            return None
        self.relieve(bound_s)
        return [int(self.order[i]) for i in self.place]

    def greedy(self) -> bool:
        """Largest first, each where the worst link on its way is fastest."""
        np = self.np
        for shard in np.argsort(-self.sizes, kind="stable").tolist():
            size = self.sizes[shard]
            worst = self.time + self.slope * size
            for level in self.levels:
                np.maximum(worst[level], worst[self.up[level]], out=worst[level])
            worst[(self.free <= 0) | (self.room < size)] = np.inf
            v = int(self.near[np.argmin(worst[self.near])])
            if worst[v] == np.inf:
                return False
            self._put(shard, v)
        return True

    def _put(self, shard: int, v: int) -> None:
        before, size = int(self.place[shard]), float(self.sizes[shard])
        for vertex, sign in ((before, -1.0), (v, 1.0)):
            if vertex >= 0:
                self.free[vertex] -= int(sign)
                self.room[vertex] -= sign * size
                while vertex:
                    self.time[vertex] += sign * size * self.slope[vertex]
                    vertex = int(self.up[vertex])
        self.place[shard] = v

    def relieve(self, bound_s: float) -> None:
        """Take bytes from below the slowest link while no other link becomes as slow by it.

        Each step lowers the times in order of size, so it ends; the number of looks is bounded.
        """
        np = self.np
        looks = 4 * len(self.sizes) + 1000
        while looks > 0:
            edge = int(np.argmax(self.time))
            slowest = float(self.time[edge])
            if self.slope[edge] <= 0 or slowest <= bound_s * (1 + GAIN):
                return
            below = np.zeros(len(self.up), dtype=bool)
            below[edge] = True
            for level in self.levels:
                below[level] |= below[self.up[level]]
            inside = np.flatnonzero(below[self.place] & (self.sizes > 0))
            outside = np.flatnonzero(~below[self.place])
            seen: set[tuple[int, float]] = set()
            for shard in inside.tolist():
                kind = int(self.place[shard]), float(self.sizes[shard])
                if kind in seen:
                    continue
                seen.add(kind)
                looks -= 1
                if self._relieved(shard, outside, below, slowest):
                    break
            else:
                return

    def _relieved(
        self, shard: int, outside: NDArray[np.int64], below: NDArray[np.bool_], slowest: float
    ) -> bool:
        """Moved this shard away, or changed places with a smaller one."""
        np = self.np
        size, here = float(self.sizes[shard]), int(self.place[shard])
        # How many bytes may go from here to each vertex; links of the common way carry the same.
        spare = np.full(len(self.up), np.inf)
        rises = self.slope > 0
        spare[rises] = (slowest * (1 - GAIN) - self.time[rises]) / self.slope[rises]
        vertex = here
        while vertex:
            spare[vertex] = np.inf
            vertex = int(self.up[vertex])
        spare[0] = np.inf
        for level in self.levels:
            np.minimum(spare[level], spare[self.up[level]], out=spare[level])
        fits = (self.free > 0) & (self.room >= size) & (spare > size) & ~below
        if fits.any():
            self._put(shard, int(np.argmax(np.where(fits, spare, -np.inf))))
            return True
        there = self.place[outside]
        more = size - self.sizes[outside]
        useful = (more > size * GAIN) & (more < spare[there]) & (more <= self.room[there])
        if not useful.any():
            return False
        other = int(outside[np.argmax(np.where(useful, more, -np.inf))])
        target = int(self.place[other])
        self._put(shard, target)
        self._put(other, here)
        return True
