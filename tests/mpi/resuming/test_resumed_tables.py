"""Jobs with tables that are killed and continue from their checkpoint, as a user starts them.

tests/support/programs/tables/kept.py is the script.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from psdist.checkpoint.folder import Folder
from psdist.commands.checkpoints.comparing import differences
from tests.support.mpirun import Completed, Mpi, environment_prefix, require, run_program

pytestmark = pytest.mark.mpi

TIMEOUT_S = 240
KILL, KEPT, LAST = 7, "step-00000006", "step-00000012"


def run(
    mpi: Mpi,
    run_dir: Path,
    *words: str,
    servers: int = 2,
    workers: int = 2,
    script: tuple[str, ...] = ("-1",),
) -> Completed:
    require(mpi)
    python = str(environment_prefix(mpi) / "bin" / "python")
    argv = [python, "-m", "psdist", "run", "--workers", str(workers), "--servers", str(servers)]
    argv += ["--group", "rank", "--run-dir", str(run_dir), *words]
    argv += ["-m", "tests.support.programs.tables.kept", f"{run_dir}.safetensors", *script]
    return run_program(argv, timeout_s=TIMEOUT_S, env={"PSDIST_PROGRESS": "off"})


def succeeded(done: Completed) -> Completed:
    assert done.returncode == 0, done.text
    return done


def command(*words: str) -> Completed:
    return run_program([sys.executable, "-m", "psdist", *words], timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a job that was killed."""
    run_dir = tmp_path_factory.mktemp("tables") / "killed"
    assert run("openmpi", run_dir, "--record", script=(str(KILL),)).returncode != 0
    return run_dir


def resumed(killed: Path, run_dir: Path, *words: str, **options: Any) -> Completed:
    shutil.copytree(killed, run_dir)
    return run("openmpi", run_dir, "--resume", "--record", *words, **options)


def test_a_killed_job_resumed_on_any_servers_equals_one_that_was_not_killed(
    killed: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    succeeded(run("openmpi", whole))
    rows = Path(f"{whole}-rows.safetensors").read_bytes()
    for servers in (3, 1):
        run_dir = tmp_path / str(servers)
        again = succeeded(resumed(killed, run_dir, servers=servers))
        assert f"resumes from checkpoint {KEPT}" in again.text
        assert "worker 1 begins at 6" in again.stdout
        one, other = (Folder(each).open(LAST) for each in (whole, run_dir))
        found = [each for each in differences(one, other) if "['random']" not in each]
        assert found == []
        assert Path(f"{run_dir}-rows.safetensors").read_bytes() == rows
    out = tmp_path / "exported.safetensors"
    succeeded(command("export", str(tmp_path / "3"), str(out), "--table", "*"))
    assert out.read_bytes() == rows
    assert "kept the rules of sync" in succeeded(command("check", str(tmp_path / "3"))).stdout


@pytest.mark.parametrize(
    "mode", ["tables.mode=async", pytest.param("mode=async", marks=pytest.mark.slow)]
)
def test_a_job_in_async_resumes_with_another_number_of_workers(
    mode: str, killed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    again = succeeded(resumed(killed, run_dir, "--set", mode, workers=3, servers=1))
    assert "worker 2 begins at 6" in again.stdout
    assert "tables: async" in succeeded(command("check", str(run_dir))).stdout


def test_other_tables_are_refused(killed: Path, tmp_path: Path) -> None:
    refused = resumed(killed, tmp_path / "run", script=("-1", "other"))
    assert refused.returncode != 0
    assert "table items: num_rows 500 there, 600 here; resume with the script" in refused.text
