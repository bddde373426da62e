"""Which hosts serve, and what part of the model each of them holds. Pure.

    choice = choose(hosts, capacity)                  # the workers stay
    choice = choose_among_ranks(hosts, sizes)         # a rank that serves is no worker

Longer than other modules: hosts before a job and ranks inside one are chosen by one judge.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal, Protocol, TypeAlias

from psdist.errors import PlacementError
from psdist.topology.network import Cluster
from psdist.topology.plan import Grouping, LinkLoad
from psdist.topology.plan.host_groups import spans_hosts
from psdist.topology.solver import Problem, edge_loads, placement
from psdist.topology.solver.filling import lower_bound_s

Strategy: TypeAlias = Literal["auto", "block", "cyclic"]
PLAIN: Final[tuple[Strategy, ...]] = ("block", "cyclic")
"""The placements that the mapper's is compared with."""
_NOTHING: Final[Mapping[str, float]] = MappingProxyType({})
UNKNOWN_MODEL_BYTES = 1e9
"""Model size of a plan where the model is not known yet."""
ALMOST_ALL = 0.9
"""Where more than this part of the servers that there could be is needed, all are taken."""
MOST_WAYS = 5000
"""Maximum ways to choose among running ranks, modulo equal hosts, for which all are compared (at
most some 0.1 s)."""
WAYS_NUMBERS = 1_000_000
"""Those ways times the vertices of the tree: in large jobs fewer ways are compared."""
AGAIN_NUMBERS = 2_000_000
"""As divisions.CLIMB_NUMBERS, where ``auto`` tries other numbers of servers."""
MOST_JUDGED = 50
"""Maximum ways, the fastest ones, that are compared in full."""
JUDGED_NODES = 1000
"""The same times the nodes of each: fewer in a large cluster, where judging takes long."""
LEAST_SHARE = 1e-3
"""Minimum share of a server that ``auto`` plans, as a part of an equal share."""
MANY_NODES = 200
"""Larger jobs try fewer choices."""
MOST_TRIES = 2
"""Smaller numbers of servers that ``auto`` tries where some would hold nothing."""
IDLE_IS_WORTH = 2.0
"""How many times longer an exchange may take, for each worker, before ``auto`` lets ranks idle as
servers that hold nothing: those on hosts that would slow every exchange."""
MEMORY_SHARE = 0.8
"""Part of a host's ordinary memory that shards may fill."""
APPLY_BYTES_PER_S = 4e9
"""Pushed bytes a server applies per second, if not measured: torch's fused Adam on one core
(docs/dev/performance.md)."""
STATE_PER_BYTE = 2.0
"""Optimizer state for each byte of parameters: two moments, as Adam has. A guess where the
optimizer is not known yet, on the safe side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    servers: int | Literal["auto"] = "auto"
    group: Grouping = "node"
    placement: Strategy = "auto"
    model_bytes: float | None = None
    """Bytes of the model's parameters on the wire; None: not known yet. Times and bytes of a plan
    are proportional to it; the placement depends on it only where memory is short."""
    may_bind: bool = True
    apply_bytes_per_s: float | None = None
    """Measured: pushed bytes that a server applies in a second with one core. Servers' parts are
    then chosen for the slowest of links and servers; for a guess, links are not slowed down."""

    @property
    def applied_bytes_per_s(self) -> float:
        """Bytes that one core applies per second, measured or guessed."""
        return self.apply_bytes_per_s or APPLY_BYTES_PER_S

    @property
    def planned_bytes(self) -> float:
        """Model size for which times and bytes are planned."""
        return UNKNOWN_MODEL_BYTES if self.model_bytes is None else self.model_bytes


class Hosts(Protocol):
    """The hosts to choose from: the ranks there other than servers."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def request(self) -> PlanRequest: ...

    def groups_on(self, node: int, num_servers: int) -> float:
        """Return the number of groups on ``node`` if it has ``num_servers`` servers."""
        ...

    def groups_beside(self, servers_at: Sequence[int]) -> list[float]:
        """Return the same of each node, for servers on each node at once."""
        ...

    def cores_on(self, node: int) -> int:
        """Return the cores that a server gets where it is the only one of the node."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    servers_at: list[int]
    """Number of servers on each node."""
    shares: list[float]
    """The part of the model on each node."""
    best_s: float | None = None
    """Proved: no other choice with the same number of servers is faster; None: not proved."""
    seconds: float = 0.0
    """Time of the slowest of links and servers in one exchange; in a job."""
    tried: int = 0
    """Where not all choices were compared, how many were; in a job."""


def choose(hosts: Hosts, capacity: Sequence[int], *, most: int | None = None) -> Choice:
    """Return the servers on each node, and the part of the model there, when the workers stay.

    ``most``: the maximum number of servers. ``capacity`` is how many servers a node has room for.
    Beside servers some workers may sit elsewhere and make other groups: each candidate is judged
    with its own. Raises PlacementError where cores or memory do not suffice.
    """
    cluster, request = hosts.cluster, hosts.request
    wanted = request.servers if most is None else most
    groups = hosts.groups_beside([0] * len(capacity))
    once = [min(each, 1) for each in capacity]
    if wanted == "auto":
        if not any(once):
            raise PlacementError(
                "no node has a core left for a server; ask for fewer workers per node, or name "
                "server nodes"
            )
        cores = min(hosts.cores_on(node) for node, room in enumerate(once) if room)
        problem = problem_of(cluster, once, groups, request, sum(once))
        wanted = _enough(problem, sum(once), cores * request.applied_bytes_per_s)
    # With groups that servers may change, the bound for some groups proves nothing of others.
    is_fixed = request.group in ("node", "rank") or spans_hosts(request.group)
    is_fixed = is_fixed or all(
        hosts.groups_on(node, count) == groups[node]
        for node, room in enumerate(capacity)
        for count in range(1, min(room, wanted) + 1)
    )
    best_s = None
    if is_fixed:
        best_s = lower_bound_s(problem_of(cluster, capacity, groups, request, wanted))
    if request.placement != "auto":
        servers_at, shares = place_plainly(cluster, capacity, request.placement, wanted)
        if full := beyond_memory(cluster, shares, request):
            raise PlacementError(
                f"placement {request.placement}: {cluster.nodes[full[0]].name} would hold "
                f"{100 * shares[full[0]]:.3g} % of the model, more than its memory has room for; "
                "use --placement auto, more nodes, or nodes with more memory"
            )
        return Choice(servers_at, shares, best_s)
    room = _room(capacity, wanted)
    solved = _solved(cluster, room, groups, request, wanted)
    # Among equals the one that is spread over the racks: a rack that fails takes fewer with it.
    candidates = [_spread_over_racks(cluster, room, wanted), solved]
    plain = [place_plainly(cluster, capacity, each, wanted)[0] for each in PLAIN]
    if any(hosts.groups_beside(each) != groups for each in (*candidates, *plain)):
        again = _solved(cluster, room, hosts.groups_beside(solved), request, wanted)
        candidates += [again, *plain]
    _, servers_at, shares = _best(hosts, candidates, _apply_bytes_per_s(hosts, capacity))
    if request.servers == "auto" and most is None and (idle := _idle(servers_at, shares)):
        return choose(hosts, capacity, most=wanted - sum(servers_at[node] for node in idle))
    return Choice(servers_at, shares, best_s)


def _idle(servers_at: Sequence[int], shares: Sequence[float]) -> list[int]:
    """The nodes whose servers hold less than is worth a server."""
    least = LEAST_SHARE / sum(servers_at)
    return [
        node
        for node, (count, share) in enumerate(zip(servers_at, shares, strict=True))
        if count and share / count < least
    ]


def choose_among_ranks(hosts: Hosts, sizes: Sequence[int]) -> Choice:
    """Return the same where ``sizes[node]`` ranks run already, and each that serves is no worker.

    So the groups depend on the answer. All ways to choose the servers are compared if, modulo equal
    hosts, there are at most MOST_WAYS; then the time is proved to be the best.
    Beyond that the best of some starts is climbed from. Both are bounded by
    numbers of steps and not by the clock: the same job has the same plan. Among equals in time the
    one with the most groups is taken, then the most even one.

    Where groups lie on several hosts, what a node counts depends on other nodes' servers, so
    ``groups_on`` says nothing: some ways are judged, and nothing is proved.
    """
    cluster, request = hosts.cluster, hosts.request
    num_nodes = sum(size > 0 for size in sizes)
    wanted = _num_servers(hosts, sizes)
    if num_nodes == 1:
        return Choice([wanted * (size > 0) for size in sizes], [float(size > 0) for size in sizes])
    if request.placement != "auto":
        best_s = None
        if not spans_hosts(request.group):
            found = _fastest_ways(hosts, sizes, wanted, numbers=0)
            best_s = None if found is None else found.best_s
        return Choice(*place_plainly(cluster, sizes, request.placement, wanted), best_s)
    first = _best_choice(hosts, sizes, sizes, wanted)
    if request.servers != "auto" or not (idle := _idle(first.servers_at, first.shares)):
        return first
    # Those ranks had better work: with fewer servers, or with none on these hosts. More workers
    # send more, so what counts is the time for each of them.
    others: list[tuple[float, Choice]] = []
    barred = [0 if node in idle else size for node, size in enumerate(sizes)]
    for room in (list(sizes), barred) if num_nodes <= MANY_NODES else (barred,):
        choice = first
        for _ in range(MOST_TRIES if num_nodes <= MANY_NODES else 1):
            if not (left := _idle(choice.servers_at, choice.shares)):
                break
            useful = sum(choice.servers_at) - sum(choice.servers_at[node] for node in left)
            choice = _best_choice(hosts, sizes, room, useful, numbers=AGAIN_NUMBERS)
        others.append((choice.seconds / (sum(sizes) - sum(choice.servers_at)), choice))
    best, choice = min(others, key=lambda each: each[0])
    return choice if best <= IDLE_IS_WORTH * first.seconds / (sum(sizes) - wanted) else first


def _best_choice(
    hosts: Hosts,
    sizes: Sequence[int],
    room: Sequence[int],
    wanted: int,
    *,
    numbers: int | None = None,
) -> Choice:
    """Return the best way to choose ``num_servers`` of the ranks, at most ``room`` on each node."""
    if spans_hosts(hosts.request.group):
        found = _some_ways(hosts, room, wanted)
    else:
        found = _fastest_ways(hosts, room, wanted, numbers=numbers)
    if found is None:
        raise PlacementError(
            f"servers = {wanted} leave no worker on any of the "
            f"{sum(size > 0 for size in sizes)} hosts; ask for fewer"
        )
    ways = found.ways[: max(2, min(MOST_JUDGED, JUDGED_NODES // len(sizes)))]
    costs, servers_at, shares = _best(hosts, ways, _apply_bytes_per_s(hosts, sizes))
    # Where nodes are barred, the proof is not of all choices.
    is_all = list(room) == list(sizes)
    tried = 0 if found.best_s is not None and is_all else found.tried
    return Choice(servers_at, shares, found.best_s if is_all else None, costs[0], tried)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ways:
    ways: list[tuple[int, ...]]
    """Servers on each node: the fastest ones, first those with the most groups, the most even."""
    best_s: float | None
    """Their time, where that is proved to be the best one."""
    tried: int


def _fastest_ways(
    hosts: Hosts, room: Sequence[int], wanted: int, *, numbers: int | None = None
) -> _Ways | None:
    """Return the numbers of servers on each node that are fastest; None where there is no way.

    ``room`` is how many of its ranks may serve. Where not all ways are compared, a climb looks at
    so many ``numbers``.
    """
    # Not above: numpy takes a while to load, and planning ahead of a job does not need it.
    from psdist.topology.solver import divisions

    problem = problem_of(hosts.cluster, room, [1.0] * len(room), hosts.request, wanted)
    first = len(problem.parent) - len(room)
    division = divisions.Division(
        parent=problem.parent,
        bytes_per_s=problem.bytes_per_s,
        max_bytes=problem.max_bytes,
        sizes=problem.capacity,
        groups_with=lambda v, count: hosts.groups_on(v - first, count) if v >= first else 0.0,
        model_bytes=problem.model_bytes,
        num_servers=wanted,
    )
    most = min(MOST_WAYS, WAYS_NUMBERS // len(problem.parent))
    ways = divisions.all_ways(division, most=most)
    if ways is not None:
        found = divisions.fastest(division, ways)
    else:
        starts = [(*(0,) * first, *each) for each in _starts(hosts, room, wanted)]
        found = divisions.climb(
            division, starts, numbers=divisions.CLIMB_NUMBERS if numbers is None else numbers
        )
    if found is None:
        return None
    return _Ways(
        ways=[way[first:] for way in divisions.most_groups_first(division, found.tied)],
        best_s=found.seconds if ways is not None else None,
        tried=found.tried,
    )


def _some_ways(hosts: Hosts, room: Sequence[int], wanted: int) -> _Ways | None:
    """Return plain ways, and those that are best for guessed groups."""
    if sum(room) < wanted:
        return None
    ways = list(dict.fromkeys(_starts(hosts, room, wanted)))
    return _Ways(ways=ways, best_s=None, tried=len(ways))


def _starts(hosts: Hosts, sizes: Sequence[int], wanted: int) -> Iterator[tuple[int, ...]]:
    """Yield placements to climb from: plain ones, those that are best for guessed groups, and hosts
    that only serve."""
    cluster = hosts.cluster
    beside_workers = [max(size - 1, 0) for size in sizes]
    capacity = beside_workers if sum(beside_workers) >= wanted else list(sizes)
    for plain in PLAIN:
        yield tuple(place_plainly(cluster, sizes, plain, wanted)[0])
    guess = _spread_over_racks(cluster, capacity, wanted)
    yield tuple(guess)
    for _ in range(2):
        room = _room(capacity, wanted)
        guess = _solved(cluster, room, hosts.groups_beside(guess), hosts.request, wanted)
        yield tuple(guess)
    left = wanted
    whole = [0] * len(sizes)
    order = _spread_over_racks(cluster, [1] * len(sizes), max(1, wanted // max(sizes)))
    for node in sorted(range(len(sizes)), key=lambda node: -order[node]):
        whole[node] = min(left, sizes[node])
        left -= whole[node]
    yield tuple(whole)


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
    cluster: Cluster,
    groups: Sequence[float],
    shares: Sequence[float],
    request: PlanRequest,
    within: Mapping[str, float] = _NOTHING,
) -> tuple[LinkLoad, ...]:
    """Bytes of one exchange on every link; no links where all sit on one host. ``within``: bytes
    that groups send in addition (:func:`host_groups.loads`)."""
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
            group_bytes=within.get(f"switch {cluster.switches[switch].name}", 0.0),
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
            group_bytes=within.get(f"node {node.name}", 0.0),
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


def _num_servers(hosts: Hosts, sizes: Sequence[int]) -> int:
    request = hosts.request
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
    cores = min(hosts.cores_on(node) for node, room in enumerate(once) if room)
    problem = problem_of(hosts.cluster, once, hosts.groups_beside(once), request, sum(once))
    return _enough(problem, most, cores * request.applied_bytes_per_s)


def apply_s(
    groups: Sequence[float], shares: Iterable[float], cores: Iterable[int], request: PlanRequest
) -> float:
    """Seconds in which the busiest of servers with these shares and cores applies its part."""
    busiest = max(share / max(1, own) for share, own in zip(shares, cores, strict=True))
    return sum(groups) * busiest * request.planned_bytes / request.applied_bytes_per_s


def cores_to_apply(
    link_bytes_per_s: float, num_servers: int, *, by_one: float = APPLY_BYTES_PER_S
) -> int:
    """Cores with which each of a host's servers applies as fast as the link brings pushes."""
    if not num_servers or math.isinf(link_bytes_per_s):
        return 1
    return max(1, math.ceil(link_bytes_per_s / num_servers / by_one))


def _enough(problem: Problem, most: int, by_one: float) -> int:
    """The fewest servers, up to ``most``, that keep up with the best of links and of servers."""
    links = placement.choose_num_servers(problem, max_servers=most)
    best_s = placement.solve(replace(problem, num_servers=most)).cost_s
    applied_s = sum(problem.groups) * problem.model_bytes / by_one
    allowed_s = max(best_s, applied_s / most) * (1 + placement.CHEAPER_BY)
    enough = max(links, math.ceil(applied_s / allowed_s))
    return most if enough > ALMOST_ALL * most else enough


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


def _apply_bytes_per_s(hosts: Hosts, room: Sequence[int]) -> list[float]:
    """Return what a server on each of the nodes applies; infinite where it was not measured."""
    by_one = hosts.request.apply_bytes_per_s
    if by_one is None:
        return [math.inf] * len(room)
    return [by_one * (hosts.cores_on(node) if most else 1) for node, most in enumerate(room)]


_Judgement: TypeAlias = tuple[tuple[float, ...], list[int], list[float]]
"""The costs, the most important first; the servers; their best shares."""


def _best(hosts: Hosts, ways: Iterable[Sequence[int]], by_one: Sequence[float]) -> _Judgement:
    """Return the judgement of the best of these ways; ``by_one``: bytes that a server on each node
    applies in a second."""
    judged = (_judge(hosts, way, by_one) for way in ways)
    return min((each for each in judged if each is not None), key=lambda each: each[0])


def _judge(hosts: Hosts, servers_at: Sequence[int], by_one: Sequence[float]) -> _Judgement | None:
    """Return None where these hosts have not enough memory."""
    cluster, request, groups = hosts.cluster, hosts.request, hosts.groups_beside(servers_at)
    try:
        problem = problem_of(cluster, servers_at, groups, request, sum(servers_at))
    except PlacementError:
        return None
    first = len(problem.parent) - len(by_one)
    rates = [*[math.inf] * first, *by_one]
    solution = placement.solve_with_servers(problem, apply_bytes_per_s=rates)
    applied_s = sum(groups) * max(
        held / rates[v] for v, held in zip(solution.servers_at, solution.server_bytes, strict=True)
    )
    total_s = sum(
        load / speed
        for load, speed in zip(
            edge_loads(problem, solution.bytes_at), problem.bytes_per_s, strict=True
        )
    )
    crowding = sum(count * count for count in servers_at)
    slowest_s = max(solution.cost_s, applied_s)
    # Workers of a group on several hosts are as many on each, where nothing is lost by that.
    first_crowding = crowding if spans_hosts(request.group) else 0
    least = max(solution.server_bytes)
    costs = (slowest_s, -sum(groups), first_crowding, least, total_s, crowding)
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
