"""A training whose loss blows up because rounds are too long ends with status 75, goes on from
before with shorter ones, and ends where short rounds would have brought it.

tests/support/programs/resuming/rising.py is the script.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psdist.commands.check import check_run
from psdist.history.writers import read_histories
from tests.support.forked_runs import ForkedRuns
from tests.support.mpirun import Completed

SCRIPT = str(Path(__file__).parents[1] / "support" / "programs" / "resuming" / "rising.py")
ROUNDS = (
    *("--record", "--resume", "--set", "outer=nesterov:lr=2,momentum=0.9"),
    *("--checkpoint-every", "2", "--set", "on_nonfinite=skip"),
)


@pytest.fixture(scope="module")
def runs() -> Iterator[ForkedRuns]:
    with ForkedRuns() as found:
        yield found


def train(
    runs: ForkedRuns, run_dir: Path, *words: str, steps: int = 16, lr: str = "0.1"
) -> Completed:
    by_loss = ("--local-steps", str(steps), "--set", "steps_by=loss")
    return runs.play("run", "--run-dir", str(run_dir), *ROUNDS, *by_loss, *words, SCRIPT, lr)


def until_it_ends(runs: ForkedRuns, run_dir: Path, **given: Any) -> list[Completed]:
    """As a job script does it."""
    attempts: list[Completed] = []
    while not attempts or attempts[-1].returncode == 75:
        assert len(attempts) < 6, attempts[-1].text
        attempts.append(train(runs, run_dir, "--set", "rollback=3", **given))
    return attempts


@pytest.fixture(scope="module")
def risen(runs: ForkedRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run to its end, and changed by nobody."""
    path = tmp_path_factory.mktemp("risen") / "run"
    attempts = until_it_ends(runs, path)
    print([each.text[-900:] for each in attempts])
    assert [each.returncode for each in attempts[:-1]]
    assert attempts[-1].returncode == 0
    return path


def summary(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text("utf-8"))
    return found


def test_what(risen: Path, runs: ForkedRuns, tmp_path: Path) -> None:
    print(summary(risen)["rollbacks"], summary(risen)["last"], summary(risen)["steps_by_loss"])
    print(sorted(each.name for each in (risen / "checkpoints").iterdir()))
    done = train(runs, tmp_path / "bad")
    print(done.returncode, done.text[-500:], summary(tmp_path / "bad")["last"])
    done = train(runs, tmp_path / "safe", steps=2)
    print(done.returncode, summary(tmp_path / "safe")["last"])
    print(check_run(risen, read_histories(risen)))
    for each in until_it_ends(runs, tmp_path / "lr", steps=2, lr="1.5"):
        print(each.returncode, each.text[-600:])
