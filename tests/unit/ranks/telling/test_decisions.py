"""What people and files hear of what psdist observes and changes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from psdist.config.settings import RunConfig
from psdist.history.rules.decisions import DECISION_LINES, read_decision_lines
from psdist.ranks.telling.decisions import Decided, DecisionReports
from psdist.report.run_directory import RunDirectory
from psdist.servers.protocol.losses import LossHeard
from psdist.servers.protocol.modes import ModeChanged
from psdist.servers.protocol.round_control import GroupCame, GroupGone, LevelsSized, ModeObserved

SEEN = ModeObserved(1, 5, [7], [9], is_judged=True, errors_ppm=[3])
SIZED = LevelsSized([10, 5, 3, 2, 1])
TO_INT4 = ModeChanged((28,), "sync", 0, "slow", 3)
TO_INT8 = ModeChanged((60,), "sync", 0, "fast", 2)
TO_SSP = ModeChanged((28,), "ssp", 2, "skewed")


def report(config: RunConfig, folder: Path, *actions: Decided) -> DecisionReports:
    directory = RunDirectory(folder)
    reports = DecisionReports(config, directory)
    for action in actions:
        reports.on_action(action)
    directory.close()
    return reports


def test_codecs_are_told_with_their_reasons(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RunConfig(codec="auto", record=True)
    assert report(config, tmp_path).now == "sync none"
    with caplog.at_level(logging.INFO, logger="psdist"):
        reports = report(config, tmp_path, SIZED, SEEN, TO_INT4, TO_INT8)
    assert caplog.messages == [
        "codec int4/int4 from iteration 28 on (slow)",
        "codec int8/int8 from iteration 60 on (fast)",
    ]
    assert reports.now == "sync int8/int8"
    assert reports.words == "sync; codec auto, none, int4/int4 from 28, int8/int8 from 60"
    assert reports.codecs.told() == [
        {"round": 0, "push": "none", "pull": "none", "why": "auto"},
        {"round": 28, "push": "int4", "pull": "int4", "why": "slow"},
        {"round": 60, "push": "int8", "pull": "int8", "why": "fast"},
    ]
    lines = (tmp_path / DECISION_LINES).read_text().splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == [
        *("sized", "observed", "changed", "changed"),
    ]
    sized, observed, changed, _ = read_decision_lines(tmp_path)
    assert sized.sized is not None
    assert sized.sized.sizes == [10, 5, 3, 2, 1]
    assert observed.observed is not None
    assert observed.observed.errors_ppm == [3]
    assert changed.changed is not None
    assert changed.changed.level == 3


def test_modes_are_told_as_modes(tmp_path: Path) -> None:
    reports = report(RunConfig(mode="auto", record=True), tmp_path, SEEN, TO_SSP)
    assert reports.now == "ssp (staleness 2)"
    assert reports.words == "auto (sync, ssp:3), ssp:2 from 28"
    assert reports.codecs.told() == []
    assert len(read_decision_lines(tmp_path)) == 2


def test_who_is_looked_at_no_more_and_who_is_from_now_on_is_kept(tmp_path: Path) -> None:
    config = RunConfig(mode="auto", record=True, max_deaths=1)
    reports = report(config, tmp_path, GroupGone(1), GroupCame(3, 40))
    assert reports.words == "auto (sync, ssp:3)"
    gone, came = read_decision_lines(tmp_path)
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
    report(config, tmp_path, TO_INT4 if config.codec else TO_SSP)
    assert not (tmp_path / DECISION_LINES).exists()


def test_codecs_of_settings_and_schedules_say_so(tmp_path: Path) -> None:
    fixed = report(RunConfig(codec="int8"), tmp_path).codecs
    assert (fixed.now, fixed.words) == ("", "")
    assert [each["why"] for each in fixed.told()] == ["settings"]
    scheduled = report(RunConfig(schedule="0: sync none; 9: sync int8"), tmp_path).codecs
    assert [each["why"] for each in scheduled.told()] == ["schedule", "schedule"]


def test_losses_are_kept_with_what_they_decide(tmp_path: Path) -> None:
    for folder, is_kept in (("kept", True), ("not", False)):
        directory = RunDirectory(tmp_path / folder)
        config = RunConfig(codec="auto", loss_patience=2, record=is_kept)
        (tmp_path / folder).mkdir()
        DecisionReports(config, directory).heard(LossHeard(1, 7, 2, -1.5))
        directory.close()
    (line,) = read_decision_lines(tmp_path / "kept")
    assert line.reported is not None
    assert line.reported.model_dump() == {"worker": 1, "round": 7, "count": 2, "total": -1.5}
    assert read_decision_lines(tmp_path / "not") == []


def test_a_standby_knows_what_was_told_and_tells_the_rest_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what the coordinator had to do, half of which is in the file when it dies."""
    config = RunConfig(codec="auto", record=True)
    report(config, tmp_path, SIZED, SEEN, TO_INT4)
    standby = DecisionReports(config, RunDirectory(tmp_path))
    with caplog.at_level(logging.INFO, logger="psdist"):
        for action in (SEEN, TO_INT4):
            standby.note(action)
    assert not caplog.messages
    assert standby.now == "sync int4/int4"
    undone = [SEEN, TO_INT4, SEEN, TO_INT8]
    assert standby.num_kept(undone) == 2
    assert DecisionReports(RunConfig(codec="auto"), RunDirectory(tmp_path)).num_kept(undone) == 0
    later = DecisionReports(config, RunDirectory(tmp_path))
    later.go_on(standby.standing())
    assert later.words == standby.words
    assert later.codecs.told() == standby.codecs.told()
