"""A table four times as large as the memory that a worker may allocate."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.mpirun import Completed, run_program

pytestmark = pytest.mark.mpi

LIMIT_MIB = 32
ROWS = 4 * LIMIT_MIB * 2**20 // (4 * 16)


def run(run_dir: Path, *options: str) -> Completed:
    argv = [sys.executable, "-m", "psdist", "run", "-n", "2", "--run-dir", str(run_dir)]
    program = ["-m", "tests.support.programs.tables.large", str(ROWS), "65536"]
    limit = ["--limit", str(LIMIT_MIB)]
    env = {"PSDIST_PROGRESS": "off"}
    return run_program([*argv, *program, *limit, *options], timeout_s=240, env=env)


def test_a_table_of_four_times_a_workers_memory_trains(tmp_path: Path) -> None:
    done = run(tmp_path / "run")
    assert done.returncode == 0, done.text
    grown = re.findall(r"^worker 0: grew (\S+) MiB$", done.stdout, re.MULTILINE)
    assert len(grown) == 1
    assert float(grown[0]) <= LIMIT_MIB
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["sets"][1]["per_server"][0]["rows"] == ROWS


def test_a_table_of_torch_does_not_fit_under_the_same_limit(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "--dense")
    assert done.returncode != 0
    assert "memory" in done.text
