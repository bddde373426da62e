"""Whether a plan is sound, whoever made it: read from a file, typed in, or about to be written.

Owns what every reader of a plan may rely on. Whether it fits the machines of a cluster is for
:mod:`psdist.topology.emit.files`, which has both. It changes nothing.

    check(plan, where="plan.json")      # or PlacementError: plan.json: rank 3: host is ...
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final, NoReturn

from psdist.errors import PlacementError
from psdist.topology.plan.plan import Plan, PlannedRank
from psdist.topology.text.untrusted import HOST_NAME, shown

MAX_RANKS: Final = 1 << 16
MAX_CPU: Final = 1 << 16
MAX_CHARACTERS: Final = 2000
WEIGHTS_TOLERANCE: Final = 1e-6
"""How far from 1 the sum of the weights may be: rounding, also of somebody who types them."""

_ROLES = ("server", "worker")
_LINK_KINDS = ("node", "switch")


def check(plan: Plan, *, where: str) -> None:
    """Raise PlacementError, one line that begins with ``where``, unless the plan is sound.

    Sound: ranks 0, 1, 2 ... in order; host names that may reach a launcher's file; servers and
    workers numbered in rank order, at least one of each; groups without gaps; a weight for each
    server, with sum 1; no core or PU twice in a rank; finite numbers; text without control
    characters, which a terminal would obey.
    """
    if len(plan.ranks) > MAX_RANKS:
        refuse(where, "the number of ranks", len(plan.ranks), f"at most {MAX_RANKS:,}")
    counts = Counter[str]()
    for position, each in enumerate(plan.ranks):
        element = f"the rank of ranks[{position}]"
        if each.rank != position:
            refuse(where, element, each.rank, f"{position}: 0, 1, 2 ... are needed, each once")
        _check_rank(each, counts[each.role], where)
        counts[each.role] += 1
    for role in _ROLES:
        if not counts[role]:
            refuse(where, f"the number of {role}s", 0, "at least 1")
    groups = {each.group for each in plan.ranks if each.role == "worker"}
    if groups != set(range(len(groups))):
        missing = min(set(range(len(groups))) - groups)
        refuse(where, f"the number of workers in group {missing}", 0, "at least 1: no gaps")
    _check_servers(plan, counts["server"], where)
    _check_figures(plan, where)


def _check_rank(each: PlannedRank, index: int, where: str) -> None:
    name = f"rank {each.rank}"
    if not HOST_NAME.fullmatch(each.host):
        wanted = "letters, digits, '.', '_' and '-', with no '-' or '.' at the start"
        refuse(where, f"{name}: host", each.host, wanted)
    if each.role not in _ROLES:
        refuse(where, f"{name}: role", each.role, "'server' or 'worker'")
    if each.index != index:
        refuse(where, f"{name}: index", each.index, f"{index}: {each.role}s count in rank order")
    if (each.group < 0) is (each.role == "worker") or each.group < -1:
        refuse(where, f"{name}: group", each.group, "-1 for a server, 0 or more for a worker")
    for key, numbers in (("cores", each.cores), ("cpus", each.cpus)):
        if not all(0 <= number < MAX_CPU for number in numbers):
            outside = next(number for number in numbers if not 0 <= number < MAX_CPU)
            refuse(where, f"{name}: {key}", outside, f"in 0 to {MAX_CPU - 1}")
        if len(set(numbers)) != len(numbers):
            twice = next(number for number, count in Counter(numbers).items() if count > 1)
            refuse(where, f"{name}: {key}", twice, "there once only")
    if bool(each.cores) != bool(each.cpus):
        wanted = f"{len(each.cores)} cores with the cpus of each, or none of both"
        refuse(where, f"{name}: number of cpus", len(each.cpus), wanted)
    for key, number in (("package", each.package), ("numa", each.numa)):
        if not -1 <= number < MAX_CPU:
            refuse(where, f"{name}: {key}", number, f"in -1 to {MAX_CPU - 1}")
    for key, text in (("gpu", each.gpu), ("nic", each.nic)):
        _check_text(text, f"{name}: {key}", where)


def _check_servers(plan: Plan, num_servers: int, where: str) -> None:
    if len(plan.weights) != num_servers:
        refuse(where, "the number of weights", len(plan.weights), f"{num_servers}, one a server")
    for server, weight in enumerate(plan.weights):
        _check_amount(weight, f"weights[{server}]", where)
    total = math.fsum(plan.weights)
    if abs(total - 1) > WEIGHTS_TOLERANCE:
        refuse(where, "the sum of the weights", total, "1")


def _check_figures(plan: Plan, where: str) -> None:
    for position, link in enumerate(plan.links):
        element = f"links[{position}]"
        _check_text(link.name, f"{element}.name", where)
        if link.kind not in _LINK_KINDS:
            refuse(where, f"{element}.kind", link.kind, "'node' or 'switch'")
        _check_amount(link.num_bytes, f"{element}.num_bytes", where)
        _check_amount(link.bytes_per_s, f"{element}.bytes_per_s", where)
        if link.bytes_per_s == 0 or not math.isfinite(link.seconds):
            refuse(where, f"{element}.bytes_per_s", link.bytes_per_s, "a link's speed")
    for key in ("model_bytes", "cost_s", "bound_s"):
        _check_amount(getattr(plan, key), key, where)
    for key, seconds in plan.compared.items():
        _check_text(key, "a key of compared", where)
        _check_amount(seconds, f"compared[{shown(key)}]", where)
    _check_text(plan.placement, "placement", where)
    _check_text(plan.source, "source", where)
    for position, note in enumerate(plan.notes):
        _check_text(note, f"notes[{position}]", where)


def _check_amount(value: float, element: str, where: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        refuse(where, element, value, "a number of 0 or more")


def _check_text(value: str, element: str, where: str) -> None:
    if len(value) > MAX_CHARACTERS or not value.isprintable():
        wanted = f"at most {MAX_CHARACTERS} characters without control characters"
        refuse(where, element, value, wanted)


def refuse(where: str, element: str, value: object, wanted: str) -> NoReturn:
    """Raise PlacementError: ``element`` of ``where`` is this value, and what it should be."""
    raise PlacementError(
        f"{where}: {element} is {shown(value)}, not {wanted}: correct it or make the plan again"
    )
