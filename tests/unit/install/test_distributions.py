"""Other distributions that provide ``psdist``: recognised from folders as pip leaves them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from psdist.commands.run import RunRequest, run
from psdist.install import distributions
from psdist.install.distributions import Rival, rivals
from tests.support.mpirun import REPOSITORY, run_program

OWN_ENTRY_POINTS = "[console_scripts]\npsdist = psdist.commands.cli:main\n"


def install(
    site: Path,
    name: str,
    version: str,
    *,
    files: Sequence[str] = ("psdist/__init__.py", "psdist/version.py"),
    has_top_level: bool = True,
    entry_points: str | None = None,
    editable: Path | None = None,
) -> None:
    """The ``.dist-info`` folder that pip would leave in ``site``."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    if has_top_level:
        (info / "top_level.txt").write_text("psdist\n")
    if entry_points is not None:
        (info / "entry_points.txt").write_text(entry_points)
    if editable is not None:
        facts = {"dir_info": {"editable": True}, "url": f"file://{editable}"}
        (info / "direct_url.json").write_text(json.dumps(facts))


def found(site: Path, package: Path | None = None) -> list[Rival]:
    return rivals([str(site)], package=package or site / "psdist")


def test_psdist_mpi_alone_has_no_rival(tmp_path: Path) -> None:
    install(tmp_path, "psdist-mpi", "0.1.0", entry_points=OWN_ENTRY_POINTS)
    install(tmp_path, "numpy", "2.4.6", files=["numpy/__init__.py"], has_top_level=False)
    assert found(tmp_path) == []


def test_another_project_in_the_same_folder_is_an_error(tmp_path: Path) -> None:
    install(tmp_path, "psdist-mpi", "0.1.0", entry_points=OWN_ENTRY_POINTS)
    install(tmp_path, "psdist", "2.1.4", has_top_level=False)
    assert found(tmp_path) == [
        Rival(
            problem=f"psdist 2.1.4 (in {tmp_path}) is another project, and its files overwrite "
            "files of psdist-mpi",
            remedy="pip uninstall psdist, then install psdist-mpi again",
            is_error=True,
        )
    ]


def test_another_project_in_another_folder_is_a_warning(tmp_path: Path) -> None:
    install(tmp_path, "psdist", "2.1.4")
    (rival,) = found(tmp_path, package=REPOSITORY / "psdist")
    assert rival.problem.endswith("another project, and either may be what `import psdist` loads")
    assert rival.remedy == "pip uninstall psdist"
    assert not rival.is_error


@pytest.mark.parametrize("has_top_level", [True, False])
def test_a_distribution_of_any_name_with_files_in_psdist_is_a_rival(
    tmp_path: Path, has_top_level: bool
) -> None:
    install(tmp_path, "phase-space", "1.0", has_top_level=has_top_level)
    (rival,) = found(tmp_path)
    assert rival.remedy.startswith("pip uninstall phase-space")


def test_an_editable_installation_under_the_old_name_beside_the_new_one_is_a_warning(
    tmp_path: Path,
) -> None:
    checkout = tmp_path / "checkout"
    site = tmp_path / "site"
    install(site, "psdist-mpi", "0.1.0", entry_points=OWN_ENTRY_POINTS, editable=checkout)
    install(site, "psdist", "0.1.0", entry_points=OWN_ENTRY_POINTS, editable=checkout)
    assert found(site, package=checkout / "psdist") == [
        Rival(
            problem=f"psdist 0.1.0 (editable, {checkout}) is psdist-mpi under its old name, and "
            "either may be what `import psdist` loads",
            remedy="pip uninstall psdist, then install psdist-mpi again",
            is_error=False,
        )
    ]


@pytest.mark.parametrize("is_editable", [True, False])
def test_the_old_name_alone_is_a_warning_with_the_line_that_installs_the_new_one(
    tmp_path: Path, is_editable: bool
) -> None:
    checkout = tmp_path / "checkout" if is_editable else None
    install(tmp_path, "psdist", "0.1.0", entry_points=OWN_ENTRY_POINTS, editable=checkout)
    (rival,) = found(tmp_path)
    again = f"pip install -e {checkout}" if checkout else "install psdist-mpi"
    assert rival.remedy == f"pip uninstall psdist, then {again}"
    assert not rival.is_error


def test_the_old_name_as_a_wheel_beside_the_new_one_is_an_error(tmp_path: Path) -> None:
    install(tmp_path, "psdist-mpi", "0.1.0", entry_points=OWN_ENTRY_POINTS)
    install(tmp_path, "psdist", "0.1.0", entry_points=OWN_ENTRY_POINTS)
    (rival,) = found(tmp_path)
    assert rival.is_error
    assert rival.remedy == "pip uninstall psdist, then install psdist-mpi again"


EDITABLE = '{"dir_info": {"editable": true}%s}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '{"dir_info": 3}', '{"dir_info": {}}'),
        *(EDITABLE % "", "[" * 100_000, EDITABLE % (', "x": ' + "[" * 100_000)),
    ],
)
def test_metadata_that_cannot_be_read_counts_as_not_editable(tmp_path: Path, text: str) -> None:
    install(tmp_path, "psdist", "2.1.4")
    (tmp_path / "psdist-2.1.4.dist-info" / "direct_url.json").write_text(text)
    (rival,) = found(tmp_path)
    assert f"(in {tmp_path})" in rival.problem


def test_a_pipe_among_the_metadata_is_not_waited_for(tmp_path: Path) -> None:
    install(tmp_path, "psdist", "2.1.4")
    os.mkfifo(tmp_path / "psdist-2.1.4.dist-info" / "entry_points.txt")
    assert len(found(tmp_path)) == 1


def test_what_a_terminal_would_obey_is_not_told(tmp_path: Path) -> None:
    install(tmp_path, "psdist", "2.1\n\x1b[31m", entry_points=OWN_ENTRY_POINTS)
    assert found(tmp_path) == []
    install(tmp_path, "psdist", "2.1", editable=Path("/home/\x1b[31m"))
    assert "/home/\\x1b[31m" in found(tmp_path)[0].problem


def test_entries_of_a_path_that_are_no_folders_are_passed_over(tmp_path: Path) -> None:
    archive = tmp_path / "archive.zip"
    archive.write_bytes(b"")
    path = ["", str(archive), str(tmp_path / "missing")]
    assert rivals(path, package=tmp_path / "psdist") == []


def site_with(tmp_path: Path, name: str, version: str, entry_points: str | None) -> Path:
    """A site-packages folder with psdist-mpi and another distribution, to import psdist from."""
    site = tmp_path / "site"
    install(site, "psdist-mpi", "0.1.0", entry_points=OWN_ENTRY_POINTS)
    install(site, name, version, entry_points=entry_points)
    (site / "psdist").symlink_to(REPOSITORY / "psdist")
    return site


def test_psdist_run_refuses_mixed_files_in_one_line(tmp_path: Path) -> None:
    site = site_with(tmp_path, "psdist", "2.1.4", None)
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('the script ran')\n")
    words = [sys.executable, "-P", "-m", "psdist", "run", str(script)]
    done = run_program(words, timeout_s=60, env={"PYTHONPATH": str(site)}, cwd=tmp_path)
    assert done.returncode == 2, done.text
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"psdist: error: psdist 2.1.4 (in {site}) is another project, and its files overwrite "
        "files of psdist-mpi: pip uninstall psdist, then install psdist-mpi again"
    ]


@pytest.mark.parametrize(
    ("variables", "num_lines"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, 0),
        ({"PSDIST_INTERNAL_PARENT": "/socket"}, 0),
    ],
)
def test_psdist_run_warns_once_in_a_job(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    num_lines: int,
) -> None:
    rival = Rival(problem="psdist 2.1.4 is there", remedy="pip uninstall psdist", is_error=False)
    monkeypatch.setattr("psdist.commands.run.rivals", lambda *_, **__: [rival])
    monkeypatch.setattr("psdist.commands.run_rank.run_program", lambda *_, **__: 0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    from psdist.commands.program import Program

    assert run(RunRequest(program=Program(name=__file__))) == 0
    line = "psdist: warning: psdist 2.1.4 is there: pip uninstall psdist\n"
    assert capsys.readouterr().err == line * num_lines


def test_the_name_of_the_distribution_is_that_of_the_metadata() -> None:
    assert f"name = {distributions.NAME}\n" in (REPOSITORY / "setup.cfg").read_text()
