"""A worker that is killed in the middle of a push of rows, whose messages have left in part."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from psdist.commands.check import check_run
from psdist.history.writers import read_histories
from tests.support.mpirun import run_program

pytestmark = pytest.mark.mpi


def test_nothing_of_the_push_of_a_killed_worker_is_half_applied(tmp_path: Path) -> None:
    settings = ("max_deaths=1", "tables.max_rows=50", "progress=off")
    argv = [sys.executable, "-m", "psdist", "run", "-n", "4", "--group", "rank", "--record"]
    argv += [f"--set={each}" for each in settings]
    done = run_program(
        [*argv, "-m", "tests.support.programs.tables.dies"],
        timeout_s=120,
        env={"PSDIST_RUN_DIR": str(tmp_path / "run")},
    )
    assert done.returncode == 0, done.text
    errors = re.findall(r"^worker (\d): error (\S+)$", done.stdout, re.MULTILINE)
    assert sorted(worker for worker, _ in errors) == ["0", "2"], done.text
    assert all(float(error) < 1e-5 for _, error in errors), done.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [each["worker"] for each in summary["deaths"]] == [1]
    report = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert report.proved, (report.violations, report.notes)
