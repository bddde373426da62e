"""Which ranks of a job wait as spares, and a plan that has them; pure.

    spares = choose_spares(["n1", "n1", "n2", "n2", "n3"], 1)     # (4,): a host of its own
    plan = with_spares(plan_job(cluster, others, request), hosts, spares)

A host fails as a whole, so spares are first whole hosts, if two others remain for the servers and
their replicas, then the last ranks of the hosts that have most. They are not bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from psdist.errors import PlacementError
from psdist.topology.machine import UNKNOWN
from psdist.topology.plan import Plan, PlannedRank

LEAST_BESIDE = 3
"""Minimum ranks of a job besides its spares: two servers and a worker, or two workers and a
server."""


def choose_spares(hosts: Sequence[str], count: int) -> tuple[int, ...]:
    """``hosts``: of each rank. ``count`` ranks, ascending. Raises PlacementError where too few are
    left."""
    if count and len(hosts) - count < LEAST_BESIDE:
        raise PlacementError(
            f"failures.spares = {count} with {len(hosts)} ranks: besides spares, a job needs "
            "2 servers and a worker, or, if workers are to be replaced, 2 workers and a server; "
            f"start {count + LEAST_BESIDE} ranks or more, or ask for fewer spares"
        )
    here: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        here.setdefault(host, []).append(rank)
    num_spares = dict.fromkeys(here, 0)
    found: list[int] = []
    for host in sorted(here, key=lambda each: (len(here[each]), -here[each][0])):
        if len(here[host]) <= count - len(found) and len(here) > 2:
            found += here.pop(host)
    while len(found) < count:
        host = max(here, key=lambda each: (len(here[each]), -num_spares[each], here[each][0]))
        num_spares[host] += 1
        found.append(here[host].pop())
    return tuple(sorted(found))


def with_spares(plan: Plan, hosts: Sequence[str], spares: Sequence[int]) -> Plan:
    """``plan``, of all ranks but ``spares``, with these; ``hosts``: of each rank."""
    waiting = [
        PlannedRank(
            rank=rank,
            host=hosts[rank],
            role="spare",
            index=index,
            group=-1,
            cores=(),
            cpus=(),
            package=UNKNOWN,
            numa=UNKNOWN,
            gpu="",
            nic="",
        )
        for index, rank in enumerate(spares)
    ]
    ranks = sorted([*plan.ranks, *waiting], key=lambda each: each.rank)
    return replace(plan, ranks=tuple(ranks))
