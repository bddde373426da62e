"""A job that is to be started again must be one that can go on."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.config.settings import RunConfig, contradiction


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"steps_by": "speed", "local_steps": 4, "mode": "async"},
            "groups are in different hands of a pass when a checkpoint is made",
        ),
    ],
)
def test_a_job_that_could_not_be_started_again_is_not_ended_for_that(
    settings: dict[str, Any], words: str
) -> None:
    assert contradiction(RunConfig(**settings)) == ""
    wrong = contradiction(RunConfig(**settings, on_usr1="requeue"))
    assert wrong.startswith("on_usr1 = requeue ends the job so that it is started again")
    assert words in wrong
    assert wrong.endswith("; or set on_usr1 = checkpoint")
    both = contradiction(RunConfig(**settings, on_usr1="requeue", resume=True))
    assert both == contradiction(RunConfig(**settings, resume=True))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"codec": "auto"},
        {"steps_by": "loss", "local_steps": 4},
        {"steps_by": "speed", "local_steps": 4},
        {"mode": "auto"},
    ],
)
def test_a_job_that_can_be_started_again_may_be_ended_for_that(settings: dict[str, Any]) -> None:
    assert contradiction(RunConfig(**settings, on_usr1="requeue")) == ""
