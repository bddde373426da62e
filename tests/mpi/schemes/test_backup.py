"""Backup groups under mpirun: a group that is slow now and then, and one that always is.

tests/support/programs/schemes/backup_script.py is the script.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from psdist.checkpoint.folder import Folder
from psdist.commands import check
from psdist.history.writers import read_history
from tests.support.mpirun import REPOSITORY, Completed, run_mpi

pytestmark = pytest.mark.mpi

SCRIPT = str(REPOSITORY / "tests" / "support" / "programs" / "schemes" / "backup_script.py")
QUIET = {"PSDIST_PROGRESS": "off", "PYTHONPATH": str(REPOSITORY)}


def run_script(folder: Path, *options: str, passed: tuple[str, ...]) -> Completed:
    words = ["-m", "psdist", "run", "--record", "--group", "rank", "--servers", "2", *options]
    words += ["--set", "chunk_bytes=4096"]
    words += ["--run-dir", str(folder / "run"), SCRIPT, str(folder), *passed]
    return run_mpi(5, words, timeout_s=120, env=QUIET)


def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("seen.*"))]


@pytest.mark.slow
def test_who_is_slow_now_and_then_misses_rounds_and_their_batches(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--backup", "1", passed=("36", "0.01", "random"))
    assert done.returncode == 0, done.text
    assert check.main(tmp_path / "run") == 0
    told = seen(tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["clocks"] == [36, 36, 36], "all passes end alike"
    assert max(summary["rounds_missed"]) > 0
    assert [each["clock"] for each in told] == [36, 36, 36]
    assert len({each["mean"] for each in told}) == 1
    assert "of the rounds (by group)" in done.text
    samples = [sample for each in told for sample in each["samples"]]
    assert len(samples) == len(set(samples)), "no sample comes twice"
    # A batch is left out for every round that was, and for no other.
    for each in told:
        assert each["rounds"] == sorted(set(each["rounds"]))
        assert len(each["samples"]) == 4 * len(each["rounds"])


def test_who_is_always_slow_contributes_now_and_then(tmp_path: Path) -> None:
    options = ("--backup", "1", "--set", "backup_every=6")
    done = run_script(tmp_path, *options, passed=("24", "0.01", "always", "clipped"))
    assert done.returncode == 0, done.text
    assert check.main(tmp_path / "run") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    *_, slow = summary["rounds_missed"]
    assert 12 <= slow <= 21
    log = "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
    assert "max_grad_norm clips each group's own gradient, not the joint one: groups may" in log


@pytest.mark.slow
def test_a_run_goes_on_with_what_groups_have_missed(tmp_path: Path) -> None:
    options = ("--backup", "1", "--set", "backup_every=9", "--checkpoint-every", "10")
    passed = ("36", "0.01", "always")
    done = run_script(tmp_path, *options, passed=passed)
    assert done.returncode == 0, done.text
    before = seen(tmp_path)
    folder = Folder(tmp_path / "run")
    name = folder.names()[0]
    (folder.path / "latest").write_text(name + "\n")
    done = run_script(tmp_path, *options, "--resume", passed=passed)
    assert done.returncode == 0, done.text
    assert f"resumes from checkpoint {name}" in done.text
    assert check.main(tmp_path / "run") == 0
    clock, told = int(name.removeprefix("step-")), seen(tmp_path)
    assert [each["clock"] for each in told] == [36, 36, 36]
    assert len({each["mean"] for each in told}) == 1
    assert all(min(each["rounds"]) >= clock for each in told)
    known = [dict(zip(each["rounds"], batches(each), strict=True)) for each in before]
    for mine, its in zip(known, told, strict=True):
        now = dict(zip(its["rounds"], batches(its), strict=True))
        assert all(mine.get(at, batch) == batch for at, batch in now.items())
    rounds = told[2]["rounds"]
    assert rounds[-1] > clock, "it has come back"
    running = read_history(tmp_path / "run").run.missed_running
    assert len(running) == 3
    assert max(running) < 9


def batches(told: dict[str, Any]) -> list[list[int]]:
    return [told["samples"][at : at + 4] for at in range(0, len(told["samples"]), 4)]
