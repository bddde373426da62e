"""The placement problem as numbers: a tree of links, who pushes where, where servers may sit.

``filling`` has the tools and the bound (docs/guides/placement.md has the proofs), ``placement`` the
choice; ``divisions`` is the choice where a server costs a worker. Pure arithmetic.

    # A switch (vertex 0) with two nodes: a group on each, room for one server on each.
    problem = Problem(
        parent=(-1, 0, 0),
        bytes_per_s=(math.inf, 12e9, 12e9),
        groups=(0, 1, 1),
        capacity=(0, 1, 1),
        max_bytes=(math.inf,) * 3,
        model_bytes=4e9,
        num_servers=2,
    )

All groups exchange the whole model with the servers: each pushes its gradient and pulls the
parameters. Edge e cuts off subtree T, with M_T of the M bytes and G_T of the G groups inside. The
G - G_T groups outside push M_T bytes each into T, the G_T inside pull the M - M_T bytes outside;
the other direction carries as much (their pulls, and the others' pushes):

    L_e = M_T (G - G_T) + G_T (M - M_T)        bytes in each direction
    time = max over e of L_e / b_e
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from psdist.errors import InvariantError, PlacementError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A rooted tree; the edge of vertex v joins it to ``parent[v]``. Vertex 0 is the root.

    Raises PlacementError for a link without speed, too few places or too little memory, and
    InvariantError where the tuples are not a tree at all.
    """

    parent: tuple[int, ...]
    """``parent[0]`` is -1, ``0 <= parent[v] < v`` for all others."""
    bytes_per_s: tuple[float, ...]
    """Bandwidth of the edge of v, in each direction; may be inf; no meaning at the root."""
    groups: tuple[float, ...]
    """How many groups push and pull from v; a group of several vertices counts in fractions."""
    capacity: tuple[int, ...]
    """How many servers may sit at v; 0 for a switch."""
    max_bytes: tuple[float, ...]
    """How many bytes of the model the memory at v has room for; inf where nothing bounds them."""
    model_bytes: float
    num_servers: int

    def __post_init__(self) -> None:
        num = len(self.parent)
        columns = (self.bytes_per_s, self.groups, self.capacity, self.max_bytes)
        if num == 0 or any(len(column) != num for column in columns):
            raise InvariantError(
                f"placement: {num} vertices, but columns of {[len(column) for column in columns]}"
            )
        if self.parent[0] != -1 or not all(
            0 <= up < v for v, up in enumerate(self.parent[1:], start=1)
        ):
            raise InvariantError("placement: each vertex but the root needs a parent before it")
        for v in range(num):
            if v and not self.bytes_per_s[v] > 0:
                raise PlacementError(
                    f"placement: the link above vertex {v} has {self.bytes_per_s[v]!r} bytes/s; "
                    "give it a speed above 0"
                )
            if not (0 <= self.groups[v] < math.inf and self.max_bytes[v] >= 0):
                raise InvariantError(
                    f"placement: vertex {v} has groups {self.groups[v]!r} and max_bytes "
                    f"{self.max_bytes[v]!r}"
                )
            if self.capacity[v] < 0:
                raise InvariantError(f"placement: vertex {v} has capacity {self.capacity[v]!r}")
        if not 0 < self.model_bytes < math.inf:
            raise PlacementError(
                f"placement: the model has {self.model_bytes!r} bytes; it needs more than 0"
            )
        self._check_room()

    def _check_room(self) -> None:
        if self.num_servers < 1:
            raise PlacementError(
                f"placement: {self.num_servers!r} servers asked for; ask for 1 or more"
            )
        room = sum(self.capacity)
        if room < self.num_servers:
            raise PlacementError(
                f"placement: {self.num_servers} servers asked for, but there is room for {room} "
                f"on {len(self.candidates)} nodes; ask for fewer servers, fewer workers per node "
                "or more nodes"
            )
        largest = sorted((self.max_bytes[v] for v in self.candidates), reverse=True)
        held = math.fsum(largest[: self.num_servers])
        if held < self.model_bytes:
            raise PlacementError(
                f"placement: with servers = {self.num_servers} there is memory for "
                f"{held / 1e9:.3g} GB of the model's {self.model_bytes / 1e9:.3g} GB besides its "
                "optimizer state; use servers on more nodes, or nodes with more memory"
            )

    @property
    def candidates(self) -> tuple[int, ...]:
        """The vertices where a server may sit."""
        return tuple(v for v, places in enumerate(self.capacity) if places > 0)


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Where the servers sit and what each holds."""

    servers_at: tuple[int, ...]
    """The vertex of each server."""
    server_bytes: tuple[float, ...]
    """Bytes of the model that each server holds; their sum is the model's. A server may hold none:
    where its vertex is so slow that every byte there would delay the exchange."""
    bytes_at: tuple[float, ...]
    """Bytes held at each vertex: the sum over its servers."""
    cost_s: float
    """Time of one exchange (a push and its pull): of the worst edge."""
    bound_s: float
    """No placement is faster (docs/guides/placement.md has the proof)."""


def subtree_sums(problem: Problem, values: Sequence[float]) -> list[float]:
    """For each vertex the sum of ``values`` over its subtree, itself included. O(n)."""
    sums = [float(value) for value in values]
    for v in range(len(sums) - 1, 0, -1):
        sums[problem.parent[v]] += sums[v]
    return sums


def edge_loads(problem: Problem, bytes_at: Sequence[float]) -> list[float]:
    """Bytes that one exchange sends over the edge above each vertex, in each direction. O(n).

    ``bytes_at`` are bytes of the model held at each vertex. The root has no edge: 0.
    """
    mass, groups = subtree_sums(problem, bytes_at), subtree_sums(problem, problem.groups)
    total_bytes, num_groups = mass[0], groups[0]
    return [0.0] + [
        mass[v] * (num_groups - groups[v]) + groups[v] * (total_bytes - mass[v])
        for v in range(1, len(mass))
    ]


def edge_times_s(problem: Problem, bytes_at: Sequence[float]) -> list[float]:
    """Seconds of each edge in one exchange; 0 at the root."""
    loads = edge_loads(problem, bytes_at)
    return [0.0] + [loads[v] / problem.bytes_per_s[v] for v in range(1, len(loads))]


def cost_s(problem: Problem, bytes_at: Sequence[float]) -> float:
    """Seconds of one exchange: of the slowest edge; 0 where there is no edge."""
    return max(edge_times_s(problem, bytes_at))
