"""A mutant: one file with one small fault, as edits of its text.

Owns how a fault is written down: where, by which operator, what becomes of the text. Edits are
byte spans of the source, so that a survivor is shown as the diff that somebody would have typed.
"""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import CodeType

Key = tuple[str, str, str, str, str, int]
"""(file, function, operator, the line's text, change, ordinal): survives edits elsewhere."""


@dataclass(frozen=True, order=True)
class Edit:
    start: int
    """In bytes of the file's UTF-8."""
    end: int
    text: str


@dataclass(frozen=True, order=True, kw_only=True)
class Mutant:
    path: str
    line: int
    column: int
    last_line: int
    operator: str
    change: str
    """``was -> is``, in one line."""
    function: str
    """Qualified name; "" at module level."""
    source_line: str
    edits: tuple[Edit, ...]
    statement: tuple[int, int]
    """First and last line of the statement, of a compound one its head."""
    is_top_level: bool
    """Runs when the module is imported."""
    ordinal: int = 0
    """Among mutants that are alike in all of the above but the place."""

    @property
    def key(self) -> Key:
        return (
            *(self.path, self.function, self.operator),
            *(self.source_line, self.change, self.ordinal),
        )

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator}: {self.change}"

    def applied_to(self, text: str) -> str:
        data = text.encode()
        for edit in sorted(self.edits, reverse=True):
            data = data[: edit.start] + edit.text.encode() + data[edit.end :]
        return data.decode()

    def diff(self, text: str) -> str:
        lines = difflib.unified_diff(
            text.splitlines(), self.applied_to(text).splitlines(), self.path, self.path, "", "", 2
        )
        return "\n".join(line.rstrip("\n") for line in lines)


def numbered(mutants: Iterable[Mutant]) -> list[Mutant]:
    """In the order of the file, each with its ordinal; what is there twice only once."""
    seen: Counter[Key] = Counter()
    result = []
    by_edit = {mutant.edits: mutant for mutant in sorted(mutants, reverse=True)}
    for mutant in sorted(by_edit.values()):
        ordinal = seen[mutant.key]
        seen[mutant.key] += 1
        result.append(replace(mutant, ordinal=ordinal))
    return result


def is_same_program(one: str, other: str) -> bool:
    """Whether both compile to the same code, wherever it stands."""
    return _instructions(compile(one, "", "exec", dont_inherit=True)) == _instructions(
        compile(other, "", "exec", dont_inherit=True)
    )


def _instructions(code: CodeType) -> tuple[object, ...]:
    constants = tuple(
        _instructions(each) if isinstance(each, CodeType) else (type(each), repr(each))
        for each in code.co_consts
    )
    return (code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars)


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def unparsed(node: ast.AST) -> str:
    return in_one_line(ast.unparse(node))
