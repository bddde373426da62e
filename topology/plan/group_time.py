"""How long a group's workers need to reduce their gradients and to share parameters on a host.

groups_s(cluster, ranks, model_bytes=4e9)       # of the slowest group; 0 where it is not known
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from psdist.topology.machine.paths import Paths
from psdist.topology.network.cluster import Cluster
from psdist.topology.plan.plan import PlannedRank


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
