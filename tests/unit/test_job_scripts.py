"""``psdist slurm``: the scripts it prints. They run here with stand-ins for srun, mpirun and
psdist. tests/slurm runs those for Slurm on a cluster; no test has a cluster of PBS or LSF."""

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
EXAMPLE = ("openmpi", "mpich", "mpirun", "multi-gpu")
"""The scripts that train an example if they are given no training script."""


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


def play(
    folder: Path, name: str, *arguments: str, environment_folder: str = "venv", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as a job of two hosts with two ranks each would. The stand-in for psdist is in
    ``environment_folder``."""
    programs = folder / environment_folder / "bin"
    programs.mkdir(parents=True)
    for program in ("psdist", "mpirun", "srun"):
        (programs / program).write_text(
            'printf "%s\\n" "$(basename "$0")" "$@"; echo "mode ${PSDIST_MODE:-of the settings}"\n'
            '[ -z "${SRUN_CPUS_PER_TASK:-}" ] || echo "$SRUN_CPUS_PER_TASK cores"\n'
        )
        (programs / program).chmod(0o755)
    (folder / "psdist" / "examples").mkdir(parents=True)
    (folder / "psdist" / "examples" / "digits.py").touch()
    (folder / "train.py").touch()
    (folder / "hosts").write_text("n1\nn1\nn2\nn2\n")
    job, submitted, hosts = BATCH.get(name, ("SLURM_JOB_ID", "SLURM_SUBMIT_DIR", "HOSTS"))
    return subprocess.run(
        ["bash", str(REPOSITORY / "slurm" / cli.JOB_SCRIPTS[name]), *arguments],
        cwd=folder,
        env={
            "PATH": "/usr/bin:/bin",
            job: "7",
            submitted: str(folder),
            hosts: str(folder / "hosts"),
            "SLURM_NTASKS": "4",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_ON_NODE": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize("name", EXAMPLE)
def test_the_job_scripts_choose_ssp_for_their_example_only(name: str, tmp_path: Path) -> None:
    venv = {"VENV": str(tmp_path / "a" / "venv")}
    example = play(tmp_path / "a", name, **venv)
    assert example.stdout.splitlines()[-2:] == ["psdist/examples/digits.py", "mode ssp"]
    venv = {"VENV": str(tmp_path / "b" / "venv")}
    own = play(tmp_path / "b", name, "train.py", "--epochs", "5", **venv)
    assert own.stdout.splitlines()[-3:] == ["--epochs", "5", "mode of the settings"], own.stderr


@pytest.mark.parametrize("name", ["openmpi", "mpich", "multi-gpu"])
def test_srun_gives_each_rank_the_cores_that_sbatch_was_asked_for(
    name: str, tmp_path: Path
) -> None:
    done = play(tmp_path, name, VENV=str(tmp_path / "venv"), SLURM_CPUS_PER_TASK="4")
    assert done.stdout.splitlines()[-1] == "4 cores", done.stderr


@pytest.mark.parametrize("name", [*EXAMPLE, *BATCH])
def test_a_job_script_finds_psdist_in_the_environment_or_on_path(name: str, tmp_path: Path) -> None:
    """In VENV, else in .venv of the folder of the submission, else on PATH, as a module puts it."""

    def started(folder: Path, environment_folder: str, **environment: str) -> str:
        done = play(
            folder,
            name,
            "train.py",
            environment_folder=environment_folder,
            SCRIPT="train.py",
            **environment,
        )
        return done.stdout + done.stderr

    assert "mode of the settings\n" in started(tmp_path / "a", ".venv")
    module = f"{tmp_path / 'b' / 'module' / 'bin'}:/usr/bin:/bin"
    assert "mode of the settings\n" in started(tmp_path / "b", "module", PATH=module)
    missing = started(tmp_path / "c", "module")
    assert "c/.venv or on PATH: load its module" in missing
    module = module.replace("/b/", "/d/")
    wrong = started(tmp_path / "d", "module", PATH=module, VENV="/nowhere")
    assert wrong.endswith("there is no psdist in VENV=/nowhere\n")


@pytest.mark.parametrize("name", BATCH)
def test_a_batch_job_starts_a_rank_for_each_line_of_its_hosts(name: str, tmp_path: Path) -> None:
    venv = str(tmp_path / "venv")
    given = {"SCRIPT": "train.py", "ARGS": "--epochs 5", "PSDIST_MODE": "sync", "VENV": venv}
    done = play(tmp_path, name, **given)
    hosts = str(tmp_path / "hosts")
    assert done.stdout.splitlines() == [
        *("mpirun", "-n", "4", "--hostfile", hosts, "--bind-to", "none"),
        *("psdist", "run", "train.py", "--epochs", "5", "mode sync"),
    ], done.stderr


@pytest.mark.parametrize("name", BATCH)
def test_a_batch_job_without_a_script_says_how_to_name_one(name: str, tmp_path: Path) -> None:
    done = play(tmp_path, name, VENV=str(tmp_path / "venv"))
    assert done.returncode == 2
    assert f"mpirun.{name}: there is no training script ''" in done.stderr
