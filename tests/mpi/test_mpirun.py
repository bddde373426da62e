"""The helper that starts MPI programs is itself tested: a broken one would hide every hang."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.mpirun import (
    LeftoverProcessError,
    Mpi,
    ProgramTimeoutError,
    run_mpi,
    run_program,
)

SAY_HELLO = """
from mpi4py import MPI
world = MPI.COMM_WORLD
MPI.COMM_WORLD.barrier()
print(f"rank {world.rank} of {world.size} {MPI.Query_thread() == MPI.THREAD_MULTIPLE}")
"""

WAIT_FOR_A_MESSAGE_THAT_NEVER_COMES = """
import os, time
from mpi4py import MPI

def wait_here():
    while not MPI.COMM_WORLD.iprobe(tag=7):
        time.sleep(0.01)

if MPI.COMM_WORLD.rank == 1:
    wait_here()
os.read(os.pipe()[0], 1)
"""

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_every_rank_of_a_program_runs_and_knows_the_others(mpi: Mpi) -> None:
    done = run_mpi(3, ["-c", SAY_HELLO], mpi=mpi, timeout_s=60)
    assert done.returncode == 0, done.text
    assert sorted(done.stdout.splitlines()) == [f"rank {r} of 3 True" for r in range(3)]


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_program_that_hangs_is_killed_and_says_where_it_stood(mpi: Mpi) -> None:
    with pytest.raises(ProgramTimeoutError, match="wait_here"):
        run_mpi(2, ["-c", WAIT_FOR_A_MESSAGE_THAT_NEVER_COMES], mpi=mpi, timeout_s=5)


def test_the_status_of_a_rank_that_fails_is_not_lost() -> None:
    done = run_mpi(2, ["-c", "raise SystemExit(7)"], timeout_s=60)
    assert done.returncode == 7, done.text


def test_a_process_that_outlives_its_launcher_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.support.mpirun.LINGER_S", 0.5)
    leave_a_daemon = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
"""
    with pytest.raises(LeftoverProcessError, match=r"time\.sleep\(60\)"):
        run_program([sys.executable, "-c", leave_a_daemon], timeout_s=30)


def test_variables_of_the_shell_do_not_reach_a_program_but_given_ones_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PSDIST_MODE", "async")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    show = "import os; print(os.environ.get('PSDIST_MODE'), 'SLURM_JOB_ID' in os.environ)"
    assert run_program([sys.executable, "-c", show], timeout_s=30).stdout == "None False\n"
    given = {"PSDIST_MODE": "sync"}
    done = run_program([sys.executable, "-c", show], timeout_s=30, env=given, cwd=tmp_path)
    assert done.stdout == "sync False\n"
