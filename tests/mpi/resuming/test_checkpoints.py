"""Jobs that are killed and continue from their checkpoint, as a user starts them.

tests/support/programs/resuming/checkpointed.py is the script.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.mpirun import Completed, Mpi, environment_prefix, require, run_program

pytestmark = pytest.mark.mpi

TIMEOUT_S = 240
STEPS, KILL = 10, 8
KEPT = "step-00000006"


def run(
    mpi: Mpi,
    run_dir: Path,
    *words: str,
    servers: int = 2,
    workers: int = 2,
    options: tuple[str, ...] = ("--record",),
    kill: int = -1,
    script: tuple[str, ...] = ("adamw",),
) -> Completed:
    require(mpi)
    python = str(environment_prefix(mpi) / "bin" / "python")
    argv = [python, "-m", "psdist", "run", "--workers", str(workers), "--servers", str(servers)]
    argv += ["--group", "rank", "--set", "chunk_bytes=4096", *options, "--run-dir", str(run_dir)]
    argv += [*words, "-m", "tests.support.programs.resuming.checkpointed"]
    optimizer, *dtype = script
    argv += [str(run_dir) + ".safetensors", optimizer, str(STEPS), str(kill), *dtype]
    return run_program(argv, timeout_s=TIMEOUT_S, env={"PSDIST_PROGRESS": "off"})


def check(run_dir: Path) -> Completed:
    return run_program([sys.executable, "-m", "psdist", "check", str(run_dir)], timeout_s=TIMEOUT_S)


def saved(run_dir: Path) -> bytes:
    return Path(str(run_dir) + ".safetensors").read_bytes()


def exported(run_dir: Path) -> bytes:
    """Return the file that ``psdist export`` makes of the newest checkpoint, without MPI."""
    out = Path(str(run_dir) + "-exported.safetensors")
    argv = [sys.executable, "-m", "psdist", "export", str(run_dir), str(out)]
    done = run_program(argv, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.text
    return out.read_bytes()


def killed_and_resumed(tmp_path: Path, mpi: Mpi = "openmpi", **options: Any) -> Path:
    """The run directory of a job that was killed once."""
    run_dir = tmp_path / "killed"
    first = run(mpi, run_dir, kill=KILL, **options)
    assert first.returncode != 0, first.text
    again = run(mpi, run_dir, "--resume", **options)
    assert again.returncode == 0, again.text
    assert f"resumes from checkpoint {KEPT}" in again.text
    assert "worker 0 begins at [6, 6]" in again.text
    return run_dir


def test_a_killed_job_that_goes_on_ends_as_one_that_was_not_killed(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    # --resume where there is nothing to continue from: the same line starts a run.
    done = run("openmpi", whole, "--resume")
    assert done.returncode == 0, done.text
    assert "has no checkpoint to resume from: this run starts afresh" in done.text
    run_dir = killed_and_resumed(tmp_path)
    assert saved(run_dir) == saved(whole)
    summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
    assert summary["attempts"] == 2
    assert summary["resumed_from"] == KEPT
    assert summary["checkpoints"] == 1  # after iteration 9
    assert summary["clocks"] == [STEPS, STEPS]
    proved = check(run_dir)
    assert proved.returncode == 0, proved.text
    assert "attempt 1: " in proved.text
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("step-*")) == [
        "step-00000006",
        "step-00000009",
    ]


@pytest.mark.slow
def test_one_whose_mode_changes_goes_on_under_the_rule_of_each_round(tmp_path: Path) -> None:
    """Killed in sync behind ssp; what is left is sync, and then async."""
    options = ("--record", "--schedule", "0: ssp:2; 4: sync; 9: async")
    run_dir = killed_and_resumed(tmp_path, options=options)
    summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
    ruled = [(each["round"], each["mode"]) for each in summary["modes"]]
    assert ruled == [(0, "ssp"), (4, "sync"), (9, "async")]
    proved = check(run_dir)
    assert proved.returncode == 0, proved.text


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
def test_so_it_does_with_other_optimizers(optimizer: str, tmp_path: Path) -> None:
    assert run("openmpi", tmp_path / "whole", script=(optimizer,)).returncode == 0
    run_dir = killed_and_resumed(tmp_path, script=(optimizer,))
    assert saved(run_dir) == saved(tmp_path / "whole")


@pytest.mark.slow
def test_masters_of_bfloat16_go_on_exactly(tmp_path: Path) -> None:
    script = ("sgd", "bfloat16")
    assert run("openmpi", tmp_path / "whole", script=script).returncode == 0
    run_dir = killed_and_resumed(tmp_path, script=script)
    assert saved(run_dir) == saved(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2, 3, 6])
def test_any_number_of_servers_goes_on_with_the_same_bits(servers: int, tmp_path: Path) -> None:
    assert run("openmpi", tmp_path / "whole").returncode == 0
    run_dir = tmp_path / "killed"
    assert run("openmpi", run_dir, kill=KILL).returncode != 0
    again = run("openmpi", run_dir, "--resume", servers=servers)
    assert again.returncode == 0, again.text
    assert saved(run_dir) == saved(tmp_path / "whole")
    kept = json.loads((run_dir / "checkpoints" / "step-00000009" / "index.json").read_text("utf-8"))
    assert kept["servers"] == servers
    assert len(list((run_dir / "checkpoints" / "step-00000009").glob("server-*"))) == servers
    assert exported(run_dir) == exported(tmp_path / "whole")
    proved = check(run_dir)
    assert proved.returncode == 0, proved.text


@pytest.mark.slow
def test_values_and_state_are_the_same_bits_on_another_number_of_servers() -> None:
    require("openmpi")
    words = ["-m", "tests.benchmarks.checkpoints.restored_elsewhere", "--mib", "1"]
    words += ["--servers", "2", "--on", "3"]
    done = run_program([sys.executable, *words], timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.text
    assert json.loads(done.stdout)["exported_files_are_equal"]
    assert "the same, bit by bit" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
def test_another_number_of_workers_goes_on_in_every_mode(mode: str, tmp_path: Path) -> None:
    options = ("--record", "--mode", mode)
    run_dir = tmp_path / "killed"
    assert run("openmpi", run_dir, options=options, kill=KILL).returncode != 0
    again = run("openmpi", run_dir, "--resume", options=options, workers=3)
    assert again.returncode == 0, again.text
    tensors = load_file(str(run_dir) + ".safetensors")
    assert all(bool(torch.isfinite(each).all()) for each in tensors.values())
    proved = check(run_dir)
    assert proved.returncode == 0, proved.text


@pytest.mark.slow
def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run("openmpi", run_dir).returncode == 0
    again = run("openmpi", run_dir, "--resume", script=("sgd",))
    assert again.returncode == 2
    assert "optimizer torch.optim.AdamW there, torch.optim.SGD here" in again.text
    assert again.text.count("the script's model is not that of checkpoint") == 1
