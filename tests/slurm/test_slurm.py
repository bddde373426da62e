"""On a Slurm cluster of four hosts: both MPIs by srun, and every job script as users submit it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.mpirun import REPOSITORY, Mpi
from tests.support.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

DIGITS = "psdist/examples/digits.py"

SAY_WHERE = """
import numpy as np
from psdist.ranks.agreement import start_mpi
from mpi4py import MPI
world = start_mpi()
neighbours = world.Split_type(MPI.COMM_TYPE_SHARED).size
sent, received = np.full(1, world.rank + 1), np.empty(1, int)
world.Allreduce(sent, received)
print(world.rank, world.size, MPI.Get_processor_name(), neighbours, received[0])
"""

JOB_SCRIPTS: dict[str, Mpi] = {
    "srun-openmpi.sbatch": "openmpi",
    "srun-mpich.sbatch": "mpich",
    "mpirun.sbatch": "openmpi",
    "multi-gpu.sbatch": "openmpi",
}


@pytest.mark.parametrize(("mpi", "plugin"), [("openmpi", "pmix"), ("mpich", "pmi2")])
def test_srun_makes_one_world_over_four_hosts(
    slurm_cluster: SlurmCluster, mpi: Mpi, plugin: str
) -> None:
    done = slurm_cluster.srun(
        [f"--mpi={plugin}", "-N", "4", "--ntasks-per-node=2", "python", "-c", SAY_WHERE],
        mpi=mpi,
        timeout_s=120,
    )
    assert done.returncode == 0, done.text
    ranks = [line.split() for line in done.stdout.splitlines()]
    assert sorted(int(rank) for rank, *_ in ranks) == list(range(8)), done.text
    # Eight ranks, two on each host, who see each other and no third; the sum of 1 to 8.
    assert {(size, near, total) for _, size, _, near, total in ranks} == {("8", "2", "36")}
    assert Counter(host for _, _, host, *_ in ranks) == {"h1": 2, "h2": 2, "h3": 2, "h4": 2}


def test_mpich_starts_whatever_its_ranks_publish(slurm_cluster: SlurmCluster) -> None:
    # Without psdist.install.quirks all ranks abort in MPI_Init: MPICH's UCX publishes what the
    # heap holds.
    program = str(REPOSITORY / "tests" / "support" / "programs" / "dense_heap.py")
    for _ in range(3):
        done = slurm_cluster.srun(
            ["--mpi=pmi2", "-N", "4", "--ntasks-per-node=2", "python", program],
            mpi="mpich",
            timeout_s=120,
        )
        assert done.returncode == 0, done.text
        assert done.stdout.splitlines() == ["one of 8"] * 8, done.text


def test_slurm_knows_the_racks(slurm_cluster: SlurmCluster) -> None:
    done = slurm_cluster.srun(["-N", "4", "printenv", "SLURM_TOPOLOGY_ADDR"], timeout_s=60)
    assert sorted(done.stdout.split()) == [
        "spine.rack1.h1",
        "spine.rack1.h2",
        "spine.rack2.h3",
        "spine.rack2.h4",
    ], done.text


def test_hosts_share_files_but_neither_tmp_nor_shared_memory(slurm_cluster: SlurmCluster) -> None:
    shared = slurm_cluster.directory("shared")
    mine, all_of = f"{shared.name}-$SLURMD_NODENAME", f"{shared.name}-*"
    touch = f"touch /tmp/{mine} /dev/shm/{mine} {shared}/{mine}"
    look = f"echo $(for d in /tmp /dev/shm {shared}; do ls -d $d/{all_of} | wc -l; done)"
    # Nobody looks before all have touched: a step begins when the one before it has ended.
    for command in (touch, look):
        done = slurm_cluster.srun(["-N", "4", "sh", "-c", command], timeout_s=60)
        assert done.returncode == 0, done.text
    assert done.stdout.splitlines() == ["1 1 4"] * 4


def test_a_job_that_fails_is_not_taken_for_one_that_ended_well(
    slurm_cluster: SlurmCluster,
) -> None:
    script = slurm_cluster.directory("failing") / "job.sbatch"
    script.write_text("#!/bin/sh\necho what went wrong\nexit 3\n")
    done = slurm_cluster.sbatch(script, timeout_s=60)
    assert (done.returncode, done.stdout) == (3, "what went wrong\n")


def test_every_job_script_is_tested_here() -> None:
    assert {path.name for path in (REPOSITORY / "slurm").glob("*.sbatch")} == {
        *JOB_SCRIPTS,
        "requeue.sbatch",
    }


@pytest.mark.parametrize("name", JOB_SCRIPTS)
def test_a_job_script_trains_the_digits_example(slurm_cluster: SlurmCluster, name: str) -> None:
    """One as it is and as a user starts it; the others on two hosts, and for two epochs."""
    run_dir = slurm_cluster.directory(name) / "run"
    env = {"PSDIST_MODE": "ssp", "PSDIST_STALENESS": "2", "PSDIST_RUN_DIR": str(run_dir)}
    is_users = name == "srun-openmpi.sbatch"
    if is_users:
        env["PYTHONPATH"] = ""  # nothing of tests/support/startup
    done = slurm_cluster.sbatch(
        REPOSITORY / "slurm" / name,
        sbatch_args=() if is_users else ("--nodes=2",),
        script_args=() if is_users else (DIGITS, "--epochs=2"),
        mpi=JOB_SCRIPTS[name],
        env=env,
        timeout_s=400,
    )
    assert done.returncode == 0, done.text
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["exit"], summary["mode"], summary["staleness"]) == ("completed", "ssp", 2)
    ranks = json.loads((run_dir / "ranks.json").read_text())
    assert len({rank["host"] for rank in ranks}) == (4 if is_users else 2), ranks


@pytest.mark.parametrize("name", JOB_SCRIPTS)
def test_a_job_script_without_arguments_means_the_digits_example(
    slurm_cluster: SlurmCluster, name: str
) -> None:
    elsewhere = slurm_cluster.directory("elsewhere")
    done = slurm_cluster.sbatch(
        REPOSITORY / "slurm" / name, mpi=JOB_SCRIPTS[name], timeout_s=60, cwd=elsewhere
    )
    assert done.returncode == 2, done.text
    assert done.stdout == f"{name}: there is no training script {DIGITS} in {elsewhere}\n"


@pytest.mark.parametrize("is_once", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_job_script_starts_again_what_has_crashed_but_not_for_ever(
    slurm_cluster: SlurmCluster, is_once: bool
) -> None:
    folder = slurm_cluster.directory(f"requeue-{is_once}")
    program = REPOSITORY / "tests" / "support" / "programs" / "resuming" / "resumable.py"
    done = slurm_cluster.sbatch(
        REPOSITORY / "slurm" / "requeue.sbatch",
        sbatch_args=["--nodes=2", "--ntasks-per-node=2"],
        script_args=[
            *(str(program), str(folder / "out"), "--loader-processes=0", "--epochs=4"),
            *("--die-at=6", *(["--only-once"] if is_once else [])),
        ],
        env={
            "RUN_DIR": str(folder / "run"),
            "EVERY": "4",
            "PSDIST_SERVERS": "2",
            "PSDIST_MODE": "ssp",
            "PSDIST_STALENESS": "3",
        },
        timeout_s=400,
    )
    assert (folder / "run" / "attempt-1" / "ranks.json").exists(), done.text
    if is_once:
        assert done.returncode == 0, done.text
        summary = json.loads((folder / "run" / "summary.json").read_text())
        assert (summary["exit"], summary["mode"], summary["attempts"]) == ("completed", "ssp", 2)
        assert all(clock > 6 for clock in summary["clocks"])
    else:
        assert done.returncode == 2, done.text
        assert "3 times in a row without a new checkpoint" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_script_goes_on_beyond_its_time_limit(slurm_cluster: SlurmCluster) -> None:
    """Slurm signals 90 s before the limit of 3 minutes, and lets a requeued job wait for two."""
    folder = slurm_cluster.directory("time-limit")
    program = REPOSITORY / "tests" / "support" / "programs" / "resuming" / "resumable.py"
    epochs = 300
    done = slurm_cluster.sbatch(
        REPOSITORY / "slurm" / "requeue.sbatch",
        sbatch_args=["--nodes=2", "--ntasks-per-node=2", "--time=3", "--signal=B:USR1@90"],
        script_args=[
            *(str(program), str(folder / "out"), "--loader-processes=0"),
            *(f"--epochs={epochs}", "--pause-s=0.1"),
        ],
        env={"RUN_DIR": str(folder / "run"), "PSDIST_MODE": "sync", "PSDIST_SERVERS": "2"},
        timeout_s=1100,
    )
    assert done.returncode == 0, done.text
    assert "requeue.sbatch: requeued at checkpoint step-" in done.text
    first = json.loads((folder / "run" / "attempt-1" / "summary.json").read_text())
    assert first["exit"] == "requeue"
    last = json.loads((folder / "run" / "summary.json").read_text())
    assert (last["exit"], last["attempts"] > 1) == ("completed", True)
    assert int(last["resumed_from"].removeprefix("step-")) >= first["clocks"][0] > 0
    for worker in range(2):
        found = json.loads((folder / f"out-{worker}.json").read_text())
        assert found["clock"] == len(found["losses"]) == last["clocks"][0]
        # Nothing twice and nothing left out: as many iterations of every epoch.
        counts = Counter(epoch for epoch, _ in found["losses"])
        assert counts == dict.fromkeys(range(epochs), counts[0])


@pytest.mark.parametrize("name", JOB_SCRIPTS)
def test_a_job_script_names_a_training_script_that_does_not_exist(
    slurm_cluster: SlurmCluster, name: str
) -> None:
    done = slurm_cluster.sbatch(
        REPOSITORY / "slurm" / name,
        script_args=["no/such/train.py"],
        mpi=JOB_SCRIPTS[name],
        timeout_s=60,
    )
    assert done.returncode == 2, done.text
    assert "no/such/train.py" in done.stdout
    assert len(done.stdout.splitlines()) == 1, done.text


@pytest.mark.parametrize(
    ("mpi", "wrong", "right"),
    [("openmpi", "none", "pmix"), ("openmpi", "pmi2", "pmix"), ("mpich", "none", "pmi2")],
)
def test_the_wrong_mpi_option_is_one_line_that_names_the_right_one(
    slurm_cluster: SlurmCluster, tmp_path: Path, mpi: Mpi, wrong: str, right: str
) -> None:
    done = slurm_cluster.srun(
        [f"--mpi={wrong}", "-N", "2", "-n", "2", "psdist", "run", DIGITS],
        mpi=mpi,
        env={"PSDIST_RUN_DIR": str(tmp_path / "run")},
        timeout_s=120,
    )
    assert done.returncode != 0, done.text
    lines = [line for line in done.stderr.splitlines() if f"--mpi={right}" in line]
    assert len(lines) == 1, done.text
    assert "Traceback" not in done.stderr
