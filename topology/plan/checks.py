"""Whether a plan is sound, whoever made it: read from a file, typed in, or about to be written.

Owns what every reader of a plan may rely on beyond the types of its members, which are
:mod:`psdist.topology.plan.plan`'s. Whether it fits the machines of a cluster is for
:mod:`psdist.topology.emit.files`, which has both. It changes nothing.

    check(plan, where="plan.json")      # or PlacementError: plan.json: rank 3: index is 0, not 1
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final, NoReturn

from psdist.errors import PlacementError
from psdist.topology.plan.plan import Plan, PlannedRank
from psdist.topology.text.untrusted import shown

WEIGHTS_TOLERANCE: Final = 1e-6
"""How far from 1 the sum of the weights may be: rounding, also of somebody who types them."""
REMEDY: Final = "correct it or make the plan again"


def check(plan: Plan, *, where: str) -> None:
    """Raise PlacementError, one line that begins with ``where``, unless the plan is sound.

    Sound: ranks 0, 1, 2 ... in order; servers, workers and spares numbered in rank order, at least
    one of the first two; groups without gaps; a weight for each server, with sum 1; as many cores
    as CPUs or none; links whose time is finite.
    """
    counts = Counter[str]()
    for position, each in enumerate(plan.ranks):
        element = f"the rank of ranks[{position}]"
        if each.rank != position:
            refuse(where, element, each.rank, f"{position}: 0, 1, 2 ... are needed, each once")
        _check_rank(each, counts[each.role], where)
        counts[each.role] += 1
    for role in ("server", "worker"):
        if not counts[role]:
            refuse(where, f"the number of {role}s", 0, "at least 1")
    groups = {each.group for each in plan.ranks if each.role == "worker"}
    if groups != set(range(len(groups))):
        missing = min(set(range(len(groups))) - groups)
        refuse(where, f"the number of workers in group {missing}", 0, "at least 1: no gaps")
    num_servers = counts["server"]
    if len(plan.weights) != num_servers:
        refuse(where, "the number of weights", len(plan.weights), f"{num_servers}, one a server")
    total = math.fsum(plan.weights)
    if abs(total - 1) > WEIGHTS_TOLERANCE:
        refuse(where, "the sum of the weights", total, "1")
    for position, link in enumerate(plan.links):
        if not math.isfinite(link.seconds):
            refuse(where, f"links[{position}].bytes_per_s", link.bytes_per_s, "a link's speed")


def _check_rank(each: PlannedRank, index: int, where: str) -> None:
    name = f"rank {each.rank}"
    if each.index != index:
        refuse(where, f"{name}: index", each.index, f"{index}: {each.role}s count in rank order")
    if (each.group < 0) is (each.role == "worker") or each.group < -1:
        refuse(where, f"{name}: group", each.group, "0 or more for a worker, -1 for all others")
    if bool(each.cores) != bool(each.cpus):
        wanted = f"{len(each.cores)} cores with the cpus of each, or none of both"
        refuse(where, f"{name}: number of cpus", len(each.cpus), wanted)


def refuse(where: str, element: str, value: object, wanted: str) -> NoReturn:
    """Raise PlacementError: ``element`` of ``where`` is this value, and what it should be."""
    raise PlacementError(f"{where}: {element} is {shown(value)}, not {wanted}: {REMEDY}")
