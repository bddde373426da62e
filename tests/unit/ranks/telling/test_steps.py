"""What people and files hear of local steps that the coordinator fixes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from psdist.config.settings import RunConfig
from psdist.controller.steps import Term
from psdist.history.hands import STEP_LINES
from psdist.ranks.telling.steps import StepReports
from psdist.report.run_directory import RunDirectory
from psdist.servers.protocol.losses import LossHeard
from psdist.servers.protocol.steps import StepsChosen, StepsObserved

HEARD = LossHeard(2, 5, 3, 1.5)


def chosen(block: int, *steps: int, why: str = "") -> StepsChosen:
    return StepsChosen(Term(0, 0, block), steps, why)


def report(folder: Path, *actions: object, **settings: Any) -> StepReports:
    directory = RunDirectory(folder)
    reports = StepReports(RunConfig(local_steps=8, **settings), directory)
    for action in actions:
        if isinstance(action, LossHeard):
            reports.heard(action)
        elif isinstance(action, StepsObserved):
            reports.observed(action)
        elif isinstance(action, StepsChosen):
            reports.chosen(action)
    directory.close()
    return reports


def test_what_was_heard_and_fixed_is_kept_with_the_history(tmp_path: Path) -> None:
    actions = (HEARD, StepsObserved(1, 4, 900), chosen(2, 4, 4, why="low"))
    report(tmp_path, *actions, record=True, steps_by="loss")
    lines = [json.loads(line) for line in (tmp_path / STEP_LINES).read_text().splitlines()]
    assert lines == [
        {"reported": {"worker": 2, "round": 5, "count": 3, "total": 1.5}},
        {"observed": {"group": 1, "round": 4, "step_us": 900}},
        {"fixed": {"loader": 0, "number": 0, "block": 2, "steps": [4, 4], "why": "low"}},
    ]
    report(tmp_path / "none", *actions, steps_by="loss")
    assert not (tmp_path / "none").exists()


def test_people_hear_of_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="psdist"):
        report(tmp_path, HEARD, chosen(2, 8, 8), chosen(3, 4, 4, why="low"), steps_by="loss")
        report(tmp_path, chosen(3, 8, 8), chosen(4, 4, 12, why="fast"), steps_by="speed")
        report(tmp_path, chosen(1, *range(1, 18), why="fast"), steps_by="speed")
    assert caplog.messages == [
        "local steps: 4 (low)",
        "local steps by group: 4, 12 (fast)",
        f"local steps by group: {', '.join(map(str, range(1, 17)))}, ... (fast)",
    ]


def test_people_hear_once_of_losses_that_nobody_reports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="psdist"):
        report(tmp_path, *(chosen(block, 8, 8) for block in range(6)), steps_by="loss")
        report(tmp_path, chosen(2, 8, 8), HEARD, chosen(3, 8, 8), steps_by="loss")
        report(tmp_path, *(chosen(block, 8, 8) for block in range(6)), steps_by="speed")
    assert caplog.messages == [
        "local.steps_by = loss: no loss was reported in the first 9 rounds; rounds stay at 8 local "
        "steps until the script calls job.report(loss)"
    ]


def test_the_end_of_a_run_tells_all_changes_by_the_loss(tmp_path: Path) -> None:
    changes = chosen(0, 8, 8), chosen(2, 5, 5, why="low"), chosen(3, 5, 5), chosen(4, 2, 2, why="0")
    reports = report(tmp_path, *changes, steps_by="loss")
    assert reports.words == "local steps 8, 5 from 5, 2 from 13"
    assert reports.told() == [
        {"round": 0, "steps": 8, "why": "settings"},
        {"round": 5, "steps": 5, "why": "low"},
        {"round": 13, "steps": 2, "why": "0"},
    ]
    reports = report(tmp_path, *changes, steps_by="speed")
    assert (reports.words, reports.told()) == ("", [])
