"""A plan as JSON and back: what ``psdist plan`` writes and ``psdist run --placement`` reads.

Owns the format. What comes from a file is not trusted: it has limits, and ends in a sound
:class:`~psdist.topology.plan.plan.Plan` or in one PlacementError. It opens no file.

    data = encode(plan)
    assert decode(data, where="plan.json") == plan
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Final

from psdist.errors import PlacementError
from psdist.topology.plan.checks import MAX_RANKS, check, refuse
from psdist.topology.plan.plan import LinkLoad, Plan, PlannedRank
from psdist.topology.text.strict_json import Limits, parse
from psdist.topology.text.untrusted import decoded, shown

FORMAT: Final = "psdist plan"
VERSION: Final = 2
MAX_BYTES: Final = 32 << 20
"""10,000 ranks with 192 cores of two threads each."""
# A rank has six brackets, the others are for the links; its cores lie three deep.
LIMITS: Final = Limits(depth=8, brackets=10 * MAX_RANKS, commas=6_000_000)
_PLAN_KEYS = tuple(field.name for field in fields(Plan))
_RANK_KEYS = tuple(field.name for field in fields(PlannedRank))
_LINK_KEYS = ("name", "kind", "num_bytes", "bytes_per_s")
# One to a line; everything else of a plan is short.
_LONG_LISTS = ("ranks", "links")


def encode(plan: Plan) -> bytes:
    """The plan as JSON, ASCII, a line for each rank and link, keys always in the same order.

    Raises PlacementError for a plan that ``decode`` would refuse.
    """
    check(plan, where="plan")
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
    plan: what :mod:`psdist.topology.plan.checks` refuses, keys that are unknown, missing or there
    twice, more than 32 MiB.
    """
    text = decoded(data, where=where, max_bytes=MAX_BYTES)
    content = parse(text, where=where, made_by="psdist plan", limits=LIMITS)
    if isinstance(content, dict):  # first, so that another program's file is called that
        found = content.get("format"), content.get("version")
        if found != (FORMAT, VERSION):
            raise PlacementError(
                f"{where}: format {shown(found[0])}, version {shown(found[1])}: this psdist reads "
                f"{FORMAT!r}, version {VERSION}; make the plan again with psdist plan"
            )
    top = _object(content, ("format", "version", *_PLAN_KEYS), "the plan", where)
    compared = top["compared"]
    if not isinstance(compared, dict):
        refuse(where, "compared", compared, "an object of seconds by placement")
    ranks = [
        _rank(value, f"ranks[{position}]", where)
        for position, value in enumerate(_items(top["ranks"], "ranks", where))
    ]
    plan = Plan(
        ranks=tuple(sorted(ranks, key=lambda each: each.rank)),
        weights=tuple(
            _number(value, "weights", where) for value in _items(top["weights"], "weights", where)
        ),
        links=tuple(
            _link(value, f"links[{position}]", where)
            for position, value in enumerate(_items(top["links"], "links", where))
        ),
        model_bytes=_number(top["model_bytes"], "model_bytes", where),
        placement=_text(top["placement"], "placement", where),
        cost_s=_number(top["cost_s"], "cost_s", where),
        bound_s=_number(top["bound_s"], "bound_s", where),
        compared={key: _number(value, "compared", where) for key, value in compared.items()},
        source=_text(top["source"], "source", where),
        notes=tuple(_text(value, "notes", where) for value in _items(top["notes"], "notes", where)),
    )
    check(plan, where=where)
    return plan


def _rank(value: object, element: str, where: str) -> PlannedRank:
    members = _object(value, _RANK_KEYS, element, where)

    def read(key: str, reader: Callable[[object, str, str], Any]) -> Any:
        return reader(members[key], f"{element}.{key}", where)

    return PlannedRank(
        rank=read("rank", _integer),
        host=read("host", _text),
        role=read("role", _text),
        index=read("index", _integer),
        group=read("group", _integer),
        cores=read("cores", _integers),
        cpus=read("cpus", _integers),
        package=read("package", _integer),
        numa=read("numa", _integer),
        gpu=read("gpu", _text),
        nic=read("nic", _text),
    )


def _link(value: object, element: str, where: str) -> LinkLoad:
    members = _object(value, _LINK_KEYS, element, where)
    kind: Any = _text(members["kind"], f"{element}.kind", where)
    return LinkLoad(
        name=_text(members["name"], f"{element}.name", where),
        kind=kind,
        num_bytes=_number(members["num_bytes"], f"{element}.num_bytes", where),
        bytes_per_s=_number(members["bytes_per_s"], f"{element}.bytes_per_s", where),
    )


def _object(value: object, keys: Sequence[str], element: str, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        refuse(where, element, value, "an object")
    if wrong := sorted(value.keys() ^ set(keys)):
        what = "has no key" if wrong[0] in keys else "has the unknown key"
        raise PlacementError(
            f"{where}: {element} {what} {shown(wrong[0])}: correct it or make the plan again"
        )
    return value


def _items(value: object, element: str, where: str) -> list[object]:
    if not isinstance(value, list):
        refuse(where, element, value, "a list")
    return value


def _integers(value: object, element: str, where: str) -> tuple[int, ...]:
    return tuple(_integer(item, element, where) for item in _items(value, element, where))


def _integer(value: object, element: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        refuse(where, element, value, "a whole number")
    return value


def _number(value: object, element: str, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse(where, element, value, "a number")
    try:
        return float(value)
    except OverflowError:
        refuse(where, element, value, "a number that a float holds")


def _text(value: object, element: str, where: str) -> str:
    if not isinstance(value, str):
        refuse(where, element, value, "text")
    return value


def _member(key: str, value: object) -> str:
    return f"  {json.dumps(key)}: {json.dumps(value)}"
