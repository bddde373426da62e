"""From a cluster to a plan: who serves, who works, on which cores, and what it costs. Pure.

    plan = plan_job(cluster, ranks, PlanRequest(servers="auto", group="node"))   # ranks are there
    plan = plan_ahead(cluster, PlanRequest(servers="auto"), workers=[8, 8, 8])   # before the job

Inside a job the hosts of the ranks are given, and a server takes the place of a worker. Before a
job the workers are given and servers come in addition. With the group ``auto``, groups of hosts and
of racks are planned, and the faster plan is taken.

Longer than other modules: a plan inside a job and one before it, and what is said of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from psdist.errors import PlacementError
from psdist.topology.machine import UNKNOWN, Machine
from psdist.topology.network import Cluster
from psdist.topology.plan import MAX_RANKS, Grouping, Plan, PlannedRank, host_groups, seating
from psdist.topology.plan.exchange_time import groups_s, judged
from psdist.topology.plan.gpu_shares import Role
from psdist.topology.plan.host_groups import require_racks, spans_hosts
from psdist.topology.plan.seating import Seat
from psdist.topology.plan.serving_hosts import (
    LEAST_SHARE,
    PLAIN,
    Choice,
    PlanRequest,
    Strategy,
    beyond_memory,
    choose,
    choose_among_ranks,
    cores_to_apply,
    link_loads,
    place_plainly,
)
from psdist.topology.text.hostlist import natural_key

__all__ = ["Grouping", "PlanRequest", "RankFacts", "Strategy", "on_hosts", "plan_ahead", "plan_job"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """Facts about a running rank."""

    rank: int
    host: str
    cpus: frozenset[int]
    """OS numbers of the PUs it may use."""
    gpus: tuple[str, ...] | None = None
    """PCI bus ids of the GPUs it can see; None if unknown."""
    kernel: str = ""
    """Boot id of its kernel: hosts that have the same one share their processors."""
    nic: str = ""
    """The network cards that its MPI is confined to already, with commas, or ""."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Host:
    """A host's part in a plan: its ranks, and how many of them serve."""

    node: int
    ranks: tuple[int, ...]
    num_servers: int
    may_bind: bool = True
    facts: tuple[RankFacts, ...] = ()


def _check_number(num_ranks: int) -> None:
    """Before any work: no plan for as many can be written."""
    if num_ranks > MAX_RANKS:
        raise PlacementError(
            f"{num_ranks:,} ranks are more than the {MAX_RANKS:,} that a plan is made for: start "
            "fewer, or several jobs"
        )


def plan_job(cluster: Cluster, ranks: Sequence[RankFacts], request: PlanRequest) -> Plan:
    """A plan for ranks that run already, in rank order, on the nodes of ``cluster``.

    ``servers="auto"`` takes at most one rank of each node and at most half of all. Raises
    PlacementError where the numbers do not fit.
    """
    if request.group == "auto":
        return _faster(cluster, request, lambda asked: plan_job(cluster, ranks, asked))
    require_racks(cluster, request.group)
    _check_number(len(ranks))
    index = {node.name: position for position, node in enumerate(cluster.nodes)}
    here: list[list[RankFacts]] = [[] for _ in cluster.nodes]
    for facts in ranks:
        here[index[facts.host]].append(facts)
    sharing = _hosts_with_one_kernel(ranks)

    def host_with(node: int, num_servers: int) -> _Host:
        return _Host(
            node=node,
            ranks=tuple(facts.rank for facts in here[node]),
            num_servers=num_servers,
            may_bind=request.may_bind and cluster.nodes[node].name not in sharing,
            facts=tuple(here[node]),
        )

    sizes = [len(each) for each in here]
    hosts = _Hosts(
        cluster,
        request,
        host_with,
        lambda servers_at: [size - count for size, count in zip(sizes, servers_at, strict=True)],
    )
    choice = choose_among_ranks(hosts, sizes)
    notes = _notes(cluster)
    if sharing:
        notes.append(
            f"{len(sharing)} hosts share one kernel and so their processors: "
            "their ranks are not bound"
        )

    def hosts_with(servers_at: Sequence[int]) -> list[_Host]:
        return [host_with(node, count) for node, count in enumerate(servers_at) if here[node]]

    chosen = hosts_with(choice.servers_at)
    serving = [host for host in chosen if len(host.ranks) == host.num_servers > 1]
    if serving and request.placement == "auto":
        notes.append(
            f"{len(serving)} of {len(chosen)} hosts only serve: with this number of workers "
            "that is the faster exchange; --placement cyclic spreads the servers over all hosts"
        )
    return _assemble(hosts, hosts_with, sizes, choice, notes)


def _faster(
    cluster: Cluster, request: PlanRequest, plan_with: Callable[[PlanRequest], Plan]
) -> Plan:
    """Return the faster one of the plans with groups of hosts and of racks; a note has both
    times."""
    of_nodes = plan_with(replace(request, group="node"))
    if len(of_nodes.hosts) == 1:
        return of_nodes
    if not cluster.has_racks:
        note = "group = auto: node, since nothing is known of racks"
        return replace(of_nodes, notes=(*of_nodes.notes, note))
    of_racks = plan_with(replace(request, group="rack"))
    is_faster = of_racks.whole_s < of_nodes.whole_s
    best, words = (of_racks, "rack") if is_faster else (of_nodes, "node")
    note = (
        f"group = auto: {words}; an exchange and what groups do before and after it are predicted "
        f"to take {of_racks.whole_s:.3g} s with rack, {of_nodes.whole_s:.3g} s with node"
    )
    return replace(best, notes=(*best.notes, note))


def plan_ahead(
    cluster: Cluster,
    request: PlanRequest,
    *,
    workers: Sequence[int],
    server_nodes: Iterable[str] = (),
) -> Plan:
    """Return a plan for a job that is still to be started, with ``workers[i]`` workers on node i.

    Servers come in addition, on cores that the workers leave. Where ``server_nodes`` are named,
    only those have any. Raises PlacementError where cores or memory do not suffice.
    """
    if request.group == "auto":
        nodes = tuple(server_nodes)
        return _faster(
            cluster,
            request,
            lambda asked: plan_ahead(cluster, asked, workers=workers, server_nodes=nodes),
        )
    require_racks(cluster, request.group)
    _check_number(sum(workers) + (1 if request.servers == "auto" else request.servers))
    allowed = set(server_nodes)
    capacity: list[int] = []
    for here, num_workers in zip(cluster.nodes, workers, strict=True):
        left = len(here.machine.cores) - num_workers
        if left < 0:
            raise PlacementError(
                f"{num_workers} workers on {here.name}, whose cores are {len(here.machine.cores)}: "
                "each needs one; ask for fewer workers per node"
            )
        capacity.append(left if not allowed or here.name in allowed else 0)
    if not any(workers):
        raise PlacementError("no node has a worker; ask for at least one")

    def host_with(node: int, num_servers: int) -> _Host:
        ranks = tuple(range(num_servers + workers[node]))
        return _Host(node=node, ranks=ranks, num_servers=num_servers)

    hosts = _Hosts(cluster, request, host_with, lambda _servers_at: workers)
    choice = choose(hosts, capacity)
    _check_number(sum(workers) + sum(choice.servers_at))

    def hosts_with(servers_at: Sequence[int]) -> list[_Host]:
        found: list[_Host] = []
        first = 0
        for node, num_workers in enumerate(workers):
            end = first + servers_at[node] + num_workers
            if end > first:
                ranks = tuple(range(first, end))
                found.append(_Host(node=node, ranks=ranks, num_servers=servers_at[node]))
            first = end
        return found

    return _assemble(hosts, hosts_with, capacity, choice, _notes(cluster))


def on_hosts(plan: Plan, cluster: Cluster, hosts: Sequence[str]) -> Plan:
    """``plan`` as it is when its ranks run on other hosts than planned, ``hosts[rank]``.

    Roles, groups and shards stay; cores and GPUs were those of other machines, so ranks that have
    moved get none. Loads and cost are those of the real hosts; no bound is known. Raises
    PlacementError where a group that was planned within one host would not lie within one.
    """
    index = {node.name: position for position, node in enumerate(cluster.nodes)}
    homes: dict[int, Counter[str]] = {}
    planned: dict[int, set[str]] = {}
    for each in plan.ranks:
        if each.role == "worker":
            homes.setdefault(each.group, Counter())[hosts[each.rank]] += 1
            planned.setdefault(each.group, set()).add(each.host)
    for group, found in homes.items():
        if len(found) > 1 == len(planned[group]):
            where = ", ".join(sorted(found, key=natural_key))
            raise PlacementError(
                f"group {group} of the plan lies on {where}, but was planned as a group of one "
                "host: start the ranks on hosts as planned, or make a new plan"
            )
    has_moved = any(each.host != hosts[each.rank] for each in plan.ranks)
    moved = ["made for other hosts: ranks that are elsewhere are not bound"] * has_moved
    ranks = tuple(
        each
        if each.host == hosts[each.rank]
        else replace(
            each,
            host=hosts[each.rank],
            cores=(),
            cpus=(),
            package=UNKNOWN,
            numa=UNKNOWN,
            gpu="",
            nic="",
        )
        for each in plan.ranks
    )
    groups, shares = [0.0] * len(index), [0.0] * len(index)
    for each in ranks:
        if each.role == "server":
            shares[index[each.host]] += plan.weights[each.index]
    for found in homes.values():
        for host, count in found.items():
            groups[index[host]] += count / found.total()
    within = host_groups.loads(cluster, ranks, model_bytes=plan.model_bytes)
    links = link_loads(cluster, groups, shares, PlanRequest(model_bytes=plan.model_bytes), within)
    return replace(
        plan,
        ranks=ranks,
        links=links,
        cost_s=max((link.seconds for link in links), default=0.0),
        bound_s=0.0,
        compared={},
        source=cluster.source,
        notes=(*_notes(cluster), *moved),
        cards_s=plan.cards_s if not has_moved else 0.0,
        groups_s=groups_s(cluster, ranks, model_bytes=plan.model_bytes)
        + max((link.group_seconds for link in links), default=0.0),
    )


def _notes(cluster: Cluster) -> list[str]:
    """Return the cluster's notes if there is a network to guess, and the notes of the machines."""
    notes = list(cluster.notes) if len(cluster.nodes) > 1 else []
    return notes + list(
        dict.fromkeys(note for each in cluster.nodes for note in each.machine.notes)
    )


def _hosts_with_one_kernel(ranks: Sequence[RankFacts]) -> set[str]:
    """Hosts (containers, namespaces) that share a kernel with a host of another name."""
    hosts_of: dict[str, set[str]] = {}
    for facts in ranks:
        if facts.kernel:
            hosts_of.setdefault(facts.kernel, set()).add(facts.host)
    return {host for hosts in hosts_of.values() if len(hosts) > 1 for host in hosts}


def _home(seat: Seat, group: Grouping) -> tuple[int, int]:
    """Return the place that workers of a group share; a package for a rank on several NUMA
    nodes."""
    return seat.package, seat.numa if group == "numa" else UNKNOWN


class _Hosts:
    """The ranks of each host other than servers; equal hosts share one computation of seats."""

    def __init__(
        self,
        cluster: Cluster,
        request: PlanRequest,
        host_with: Callable[[int, int], _Host],
        workers_beside: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        """``host_with(node, servers)``; ``workers_beside``: on each node, by the servers there."""
        self.cluster, self.request = cluster, request
        self._host_with, self._workers_beside = host_with, workers_beside
        self._groups: dict[tuple[int, int], float] = {}
        self._are_one_group = request.group == "node" or spans_hosts(request.group)
        self._by_one = request.applied_bytes_per_s
        same: dict[int, int] = {}  # machines that are one object, as psdist plan has them
        kinds: dict[Machine, int] = {}
        self._kinds = [
            same[id(node.machine)]
            if id(node.machine) in same
            else same.setdefault(
                id(node.machine), kinds.setdefault(_without_names(node.machine), len(kinds))
            )
            for node in cluster.nodes
        ]
        self._found: dict[tuple[object, ...], tuple[tuple[Role, Seat], ...]] = {}

    def groups_on(self, node: int, num_servers: int) -> float:
        """Return the number of groups on ``node`` if it has ``num_servers`` servers."""
        key = (node, num_servers)
        if key not in self._groups:
            self._groups[key] = self._num_groups(self._host_with(node, num_servers))
        return self._groups[key]

    def _num_groups(self, host: _Host) -> float:
        group, num_workers = self.request.group, len(host.ranks) - host.num_servers
        if group == "rank" or num_workers == 0:
            return float(num_workers)
        if group == "node":
            return 1.0
        return float(len({_home(seat, group) for role, seat in self.of(host) if role == "worker"}))

    def groups_beside(self, servers_at: Sequence[int]) -> list[float]:
        """Return the same of each node, a part of a group where groups lie on several hosts."""
        if spans_hosts(self.request.group):
            workers = self._workers_beside(servers_at)
            return host_groups.parts(self.cluster, workers, self.request.group)
        return [self.groups_on(node, count) for node, count in enumerate(servers_at)]

    def cores_on(self, node: int) -> int:
        """Return the cores of a server that is the only one there; 1 if ranks are not bound."""
        seats = self.of(self._host_with(node, 1))
        return max([1, *(len(seat.cores) for role, seat in seats if role == "server")])

    def of(self, host: _Host) -> tuple[tuple[Role, Seat], ...]:
        """Return role and seat of each of the host's ranks."""
        facts = tuple((facts.cpus, facts.gpus, facts.nic) for facts in host.facts)
        node = self.cluster.nodes[host.node]
        needed = cores_to_apply(node.bytes_per_s, host.num_servers, by_one=self._by_one)
        sizes = (len(host.ranks), host.num_servers, needed)
        key = (self._kinds[host.node], sizes, host.may_bind, facts)
        if key not in self._found:
            roles = _roles(node.machine, host)
            seats = _seats(node.machine, host, roles, needed, are_one_group=self._are_one_group)
            self._found[key] = tuple(zip(roles, seats, strict=True))
        return self._found[key]


def _without_names(machine: Machine) -> Machine:
    """Keep only what decides the seats."""
    return replace(
        machine,
        name="",
        notes=(),
        numa_nodes=(),
        devices=tuple(replace(each, uuid="", port_guids=()) for each in machine.devices),
    )


def _roles(machine: Machine, host: _Host) -> list[Role]:
    """The first ranks of the host serve; if a launcher bound them, those near the network card."""
    order = list(range(len(host.ranks)))
    masks = [facts.cpus for facts in host.facts]
    if seating.are_disjoint(masks):
        order = seating.nearest_to_network(machine, masks)
    serving = set(order[: host.num_servers])
    return ["server" if index in serving else "worker" for index in range(len(host.ranks))]


def _seats(
    machine: Machine,
    host: _Host,
    roles: Sequence[Role],
    server_cores: int,
    *,
    are_one_group: bool,
) -> tuple[Seat, ...]:
    seen = [facts.gpus for facts in host.facts if facts.gpus is not None]
    return seating.seat(
        machine,
        roles,
        masks=[facts.cpus for facts in host.facts] or None,
        gpus=seen if seen and len(seen) == len(host.facts) else None,
        nics=[facts.nic for facts in host.facts],
        may_bind=host.may_bind,
        server_cores=server_cores,
        are_one_group=are_one_group,
    )


def _assemble(
    seats: _Hosts,
    hosts_with: Callable[[Sequence[int]], Sequence[_Host]],
    capacity: Sequence[int],
    choice: Choice,
    notes: Sequence[str],
) -> Plan:
    cluster, request = seats.cluster, seats.request
    servers_at, shares = choice.servers_at, choice.shares
    hosts = hosts_with(servers_at)
    ranks, server_nodes = _ranks_on(seats, hosts)
    weights = tuple(shares[node] / servers_at[node] for node in server_nodes)
    found = judged(cluster, ranks, weights, seats.groups_beside(servers_at), shares, request)
    compared: dict[str, float] = {}
    for strategy in PLAIN:
        there, equal = place_plainly(cluster, capacity, strategy, len(server_nodes))
        if beyond_memory(cluster, equal, request):
            continue
        others, _ = _ranks_on(seats, hosts_with(there))
        even = (1 / len(server_nodes),) * len(server_nodes)
        times = judged(cluster, others, even, seats.groups_beside(there), equal, request)
        compared[strategy] = times.exchange_s
    links = found.links
    plan = Plan(
        ranks=ranks,
        weights=weights,
        links=links,
        model_bytes=request.planned_bytes,
        placement=request.placement,
        cost_s=found.links_s,
        bound_s=choice.best_s or 0.0 if links and cluster.is_exact else 0.0,
        compared=compared,
        source=cluster.source,
        servers_s=found.servers_s,
        cards_s=found.cards_s,
        groups_s=groups_s(cluster, ranks, model_bytes=request.planned_bytes) + found.within_s,
    )
    limits = _limit_notes(plan, request) if links else []
    if choice.tried:
        limits.append(
            f"which ranks serve is the best of {choice.tried:,} ways tried, not of all: a faster "
            "one may exist"
        )
    workers = [0] * len(cluster.nodes)
    for host in hosts:
        workers[host.node] = len(host.ranks) - host.num_servers
    smaller = host_groups.size_notes(cluster, workers, request.group)
    return replace(plan, notes=(*notes, *smaller, *_seat_notes(seats, hosts), *limits))


def _ranks_on(seats: _Hosts, hosts: Sequence[_Host]) -> tuple[tuple[PlannedRank, ...], list[int]]:
    """Return the seated ranks of ``hosts``, and the node of each server."""
    seated: dict[int, tuple[int, Role, Seat]] = {}
    for host in hosts:
        for rank, (role, seat) in zip(host.ranks, seats.of(host), strict=True):
            seated[rank] = (host.node, role, seat)
    return _number(seats.cluster, seated, seats.request.group)


def _wide_groups(
    cluster: Cluster, seated: dict[int, tuple[int, Role, Seat]], group: Grouping
) -> dict[int, int]:
    """The number of each node's group, in an order of its own, where groups lie on several."""
    if not spans_hosts(group):
        return {}
    workers = [0] * len(cluster.nodes)
    for node, role, _ in seated.values():
        workers[node] += role == "worker"
    found = enumerate(host_groups.of_hosts(cluster, workers, group))
    return {node: number for number, nodes in found for node in nodes}


def _limit_notes(plan: Plan, request: PlanRequest) -> list[str]:
    """Return notes for a plan whose time is not limited by links only."""
    notes = []
    if plan.limit != "links":
        more = "; ask for more servers" if request.servers != "auto" else ""
        notes.append(
            f"the {plan.limit}, not the links, limit an exchange: it takes "
            f"{_times(plan.exchange_s, plan.cost_s)} the time of the slowest link"
            + (more if plan.limit == "servers" else "")
            + _parts_advice(plan, request)
        )
    empty = sum(weight * len(plan.weights) < LEAST_SHARE for weight in plan.weights)
    if empty:
        notes.append(
            f"{empty} of {len(plan.weights)} servers hold nothing, since every byte on their hosts "
            "would make an exchange longer"
            + (
                ", and as workers they would even more"
                if request.servers == "auto"
                else f"; ask for {len(plan.weights) - empty}"
            )
        )
    return notes


def _parts_advice(plan: Plan, request: PlanRequest) -> str:
    if plan.limit != "servers" or plan.has_equal_parts or request.apply_bytes_per_s is not None:
        return ""
    return (
        "; their parts are those that suit the links, since what a core applies is a guess: psdist "
        "plan --apply SPEED, where you have measured it, chooses them for servers, too"
    )


def _times(longer_s: float, shorter_s: float) -> str:
    return f"{longer_s / shorter_s:.1f} times" if shorter_s > 0 else "many times"


def _seat_notes(seats: _Hosts, hosts: Sequence[_Host]) -> list[str]:
    """Return notes on shares: cores that no rank uses, a share across packages."""
    idle: dict[tuple[int, int], list[str]] = {}
    wide: list[str] = []
    for host in hosts:
        node = seats.cluster.nodes[host.node]
        given = [seat.cores for _, seat in seats.of(host)]
        cores = node.machine.cores
        left = len(cores) - len({core for each in given for core in each})
        if left and all(given):
            idle.setdefault((left, len(cores)), []).append(node.name)
        if len(given) == 1 and len({core.package for core in cores}) > 1:
            wide.append(node.name)
    notes = [
        f"{_some_hosts(names)}: {left} of {total} cores idle, since workers get equal shares, none "
        "across packages, and servers what applying needs"
        for (left, total), names in idle.items()
    ]
    if wide:
        notes.append(
            f"{_some_hosts(wide)}: one rank on several packages, since it is alone there; its "
            "memory is near some of its cores only"
        )
    return notes


def _some_hosts(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _number(
    cluster: Cluster, seated: dict[int, tuple[int, Role, Seat]], group: Grouping
) -> tuple[tuple[PlannedRank, ...], list[int]]:
    """The ranks with their numbers among servers, workers and groups; the node of each server."""
    counts: dict[Role, int] = {"server": 0, "worker": 0}
    groups: dict[tuple[int, tuple[int, int]], int] = {}
    server_nodes: list[int] = []
    ranks: list[PlannedRank] = []
    wide = _wide_groups(cluster, seated, group)
    for rank in sorted(seated):
        node, role, seat = seated[rank]
        member = -1
        if role == "server":
            server_nodes.append(node)
        else:
            whole = {"node": (UNKNOWN, UNKNOWN), "rank": (rank, UNKNOWN)}
            key = (node, whole.get(str(group), _home(seat, group)))
            if wide:
                key = (wide[node], (UNKNOWN, UNKNOWN))
            member = groups.setdefault(key, len(groups))
        ranks.append(
            PlannedRank(
                rank=rank,
                host=cluster.nodes[node].name,
                role=role,
                index=counts[role],
                group=member,
                cores=seat.cores,
                cpus=seat.cpus,
                package=seat.package,
                numa=seat.numa,
                gpu=seat.gpu,
                nic=seat.nic,
            )
        )
        counts[role] += 1
    return tuple(ranks), server_nodes
