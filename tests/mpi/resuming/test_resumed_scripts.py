"""Scripts with dropout, batch norm, augmentation in loader processes and schedulers, killed and
resumed: they end with the bits of an undisturbed run.

tests/support/programs/resuming/resumable.py is the script.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.mpirun import Completed, environment_prefix, require, run_program

pytestmark = pytest.mark.mpi

TIMEOUT_S = 240
ITERATIONS = 15
"""Iterations of each worker: 3 epochs of 5 batches."""


def run(run_dir: Path, *words: str, script: tuple[str, ...] = (), workers: int = 2) -> Completed:
    require("openmpi")
    python = str(environment_prefix("openmpi") / "bin" / "python")
    argv = [python, "-m", "psdist", "run", "--workers", str(workers), "--servers", "1"]
    argv += ["--run-dir", str(run_dir), *words, "-m", "tests.support.programs.resuming.resumable"]
    argv += [str(run_dir) + ".out", *script]
    repository = str(Path(__file__).parents[3])
    env = {"PSDIST_PROGRESS": "off", "PYTHONPATH": repository}
    return run_program(argv, timeout_s=TIMEOUT_S, env=env)


def found(run_dir: Path, *, workers: int = 2) -> list[Any]:
    """The samples that each worker has seen, its state at its end, and the saved model."""
    of_workers = [
        json.loads(Path(f"{run_dir}.out-{worker}.json").read_text("utf-8"))
        for worker in range(workers)
    ]
    return [*of_workers, Path(f"{run_dir}.safetensors").read_bytes()]


def resumed_from(done: Completed) -> int:
    match = re.search(r"resumes from checkpoint step-([0-9]{8})", done.text)
    assert match, done.text
    return int(match[1])


@pytest.mark.parametrize(
    "codec",
    [
        "none",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("int4/sign", "lowrank:1/sign", "topk:0.1+burst:3/sign")
        ),
    ],
)
def test_a_script_that_is_killed_and_resumed_sees_and_learns_what_it_would_have(
    tmp_path: Path, codec: str
) -> None:
    """With codecs: what workers have left out of pushes, and what they hold, continue as well."""
    whole = run(tmp_path / "whole", "--codec", codec)
    assert whole.returncode == 0, whole.text
    run_dir = tmp_path / "killed"
    # Epochs end at 5, 10 and 15: cuts at 4, 8 and 12 lie within them.
    every = ("--checkpoint-every", "4", "--resume", "--codec", codec)
    assert run(run_dir, *every, script=("--die-at", "14")).returncode != 0
    again = run(run_dir, *every)
    assert again.returncode == 0, again.text
    assert resumed_from(again) in (8, 12)  # the last may not have been written yet
    assert found(run_dir) == found(tmp_path / "whole")
    assert [len(each["losses"]) for each in found(run_dir)[:2]] == [ITERATIONS] * 2


def test_sigterm_waits_for_a_last_checkpoint_and_ends_the_job(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # The chief sends it; the other worker comes to its boundary because the coordinator says so.
    done = run(run_dir, script=("--signal-at", "7", "--loader-processes", "0", "--epochs", "500"))
    assert done.returncode == 143, done.text
    assert done.text.count("interrupted by SIGTERM") == 1
    summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
    assert (summary["exit"], summary["checkpoints"]) == ("interrupted", 1)
    (kept,) = (run_dir / "checkpoints").glob("step-*")
    assert kept.name >= "step-00000007"


@pytest.mark.slow
def test_a_job_that_is_requeued_and_terminated_ends_as_one_that_was_not(tmp_path: Path) -> None:
    assert run(tmp_path / "whole").returncode == 0
    run_dir = tmp_path / "run"
    words = ("--resume", "--set", "on_usr1=requeue")
    first = run(run_dir, *words, script=("--signal-at", "4", "--signal", "SIGUSR1"))
    assert first.returncode == 75, first.text
    second = run(run_dir, *words, script=("--signal-at", "9"))
    assert second.returncode == 143, second.text
    assert resumed_from(second) >= 4
    third = run(run_dir, *words)
    assert third.returncode == 0, third.text
    assert resumed_from(third) >= 9
    assert found(run_dir) == found(tmp_path / "whole")


@pytest.mark.slow
def test_usr1_while_ranks_start_ends_the_job_at_its_first_boundary(tmp_path: Path) -> None:
    script = ("--usr1-before-init", "--loader-processes", "0")
    done = run(tmp_path / "run", "--set", "on_usr1=requeue", script=script)
    assert done.returncode == 75, done.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    assert (summary["exit"], summary["clocks"], summary["checkpoints"]) == ("requeue", [0], 1)


@pytest.mark.slow
@pytest.mark.parametrize("die_at", range(2, ITERATIONS + 1))
def test_so_it_does_wherever_it_is_killed(die_at: int, tmp_path: Path) -> None:
    assert run(tmp_path / "whole").returncode == 0
    run_dir = tmp_path / "killed"
    every = ("--checkpoint-every", "1", "--resume")
    assert run(run_dir, *every, script=("--die-at", str(die_at))).returncode != 0
    assert run(run_dir, *every).returncode == 0
    assert found(run_dir) == found(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_elsewhere_a_resumed_script_makes_its_iterations_and_no_others(
    mode: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "killed"
    words = ("--mode", mode, "--group", "rank", "--checkpoint-every", "4", "--resume", "--record")
    assert run(run_dir, *words, script=("--die-at", "14")).returncode != 0
    again = run(run_dir, *words)
    assert again.returncode == 0, again.text
    for each in found(run_dir)[:2]:
        assert each["clock"] == len(each["losses"]) == ITERATIONS
        assert [epoch for epoch, _ in each["losses"]] == [0] * 5 + [1] * 5 + [2] * 5


@pytest.mark.slow
def test_a_time_in_place_of_a_number_makes_checkpoints_too(tmp_path: Path) -> None:
    done = run(
        tmp_path / "run",
        *("--checkpoint-every", "1s"),
        script=("--epochs", "600", "--loader-processes", "0"),
    )
    assert done.returncode == 0, done.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    assert summary["checkpoints"] >= 1


@pytest.mark.slow
def test_other_workers_go_on_with_what_can_move(tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    every = ("--checkpoint-every", "4", "--resume")
    assert run(run_dir, *every, script=("--die-at", "14")).returncode != 0
    again = run(run_dir, *every, workers=1)
    assert again.returncode == 0, again.text
    assert "is of other workers: buffers and what is attached are the chief's" in again.text
    assert "the checkpoint is of 2 workers, the job of 1: batch sizes are per worker" in again.text


@pytest.mark.parametrize("feed", ["list", "loader"])
def test_checkpoint_every_without_a_boundary_is_a_warning(tmp_path: Path, feed: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, psdist\n"
        "job = psdist.init()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "batches = [torch.ones(2)] * 4\n"
        f"for batch in job.loader(batches, batch_size=1) if {feed == 'loader'} else batches:\n"
        "    model(batch).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    words = ["-m", "psdist", "run", "--run-dir", "run", "--checkpoint-every", "2", str(script)]
    done = run_program([sys.executable, *words], timeout_s=TIMEOUT_S, cwd=tmp_path)
    assert done.returncode == 0, done.text
    told = "checkpoint.every = 2 makes no checkpoint: the script uses no psdist loader"
    assert done.stderr.count(told) == (feed == "list"), done.text
    assert (tmp_path / "run" / "checkpoints").exists() == (feed == "loader")
