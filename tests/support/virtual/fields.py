"""Fields of a server: those that its classes have, those that the page PAGE lists, and those that
hold something at a moment of a virtual job.

    fields_of("ReceivePool")                    # {"_free", "_held", ...}
    rows()                                      # of the table, one for each class and kind
    fields_in_use(job.servers[1], {"Replica"})  # {("Replica", "_arrived"), ...}
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import deque
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from textwrap import dedent
from types import NoneType
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = "docs/reference/server-fields.md"
_HEADING = "# Fields of a server"
_PLAIN = (int, float, str, bytes, NoneType)
_CONTAINERS = (list, tuple, set, frozenset, deque)


class Row(NamedTuple):
    cls: str
    kind: str
    fields: tuple[str, ...]
    remedy: str


def rows() -> list[Row]:
    """Return the rows of the table of PAGE."""
    text = (REPOSITORY / PAGE).read_text(encoding="utf-8")
    section = text.partition(_HEADING)[2].partition("\n## ")[0]
    found: list[Row] = []
    for line in section.splitlines():
        cells = [each.strip() for each in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[2].startswith("`"):
            (name, *_) = re.findall(r"`(\w+)`", cells[0]) or [found[-1].cls]
            found.append(Row(name, cells[1], tuple(re.findall(r"`(\w+)`", cells[2])), cells[3]))
    return found


@cache
def class_of_server(name: str) -> type:
    """Return the class of this name in servers/. Raises LookupError if there is none."""
    for path in sorted((REPOSITORY / "servers").rglob("*.py")):
        if re.search(rf"^class {name}\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
            cls: type = getattr(importlib.import_module(f"psdist.{module}"), name)
            return cls
    raise LookupError(f"{PAGE} lists the fields of {name}, which servers/ does not have")


def fields_of(name: str) -> set[str]:
    """Return the attributes that the class declares or sets in ``self``, and its bases do not."""
    cls, *bases = class_of_server(name).__mro__
    return _fields_in(cls).difference(*map(_fields_in, bases))


@cache
def _fields_in(cls: type) -> set[str]:
    if not cls.__module__.startswith("psdist."):
        return set()
    nodes = ast.walk(ast.parse(dedent(inspect.getsource(cls))))
    return {field for node in nodes for field in _fields_set_by(node)}


def _fields_set_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                yield each.target.id
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        for each in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(each, ast.Attribute) and getattr(each.value, "id", "") == "self":
                yield each.attr


def fields_in_use(root: object, names: set[str]) -> set[tuple[str, str]]:
    """Return the fields of objects of these classes, within ``root``, that hold something."""
    found = set[tuple[str, str]]()
    seen, left = set[int](), [root]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, Enum):
            continue
        seen.add(id(each))
        bases = names.intersection(base.__name__ for base in type(each).__mro__)
        if isinstance(each, dict):
            left += each.values()
        elif isinstance(each, _CONTAINERS) and not hasattr(each, "_fields"):
            left += each
        elif type(each).__module__.startswith("psdist.servers"):
            for field in (*_attributes(type(each)), *getattr(each, "__dict__", ())):
                value = getattr(each, field, None)
                if not isinstance(value, _PLAIN):
                    left.append(value)
                if bases and _holds_something(value):
                    found.update((name, field) for name in bases)
    return found


@cache
def _attributes(cls: type) -> tuple[str, ...]:
    """Return the slots of a class; nothing for a class without slots."""
    slots = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    return tuple(name for each in slots for name in ([each] if isinstance(each, str) else each))


def _holds_something(value: Any) -> bool:
    if isinstance(value, int):
        return value not in (0, -1)
    return value is not None and (not isinstance(value, (dict, *_CONTAINERS)) or bool(value))
