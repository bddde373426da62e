"""Mistakes of tests/mpi/test_bad_input.py under srun, over three hosts: told once, all end."""

from __future__ import annotations

import re

import pytest

from tests.support.bad_input import QUIET, SCRIPT, TIMEOUT_S, said, the_line
from tests.support.mpirun import Completed, Mpi
from tests.support.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slurm

SRUN: tuple[tuple[Mpi, str], ...] = (("openmpi", "pmix"), ("mpich", "pmi2"))


def srun_script(
    cluster: SlurmCluster, mistake: str, *, mpi: Mpi, plugin: str, options: tuple[str, ...] = ()
) -> Completed:
    run_dir = str(cluster.directory("bad") / "run")  # hosts do not share /tmp
    # pmi2 would let the others of a rank that was killed wait; Slurm's PMIx ends the step.
    words = ["--nodes=3", "--ntasks=3", f"--mpi={plugin}", "--kill-on-bad-exit=1"]
    words += [
        "python",
        "-m",
        "psdist",
        "run",
        "--servers",
        "1",
        "--group",
        "rank",
        "--run-dir",
        run_dir,
        *options,
    ]
    words += [str(SCRIPT), mistake]
    return cluster.srun(words, mpi=mpi, timeout_s=TIMEOUT_S, env=QUIET)


@pytest.mark.parametrize(("mpi", "plugin"), SRUN)
def test_srun_ends_all_hosts_when_a_script_raises_on_one(
    slurm_cluster: SlurmCluster, mpi: Mpi, plugin: str
) -> None:
    done = srun_script(slurm_cluster, "raises_on_one_worker", mpi=mpi, plugin=plugin)
    assert done.returncode != 0, done.text
    assert re.match(r"psdist: worker 1 \(rank \d on h\d\):", said(done)[0]), done.text
    assert done.stderr.count("RuntimeError: lost at iteration 1") == 1, done.text
    assert done.stderr.count("Traceback") == 1, done.text


@pytest.mark.parametrize(("mpi", "plugin"), SRUN)
def test_srun_shows_a_wrong_setting_once_for_all_hosts(
    slurm_cluster: SlurmCluster, mpi: Mpi, plugin: str
) -> None:
    options = ("--staleness", "-1")
    done = srun_script(slurm_cluster, "x", mpi=mpi, plugin=plugin, options=options)
    # All ranks exit with 2; srun ends those that are slower than the first, and then says 143.
    assert done.returncode in (2, 143), done.text
    assert the_line(done, status=done.returncode) == (
        "psdist: error: staleness = -1 (command line): must be a whole number from 0 to 2147483647"
    )


@pytest.mark.parametrize(("mpi", "plugin"), SRUN)
def test_srun_ends_all_hosts_when_a_rank_is_killed(
    slurm_cluster: SlurmCluster, mpi: Mpi, plugin: str
) -> None:
    done = srun_script(slurm_cluster, "is_killed", mpi=mpi, plugin=plugin)
    assert done.returncode != 0, done.text
    assert "completed" not in done.stdout, done.text
