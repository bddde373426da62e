"""What a placement costs: the load of every edge and the time of the slowest one.

Owns the formula. Chooses nothing: :mod:`psdist.topology.solver.placement` does.

All groups exchange the whole model with the servers: each pushes its gradient and pulls the
parameters. Edge e cuts off subtree T, with M_T of the M bytes and G_T of the G groups inside. The
G - G_T groups outside push M_T bytes each into T, the G_T inside pull the M - M_T bytes outside;
the other direction carries as much (their pulls, and the others' pushes):

    L_e = M_T (G - G_T) + G_T (M - M_T)        bytes in each direction
    time = max over e of L_e / b_e

    cost_s(problem, bytes_at)
"""

from __future__ import annotations

from collections.abc import Sequence

from psdist.topology.solver.problem import Problem


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


def worst_edge(problem: Problem, bytes_at: Sequence[float]) -> int:
    """The vertex whose edge is slowest, the lowest number on a tie; -1 where all are idle."""
    times = edge_times_s(problem, bytes_at)
    worst = max(times)
    return times.index(worst) if worst > 0 else -1
