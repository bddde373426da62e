"""A job that is ended so that it is started again: whatever it trains with can continue."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.config.settings import RunConfig, contradiction


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"codec": "auto"},
        {"steps_by": "loss", "local_steps": 4},
        {"steps_by": "speed", "local_steps": 4},
        {"steps_by": "speed", "local_steps": 4, "mode": "async"},
        {"backup": 1},
        {"mode": "auto"},
    ],
)
def test_a_job_that_can_be_started_again_may_be_ended_for_that(settings: dict[str, Any]) -> None:
    assert contradiction(RunConfig(**settings, on_usr1="requeue")) == ""
