"""``psdist slurm``: the scripts it prints. Those for PBS and LSF run here with stand-ins for mpirun
and psdist; no test has such a cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from psdist.commands import cli
from tests.support.mpirun import REPOSITORY

BATCH = {
    "pbs": {"PBS_JOBID": "7", "PBS_O_WORKDIR": "", "PBS_NODEFILE": ""},
    "lsf": {"LSB_JOBID": "7", "LS_SUBCWD": "", "LSB_DJOB_HOSTFILE": ""},
}
"""Variables of a job: its number, the folder of the submission, the file of hosts."""


@pytest.mark.parametrize("name", cli.JOB_SCRIPTS)
def test_a_job_script_is_printed_as_it_is(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["slurm", name])
    assert caught.value.code == 0
    text = (REPOSITORY / "slurm" / cli.JOB_SCRIPTS[name]).read_text(encoding="utf-8")
    assert capfd.readouterr().out == text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_every_job_script_has_a_name_and_an_unknown_name_is_refused(
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = REPOSITORY / "slurm"
    scripts = [each.name for each in folder.iterdir() if each.suffix != ".sh"]
    assert sorted(cli.JOB_SCRIPTS.values()) == sorted(scripts)
    with pytest.raises(SystemExit) as caught:
        cli.main(["slurm", "cobalt"])
    assert caught.value.code == 2
    assert "cobalt: expected one of openmpi, mpich" in capfd.readouterr().err


def play(folder: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a job of two hosts with two ranks each would."""
    programs = folder / "venv" / "bin"
    programs.mkdir(parents=True)
    for program in ("psdist", "mpirun"):
        (programs / program).write_text(
            'printf "%s\\n" "$(basename "$0")" "$@"; echo "mode $PSDIST_MODE"\n'
        )
        (programs / program).chmod(0o755)
    (folder / "train.py").touch()
    (folder / "hosts").write_text("n1\nn1\nn2\nn2\n")
    job, submitted, hosts = BATCH[name]
    return subprocess.run(
        ["bash", str(REPOSITORY / "slurm" / cli.JOB_SCRIPTS[name])],
        env={
            "PATH": "/usr/bin:/bin",
            job: "7",
            submitted: str(folder),
            hosts: str(folder / "hosts"),
            "VENV": str(folder / "venv"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize("name", BATCH)
def test_a_batch_job_starts_a_rank_for_each_line_of_its_hosts(name: str, tmp_path: Path) -> None:
    done = play(tmp_path, name, SCRIPT="train.py", ARGS="--epochs 5", PSDIST_MODE="sync")
    hosts = str(tmp_path / "hosts")
    assert done.stdout.splitlines() == [
        *("mpirun", "-n", "4", "--hostfile", hosts, "--bind-to", "none"),
        *("psdist", "run", "train.py", "--epochs", "5", "mode sync"),
    ], done.stderr


@pytest.mark.parametrize("name", BATCH)
def test_a_batch_job_without_a_script_says_how_to_name_one(name: str, tmp_path: Path) -> None:
    done = play(tmp_path, name)
    assert done.returncode == 2
    assert f"mpirun.{name}: there is no training script ''" in done.stderr
