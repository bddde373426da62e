"""The directory of another job of the same ranks, and what a script decides about the first one."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from psdist.config.sources import Resolved, resolve, script_settings, with_script
from psdist.errors import ConfigError
from psdist.protocol.roles import Place, Roles
from psdist.ranks.run_files import (
    create_next_run_directory,
    create_run_directory,
    take_settings_of_script,
)
from psdist.report.run_directory import RunDirectory

PLACES = tuple(Place(rank=rank, host="n0", pid=rank + 1, cores=(rank,)) for rank in range(2))
ROLES = Roles(places=PLACES, server_ranks=(0,), worker_ranks=(1,), groups=((0,),))


def made_by_script(base: Resolved) -> Resolved:
    return with_script(base, script_settings({"mode": "ssp", "staleness": 7}))


@pytest.fixture
def base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Resolved:
    resolved = resolve(command_line={"run_dir": str(tmp_path / "run")}, environment={})
    create_run_directory(resolved, ROLES, {"plan.txt": "a picture\n"})
    capsys.readouterr()
    return resolved


def test_the_file_and_the_words_have_what_the_script_decides(
    base: Resolved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run")
    before = (run.path / "config.toml").read_text()
    take_settings_of_script(run, base, ROLES)
    assert (run.path / "config.toml").read_text() == before
    assert capsys.readouterr().out == ""
    take_settings_of_script(run, made_by_script(base), ROLES)
    config = tomllib.loads((run.path / "config.toml").read_text())
    assert (config["mode"], config["staleness"]) == ("ssp", 7)
    assert capsys.readouterr().out.splitlines() == [
        "psdist: mode = ssp  (psdist.init)",
        "psdist: staleness = 7  (psdist.init)",
        "psdist: mode ssp (staleness 7) with one group: no group can be ahead of another; --group "
        "rank makes every worker a group of its own",
    ]


def test_another_job_has_a_directory_of_its_own(
    base: Resolved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "run", tmp_path / "run-2"
    create_next_run_directory(second, made_by_script(base), ROLES, first=first)
    assert sorted(path.name for path in second.iterdir()) == [
        "config.toml",
        "plan.txt",
        "ranks.json",
    ]
    assert (second / "plan.txt").read_text() == "a picture\n"
    assert json.loads((second / "ranks.json").read_text()) == json.loads(
        (first / "ranks.json").read_text()
    )
    assert tomllib.loads((second / "config.toml").read_text())["mode"] == "ssp"
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [
        f"psdist: another job of the same ranks: run_dir = {second}",
        "psdist: mode = ssp  (psdist.init)",
    ]


def test_a_directory_with_a_run_is_left_alone(base: Resolved, tmp_path: Path) -> None:
    first = tmp_path / "run"
    before = (first / "config.toml").read_text()
    with pytest.raises(ConfigError, match="it holds a run already"):
        create_next_run_directory(first, made_by_script(base), ROLES, first=first)
    assert (first / "config.toml").read_text() == before


def test_what_cannot_be_written_is_said(base: Resolved, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"run_dir = {path}: cannot be made"):
            create_next_run_directory(path, base, ROLES, first=tmp_path / "run")
    gone = RunDirectory(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"cannot be written \(No such file.*another run_dir"):
        take_settings_of_script(gone, made_by_script(base), ROLES)


def test_the_table_of_ranks_has_every_role(tmp_path: Path) -> None:
    places = tuple(Place(rank=rank, host="n0", pid=rank, cores=(0,)) for rank in range(4))
    roles = Roles(
        places=places, server_ranks=(0, 1), worker_ranks=(3,), groups=((0,),), spare_ranks=(2,)
    )
    resolved = resolve(command_line={"run_dir": str(tmp_path / "run")}, environment={})
    create_run_directory(resolved, roles, {})
    table = json.loads((tmp_path / "run" / "ranks.json").read_text())
    assert [each["role"] for each in table] == ["server", "server", "spare", "worker"]
    assert [(each["worker"], each["group"]) for each in table][2:] == [(None, None), (0, 0)]
