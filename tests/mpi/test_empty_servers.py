"""A server that holds nothing is named when the model is known, and in summary.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.mpirun import REPOSITORY, Mpi, run_mpi, run_program

JOB = [
    "-m",
    "psdist",
    "run",
    str(REPOSITORY / "tests" / "support" / "programs" / "round_trip_job.py"),
]


@pytest.mark.mpi
@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_servers_without_a_chunk_are_named_once_and_in_the_summary(
    mpi: Mpi, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    env = {"PSDIST_RUN_DIR": str(run_dir), "PSDIST_PROGRESS": "off", "PSDIST_SERVERS": "3"}
    done = run_mpi(4, JOB, timeout_s=120, mpi=mpi, env=env)
    assert done.returncode == 0, done.text
    (warning,) = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert warning.endswith(
        "servers 1, 2 hold nothing and only wait: the model of 512 bytes is cut into 1 chunk of at "
        "most 512 bytes; set servers = 1"
    ), done.text
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["empty_servers"] == [1, 2]
    assert [each["num_chunks"] for each in summary["per_server"]] == [1, 0, 0]


def test_where_all_servers_hold_some_the_summary_names_none(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    env = {"PSDIST_RUN_DIR": str(run_dir), "PSDIST_PROGRESS": "off"}
    done = run_program([sys.executable, *JOB], timeout_s=120, env=env)
    assert done.returncode == 0, done.text
    assert "WARNING" not in done.stderr
    assert json.loads((run_dir / "summary.json").read_text())["empty_servers"] == []
