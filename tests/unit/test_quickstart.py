"""The scripts that a user runs first: what they say on a machine that lacks something, and that
the quickstart trains and proves its run."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.mpirun import REPOSITORY, run_program

QUICKSTART = REPOSITORY / "slurm" / "quickstart.sh"


def commands_only(directory: Path, **programs: str) -> str:
    """A PATH with the usual commands and these programs, but no Python."""
    for name in ("dirname", "cksum", "cat", "sed", "date", "bash"):
        (directory / name).symlink_to(f"/usr/bin/{name}")
    for name, text in programs.items():
        program = directory / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return str(directory)


def test_a_machine_without_python_is_told_what_to_install(tmp_path: Path) -> None:
    env = {"PATH": commands_only(tmp_path), "VENV": str(tmp_path / "venv")}
    done = run_program(["/bin/bash", str(QUICKSTART)], timeout_s=30, env=env)
    assert done.returncode == 1, done.text
    assert done.stderr.splitlines() == [
        "psdist needs Python 3.11 or newer with venv; seen: no python3 at all. On Debian or "
        "Ubuntu: apt install python3 python3-venv. Or name one in PYTHON."
    ]


def test_an_old_python_and_one_without_venv_are_named(tmp_path: Path) -> None:
    path = commands_only(
        tmp_path,
        # The first question is the version, the second whether venv can be imported.
        python3="exit 1",
        **{"python3.12": 'case "$2" in *venv*) exit 1;; esac'},
    )
    env = {"PATH": path, "VENV": str(tmp_path / "venv")}
    done = run_program(["/bin/bash", str(QUICKSTART)], timeout_s=30, env=env)
    assert done.returncode == 1, done.text
    assert "seen: python3.12 (without venv) python3 (not 3.11 or newer, or" in done.stderr


# Stands for the Python of an environment: pip uninstall removes the folder that pip would remove.
FAKE_PYTHON = """
printf '%s\\n' "$*" >>"$LOG"
case "$*" in *uninstall*) rm -r "$SITE/psdist-"*.dist-info;; esac
"""


@pytest.mark.parametrize("other", ["psdist-0.1.0", "psdist-2.1.4", None])
def test_an_environment_keeps_no_second_distribution_of_the_package(
    tmp_path: Path, other: str | None
) -> None:
    venv = tmp_path / "venv of mine"
    site = venv / "lib" / "python3.11" / "site-packages"
    (site / "psdist_mpi-0.1.0.dist-info").mkdir(parents=True)
    (venv / "bin").mkdir()
    program = venv / "bin" / "python"
    program.write_text(f"#!/bin/sh{FAKE_PYTHON}")
    program.chmod(0o755)
    log = tmp_path / "log"
    env = {"LOG": str(log), "SITE": str(site)}
    words = ["bash", "-c", f'source {REPOSITORY}/slurm/venv.sh; make_venv "$0" mpi', str(venv)]
    assert run_program(words, timeout_s=30, env=env).returncode == 0
    log.unlink()  # the environment is complete now

    if other is not None:
        (site / f"{other}.dist-info").mkdir()
    done = run_program(words, timeout_s=30, env=env)
    assert done.returncode == 0, done.text
    assert [path.name for path in site.iterdir()] == ["psdist_mpi-0.1.0.dist-info"]
    asked = [line for line in log.read_text().splitlines() if line.startswith("-m pip")]
    wanted = [] if other is None else ["uninstall", "install"]
    assert [line.split()[2] for line in asked] == wanted


def lines_of_the_readme() -> list[str]:
    """Patterns of the output that README.md shows. Numbers may differ; of a line that begins with
    words, only the part before its first number counts."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    block = text.split("$ bash slurm/quickstart.sh\n")[1].split("\n\n")[0]
    patterns = []
    for line in textwrap.dedent(block).splitlines():
        if line.strip() != "...":
            words = line if line[0].isdigit() else re.split(r"\d", line)[0]
            patterns.append("^" + re.sub(r"\d[\d,]*", r"[\\d,]+", re.escape(words)))
    assert len(patterns) >= 6
    return patterns


@pytest.mark.mpi
def test_the_quickstart_trains_and_proves_its_run_from_any_directory(tmp_path: Path) -> None:
    # An environment that slurm/venv.sh did not make would be made anew, which downloads torch; and
    # one that it made for another clone would be this one's from then on.
    stamp = Path(sys.prefix, "complete")
    if not stamp.exists() or not stamp.read_text().startswith(f"{REPOSITORY} torch"):
        pytest.skip(f"{sys.prefix} was not made by slurm/venv.sh for this clone; tests/run.sh does")
    run_dir = tmp_path / "run of mine"
    env = {"VENV": sys.prefix, "PSDIST_RUN_DIR": str(run_dir), "PATH": os.environ["PATH"]}
    env["PYTHONPATH"] = ""  # as a user's: nothing of tests/support/startup
    done = run_program(["bash", str(QUICKSTART)], timeout_s=280, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.text
    for shown in lines_of_the_readme():
        assert re.search(shown, done.text, re.MULTILINE), f"{shown} is not in\n{done.text}"
    assert (run_dir / "summary.json").exists()
