"""Time of an exchange on links, servers and network cards: one judge of all placements. Pure.

times = judged(cluster, ranks, weights, groups, shares, request)
times.links_s, times.servers_s, times.cards_s
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from psdist.topology.machine.paths import Paths
from psdist.topology.network import Cluster
from psdist.topology.plan import LinkLoad, PlannedRank, host_groups
from psdist.topology.plan.serving_hosts import PlanRequest, apply_s, link_loads


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of one exchange."""

    links: tuple[LinkLoad, ...]
    servers_s: float
    cards_s: float

    @property
    def links_s(self) -> float:
        return max((link.seconds for link in self.links), default=0.0)

    @property
    def within_s(self) -> float:
        """Time in which groups of several hosts reduce and distribute among them."""
        return max((link.group_seconds for link in self.links), default=0.0)

    @property
    def exchange_s(self) -> float:
        return max(self.links_s, self.servers_s, self.cards_s)


def judged(
    cluster: Cluster,
    ranks: Sequence[PlannedRank],
    weights: Sequence[float],
    groups: Sequence[float],
    shares: Sequence[float],
    request: PlanRequest,
) -> Times:
    """Times for seated ranks; ``weights`` are the servers', ``groups`` and ``shares`` the
    nodes'."""
    cores = [len(each.cores) for each in ranks if each.role == "server"]
    within = host_groups.loads(cluster, ranks, model_bytes=request.planned_bytes)
    return Times(
        links=link_loads(cluster, groups, shares, request, within),
        servers_s=apply_s(groups, weights, cores, request),
        cards_s=_cards_s(cluster, ranks, weights, groups, shares, request),
    )


def _cards_s(
    cluster: Cluster,
    ranks: Sequence[PlannedRank],
    weights: Sequence[float],
    groups: Sequence[float],
    shares: Sequence[float],
    request: PlanRequest,
) -> float:
    """Seconds of the busiest network card of known speed; a group's traffic on a host is its first
    rank's there."""
    if len(cluster.nodes) == 1:
        return 0.0
    index = {node.name: position for position, node in enumerate(cluster.nodes)}
    num_groups = sum(groups)
    sent: defaultdict[tuple[int, str], float] = defaultdict(float)
    workers = Counter(each.group for each in ranks if each.role == "worker")
    here = Counter((each.group, each.host) for each in ranks if each.role == "worker")
    seen: set[tuple[int, int]] = set()
    for each in ranks:
        node = index[each.host]
        if each.role == "server":
            share = weights[each.index] * (num_groups - groups[node])
        elif (each.group, node) not in seen:
            seen.add((each.group, node))
            part = here[each.group, each.host] / workers[each.group]
            share = part * (1 - shares[node])
        else:
            continue
        sent[node, each.nic] += share
    speeds = {
        (node, card.name): card.speed
        for node in {node for node, _ in sent}
        for card in cluster.nodes[node].machine.nics
    }
    return max(
        (
            share * request.planned_bytes / speed
            for key, share in sent.items()
            if (speed := speeds.get(key, 0.0))
        ),
        default=0.0,
    )


def groups_s(cluster: Cluster, ranks: Sequence[PlannedRank], *, model_bytes: float) -> float:
    """Seconds that the slowest group's collectives take, a ring over what joins its GPUs on a host.

    Each worker sends all but its own part once to reduce and once to share. Known of groups of
    which each worker has a GPU of its own; others reduce in memory, whose speed no source tells.
    """
    machines = {node.name: node.machine for node in cluster.nodes}
    groups: defaultdict[tuple[int, str], list[PlannedRank]] = defaultdict(list)
    for each in ranks:
        if each.role == "worker":
            groups[each.group, each.host].append(each)
    paths: dict[int, Paths] = {}
    speeds: dict[tuple[int, tuple[str, ...]], float] = {}
    longest = 0.0
    for members in groups.values():
        number = len(members)
        gpus = tuple(each.gpu for each in members)
        if number < 2 or "" in gpus or len(set(gpus)) < number:
            continue
        machine = machines[members[0].host]
        key = (id(machine), gpus)
        if key not in speeds:
            known = {gpu.pci: gpu for gpu in machine.gpus}
            found = paths.setdefault(id(machine), Paths(machine))
            speeds[key] = found.ring_bytes_per_s([known[gpu] for gpu in gpus])
        longest = max(longest, 2 * (number - 1) / number * model_bytes / speeds[key])
    return longest
