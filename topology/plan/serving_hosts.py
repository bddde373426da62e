"""Which hosts serve, and what part of the model each of them holds. Pure.

    servers_at, shares = choose(cluster, capacity, groups_beside, request)
    servers_at, shares = choose_among_ranks(cluster, sizes, groups_beside, request)

A cluster becomes the tree problem of :mod:`psdist.topology.solver.placement` here, and its solution
counts per node. Groups are counted by the caller, who knows the seats.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from psdist.errors import PlacementError
from psdist.topology.network.cluster import Cluster
from psdist.topology.plan.plan import LinkLoad
from psdist.topology.solver import placement
from psdist.topology.solver.objective import edge_loads
from psdist.topology.solver.problem import Problem

Grouping: TypeAlias = Literal["node", "socket", "numa", "rank"]
Strategy: TypeAlias = Literal["auto", "block", "cyclic"]
GroupsBeside: TypeAlias = Callable[[Sequence[int]], list[float]]
"""Servers on each node -> groups on each node, made by the workers that are left there."""

UNKNOWN_MODEL_BYTES = 1e9
"""What a plan is made for where nobody knows the model yet."""
ALMOST_ALL = 0.9
"""Where more than this part of the servers that there could be is needed, all are taken."""
MOST_JUDGED = 200
"""Ways to choose among running ranks up to which all are judged (some 0.1 s)."""
MEMORY_SHARE = 0.8
"""Of a host's ordinary memory that shards may fill."""
APPLY_BYTES_PER_S = 4e9
"""Pushed bytes that a server applies in a second where nobody measured it: torch's fused Adam on
one core (docs/performance.md)."""
STATE_PER_BYTE = 2.0
"""Optimizer state for each byte of parameters: two moments, as Adam has. A guess where the
optimizer is not known yet, on the safe side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    servers: int | Literal["auto"] = "auto"
    group: Grouping = "node"
    placement: Strategy = "auto"
    model_bytes: float | None = None
    """Of the model's parameters on the wire; None: not known yet. Times and bytes of a plan are
    proportional to it; the placement depends on it only where memory is short."""
    may_bind: bool = True

    @property
    def planned_bytes(self) -> float:
        """What times and bytes of the plan are for."""
        return UNKNOWN_MODEL_BYTES if self.model_bytes is None else self.model_bytes


def choose(
    cluster: Cluster, capacity: Sequence[int], groups_beside: GroupsBeside, request: PlanRequest
) -> tuple[list[int], list[float]]:
    """Servers on each node, and the part of the model there, when the workers stay.

    ``capacity`` is how many servers a node has room for. Beside servers some workers may sit
    elsewhere and make other groups: each candidate is judged with its own. Raises PlacementError
    where cores or memory do not suffice.
    """
    wanted = request.servers
    groups = groups_beside([0] * len(capacity))
    once = [min(each, 1) for each in capacity]
    if wanted == "auto":
        if not any(once):
            raise PlacementError(
                "no node has a core left for a server; ask for fewer workers per node, or name "
                "server nodes"
            )
        wanted = _enough(problem_of(cluster, once, groups, request, sum(once)), sum(once))
    if request.placement != "auto":
        servers_at, shares = place_plainly(cluster, capacity, request.placement, wanted)
        if full := beyond_memory(cluster, shares, request):
            raise PlacementError(
                f"placement {request.placement}: {cluster.nodes[full[0]].name} would hold "
                f"{100 * shares[full[0]]:.3g} % of the model, more than its memory has room for; "
                "use --placement auto, more nodes, or nodes with more memory"
            )
        return servers_at, shares
    asked = replace(request, servers=wanted)
    room = _room(capacity, wanted)
    solved = _solved(cluster, room, groups, asked, wanted)
    # Among equals the one that is spread over the racks: a rack that fails takes fewer with it.
    candidates = [_spread_over_racks(cluster, room, wanted), solved]
    plain = [
        place_plainly(cluster, capacity, "block", wanted)[0],
        place_plainly(cluster, capacity, "cyclic", wanted)[0],
    ]
    if any(groups_beside(each) != groups for each in (*candidates, *plain)):
        again = _solved(cluster, room, groups_beside(solved), asked, wanted)
        candidates += [again, *plain]
    judged = [
        judgement
        for candidate in candidates
        if (judgement := _judge(cluster, candidate, groups_beside(candidate), asked)) is not None
    ]
    _, servers_at, shares = min(judged, key=lambda each: each[0])
    return servers_at, shares


def choose_among_ranks(
    cluster: Cluster, sizes: Sequence[int], groups_beside: GroupsBeside, request: PlanRequest
) -> tuple[list[int], list[float]]:
    """The same where ``sizes[node]`` ranks run already, and each that serves is no worker.

    So the groups depend on the answer. Candidates are made with a guess of the groups; then each
    is judged with the groups that it really leaves, and the best shares for those. Small clusters
    are searched exhaustively, so the result is optimal. Among equals in time the one with the most
    groups is taken, then the most even one.
    """
    num_nodes = sum(size > 0 for size in sizes)
    wanted = _num_servers(cluster, sizes, groups_beside, request)
    if request.placement != "auto":
        return place_plainly(cluster, sizes, request.placement, wanted)
    if num_nodes == 1:
        return [wanted * (size > 0) for size in sizes], [float(size > 0) for size in sizes]
    beside_workers = [max(size - 1, 0) for size in sizes]
    capacity = beside_workers if sum(beside_workers) >= wanted else list(sizes)
    asked = replace(request, servers=wanted)
    guess = _spread_over_racks(cluster, capacity, wanted)
    candidates = {
        tuple(place_plainly(cluster, sizes, "block", wanted)[0]): None,
        tuple(place_plainly(cluster, sizes, "cyclic", wanted)[0]): None,
        tuple(guess): None,
    }
    for _ in range(2):
        guess = _solved(cluster, _room(capacity, wanted), groups_beside(guess), asked, wanted)
        candidates[tuple(guess)] = None
    if (ways := _all_ways(sizes, wanted)) is not None:
        candidates.update(dict.fromkeys(ways))
    judged = [
        judgement
        for candidate in candidates
        if any(groups := groups_beside(candidate))
        and (judgement := _judge(cluster, candidate, groups, asked)) is not None
    ]
    if not judged:
        raise PlacementError(
            f"servers = {wanted} leave no worker on any of the {num_nodes} hosts; ask for fewer"
        )
    _, servers_at, shares = min(judged, key=lambda each: each[0])
    return servers_at, shares


def place_plainly(
    cluster: Cluster, capacity: Sequence[int], strategy: Strategy, num_servers: int
) -> tuple[list[int], list[float]]:
    """Block or cyclic, with equal shards: what the mapper is compared with."""
    request = PlanRequest()
    problem = problem_of(cluster, capacity, [0.0] * len(capacity), request, num_servers)
    place = placement.block if strategy == "block" else placement.cyclic
    servers_at = _by_node(cluster, problem, place(problem))
    return servers_at, [count / num_servers for count in servers_at]


def beyond_memory(cluster: Cluster, shares: Sequence[float], request: PlanRequest) -> list[int]:
    """The nodes whose part of the model does not go into their memory; none if its size is open."""
    room = _model_room(cluster, request)
    return [
        node
        for node, share in enumerate(shares)
        if share * request.planned_bytes > room[node] * (1 + 1e-9)
    ]


def link_loads(
    cluster: Cluster, groups: Sequence[float], shares: Sequence[float], request: PlanRequest
) -> tuple[LinkLoad, ...]:
    """What one exchange sends over every link; no links where all sit on one host."""
    if len(cluster.nodes) == 1:
        return ()
    num_nodes = len(cluster.nodes)
    problem = problem_of(cluster, [1] * num_nodes, groups, PlanRequest(), num_nodes)
    order = _switches_from_the_root(cluster)
    held = [0.0] * len(order) + [share * request.planned_bytes for share in shares]
    loads = edge_loads(problem, held)
    loaded = [
        LinkLoad(
            name=cluster.switches[switch].name,
            kind="switch",
            num_bytes=loads[vertex],
            bytes_per_s=problem.bytes_per_s[vertex],
        )
        for vertex, switch in enumerate(order)
        if vertex
    ]
    loaded += [
        LinkLoad(
            name=node.name,
            kind="node",
            num_bytes=loads[len(order) + index],
            bytes_per_s=node.bytes_per_s,
        )
        for index, node in enumerate(cluster.nodes)
    ]
    return tuple(loaded)


def problem_of(
    cluster: Cluster,
    capacity: Sequence[int],
    groups: Sequence[float],
    request: PlanRequest,
    num_servers: int,
) -> Problem:
    """The tree problem: switches from the root down, then the nodes in their order."""
    order = _switches_from_the_root(cluster)
    vertex = {switch: index for index, switch in enumerate(order)}
    none = [0] * len(order)
    return Problem(
        parent=(
            -1,
            *(vertex[cluster.switches[switch].parent] for switch in order[1:]),
            *(vertex[node.switch] for node in cluster.nodes),
        ),
        bytes_per_s=(
            math.inf,
            *(cluster.switches[switch].bytes_per_s for switch in order[1:]),
            *(node.bytes_per_s for node in cluster.nodes),
        ),
        groups=(*none, *groups),
        capacity=(*none, *capacity),
        max_bytes=(*none, *_model_room(cluster, request)),
        model_bytes=request.planned_bytes,
        num_servers=num_servers,
    )


def _model_room(cluster: Cluster, request: PlanRequest) -> list[float]:
    """Bytes of parameters that go into each node's memory; infinite where that is not known."""
    if request.model_bytes is None:
        return [math.inf] * len(cluster.nodes)
    share = MEMORY_SHARE / (1 + STATE_PER_BYTE)
    return [node.machine.memory_bytes * share or math.inf for node in cluster.nodes]


def _num_servers(
    cluster: Cluster, sizes: Sequence[int], groups_beside: GroupsBeside, request: PlanRequest
) -> int:
    num_ranks, num_nodes = sum(sizes), sum(size > 0 for size in sizes)
    if request.servers != "auto":
        if request.servers >= num_ranks:
            raise PlacementError(
                f"servers = {request.servers} with {num_ranks} ranks: at least one rank must be a "
                f"worker, so at most {num_ranks - 1} can be servers; start more ranks or ask for "
                "fewer servers"
            )
        return request.servers
    most = min(num_nodes, max(1, num_ranks // 2))
    if num_nodes == 1 or any(size == 1 for size in sizes):
        return most
    once = [min(size, 1) for size in sizes]
    return _enough(problem_of(cluster, once, groups_beside(once), request, sum(once)), most)


def apply_s(groups: Sequence[float], shares: Iterable[float], request: PlanRequest) -> float:
    """Seconds in which the busiest of servers with these shares applies what it is sent."""
    return sum(groups) * max(shares) * request.planned_bytes / APPLY_BYTES_PER_S


def _enough(problem: Problem, most: int) -> int:
    """The fewest servers, up to ``most``, that keep up with the best of links and of servers."""
    links = placement.choose_num_servers(problem, max_servers=most)
    best_s = placement.solve(replace(problem, num_servers=most)).cost_s
    applied_s = sum(problem.groups) * problem.model_bytes / APPLY_BYTES_PER_S  # by one server
    allowed_s = max(best_s, applied_s / most) * (1 + placement.CHEAPER_BY)
    enough = max(links, math.ceil(applied_s / allowed_s))
    return most if enough > ALMOST_ALL * most else enough


def _all_ways(sizes: Sequence[int], num_servers: int) -> list[tuple[int, ...]] | None:
    """Every number of servers on each node, or None where there are more than MOST_JUDGED ways."""
    ways: list[tuple[int, ...]] = [()]
    left = sum(sizes)
    for size in sizes:
        left -= size
        # What is placed so far can still be completed by the nodes that come.
        ways = [
            (*way, count)
            for way in ways
            for count in range(size + 1)
            if 0 <= num_servers - sum(way) - count <= left
        ]
        if len(ways) > MOST_JUDGED:
            return None
    return ways


def _room(capacity: Sequence[int], num_servers: int) -> list[int]:
    """One server a node: a second one moves no byte off a link. More where nodes do not suffice."""
    once = [min(each, 1) for each in capacity]
    return once if sum(once) >= num_servers else list(capacity)


def _solved(
    cluster: Cluster,
    room: Sequence[int],
    groups: Sequence[float],
    request: PlanRequest,
    num_servers: int,
) -> list[int]:
    problem = problem_of(cluster, room, groups, request, num_servers)
    return _by_node(cluster, problem, placement.solve(problem).servers_at)


def _judge(
    cluster: Cluster, servers_at: Sequence[int], groups: Sequence[float], request: PlanRequest
) -> tuple[tuple[float, ...], list[int], list[float]] | None:
    """(what it costs, in the order of what counts; the servers; their best shares).

    None where these hosts have not enough memory.
    """
    try:
        problem = problem_of(cluster, servers_at, groups, request, sum(servers_at))
    except PlacementError:
        return None
    solution = placement.solve(problem)
    total_s = sum(
        load / speed
        for load, speed in zip(
            edge_loads(problem, solution.bytes_at), problem.bytes_per_s, strict=True
        )
    )
    crowding = sum(count * count for count in servers_at)
    costs = (solution.cost_s, -sum(groups), max(solution.server_bytes), total_s, crowding)
    # Rounded: what differs in the last bits only must not decide.
    rounded = tuple(float(f"{cost:.9e}") for cost in costs)
    return rounded, list(servers_at), _shares(cluster, problem, solution)


def _spread_over_racks(cluster: Cluster, capacity: Sequence[int], num_servers: int) -> list[int]:
    """One server at a time to the switch, and there the node, with the fewest for its room."""
    placed = [0] * len(capacity)
    room: Counter[int] = Counter()
    free: dict[int, list[tuple[int, int]]] = {}
    for node, each in enumerate(capacity):
        if each:
            switch = cluster.nodes[node].switch
            room[switch] += each
            free.setdefault(switch, []).append((0, node))  # in order, so it is a heap
    # (filled to what part, servers on its emptiest node, that node, switch)
    heap = [(0.0, *nodes[0], switch) for switch, nodes in free.items()]
    heapq.heapify(heap)
    used: Counter[int] = Counter()
    for _ in range(num_servers):
        _, _, node, switch = heapq.heappop(heap)
        heapq.heappop(free[switch])
        placed[node] += 1
        used[switch] += 1
        if placed[node] < capacity[node]:
            heapq.heappush(free[switch], (placed[node], node))
        if free[switch]:
            heapq.heappush(heap, (used[switch] / room[switch], *free[switch][0], switch))
    return placed


def _by_node(cluster: Cluster, problem: Problem, servers_at: Sequence[int]) -> list[int]:
    first = len(problem.parent) - len(cluster.nodes)
    counts = Counter(servers_at)
    return [counts[first + index] for index in range(len(cluster.nodes))]


def _shares(cluster: Cluster, problem: Problem, solution: placement.Solution) -> list[float]:
    first = len(problem.parent) - len(cluster.nodes)
    return [each / problem.model_bytes for each in solution.bytes_at[first:]]


def _switches_from_the_root(cluster: Cluster) -> list[int]:
    children: dict[int, list[int]] = {}
    for index, switch in enumerate(cluster.switches):
        children.setdefault(switch.parent, []).append(index)
    order = list(children[-1])
    for above in order:  # grows while it is read: breadth first
        order += children.get(above, [])
    return order
