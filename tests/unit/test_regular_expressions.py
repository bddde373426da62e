"""Regular expressions mean the same in every Python that psdist runs under.

Possessive quantifiers and atomic groups came with Python 3.11 and match wrongly in its early
patch versions: in 3.11.2, Debian 12's own, ``(?:\\[[^\\]]*\\]|[^,\\[\\]])*+`` finds ``n[`` in
``n[1-3``. A text that may be hostile is read by an expression that never goes back, or by hand.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import psdist

REPOSITORY = Path(psdist.__file__).parent.parent
UNRELIABLE = {"POSSESSIVE_REPEAT", "ATOMIC_GROUP"}
# One of these is in each of them; most texts have neither and are not parsed.
SIGNS = re.compile(r"[*+?}]\+|\(\?>")


def sources() -> list[Path]:
    """Python files, by their content: scripts may have no suffix."""
    folders = (
        "psdist",
        "servers",
        "topology",
        "workers",
        "tests",
        "docs",
        "examples",
        "slurm",
        ".ci",
    )
    files = [path for name in folders for path in sorted((REPOSITORY / name).rglob("*"))]
    return [
        path
        for path in files
        if path.is_file() and (path.suffix == ".py" or is_python_script(path))
    ]


def is_python_script(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(100)
    return first.startswith(b"#!") and b"python" in first


def texts(tree: ast.AST) -> Iterator[tuple[int, str | bytes]]:
    """(line, text) of every string but docstrings; an f-string with 1 in the place of values."""
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):  # parents come before their children
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            inside |= set(node.values)
            parts = [part.value if isinstance(part, ast.Constant) else "1" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str | bytes)
            and node not in inside
        ):
            yield node.lineno, node.value


def unreliable(pattern: str | bytes) -> set[str]:
    """Which of the operations in UNRELIABLE a text has, read as a regular expression."""
    if not SIGNS.search(pattern if isinstance(pattern, str) else pattern.decode("latin-1")):
        return set()
    try:
        with warnings.catch_warnings(action="ignore"):
            parsed = re._parser.parse(pattern)
    except (re.error, OverflowError, RecursionError):
        return set()  # no regular expression
    return UNRELIABLE & set(operations(parsed))


def operations(parsed: object) -> Iterator[str]:
    """The names of all operations in what re._parser returns: tuples and lists in each other."""
    if isinstance(parsed, int):
        yield str(parsed)  # its constants are integers with a name
    elif isinstance(parsed, (tuple, list)) or type(parsed).__name__ == "SubPattern":
        for part in parsed:
            yield from operations(part)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a*+", {"POSSESSIVE_REPEAT"}),
        ("(?:x|[ab]{2,3}+)?", {"POSSESSIVE_REPEAT"}),
        ("(?<=q)(?P<name>a?+|b)", {"POSSESSIVE_REPEAT"}),
        (b"(?!(?>a|b))", {"ATOMIC_GROUP"}),
        ("(c)?(?(1)(?>a)b*+|d)", UNRELIABLE),
        (r"a*?(b|c)+\*+[*+]", set()),
        ("no expression: (", set()),
    ],
)
def test_what_must_not_be_used_is_found(pattern: str | bytes, found: set[str]) -> None:
    assert unreliable(pattern) == found


def test_strings_are_found_wherever_they_stand() -> None:
    code = '"""docs a*+"""\nP = f"{1}a" "b*+"\ndef f(p="c"):\n    return match(b"d", g("e"))\n'
    found = set(texts(ast.parse(code)))
    assert found == {(2, "1ab*+"), (3, "c"), (4, b"d"), (4, "e")}


def test_no_expression_depends_on_the_patch_version_of_python() -> None:
    files = sources()
    names = {path.relative_to(REPOSITORY).as_posix() for path in files}
    assert {"psdist/errors.py", "topology/text/hostlist.py", "tests/cluster"} <= names
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line}: {text!r:.80}"
        for path in files
        for line, text in texts(ast.parse(path.read_bytes()))
        if path != Path(__file__).resolve() and unreliable(text)
    ]
    assert wrong == []
