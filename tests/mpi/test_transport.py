"""Transport's contract over MPI, between ranks that do nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mpirun import Mpi, run_mpi

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_headers_and_control_messages_of_a_pair_keep_their_order(mpi: Mpi, tmp_path: Path) -> None:
    env = {"PSDIST_RUN_DIR": str(tmp_path / "run"), "PSDIST_PROGRESS": "off"}
    program = ("-m", "tests.support.programs.in_order")
    done = run_mpi(3, program, timeout_s=120, mpi=mpi, env=env)
    assert done.returncode == 0, done.text
    assert "all in order" in done.stdout, done.text
