"""Training loops from PyTorch's tutorials, under ``psdist run -n 4`` (docs/tutorials.md)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from psdist.commands.check import check_run
from psdist.history.writers import read_histories
from tests.support.mpirun import REPOSITORY, run_program

FOLDER = REPOSITORY / "tests" / "support" / "programs" / "tutorials"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
SAVED = {"gan": ["generator"], "dqn": ["policy"], "seq2seq": ["decoder", "encoder"], "vae": ["vae"]}


def test_there_are_ten() -> None:
    assert len(SCRIPTS) == 10


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "ssp"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_tutorials_loop_trains_and_is_proved(script: str, mode: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "psdist", "run", "-n", "4", "--mode", mode, "--group", "rank"]
    command += ["--run-dir", "run", "--record", "--set", "checksum_every=2"]
    command += [*(["--staleness", "2"] if mode == "ssp" else []), str(FOLDER / f"{script}.py")]
    done = run_program(command, timeout_s=200, cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 0, done.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit"] == "completed"
    assert all(min(each["clocks"]) > 0 for each in summary["sets"])
    assert summary["last"]["loss"] == summary["last"]["loss"], "not a number"
    report = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert report.proved, report
    for name in SAVED.get(script, ["model"]):
        with safe_open(tmp_path / f"{name}.safetensors", "pt") as saved:
            assert saved.keys()
