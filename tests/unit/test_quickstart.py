"""The scripts that a user runs first: what they say on a machine that lacks something, and that
the quickstart trains and proves its run."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import textwrap
from contextlib import suppress
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


def fake_environment(tmp_path: Path) -> Path:
    """An environment in which nothing is installed, and whose programs only note their words."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "psdist"):
        (programs / name).write_text('#!/bin/sh\nprintf "%s\\n" "$*" >>"$LOG"\n')
        (programs / name).chmod(0o755)
    return programs.parent


def quickstart_at_a_terminal(
    tmp_path: Path, *words: str, answer: str = ""
) -> tuple[int, str, list[str]]:
    """(exit status, what was printed, the words of pip and psdist). Nobody answers without
    ``answer``."""
    log = tmp_path / "log"
    log.touch()
    environment = {
        "LOG": str(log),
        "VENV": str(fake_environment(tmp_path)),
        "PATH": os.environ["PATH"],
        "PIP_FIND_LINKS": "wheels",
    }
    terminal, its_end = pty.openpty()
    with open(terminal, "w+b", buffering=0) as user:
        job = subprocess.Popen(
            ["bash", str(QUICKSTART), *words],
            env=environment,
            stdin=its_end,
            stdout=its_end,
            stderr=its_end,
        )
        os.close(its_end)
        user.write(answer.encode())
        text = ""
        with suppress(OSError):  # the other end is closed
            while part := user.read(4096):
                text += part.decode()
        status = job.wait(30)
    done = [line for line in log.read_text().splitlines() if line.startswith(("-m pip", "run"))]
    return status, text.replace("\r\n", "\n"), done


@pytest.mark.parametrize(
    ("words", "answer", "status", "num_commands"),
    [
        ((), "n\n", 1, 0),
        ((), "\x04", 1, 0),  # Ctrl-D
        ((), "y\n", 0, 2),
        ((), "\n", 0, 2),
        (("--yes",), "", 0, 2),
    ],
)
def test_the_quickstart_says_what_it_will_install_and_asks_at_a_terminal(
    words: tuple[str, ...], answer: str, status: int, num_commands: int, tmp_path: Path
) -> None:
    found = quickstart_at_a_terminal(tmp_path, *words, answer=answer)
    assert found[0] == status, found[1]
    assert len(found[2]) == num_commands
    for said in (
        "Installing psdist-mpi[mpi,examples] into ",
        "5 GB with the CUDA build of torch, the default on Linux; 2.7 GB of that are CUDA",
        "1.3 GB with a CPU build: set PIP_EXTRA_INDEX_URL",
        "Set now: PIP_FIND_LINKS.\n",
    ):
        assert said in found[1]
    assert ("Continue? [Y/n]" in found[1]) == (not words)
    assert ("Nothing was installed." in found[1]) == (not num_commands)


def test_without_a_terminal_the_quickstart_continues(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = {"LOG": str(log), "VENV": str(fake_environment(tmp_path)), "PATH": os.environ["PATH"]}
    done = run_program(["bash", str(QUICKSTART)], timeout_s=30, env=env)
    assert done.returncode == 0, done.text
    assert "Continue?" not in done.text
    assert "1.3 GB with a CPU build" in done.stderr
    assert "-m pip install" in log.read_text()


def test_a_folder_with_other_files_is_not_emptied_for_an_environment(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("years of work")
    env = {"PATH": os.environ["PATH"], "VENV": str(tmp_path)}
    done = run_program(["bash", str(QUICKSTART), "--yes"], timeout_s=30, env=env)
    assert (done.returncode, done.stderr) == (
        1,
        f"{tmp_path} holds files and is no virtual environment: name another folder in VENV.\n",
    )
    assert thesis.read_text() == "years of work"


def test_the_environment_may_be_named_from_the_current_folder(tmp_path: Path) -> None:
    log = tmp_path / "log"
    fake_environment(tmp_path)
    env = {"LOG": str(log), "VENV": "venv", "PATH": os.environ["PATH"]}
    done = run_program(["bash", str(QUICKSTART)], timeout_s=30, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.text
    assert "run -n 4" in log.read_text()


def test_the_quickstart_refuses_other_words(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "VENV": str(tmp_path)}
    done = run_program(["bash", str(QUICKSTART), "--no"], timeout_s=30, env=env)
    assert (done.returncode, done.stderr) == (
        2,
        "quickstart.sh: --no: expected --yes or nothing\n",
    )


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
    # An environment that slurm/venv.sh did not make would be made again, which downloads torch; and
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
