"""A training whose loss blows up because rounds are too long ends with status 75, continues from
before with shorter ones, and ends where short rounds would have brought it.

tests/support/programs/resuming/rising.py is the script.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psdist.commands.check import check_run
from psdist.history.rules.findings import Rule
from psdist.history.writers import read_histories
from tests.support.forked_runs import ForkedRuns
from tests.support.mpirun import Completed

SCRIPT = str(Path(__file__).parents[1] / "support" / "programs" / "resuming" / "rising.py")
ROUNDS = (
    *("--record", "--resume", "--set", "outer=nesterov:lr=2,momentum=0.9"),
    *("--checkpoint-every", "2", "--set", "on_nonfinite=skip"),
)

RATES = ("0.02", "0.15", "0.02")
"""Learning rate of each epoch: rounds of 10 steps converge with the first, not with the second."""


@pytest.fixture(scope="module")
def runs() -> Iterator[ForkedRuns]:
    with ForkedRuns() as found:
        yield found


def train(
    runs: ForkedRuns, run_dir: Path, *words: str, steps: int = 16, rates: tuple[str, ...] = RATES
) -> Completed:
    by_loss = ("--local-steps", str(steps), "--set", "steps_by=loss")
    return runs.play("run", "--run-dir", str(run_dir), *ROUNDS, *by_loss, *words, SCRIPT, *rates)


def until_it_ends(runs: ForkedRuns, run_dir: Path, **given: Any) -> list[Completed]:
    """As a job script does it."""
    attempts: list[Completed] = []
    while not attempts or attempts[-1].returncode == 75:
        assert len(attempts) < 6, attempts[-1].text
        attempts.append(train(runs, run_dir, "--set", "rollback=3", **given))
    return attempts


@pytest.fixture(scope="module")
def risen(runs: ForkedRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run to its end, and left unchanged."""
    path = tmp_path_factory.mktemp("risen") / "run"
    attempts = until_it_ends(runs, path)
    first, last = attempts
    assert (first.returncode, last.returncode) == (75, 0), [each.text for each in attempts]
    assert "requeue: the loss has blown up: --resume continues, the loss was " in first.text
    assert "of after it began to rise are set aside (*.rolled-back-1)" in last.text
    return path


def summary(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text("utf-8"))
    return found


def test_the_next_attempt_goes_on_from_before_with_half_as_many_steps(risen: Path) -> None:
    before, after = summary(risen / "attempt-1"), summary(risen)
    assert before["exit"] == "requeue"
    (line,) = map(json.loads, (risen / "rollbacks.jsonl").read_text().splitlines())
    assert line["attempt"] == 1
    rollback = line["rollback"]
    assert rollback["loss"] > 3 * rollback["best"]
    assert rollback["allowed"] == rollback["lossiest"] // 2
    names = sorted(each.name for each in (risen / "checkpoints").glob("step-*"))
    aside = [name for name in names if name.endswith(".rolled-back-1")]
    assert aside
    assert all(int(name[5:13]) > rollback["good"] for name in aside)
    assert 0 < int(after["resumed_from"].removeprefix("step-")) <= rollback["good"]
    assert after["rollbacks"] == before["rollbacks"]
    assert f"{rollback['allowed']} local steps at most" in after["rollbacks"][0]["why"]
    assert max(each["steps"] for each in after["steps_by_loss"]) == rollback["allowed"]
    report = check_run(risen, read_histories(risen))
    assert report.proved, report
    assert after["last"]["final"] < 1.1 * rollback["best"]


def test_a_third_attempt_is_as_careful(runs: ForkedRuns, risen: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(risen, tmp_path / "run"))
    kept = sorted((path / "checkpoints").glob("step-????????"))
    (path / "checkpoints" / "latest").write_text(f"{kept[0].name}\n")
    done = train(runs, path, "--set", "rollback=3")
    assert done.returncode == 0, done.text
    most = json.loads((path / "rollbacks.jsonl").read_text())["rollback"]["allowed"]
    assert max(each["steps"] for each in summary(path)["steps_by_loss"]) <= most
    assert check_run(path, read_histories(path)).proved


@pytest.mark.slow
def test_without_it_the_loss_is_lost(runs: ForkedRuns, risen: Path, tmp_path: Path) -> None:
    for name, steps in (("bad", 16), ("safe", 2)):
        assert train(runs, tmp_path / name, steps=steps).returncode == 0
    bad, safe, found = (
        summary(each)["last"]["final"] for each in (tmp_path / "bad", tmp_path / "safe", risen)
    )
    assert bad > 10 * safe
    assert found < 1.1 * safe


def test_where_nothing_less_lossy_is_left_one_error_says_so(
    runs: ForkedRuns, tmp_path: Path
) -> None:
    """A learning rate with which no rounds go well."""
    first, last = until_it_ends(runs, tmp_path / "run", steps=2, rates=("1.5",))
    assert (first.returncode, last.returncode) == (75, 2)
    assert "that was with 1 local step, and nothing less lossy is left" in last.text
    assert "--resume continues" not in last.text
    assert len((tmp_path / "run" / "rollbacks.jsonl").read_text().splitlines()) == 2
    checked = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert not checked.num_violations, checked
    again = train(runs, tmp_path / "run", steps=2, rates=("0.02",))
    assert again.returncode == 0, again.text
    assert "set aside (*.rolled-back-2)" in again.text
    checked = check_run(tmp_path / "run", read_histories(tmp_path / "run"))
    assert not checked.num_violations, checked


@pytest.mark.parametrize(
    ("name", "pattern", "instead", "rule"),
    [
        ("attempt-1/steps.jsonl", r'"good": ', '"good": 1', Rule.HANDS),
        ("attempt-1/steps.jsonl", r'{"rolled_back".*\n', "", Rule.KEPT),
        ("attempt-1/history/run.json", r'"rollback": 3.0', '"rollback": 1e9', Rule.HANDS),
        ("steps.jsonl", r'{"resumed".*\n', "", Rule.KEPT),
    ],
)
def test_a_rollback_that_does_not_follow_is_found(
    name: str, pattern: str, instead: str, rule: Rule, risen: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(risen, tmp_path / "run"))
    text, count = re.subn(pattern, instead, (path / name).read_text())
    assert count
    (path / name).write_text(text)
    assert rule.value in check_run(path, read_histories(path)).violations_by_rule
