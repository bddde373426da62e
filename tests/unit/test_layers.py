"""The house stands as setup.cfg says: every module is in a layer, and imports go down only."""

from __future__ import annotations

import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import psdist

REPOSITORY = Path(__file__).resolve().parents[2]
CONTRACT = "importlinter:contract:layers"
LONGEST = 400
"""Lines of a module that needs no reason."""


def layers() -> list[set[str]]:
    settings = ConfigParser()
    settings.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    lines = settings[CONTRACT]["layers"].split("\n")
    return [{name.strip() for name in line.split("|")} for line in lines if line.strip()]


def modules() -> set[str]:
    """Names of all modules and packages directly in psdist."""
    (folder,) = map(Path, psdist.__path__)
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    return files | {path.parent.name for path in folder.glob("*/__init__.py")}


def test_every_module_of_psdist_stands_in_exactly_one_layer() -> None:
    named = [name for layer in layers() for name in layer]
    assert sorted(named) == sorted(modules())


def test_servers_and_workers_know_nothing_of_each_other() -> None:
    assert {"servers", "workers"} in layers()  # siblings in a layer must not import each other


def test_imports_go_down_the_layers_only() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_module_that_is_long_says_why() -> None:
    silent = [
        str(path.relative_to(REPOSITORY))
        for room in ("psdist", "servers", "workers", "topology")
        for path in (REPOSITORY / room).rglob("*.py")
        if len(text := path.read_text(encoding="utf-8").splitlines()) > LONGEST
        and not any("Longer than other modules" in line for line in text)
    ]
    assert not silent, f"more than {LONGEST} lines without a reason in the docstring: {silent}"
