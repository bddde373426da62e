"""Which statements run: a module's code with a probe before each statement of its functions.

Owns where probes go and which lines a statement has. Tracing would say the same, but it slows all
code, several times; a probe costs only where it stands.

    reached: set[int] = set()
    probed = Probed.of(text, path, first=0)
    exec(probed.code, {PROBE: reached.add})       # and then call what it defines
    [line for line, probes in probed.lines.items() if probes & reached]
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType

PROBE = "__probe__"


@dataclass(frozen=True, kw_only=True)
class Probed:
    code: CodeType
    lines: Mapping[int, frozenset[int]]
    """Line -> the probes of its statements. A statement has all of its lines but those of the
    statements inside it: to run one part of it is to reach it."""
    end: int
    """The first number that no probe has."""

    @classmethod
    def of(cls, text: str, path: str, *, first: int) -> Probed:
        tree = ast.parse(text)
        inserter = _Inserter(first)
        inserter.insert(tree, in_function=False)
        code = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        lines = {line: frozenset(probes) for line, probes in inserter.lines.items()}
        return cls(code=code, lines=lines, end=inserter.number)


class _Inserter:
    def __init__(self, first: int) -> None:
        self.number = first
        self.lines: dict[int, set[int]] = defaultdict(set)

    def insert(self, node: ast.AST, *, in_function: bool) -> set[int]:
        """Put probes into the blocks of ``node``; the lines of what they stand before."""
        taken: set[int] = set()
        for name, block in _blocks(node):
            probed: list[ast.stmt] = []
            for place, statement in enumerate(block):
                is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
                is_class = isinstance(statement, ast.ClassDef)
                # A class has its own probes within its methods only, a function in all of it.
                inner = self.insert(
                    statement, in_function=is_function or (in_function and not is_class)
                )
                if in_function and not (place == 0 and name == "body" and _is_text(statement)):
                    probed.append(self._probe(statement, inner))
                    inner |= _lines_of(statement)
                probed.append(statement)
                taken |= inner
            setattr(node, name, probed)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ExceptHandler | ast.match_case):
                taken |= self.insert(child, in_function=in_function)
        return taken

    def _probe(self, statement: ast.stmt, inner: set[int]) -> ast.stmt:
        for line in (_lines_of(statement) - inner) | {statement.lineno}:
            self.lines[line].add(self.number)
        call = ast.Call(ast.Name(PROBE, ast.Load()), [ast.Constant(self.number)], [])
        self.number += 1
        return ast.copy_location(ast.Expr(call), statement)


def _blocks(node: ast.AST) -> Iterator[tuple[str, list[ast.stmt]]]:
    for name, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield name, value


def _lines_of(statement: ast.stmt) -> set[int]:
    decorators = getattr(statement, "decorator_list", ())
    first = min([statement.lineno, *(each.lineno for each in decorators)])
    return set(range(first, (statement.end_lineno or first) + 1))


def _is_text(statement: ast.stmt) -> bool:
    """A docstring, where it is the first of a function."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
