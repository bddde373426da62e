"""Predict a plan's time after a change: more servers, another node, faster links.

    what_if(cluster, plan, request, workers=[8, 8])     # [("one more server", 0.12), ...]

Each change is planned in full, by the planner that made the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from psdist.errors import PlacementError
from psdist.topology.network import Cluster
from psdist.topology.plan import Plan
from psdist.topology.plan.planning import PlanRequest, plan_ahead


def what_if(
    cluster: Cluster,
    plan: Plan,
    request: PlanRequest,
    *,
    workers: Sequence[int],
    server_nodes: Iterable[str] = (),
    is_useful: Callable[[Plan], bool] = lambda _plan: True,
) -> list[tuple[str, float]]:
    """Pairs of a change, in words, and the seconds of an exchange then; arguments as plan_ahead's.

    A change for which there is no room, or whose plan is not useful, is left out.
    """
    count = len(plan.weights)
    changes: list[tuple[str, float]] = []

    def attempt(words: str, changed: Cluster, **asked: object) -> None:
        others = dict(asked)
        on = others.pop("workers", workers)
        try:
            found = plan_ahead(
                changed,
                replace(request, **{"servers": count, **others}),  # type: ignore[arg-type]
                workers=on,  # type: ignore[arg-type]
                server_nodes=server_nodes,
            )
        except PlacementError:
            return
        if is_useful(found):
            changes.append((words, found.exchange_s))

    attempt("one more server", cluster, servers=count + 1)
    everywhere = len(cluster.nodes)
    if everywhere > count + 1:
        attempt(f"a server on every node ({everywhere})", cluster, servers=everywhere)
    last = cluster.nodes[-1]
    more = replace(cluster, nodes=(*cluster.nodes, replace(last, name=f"{last.name}-more")))
    attempt(
        f"another node beside {last.name}, with servers only",
        more,
        servers=count + 1,
        workers=[*workers, 0],
    )
    worst = plan.worst_link
    if worst is not None:
        twice = {worst.name: worst.bytes_per_s * 2}
        faster = (
            cluster.with_links(node_bytes_per_s=twice)
            if worst.kind == "node"
            else cluster.with_links(switch_bytes_per_s=twice)
        )
        attempt(f"twice the bandwidth on {worst.name}", faster)
    if request.group not in ("node", "auto"):
        attempt("groups of whole nodes (--group node)", cluster, group="node")
    return changes
