"""What may be mistaken for what: fields of one class and kind, members of one enum, names alike.

Owns the knowledge behind the operator "neighbour": read from the annotations of the files
themselves, never by importing them.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Neighbours:
    """Each maps a name to the one that stands in for it."""

    fields: dict[str, dict[str, str]] = field(default_factory=dict)
    """Class -> field -> the next field of the same annotation."""
    members: dict[str, dict[str, str]] = field(default_factory=dict)
    """Class of constants (an Enum, or plain) -> member -> the next member."""
    constants: dict[str, list[str]] = field(default_factory=dict)
    """A module's constant -> the others of its assignment."""

    @classmethod
    def of(cls, sources: Iterable[str]) -> Neighbours:
        found = cls()
        for source in sources:
            tree = ast.parse(source)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found._read_class(node)
            for statement in tree.body:
                if isinstance(statement, ast.Assign) and isinstance(
                    statement.targets[0], ast.Tuple
                ):
                    names = [ast.unparse(each) for each in statement.targets[0].elts]
                    if all(name.isupper() for name in names):
                        found.constants |= {
                            name: [other for other in names if other != name] for name in names
                        }
        return found

    def _read_class(self, node: ast.ClassDef) -> None:
        by_kind: dict[str, list[str]] = defaultdict(list)
        members: list[str] = []
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                by_kind[ast.unparse(statement.annotation)].append(statement.target.id)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                name = statement.targets[0].id
                if name.isupper() and isinstance(statement.value, ast.Constant):
                    members.append(name)
            elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                for kind, name in attributes_of(statement):
                    by_kind[kind].append(name)
        self.fields[node.name] = {
            name: following
            for names in by_kind.values()
            for name, following in in_a_ring(names).items()
        }
        self.members[node.name] = in_a_ring(members)


def attributes_of(init: ast.FunctionDef) -> Iterable[tuple[str, str]]:
    """(kind, name) of the attributes that a constructor sets from constants and parameters."""
    of_parameter = annotations_of(init)
    for statement in ast.walk(init):
        if isinstance(statement, ast.AnnAssign):
            targets, kind = [statement.target], ast.unparse(statement.annotation)
        elif isinstance(statement, ast.Assign):
            targets, kind = statement.targets, _kind_of(statement.value, of_parameter)
        else:
            continue
        for target in targets:
            is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            if kind and is_own and isinstance(target, ast.Attribute):
                yield kind, target.attr


def _kind_of(value: ast.expr, of_parameter: dict[str, str]) -> str:
    if isinstance(value, ast.Constant) and value.value is not None:
        return type(value.value).__name__
    return of_parameter.get(value.id, "") if isinstance(value, ast.Name) else ""


def annotations_of(function: ast.FunctionDef) -> dict[str, str]:
    """Parameter -> annotation."""
    arguments = function.args
    return {
        each.arg: ast.unparse(each.annotation)
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        if each.annotation is not None
    }


def in_a_ring(names: Iterable[str]) -> dict[str, str]:
    """Each name -> the next, the last -> the first; nothing for one alone."""
    ring = list(dict.fromkeys(names))
    return dict(zip(ring, ring[1:] + ring[:1], strict=True)) if len(ring) > 1 else {}
