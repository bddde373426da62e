"""Groups of several hosts: which hosts make one, what of it counts where, what it sends. Pure.

    of_hosts(cluster, [2, 2, 2, 0], "rack")        # [[0, 1], [2]]: nodes with workers, by group
    parts(cluster, [2, 2, 2, 0], "rack")           # [0.5, 0.5, 1.0, 0.0]: of a group on each node
    loads(cluster, ranks, model_bytes=4e9)         # bytes over each link, besides the exchange

Every worker's slice comes to it once from each other host of its group, and returns once. Below a
link are n of the group's N workers on h of its H hosts, so it carries (n (H - h) + (N - n) h) / N
of the model in each direction.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from psdist.errors import PlacementError
from psdist.topology.network import Cluster
from psdist.topology.plan import Grouping, PlannedRank


def spans_hosts(group: Grouping) -> bool:
    """Whether groups may lie on several hosts."""
    return group == "rack" or isinstance(group, int)


def require_racks(cluster: Cluster, group: Grouping) -> None:
    """Raise PlacementError if racks are requested but none are known."""
    if group == "rack" and len(cluster.nodes) > 1 and not cluster.has_racks:
        raise PlacementError(
            "group = rack: nothing is known of racks; give a table of switches (psdist plan "
            "--racks FILE, psdist run --set hosts.racks=FILE), start by Slurm with its topology "
            "plugin, or ask for a number of hosts (--group 4)"
        )


def of_hosts(cluster: Cluster, workers: Sequence[int], group: Grouping) -> list[list[int]]:
    """The nodes that have any of the ``workers``, by group: neighbours under one switch."""
    racks: defaultdict[int, list[int]] = defaultdict(list)
    for node, here in enumerate(workers):
        if here:
            racks[cluster.nodes[node].switch].append(node)
    found: list[list[int]] = []
    for nodes in racks.values():
        most = group if isinstance(group, int) else len(nodes)
        found += [nodes[first : first + most] for first in range(0, len(nodes), most)]
    return found


def parts(cluster: Cluster, workers: Sequence[int], group: Grouping) -> list[float]:
    """Return the part of a group that each node counts: its part of the group's workers."""
    found = [0.0] * len(workers)
    for nodes in of_hosts(cluster, workers, group):
        total = sum(workers[node] for node in nodes)
        for node in nodes:
            found[node] = workers[node] / total
    return found


def size_notes(cluster: Cluster, workers: Sequence[int], group: Grouping) -> list[str]:
    """Return notes on groups with fewer hosts than requested."""
    if not isinstance(group, int):
        return []
    smaller = Counter(
        len(nodes) for nodes in of_hosts(cluster, workers, group) if len(nodes) < group
    )
    if not smaller:
        return []
    words = ", ".join(f"{count} of {size}" for size, count in sorted(smaller.items(), reverse=True))
    return [
        f"group = {group}: some groups have fewer hosts ({words}), since none lies in several "
        "racks and only hosts with workers count"
    ]


def loads(
    cluster: Cluster, ranks: Sequence[PlannedRank], *, model_bytes: float
) -> dict[str, float]:
    """Bytes in each direction over the link of each node and switch that groups send over, by
    ``node NAME`` and ``switch NAME``."""
    index = {node.name: position for position, node in enumerate(cluster.nodes)}
    workers: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for each in ranks:
        if each.role == "worker":
            workers[each.group][index[each.host]] += 1
    found: defaultdict[str, float] = defaultdict(float)
    for here in workers.values():
        if len(here) == 1:
            continue
        total, num_hosts = sum(here.values()), len(here)
        below: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        for node, count in here.items():
            for link in (
                f"node {cluster.nodes[node].name}",
                *(f"switch {cluster.switches[switch].name}" for switch in cluster.path(node)[:-1]),
            ):
                below[link][0] += count
                below[link][1] += 1
        for link, (count, hosts) in below.items():
            crossing = count * (num_hosts - hosts) + (total - count) * hosts
            found[link] += crossing / total * model_bytes
    return found
