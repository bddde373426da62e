"""The placement problem by solvers and enumeration: the second opinion on the fast way.

Owns nothing that a job needs: tests and benchmarks compare :mod:`psdist.topology.solver.placement`
with this. It shares no code with it but the types: the tree stays hung up at its root, and the
linear programs go to scipy (HiGHS). Beside them the plain placements that only tests compare with.

    solve_exact(problem).cost_s      # up to 4 nodes and 6 servers
    linear_bound_s(problem)          # any number of nodes
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

from psdist.errors import InvariantError
from psdist.topology.solver import Problem, Solution, cost_s, edge_times_s

MOST_CANDIDATES = 4
MOST_SERVERS = 6


def linear_bound_s(problem: Problem) -> float:
    """The optimum of the linear program: any mass at any vertex that may have servers, seconds."""
    return _least(problem, problem.candidates)[0]


def solve_exact(problem: Problem) -> Solution:
    """The least time and then the least maximum of a server's bytes.

    Up to 4 candidates and 6 servers (InvariantError beyond).
    """
    if len(problem.candidates) > MOST_CANDIDATES or problem.num_servers > MOST_SERVERS:
        raise InvariantError(
            f"exact: {len(problem.candidates)} candidates and {problem.num_servers} servers; "
            f"at most {MOST_CANDIDATES} and {MOST_SERVERS}"
        )
    best_s = least_time_s(problem)
    ways = {
        tuple(sorted(way))
        for way in itertools.combinations_with_replacement(problem.candidates, problem.num_servers)
        if all(way.count(v) <= problem.capacity[v] for v in way)
    }
    found: tuple[float, tuple[int, ...], list[float]] | None = None
    for way in sorted(ways):
        counts = {v: way.count(v) for v in way}
        most, held = _least(problem, tuple(counts), counts=counts, within_s=best_s)
        if found is None or most < found[0] * (1 - 1e-9):
            found = most, way, held
    if found is None or found[0] == math.inf:
        raise InvariantError(f"exact: no way to hold {problem.model_bytes!r} bytes was found")
    _, way, held = found
    return Solution(
        servers_at=way,
        server_bytes=tuple(held[v] / way.count(v) for v in way),
        bytes_at=tuple(held),
        cost_s=cost_s(problem, held),
        bound_s=best_s,
    )


def least_time_s(problem: Problem) -> float:
    """The least time over all sets of ``num_servers`` places, each set a linear program."""
    num = min(problem.num_servers, len(problem.candidates))
    return min(
        _least(problem, places)[0] for places in itertools.combinations(problem.candidates, num)
    )


def most_that_fits(problem: Problem, *, within_s: float, server_bytes: float) -> float:
    """How many bytes all servers can hold together if none holds more than ``server_bytes`` and no
    edge takes longer than ``within_s``: an integer program, for tens of nodes."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    places, total = problem.candidates, problem.model_bytes
    num = len(places)
    fixed, per_byte = _edges(problem)
    # Masses as shares of the model, then the number of servers; masses anywhere are below 1.
    most = [min(1.0, problem.max_bytes[v] / total) for v in places]
    upper = np.array(most + [float(problem.capacity[v]) for v in places])
    paths = [_path(problem, v) for v in places]
    lines, right = [np.append(np.zeros(num), np.ones(num))], [float(problem.num_servers)]
    for column in range(num):
        line = np.zeros(2 * num)
        line[column], line[num + column] = 1.0, -server_bytes / total
        lines.append(line)
        right.append(0.0)
    for edge in range(1, len(problem.parent)):
        line = np.zeros(2 * num)
        # An edge with more than half of the groups below it takes mass below: all of the model is
        # held somewhere, so its load is written from the other side.
        is_heavy = per_byte[edge] < 0
        for column in range(num):
            line[column] = abs(per_byte[edge]) * ((edge in paths[column]) != is_heavy)
        unit_s = max(within_s, 1e-300)
        lines.append(line * total / unit_s)
        idle_s = fixed[edge] + min(0.0, per_byte[edge]) * total
        right.append((within_s - idle_s) / unit_s)
    done = milp(
        -np.append(np.ones(num), np.zeros(num)),
        constraints=LinearConstraint(np.array(lines), -np.inf, np.array(right)),
        integrality=np.append(np.zeros(num), np.ones(num)),
        bounds=Bounds(np.zeros(2 * num), upper),
        options={"mip_rel_gap": 0.0},
    )
    return math.nan if done.x is None else float(np.sum(done.x[:num])) * total


def _least(
    problem: Problem,
    places: Sequence[int],
    *,
    counts: dict[int, int] | None = None,
    within_s: float = math.inf,
) -> tuple[float, list[float]]:
    """Least time of masses at ``places``; with ``counts`` instead the least maximum of a server's
    bytes within ``within_s``. With the bytes at each vertex; (inf, []) if there are none."""
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    fixed, per_byte = _edges(problem)
    total = problem.model_bytes
    unit_s = _unit_s(problem, fixed)
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    right: list[float] = []
    last = len(places)  # the last variable: the time (in units), or a server's share of the model
    row = 0
    above: dict[int, list[int]] = {}
    for column, v in enumerate(places):
        while v > 0:
            above.setdefault(v, []).append(column)
            v = problem.parent[v]
    for edge in range(1, len(problem.parent)):
        for column in above.get(edge, ()):
            rows.append(row)
            columns.append(column)
            values.append(per_byte[edge] * total / unit_s)
        if counts is None:
            rows.append(row)
            columns.append(last)
            values.append(-1.0)
            right.append(-fixed[edge] / unit_s)
        else:
            right.append((within_s * (1 + 1e-10) - fixed[edge]) / unit_s)
        row += 1
    for column, v in enumerate(places if counts else ()):
        rows += [row, row]
        columns += [column, last]
        values += [1.0, -float(counts[v] if counts else 0)]
        right.append(0.0)
        row += 1
    bounds = [(0.0, min(1.0, problem.max_bytes[v] / total)) for v in places] + [(0.0, None)]
    objective = np.zeros(last + 1)
    objective[last] = 1.0
    balance = np.ones((1, last + 1))
    balance[0, last] = 0.0
    done = linprog(
        objective,
        A_ub=csr_array((values, (rows, columns)), shape=(row, last + 1)) if row else None,
        b_ub=right if row else None,
        A_eq=balance,
        b_eq=[1.0],
        bounds=bounds,
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if not done.success:
        return math.inf, []
    held = [0.0] * len(problem.parent)
    for v, share in zip(places, done.x, strict=False):
        held[v] = float(share) * total
    return float(done.x[last]) * (unit_s if counts is None else total), held


def _edges(problem: Problem) -> tuple[list[float], list[float]]:
    """Time of each edge with no mass below it, and what each byte below it adds (or takes away).

    L = M_T (G - G_T) + G_T (M - M_T) = G_T M + (G - 2 G_T) M_T, read off edge by edge.
    """
    nothing_below = edge_times_s(problem, [problem.model_bytes] + [0.0] * (len(problem.parent) - 1))
    inside = [float(each) for each in problem.groups]
    for v in range(len(inside) - 1, 0, -1):
        inside[problem.parent[v]] += inside[v]
    per_byte = [0.0] + [
        (inside[0] - 2 * inside[v]) / problem.bytes_per_s[v] for v in range(1, len(inside))
    ]
    return nothing_below, per_byte


def _unit_s(problem: Problem, nothing_below: Sequence[float]) -> float:
    """A time of the optimum's order of magnitude: solvers' tolerances are absolute."""
    slowest = min(problem.bytes_per_s[1:], default=math.inf)
    return max(nothing_below) or problem.model_bytes / slowest or 1.0


def _path(problem: Problem, v: int) -> set[int]:
    edges = set()
    while v > 0:
        edges.add(v)
        v = problem.parent[v]
    return edges


def random_placement(problem: Problem, seed: int) -> tuple[int, ...]:
    """The vertex of each server, drawn from all free places alike."""
    slots = [v for v in problem.candidates for _ in range(problem.capacity[v])]
    return tuple(random.Random(seed).sample(slots, problem.num_servers))


def bytes_per_vertex(
    problem: Problem, servers_at: Sequence[int], server_bytes: Sequence[float]
) -> list[float]:
    """Bytes at each vertex when server i sits at ``servers_at[i]`` and holds that many."""
    held = [0.0] * len(problem.parent)
    for vertex, num_bytes in zip(servers_at, server_bytes, strict=True):
        held[vertex] += num_bytes
    return held


def equal_shards_cost_s(problem: Problem, servers_at: Sequence[int]) -> float:
    """Seconds of one exchange when every one of these servers holds the same share."""
    share = problem.model_bytes / len(servers_at)
    return cost_s(problem, bytes_per_vertex(problem, servers_at, [share] * len(servers_at)))
