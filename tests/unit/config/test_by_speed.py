"""What local steps by speed go with, as the settings judge it and the document says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.config.beside import Other, table
from psdist.config.by_speed import OTHERS
from psdist.config.settings import RunConfig, contradiction
from psdist.config.sources import resolve
from psdist.errors import ConfigError

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "local-steps.md"


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: "-".join(map(str, other.given)))
def test_what_goes_with_steps_by_speed_and_what_does_not(other: Other) -> None:
    given: dict[str, Any] = {"local_steps": 8, **other.given}
    wrong = contradiction(RunConfig(**given, steps_by="speed"))
    assert bool(wrong) == bool(other.why_not)
    assert other.why_not in wrong
    assert other.remedy in wrong
    assert not contradiction(RunConfig(**given)), "with equal steps it is right"


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_there_are_checkpoints_in_every_mode(mode: str) -> None:
    given: dict[str, Any] = {"local_steps": 8, "steps_by": "speed", "mode": mode}
    for other in ({"resume": True}, {"checkpoint_every": "100"}, {"on_usr1": "requeue"}):
        assert not contradiction(RunConfig(**given, **other, run_dir="runs/a"))


def test_a_run_that_cannot_be_is_refused_at_the_start() -> None:
    said = (
        "steps_by = speed with max_deaths = 1: what a dead group was dealt would be lost; set "
        "max_deaths = 0, or steps_by = count"
    )
    given = {"mode": "sync", "steps_by": "speed", "local_steps": "8"}
    with pytest.raises(ConfigError, match=said):
        resolve(command_line={**given, "max_deaths": "1"}, environment={})
    with pytest.raises(ConfigError, match="steps_by = speed with local_steps = 1: no group can"):
        resolve(command_line={**given, "local_steps": "1"}, environment={})
    with pytest.raises(ConfigError, match=r"steps_by = .*count, speed or loss"):
        resolve(command_line={**given, "steps_by": "luck"}, environment={})
    assert resolve(command_line=given, environment={}).config.steps_by == "speed"


def test_what_is_not_given_beside_it_is_not_refused() -> None:
    assert not contradiction(RunConfig(steps_by="speed", local_steps=2, global_batch=None))
    assert "global_batch = 8" in contradiction(
        RunConfig(steps_by="speed", local_steps=2, global_batch=8)
    )


def test_the_documents_table_is_the_one_that_the_code_makes() -> None:
    assert table(OTHERS) in DOCUMENT.read_text(encoding="utf-8")
