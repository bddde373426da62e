"""Measure sources with ast: parameters, conditions, branches, texts of refusals, lines.

Knows nothing of psdist's names; tests/house.py has these and the table. Limits: ast knows no types
and no values, so attributes are matched by the usual names of variables, and a table whose entry is
stored in a variable before it is called is not seen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

Trees: TypeAlias = Mapping[str, ast.Module]
"""By path."""


@cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a module; kept, because each figure looks at all of them."""
    return list(ast.walk(tree))


def classes_of(trees: Trees) -> Iterator[tuple[str, ast.ClassDef]]:
    for path, tree in trees.items():
        yield from ((path, each) for each in nodes_of(tree) if isinstance(each, ast.ClassDef))


def class_named(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(each for _, each in classes_of({"": tree}) if each.name == name)


def methods_of(cls: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in cls.body if isinstance(each, ast.FunctionDef)}


def last_name(node: ast.AST) -> str:
    """Return ``c`` for ``a.b.c`` and ``a.c[0]``, "" for what has no name."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


# Parameters


def declared_parameters(cls: ast.ClassDef) -> list[ast.arg]:
    """Return the parameters of ``__init__`` except self, ``*args`` and ``**kwargs`` included."""
    given = methods_of(cls)["__init__"].args
    variable = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *variable][1:]


def fields_of(cls: ast.ClassDef) -> list[str]:
    """Return the fields of a class that has fields and no public methods; nothing for others."""
    methods = methods_of(cls)
    if "__init__" in methods or any(not name.startswith("_") for name in methods):
        return []
    fields = [each.target for each in cls.body if isinstance(each, ast.AnnAssign)]
    return [each.id for each in fields if isinstance(each, ast.Name)]


def hidden_parameters(cls: ast.ClassDef, instances: set[str], trees: Trees) -> list[str]:
    """Return what reaches an instance past its parameters: the fields of data classes that are
    passed (the first field is the parameter itself), attributes that other code assigns on the
    variables ``instances`` and methods it calls there that only assign, and variables of a function
    around the class that it reads."""
    fields = {each.name: fields_of(each) for _, each in classes_of(trees)}
    found = []
    for parameter in declared_parameters(cls):
        annotation = ast.unparse(parameter.annotation) if parameter.annotation else ""
        for part in annotation.split(" | "):
            found += [f"{parameter.arg}.{field}" for field in fields.get(part, [])[1:]]
    return [*found, *_set_from_outside(cls, instances, trees), *_captured(cls, trees)]


def _set_from_outside(cls: ast.ClassDef, instances: set[str], trees: Trees) -> list[str]:
    own = {
        each.attr
        for each in ast.walk(cls)
        if isinstance(each, ast.Attribute) and last_name(each.value) == "self"
    }
    setters = {name for name, method in methods_of(cls).items() if _only_assigns(method)}
    found = set()
    for node in (node for tree in trees.values() for node in nodes_of(tree)):
        if isinstance(node, ast.Attribute) and last_name(node.value) in instances:
            is_assigned = isinstance(node.ctx, ast.Store) and node.attr in own
            if is_assigned or node.attr in setters:
                found.add(f".{node.attr}")
    return sorted(found)


def _only_assigns(method: ast.FunctionDef) -> bool:
    """True if the method does nothing but assign its parameters to attributes."""
    body = [each for each in method.body if not isinstance(each, ast.Expr)]
    given = {each.arg for each in method.args.args}
    return bool(body) and all(
        isinstance(each, ast.Assign) and isinstance(each.value, ast.Name) and each.value.id in given
        for each in body
    )


def _captured(cls: ast.ClassDef, trees: Trees) -> list[str]:
    inside = {id(each) for each in ast.walk(cls)}
    for function in (node for tree in trees.values() for node in nodes_of(tree)):
        if isinstance(function, ast.FunctionDef) and any(cls is each for each in function.body):
            names = [each for each in ast.walk(function) if isinstance(each, ast.Name)]
            given = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
            given |= {n.id for n in names if isinstance(n.ctx, ast.Store) and id(n) not in inside}
            return sorted(given & {each.id for each in names if id(each) in inside})
    return []


# Conditions


def num_branches(function: ast.FunctionDef) -> int:
    kinds = ast.If | ast.IfExp | ast.While | ast.For | ast.match_case
    return sum(isinstance(node, kinds) for node in ast.walk(function))


class Condition(NamedTuple):
    line: int
    reads: Sequence[ast.AST]
    """The expressions that it reads."""


def conditions(tree: ast.Module) -> Iterator[Condition]:
    """Yield the tests of if, elif, while, conditional expressions and comprehensions; and what
    replaces a test: a case of match except the default, ``a and f()`` as a statement, a call of a
    table's entry (``table[key](...)``, ``table.get(key)(...)``), getattr with a default or a
    computed name."""
    for node in nodes_of(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield Condition(node.test.lineno, [node.test])
        elif isinstance(node, ast.comprehension):
            yield from (Condition(each.lineno, [each]) for each in node.ifs)
        elif isinstance(node, ast.Match):
            for case in node.cases:
                if case.guard is not None or not _takes_all(case.pattern):
                    guard = [case.guard] if case.guard is not None else []
                    yield Condition(case.pattern.lineno, [node.subject, case.pattern, *guard])
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.BoolOp):
            yield Condition(node.lineno, [node.value])
        elif isinstance(node, ast.Call) and (_is_entry(node.func) or _is_lookup(node)):
            yield Condition(node.lineno, [node.func, *node.args])


def _takes_all(pattern: ast.pattern) -> bool:
    return isinstance(pattern, ast.MatchAs) and pattern.pattern is None


def _is_entry(called: ast.AST) -> bool:
    """True for ``table[key]`` and ``table.get(key)``."""
    if isinstance(called, ast.Call):
        return isinstance(called.func, ast.Attribute) and called.func.attr == "get"
    return isinstance(called, ast.Subscript)


def _is_lookup(call: ast.Call) -> bool:
    """True for getattr with a default or a computed name."""
    if not isinstance(call.func, ast.Name) or call.func.id != "getattr":
        return False
    return len(call.args) > 2 or not isinstance(call.args[-1], ast.Constant)


def overridden(parent: ast.ClassDef, trees: Trees) -> list[str]:
    """Return the methods of ``parent`` that direct subclasses override."""
    return [
        f"{path}: {cls.name}.{name}"
        for path, cls in classes_of(trees)
        if any(last_name(base) == parent.name for base in cls.bases)
        for name in methods_of(cls)
        if name in methods_of(parent) and name != "__init__"
    ]


def as_words(identifier: str) -> str:
    """Return an identifier as words between underscores: ``MayMiss`` -> ``_may_miss_``."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", identifier)
    return f"_{'_'.join(parts).lower()}_"


def identifiers(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield names of variables, attributes, arguments, definitions, and texts that are one."""
    for node in (inner for each in nodes for inner in ast.walk(each)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value if node.value.isidentifier() else ""


# Private attributes

OF_NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
"""Documented methods of every NamedTuple."""
OF_TORCH = {"_backward_hooks", "_parameters", "_version"}
"""Attributes of torch's tensors and modules."""
OWN_PACKAGES = {"psdist", "servers", "workers", "topology", "tests"}


def private_attributes(tree: ast.Module) -> list[ast.Attribute]:
    """Return accesses to private attributes (``x._name``) of objects that the file does not define.

    ``x`` is neither ``self``, ``cls``, ``super()`` nor a class of the file. Methods of NamedTuples,
    attributes of torch and names of other libraries (``os._exit``) do not count.
    """
    own = {"self", "cls", "super", *(cls.name for _, cls in classes_of({"": tree}))}
    foreign = set(_foreign_names(tree))
    return [
        node
        for node in nodes_of(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in OF_NAMED_TUPLES | OF_TORCH
        and _base(node) not in own
        and _root(node) not in foreign
    ]


def _foreign_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that the file imports from other projects."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for each in node.names:
                module = node.module if isinstance(node, ast.ImportFrom) else each.name
                if (module or "").partition(".")[0] not in OWN_PACKAGES:
                    yield (each.asname or each.name).partition(".")[0]


def _base(node: ast.Attribute) -> str:
    """Return ``x`` of ``x._name`` and of ``x()._name``, if it is a name."""
    base = node.value.func if isinstance(node.value, ast.Call) else node.value
    return base.id if isinstance(base, ast.Name) else ""


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


# Texts


def text_of(node: ast.AST, constants: Mapping[str, str]) -> str:
    """Return the literal text in an expression, in order; ``constants`` are those of the module."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.Name):
        return constants.get(node.id, "")
    return "".join(text_of(each, constants) for each in ast.iter_child_nodes(node))


@cache
def constants_of(tree: ast.Module) -> dict[str, str]:
    """Return the texts that the module gives a name."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                found[target.id] = node.value.value
    return found


# Lines


class Lines(NamedTuple):
    total: int
    code: int
    docstrings: int


def count_lines(source: str, tree: ast.Module) -> Lines:
    """Count all lines, those with code, and those of docstrings (also of attributes). A blank line
    or one that begins with # is no code, even inside a text."""
    docstrings = set[int]()
    for node in nodes_of(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = source.splitlines()
    code = [
        number
        for number, line in enumerate(lines, 1)
        if number not in docstrings and line.strip() and not line.lstrip().startswith("#")
    ]
    return Lines(len(lines), len(code), len(docstrings))
