"""Which Pythons of a machine the fast tests run under, and that those tests need no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pythons
from tests.pythons import Python, ask, find, folders, this_python
from tests.support.mpirun import REPOSITORY


def interpreter(folder: Path, name: str, *, version: str, kind: str = "cpython") -> Path:
    """A program that answers as an interpreter of that version does."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    answer = {
        "path": str(path),
        "version": version,
        "abi": "",
        "kind": [kind, *map(int, version.split(".")[:2])],
    }
    return script(path, f"echo '{json.dumps(answer)}'")


def script(path: Path, line: str) -> Path:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


def test_pythons_from_3_11_on_are_found_once_each_and_without_the_one_in_use(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "bin"
    newer = interpreter(folder, "python3.13", version="3.13.0")
    debian = interpreter(folder, "python3.11", version="3.11.999")
    interpreter(folder, "python3.10", version="3.10.9")
    interpreter(folder, "python3.12", version="3.12.3", kind="pypy")
    interpreter(folder, "python3-config", version="3.12.4")
    interpreter(folder, "python", version="3.12.5")
    (folder / "python3").symlink_to(debian)
    again = interpreter(tmp_path / "again", "python3", version="3.13.0").parent
    (again / "python3.14").symlink_to(sys.executable)
    found = find([folder, again, tmp_path / "missing"], this_python())
    assert [(each.version, each.path) for each in found] == [
        ("3.11.999", str(debian)),
        ("3.13.0", str(newer)),
    ]


@pytest.mark.parametrize(
    "line",
    ["echo 'pyenv: python3.12: command not found' >&2; exit 127", "exit 0", "echo '[1]'"],
)
def test_a_command_that_is_no_python_is_none(line: str, tmp_path: Path) -> None:
    path = script(tmp_path / "python3.12", line)
    assert ask(str(path)) is None
    path.write_text("no program")
    assert ask(str(path)) is None


def test_an_environment_is_the_python_it_was_made_with() -> None:
    mine = this_python()
    assert mine.path == str(Path(sys._base_executable).resolve())
    assert find([Path(sys.prefix) / "bin"], mine) == []


def test_debians_python_is_found_however_path_is_set(tmp_path: Path) -> None:
    versions = tmp_path / ".pyenv" / "versions"
    (versions / "3.12.1" / "bin").mkdir(parents=True)
    for environment in ({}, {"PATH": ""}, {"PATH": "/nowhere::"}):
        assert Path("/usr/bin") in folders({**environment, "HOME": str(tmp_path)})
    assert folders({"HOME": str(tmp_path)})[-1] == versions / "3.12.1" / "bin"


def test_a_failure_under_one_python_is_a_failure_that_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Python(path="/good/python3", version="3.12.9", abi="")
    bad = Python(path="/bad/python3", version="3.11.1", abi="")

    def tried(python: Python, _known: Python, *, newest: Python) -> pythons.Outcome:
        assert newest is good
        text = "...\n7 passed in 1 s\n" if python is good else "it fell\n"
        return pythons.Outcome(python=python, has_passed=python is good, text=text, took_s=2)

    monkeypatch.setattr(pythons, "tried", tried)
    monkeypatch.setattr(pythons, "find", lambda *_: [bad, good])
    assert pythons.main() == 1
    said = capsys.readouterr().out
    assert "it fell\ntests/pythons.py: FAILED under Python 3.11.1 (/bad/python3)" in said
    assert "passed under Python 3.12.9 (/good/python3): 7 passed in 1 s (2 s in all)" in said
    monkeypatch.setattr(pythons, "find", lambda *_: [good])
    assert pythons.main() == 0


def test_another_patch_version_runs_what_has_differed_between_those() -> None:
    def python(version: str) -> Python:
        return Python(path="/bin/python3", version=version, abi="")

    known = python("3.11.7")
    older, newest = python("3.12.1"), python("3.13.0")
    assert pythons.tests_for(newest, known, newest=newest) == pythons.FAST
    assert pythons.tests_for(older, known, newest=newest) == pythons.PATCH_DEPENDENT
    patch = python("3.11.9")
    assert pythons.tests_for(patch, known, newest=patch) == pythons.PATCH_DEPENDENT
    assert set(pythons.PATCH_DEPENDENT) <= set(pythons.FAST)


def test_the_fast_tests_are_there_and_import_neither_torch_nor_an_mpi() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['mpi4py'] = None\n"
        "import pytest; from tests.pythons import FAST\n"
        "sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', *FAST]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout
