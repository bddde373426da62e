"""psdist's examples, killed in the middle and started again with the same line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.mpirun import Completed, environment_prefix, require, run_program

pytestmark = pytest.mark.mpi

REPOSITORY = Path(__file__).parents[3]
TIMEOUT_S = 280


def run(
    run_dir: Path,
    example: str,
    *options: str,
    die_at: int = 0,
    workers: int = 2,
    settings: tuple[str, ...] = (),
) -> Completed:
    require("openmpi")
    python = str(environment_prefix("openmpi") / "bin" / "python")
    argv = [python, "-m", "psdist", "run", "--workers", str(workers), "--servers", "1", *settings]
    argv += ["--checkpoint-every", "10", "--resume", "--run-dir", str(run_dir)]
    if die_at:
        argv += ["-m", "tests.support.programs.deaths.killed_example", example, str(die_at)]
    else:
        argv += [str(REPOSITORY / "psdist" / "examples" / f"{example}.py")]
    argv += [*options, "--save", str(run_dir) + ".safetensors"]
    env = {"PSDIST_PROGRESS": "off", "PYTHONPATH": str(REPOSITORY)}
    return run_program(argv, timeout_s=TIMEOUT_S, env=env)


def saved(run_dir: Path) -> bytes:
    return Path(str(run_dir) + ".safetensors").read_bytes()


@pytest.mark.parametrize(
    ("example", "options", "die_at", "clock"),
    [
        # 23 iterations in an epoch: killed in the second of three.
        pytest.param(
            "digits", ("--epochs", "3", "--patience", "9"), 37, 69, marks=pytest.mark.slow
        ),
        pytest.param("chars", ("--epochs", "1"), 50, 122, marks=pytest.mark.slow),
    ],
)
def test_an_example_that_is_killed_and_resumed_saves_what_it_would_have_saved(
    example: str, options: tuple[str, ...], die_at: int, clock: int, tmp_path: Path
) -> None:
    whole = run(tmp_path / "whole", example, *options)
    assert whole.returncode == 0, whole.text
    killed = tmp_path / "killed"
    first = run(killed, example, *options, die_at=die_at)
    assert first.returncode != 0, first.text
    again = run(killed, example, *options)
    assert again.returncode == 0, again.text
    assert "attempt 2 resumes from checkpoint step-000000" in again.text
    summary = json.loads((killed / "summary.json").read_text("utf-8"))
    assert summary["clocks"] == [clock]
    assert saved(killed) == saved(tmp_path / "whole")
    reports = [
        [line for line in done.text.splitlines() if "test accuracy" in line or "validation" in line]
        for done in (again, whole)
    ]
    assert reports[0] == reports[1] != []


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_with_a_global_batch_other_workers_go_on_with_the_same_iterations(
    workers: int, tmp_path: Path
) -> None:
    # 1437 images: 28 joint batches of 50, whose parts differ by one for three workers, and 37.
    def train(name: str, **more: Any) -> Completed:
        settings = ("--global-batch", "50", "--group", "rank", "--record")
        return run(tmp_path / name, "digits", "--epochs", "2", settings=settings, **more)

    assert train("whole").returncode == 0
    assert train("killed", die_at=45).returncode != 0
    again = train("killed", workers=workers)
    assert again.returncode == 0, again.text
    assert "is of other workers" in again.text
    assert "batch sizes are per worker" not in again.text
    summary = json.loads((tmp_path / "killed" / "summary.json").read_text("utf-8"))
    (kept,) = re.findall("resumes from checkpoint step-([0-9]{8})", again.text)
    assert set(summary["clocks"]) == {58}
    left = 2 * 1437 - (int(kept) * 50 - (50 - 37) * (int(kept) >= 29))
    assert summary["samples"] == left
    ours, whole = (load_file(tmp_path / f"{name}.safetensors") for name in ("killed", "whole"))
    for name, tensor in whole.items():
        assert torch.allclose(ours[name], tensor, rtol=0, atol=2e-5), name
    checked = run_program(
        [sys.executable, "-m", "psdist", "check", str(tmp_path / "killed")], timeout_s=TIMEOUT_S
    )
    assert checked.returncode == 0, checked.text


def test_batches_of_unknown_size_are_no_global_batch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import psdist, torch\n"
        "job = psdist.init()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "model, sgd = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for _ in range(3):\n"
        "    sgd.zero_grad()\n"
        "    model(torch.ones(4, 2)).sum().backward()\n"
        "    sgd.step()\n"
    )
    argv = [sys.executable, "-m", "psdist", "run", "--global-batch", "8"]
    argv += ["--run-dir", str(tmp_path / "run"), str(script)]
    done = run_program(argv, timeout_s=TIMEOUT_S)
    assert done.returncode == 2, done.text
    assert "training.global_batch = 8: the script trains with batches that no loader" in done.text
