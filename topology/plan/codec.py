"""A plan as JSON and back: what ``psdist plan`` writes and ``psdist run --placement`` reads.

Owns the format. What comes from a file is not trusted: it has limits, and ends in a sound
:class:`~psdist.topology.plan.plan.Plan` or in one PlacementError. It opens no file.

    data = encode(plan)
    assert decode(data, where="plan.json") == plan
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import fields, replace
from functools import cache
from typing import Final, NoReturn

from pydantic import TypeAdapter

from psdist.errors import PlacementError
from psdist.topology.plan.plan import MAX_RANKS, LinkLoad, Plan, PlannedRank
from psdist.topology.text.models import check_format, validated
from psdist.topology.text.strict_json import Limits, parse
from psdist.topology.text.untrusted import decoded, shown

WEIGHTS_TOLERANCE: Final = 1e-6
"""How far from 1 the sum of the weights may be: rounding, also of somebody who types them."""
REMEDY: Final = "correct it or make the plan again"


def check(plan: Plan, *, where: str) -> None:
    """Raise PlacementError, one line that begins with ``where``, unless the plan is sound.

    Whether it fits the machines of a cluster is for :mod:`psdist.topology.emit.files`.

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


FORMAT: Final = "psdist plan"
VERSION: Final = 2
MAX_BYTES: Final = 32 << 20
"""10,000 ranks with 192 cores of two threads each."""
# A rank has six brackets, the others are for the links; its cores lie three deep.
LIMITS: Final = Limits(depth=8, brackets=10 * MAX_RANKS, commas=6_000_000)
_PLAN_KEYS = tuple(field.name for field in fields(Plan))
_RANK_KEYS = tuple(field.name for field in fields(PlannedRank))
_LINK_KEYS = tuple(field.name for field in fields(LinkLoad))
# One to a line; everything else of a plan is short.
_LONG_LISTS = ("ranks", "links")


def encode(plan: Plan) -> bytes:
    """The plan as JSON, ASCII, a line for each rank and link, keys always in the same order.

    Raises PlacementError for a plan that ``decode`` would refuse.
    """
    check(validated(_adapter(), plan, where="plan", remedy=REMEDY), where="plan")
    lines = [_member("format", FORMAT), _member("version", VERSION)]
    for key in _PLAN_KEYS:
        value = getattr(plan, key)
        if key in _LONG_LISTS and value:
            names = _RANK_KEYS if key == "ranks" else _LINK_KEYS
            entries = (json.dumps({name: getattr(each, name) for name in names}) for each in value)
            lines.append(f"  {json.dumps(key)}: [\n    " + ",\n    ".join(entries) + "\n  ]")
        else:
            lines.append(_member(key, value))
    data = ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")
    if len(data) > MAX_BYTES:
        raise PlacementError(
            f"plan: {len(plan.ranks):,} ranks and their cores take {len(data):,} bytes, more than "
            f"{MAX_BYTES:,}: start fewer ranks"
        )
    return data


def decode(data: bytes, *, where: str) -> Plan:
    """The plan that ``data`` is; ``where`` names it in messages, such as the path of its file.

    Ranks may stand in any order. Raises PlacementError for anything that is not a whole and sound
    plan: members of another type (:mod:`psdist.topology.plan.plan`), keys that are unknown, missing
    or there twice, what :func:`check` refuses, more than 32 MiB.
    """
    text = decoded(data, where=where, max_bytes=MAX_BYTES)
    content = parse(text, where=where, made_by="psdist plan", limits=LIMITS)
    members = check_format(content, FORMAT, VERSION, where=where, remedy=REMEDY)
    found = validated(_adapter(), members, where=where, remedy=REMEDY)
    plan = replace(found, ranks=tuple(sorted(found.ranks, key=lambda each: each.rank)))
    check(plan, where=where)
    return plan


@cache
def _adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def _member(key: str, value: object) -> str:
    return f"  {json.dumps(key)}: {json.dumps(value)}"
