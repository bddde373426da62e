"""psdist run -m MODULE: what the module sees is what python -m shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from psdist.commands.program import Program
from tests.support.mpirun import REPOSITORY

LOOK = """
import json, sys
from pathlib import Path

import beside
from .. import neighbour
from . import __name__ as here
spec = None if __spec__ is None else __spec__.name
print("seen", json.dumps([sys.argv, sys.path[0], __name__, __package__, spec, __file__]))
print("main is this", sys.modules["__main__"].__dict__ is globals())
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a module that imports its neighbour, and a script."""
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "namespace").mkdir()
    for folder in (package, package / "inner"):
        (folder / "__init__.py").write_text(f"print('imported', {folder.name!r})\n")
    (package / "inner" / "train.py").write_text(LOOK)
    (package / "inner" / "__main__.py").write_text(LOOK)
    (package / "neighbour.py").write_text("")
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "script.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(*words: str, cwd: Path, safe_path: bool = False) -> list[str]:
    done = subprocess.run(
        [sys.executable, *(["-P"] if safe_path else []), *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    lines = [
        line for line in done.stdout.splitlines() if line.startswith(("seen", "main", "imported"))
    ]
    assert any(line.startswith("seen") for line in lines), done.stderr
    return lines


@pytest.mark.parametrize(
    ("module", "safe_path"),
    [("package.inner.train", True), ("package.inner.train", False), ("package.inner", False)],
)
def test_a_module_sees_what_python_would_show_it(module: str, safe_path: bool, tree: Path) -> None:
    words = ["-m", module, "--epochs", "5", "-m", "--", "-n", "3"]
    plain = printed(*words, cwd=tree)
    assert printed("-m", "psdist", "run", *words, cwd=tree, safe_path=safe_path) == plain


def test_looking_for_a_module_imports_nothing_of_it(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Program(name="package.inner.train", is_module=True).problem() is None
    assert capsys.readouterr().out == ""
    assert "package" not in sys.modules
    assert tree


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("package.inner", None),
        ("package.inner.train", None),
        ("json.tool", None),
        ("nowhere", "there is no module nowhere (working directory "),
        ("package.nowhere.train", "there is no module package.nowhere (working directory "),
        ("package.neighbour.train", "package.neighbour is a module, not a package"),
        ("package", "a package without __main__.py; name a module in it"),
        ("package.namespace", "a package without __main__.py; name a module in it"),
        ("script.py", "not the name of a module, such as package.train; for a file leave -m out"),
        ("package/inner", "not the name of a module, "),
        (".train", "not the name of a module, "),
        ("", "not the name of a module, "),
    ],
)
def test_a_module_that_cannot_be_run_is_told_before_anything_starts(
    name: str, why: str | None, tree: Path
) -> None:
    problem = Program(name=name, is_module=True).problem()
    assert tree
    if why is None:
        assert problem is None
    else:
        assert str(problem).startswith(f"-m {name}: {why}")
