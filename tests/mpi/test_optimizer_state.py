"""A training that stops and continues with its optimizer's state, as its user starts it, both MPIs.

tests/support/programs/resuming/continued.py is the script; here one process does the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.mpirun import Completed, Mpi, environment_prefix, require, run_program
from tests.support.programs.resuming.continued import NUM_WORKERS, make, train

pytestmark = pytest.mark.mpi

TIMEOUT_S = 120
MIDDLE, END = 3, 6
WORKERS = range(NUM_WORKERS)


def run(mpi: Mpi, run_dir: Path, servers: int, *words: str) -> Completed:
    require(mpi)
    python = str(environment_prefix(mpi) / "bin" / "python")
    argv = [python, "-m", "psdist", "run", "--workers", "2", "--servers", str(servers)]
    argv += ["--group", "rank", "--set", "chunk_bytes=4096", "--record"]
    argv += ["--run-dir", str(run_dir), "-m", "tests.support.programs.resuming.continued", *words]
    return run_program(argv, timeout_s=TIMEOUT_S, env={"PSDIST_PROGRESS": "off"})


def check(run_dir: Path) -> str:
    argv = [sys.executable, "-m", "psdist", "check", str(run_dir)]
    done = run_program(argv, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.text
    return done.stdout


def values_of(saved: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by where they are."""
    found = dict(saved["model"])
    for number, state in saved["optimizer"]["state"].items():
        found |= {f"{number} {key}": value for key, value in state.items()}
    return found


def assert_close(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    assert ours["optimizer"]["param_groups"] == plain["optimizer"]["param_groups"]
    first, second = values_of(ours), values_of(plain)
    assert first.keys() == second.keys()
    for name, value in second.items():
        distance = float(torch.linalg.vector_norm(first[name].double() - value.double()))
        assert distance <= 1e-4 * float(torch.linalg.vector_norm(value.double())), name


def plain(steps: range, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """The joint batches in one process, from a checkpoint where there is one."""
    model, optimizer = make()
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, steps, WORKERS)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_a_training_goes_on_with_its_state_in_the_next_job_and_in_plain_torch(
    mpi: Mpi, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    done = run(mpi, tmp_path / "first", 2, str(path), "0", str(MIDDLE))
    assert done.returncode == 0, done.text
    middle = torch.load(path, weights_only=True)
    assert_close(middle, plain(range(MIDDLE)))
    whole = plain(range(END))
    assert_close(plain(range(MIDDLE, END), middle), whole)

    done = run(mpi, tmp_path / "second", 1, str(path), str(MIDDLE), str(END))
    assert done.returncode == 0, done.text
    assert_close(torch.load(path, weights_only=True), whole)
    assert "optimizer state" not in check(tmp_path / "first")
    assert "note: it began with optimizer state of the chief" in check(tmp_path / "second")


def test_state_that_cannot_be_cut_is_refused_on_every_worker(tmp_path: Path) -> None:
    done = run("openmpi", tmp_path / "run", 1, "refused")
    assert done.returncode == 0, done.text
    told = (
        "torch.optim.Adafactor has state that cannot be cut into shards: state 'row_var' of "
        "parameter 0.weight is a float32 tensor of the shape (128, 1) for a parameter of the shape "
        "(128, 64)"
    )
    lines = sorted(line for line in done.stdout.splitlines() if " was told: " in line)
    assert [line.partition(" was told: ")[0] for line in lines] == ["worker 0", "worker 1"]
    assert all(told in line for line in lines), done.text
