"""psdist's examples, killed in the middle and started again with the same line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.mpirun import Completed, environment_prefix, require, run_program

pytestmark = pytest.mark.mpi

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 280


def run(run_dir: Path, example: str, *options: str, die_at: int = 0) -> Completed:
    require("openmpi")
    python = str(environment_prefix("openmpi") / "bin" / "python")
    argv = [python, "-m", "psdist", "run", "--workers", "2", "--servers", "1", "--checkpoint-every"]
    argv += ["10", "--resume", "--run-dir", str(run_dir)]
    if die_at:
        argv += ["-m", "tests.support.programs.killed_example", example, str(die_at)]
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
        ("digits", ("--epochs", "3", "--patience", "9"), 37, 69),
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
    assert "attempt 2 goes on from checkpoint step-000000" in again.text
    summary = json.loads((killed / "summary.json").read_text("utf-8"))
    assert summary["clocks"] == [clock]
    assert saved(killed) == saved(tmp_path / "whole")
    reports = [
        [line for line in done.text.splitlines() if "test accuracy" in line or "validation" in line]
        for done in (again, whole)
    ]
    assert reports[0] == reports[1] != []
