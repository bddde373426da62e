"""Tables in jobs of several processes, as their user starts them.

tests/support/programs/tables/clicks.py is the script; one process does the same in plain torch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.mpirun import Completed, Mpi, environment_prefix, require, run_program
from tests.support.programs.tables.clicks import plain

pytestmark = pytest.mark.mpi

TIMEOUT_S = 120
PROGRAM = "tests.support.programs.tables.clicks"


def run(mpi: Mpi, run_dir: Path, *options: str) -> Completed:
    require(mpi)
    python = str(environment_prefix(mpi) / "bin" / "python")
    argv = [python, "-m", "psdist", "run", "--run-dir", str(run_dir)]
    result = str(run_dir.with_suffix(".pt"))
    return run_program(
        [*argv, *options, "-m", PROGRAM, result],
        timeout_s=TIMEOUT_S,
        env={"PSDIST_PROGRESS": "off"},
    )


def result_of(mpi: Mpi, run_dir: Path, *options: str) -> tuple[dict[str, torch.Tensor], int]:
    """Return the values after a run, and the rows that were pulled."""
    done = run(mpi, run_dir, *options)
    assert done.returncode == 0, done.text
    pulled = next(line for line in done.stdout.splitlines() if line.startswith("pulled "))
    return torch.load(run_dir.with_suffix(".pt"), weights_only=True), int(pulled.split()[1])


def require_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, atol=2e-6, rtol=0, msg=name)


def test_one_process_trains_tables_as_plain_torch_does(tmp_path: Path) -> None:
    ours, _ = result_of("openmpi", tmp_path / "alone")
    require_close(ours, plain())


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_sync_has_the_same_bits_with_any_servers_and_with_prefetch(
    mpi: Mpi, tmp_path: Path
) -> None:
    groups = ["--workers", "2", "--group", "rank"]
    first, num_pulled = result_of(mpi, tmp_path / "first", *groups, "--servers", "2")
    require_close(first, plain())
    few = ["--set", "tables.max_rows=20"]  # pushes leave in parts
    for servers, more in (("1", ["--set", "tables.prefetch=off"]), ("3", few)):
        options = [*groups, "--servers", servers, *more]
        other, more_pulled = result_of(mpi, tmp_path / servers, *options)
        assert all(torch.equal(first[name], other[name]) for name in first)
        assert more_pulled > 5 * num_pulled


def test_a_group_of_several_workers_pushes_the_mean_of_its_rows(tmp_path: Path) -> None:
    options = ["--workers", "2", "--group", "node", "--servers", "2"]
    ours, _ = result_of("openmpi", tmp_path / "group", *options)
    require_close(ours, plain())
