"""The history's lines on what psdist observes and changes, as the coordinator writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from psdist.config.settings import RunConfig
from psdist.controller.kept import rolled_back
from psdist.controller.observed import (
    GroupCame,
    GroupGone,
    LevelsSized,
    LossHeard,
    ModeObserved,
    StepsObserved,
)
from psdist.controller.rollback import Rise
from psdist.controller.steps import Term
from psdist.history.lines import DECISION_LINES, STEP_LINES, DecisionLine, read_choices
from psdist.ranks.reporting.recording import ChoiceLines
from psdist.report.run_directory import RunDirectory
from psdist.servers.protocol.modes import ModeChanged
from psdist.servers.protocol.steps import StepsChosen
from psdist.servers.protocol.views import Survived

SEEN = ModeObserved(1, 5, [7], [9], is_judged=True, errors_ppm=[3])
SIZED = LevelsSized([10, 5, 3, 2, 1])
TO_INT4 = ModeChanged((28,), "sync", 0, "slow", 3)
TO_INT8 = ModeChanged((60,), "sync", 0, "fast", 2)
TO_SSP = ModeChanged((28,), "ssp", 2, "skewed")
AUTO = RunConfig(codec="auto", record=True)


def write(config: RunConfig, folder: Path, *facts: object) -> ChoiceLines:
    directory = RunDirectory(folder)
    lines = ChoiceLines(config, directory)
    for each in facts:
        lines.append(each)
    directory.close()
    return lines


def test_observations_and_changes_are_kept(tmp_path: Path) -> None:
    write(AUTO, tmp_path, SIZED, SEEN, Survived(1), TO_INT4, TO_INT8)
    lines = (tmp_path / DECISION_LINES).read_text().splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == [
        *("sized", "observed", "changed", "changed"),
    ]
    sized, observed, changed, _ = read_choices(tmp_path, DecisionLine)
    assert sized.sized is not None
    assert sized.sized.sizes == [10, 5, 3, 2, 1]
    assert observed.observed is not None
    assert observed.observed.errors_ppm == [3]
    assert changed.changed is not None
    assert changed.changed.level == 3


def test_who_is_looked_at_no_more_and_who_is_from_now_on_is_kept(tmp_path: Path) -> None:
    config = RunConfig(mode="auto", record=True, max_deaths=1)
    write(config, tmp_path, GroupGone(1), GroupCame(3, 40))
    gone, came = read_choices(tmp_path, DecisionLine)
    assert gone.gone is not None
    assert gone.gone.group == 1
    assert came.came is not None
    assert (came.came.group, came.came.first_round) == (3, 40)


@pytest.mark.parametrize(
    "config", [RunConfig(codec="auto"), RunConfig(set_mode="allowed", record=True)]
)
def test_nothing_is_kept_without_a_record_and_where_psdist_decides_nothing(
    config: RunConfig, tmp_path: Path
) -> None:
    write(config, tmp_path, TO_INT4 if config.codec else TO_SSP)
    assert list(tmp_path.iterdir()) == []


def test_losses_are_kept_with_what_they_decide(tmp_path: Path) -> None:
    for folder, is_kept in (("kept", True), ("not", False)):
        (tmp_path / folder).mkdir()
        config = RunConfig(codec="auto", loss_patience=2, record=is_kept)
        write(config, tmp_path / folder, LossHeard(1, 7, 2, -1.5))
    (line,) = read_choices(tmp_path / "kept", DecisionLine)
    assert line.reported is not None
    assert line.reported == LossHeard(1, 7, 2, -1.5)
    assert read_choices(tmp_path / "not", DecisionLine) == []


def test_local_steps_have_a_file_of_their_own(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"local_steps": 8, "steps_by": "loss"}
    rollback = rolled_back(60, Rise(9.0, 1.0, 40), 8)
    chosen = StepsChosen(Term(0, 0, 2), (4, 4), "low")
    facts = (LossHeard(2, 5, 3, 1.5), StepsObserved(1, 4, 900), chosen, rollback, rollback)
    write(RunConfig(record=True, **settings), tmp_path, *facts)
    lines = [json.loads(line) for line in (tmp_path / STEP_LINES).read_text().splitlines()]
    assert lines[:3] == [
        {"reported": {"worker": 2, "round": 5, "count": 3, "total": 1.5}},
        {"observed": {"group": 1, "round": 4, "step_us": 900}},
        {"fixed": {"loader": 0, "number": 0, "block": 2, "steps": [4, 4], "why": "low"}},
    ]
    assert [list(line) for line in lines[3:]] == [["rolled_back"]], "once"
    assert not (tmp_path / DECISION_LINES).exists()
    write(RunConfig(**settings), tmp_path / "none", *facts)
    assert not (tmp_path / "none").exists()


def test_a_standby_knows_which_lines_a_failed_coordinator_had_written(tmp_path: Path) -> None:
    write(AUTO, tmp_path, SIZED, SEEN, TO_INT4)
    undone = [SEEN, Survived(1), TO_INT4, SEEN, TO_INT8]
    assert ChoiceLines(AUTO, RunDirectory(tmp_path)).written(undone) == [SEEN, TO_INT4]
    unrecorded = RunConfig(codec="auto")
    assert ChoiceLines(unrecorded, RunDirectory(tmp_path)).written(undone) == []
