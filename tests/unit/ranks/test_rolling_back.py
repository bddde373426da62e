"""The coordinator's record when a loss has blown up, and the jobs that check for it."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

import pytest

from psdist.config.sources import resolve
from psdist.controller.kept import rolled_back
from psdist.controller.rollback import Rise
from psdist.protocol.control import Begun
from psdist.protocol.ids import COORDINATOR
from psdist.ranks.checkpointing.rollbacks import Record, read_rollbacks
from psdist.ranks.coordinating import coordinator_of
from psdist.ranks.exit import Exit
from psdist.ranks.lobby import _resolved, open_files
from psdist.ranks.reporter import Reporter
from tests.unit.ranks.test_shared_spares import rank_of


@pytest.mark.parametrize(
    ("lossiest", "status", "words"),
    [(8, 75, "--resume continues"), (1, 2, "nothing less lossy is left")],
)
def test_each_rise_is_recorded_so_that_what_it_has_spoilt_is_set_aside(
    lossiest: int, status: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[str, int]] = []
    monkeypatch.setattr(
        Exit, "abort", lambda _self, _who, text, status: ended.append((text, status))
    )
    session = rank_of(tmp_path, COORDINATOR).session
    rollback = rolled_back(60, Rise(9.0, 1.0, 40), lossiest)
    Reporter(session, coordinator_of(session)).on_action(rollback)
    assert read_rollbacks(tmp_path) == [Record(1, rollback)]
    ((text, found),) = ended
    assert found == status
    assert words in text


def test_a_job_behind_the_first_does_without_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {
        "run_dir": str(tmp_path / "run"),
        "rollback": 3.0,
        "checkpoint_every": "9",
        "steps_by": "loss",
        "local_steps": 8,
        "on_nonfinite": "skip",
    }
    rank = rank_of(tmp_path / "run", COORDINATOR)
    rank.use_settings(resolve(command_line=given, environment={}))
    first, second = Begun(job=1, settings={}), Begun(job=2, settings={})
    assert _resolved(rank, first).config.rollback == 3
    assert _resolved(rank, second).config.rollback is None
    with caplog.at_level(logging.WARNING, logger="psdist"):
        open_files(rank, second)
    assert caplog.messages == [
        "training.rollback = 3 is left out in job 2: it starts afresh whenever the processes do, "
        "and so has no checkpoint to go back to"
    ]
    tables = tomllib.loads((tmp_path / "run-2" / "config.toml").read_text())
    assert "rollback" not in tables["training"]
