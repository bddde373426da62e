"""``--json``: what each command prints is what docs/reference/json.md lists, key by key."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from psdist.checkpoint.folder import Folder
from psdist.commands import cli, doctor
from psdist.commands.doctor import Finding
from psdist.protocol.control import Progress
from psdist.ranks.reporting.rank_reports import OpenCall
from tests.support.checkpoints import Made
from tests.support.mpirun import REPOSITORY
from tests.unit.commands.test_status import Job
from tests.unit.commands.test_trace import a_run_with_a_straggler
from tests.unit.history.test_check import recorded

PAGE = REPOSITORY / "docs" / "reference" / "json.md"
TYPES: dict[type, str] = {
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "list",
    dict: "object",
    type(None): "null",
}
WITHOUT = {"run", "export", "slurm"}
"""Commands that print nothing to be read by programs."""
INTO_A_FILE = {"probe", "pushpull", "step", "convergence", "group", "server"}


def listed(command: str) -> dict[str, set[str]]:
    """Key -> its types, in the page."""
    text = PAGE.read_text(encoding="utf-8")
    part = text.split(f"## {command}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\S+)` \| ([a-z ]+) \|", part, re.MULTILINE)
    assert rows
    return {key: set(types.split(" or ")) for key, types in rows}


def found(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """(key, type) of everything in an output; objects in lists of objects are looked into."""
    for key, each in value.items():
        yield f"{at}{key}", TYPES[type(each)]
        if isinstance(each, list):
            for item in each:
                if isinstance(item, dict):
                    yield from found(item, f"{at}{key}[].")


def status_file(path: Path) -> None:
    call = OpenCall(7, "save", [0], [1, 2])
    Job(path).write({0: Progress(worker=0, clock=40, samples=0)}, calls=[call])


def checkpoints(path: Path) -> None:
    for step in (100, 200):
        Made(step=step, seed=step).write(Folder(path))
    (path / "checkpoints" / "step-00000100" / "index.json").write_text("{")


def two_checkpoints(path: Path) -> None:
    for name in ("a", "b"):
        Made(step=100, seed=ord(name)).write(Folder(path / name))


CASES: dict[str, tuple[Callable[[Path], object], tuple[str, ...], int]] = {
    "psdist status": (status_file, (".",), 0),
    "psdist check": (recorded, (".",), 0),
    "psdist trace": (lambda path: a_run_with_a_straggler(path, num_steps=8), (".",), 0),
    "psdist doctor": (lambda _: None, (), 1),
    "psdist checkpoint list": (checkpoints, (".",), 0),
    "psdist checkpoint verify": (checkpoints, (".",), 1),
    "psdist checkpoint diff": (two_checkpoints, ("a", "b"), 1),
    "psdist settings": (lambda _: None, (), 0),
    "psdist settings --conflicts": (lambda _: None, (), 0),
}


@pytest.mark.parametrize("command", CASES)
def test_json_has_the_keys_and_types_that_the_page_lists(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare, words, status = CASES[command]
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    finding = Finding(subject="MPI", value="none", state="error", remedy="install one")
    monkeypatch.setattr(doctor, "examine", lambda _: [finding])
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main([*command.split()[1:], *words, "--json"])
    assert caught.value.code == status

    told = json.loads(capsys.readouterr().out)
    name, *alternative = command.split(" --")
    assert list(told)[:2] == ["format", "version"]
    assert (told.pop("format"), told.pop("version")) == (name, 1)
    rows = listed(name)
    seen = set(found(told))
    assert {key for key, kind in seen if kind not in rows.get(key, ())} == set()
    if name == "psdist settings":
        other = "settings" if alternative else "conflicts"
        rows = {key: each for key, each in rows.items() if not key.startswith(other)}
    assert {key for key, _ in seen} == set(rows)


def test_plan_prints_the_file_that_it_would_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--nodes", "n[1-2]", "--link", "10Gbit", "--json"]
    for more in ([], ["--emit", "json", "--out", str(tmp_path)]):
        with pytest.raises(SystemExit) as caught:
            cli.main([*words, *more])
        assert caught.value.code == 0
    told = capsys.readouterr().out
    assert told == (tmp_path / "plan.json").read_text() * 2


def commands(group: Any) -> Iterator[Any]:
    for command in group.commands.values():
        if hasattr(command, "commands"):
            yield from commands(command)
        else:
            yield command


def test_every_command_that_shows_something_has_json() -> None:
    group = typer.main.get_command(cli.app)
    kinds = {
        str(command.name): {
            getattr(each, "is_flag", None) for each in command.params if "--json" in each.opts
        }
        for command in commands(group)
    }
    assert {name for name, kind in kinds.items() if not kind} == WITHOUT
    assert {name for name, kind in kinds.items() if kind == {False}} == INTO_A_FILE
    assert all(kind in (set(), {True}, {False}) for kind in kinds.values())
