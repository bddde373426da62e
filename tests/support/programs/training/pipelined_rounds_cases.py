"""Rounds of local steps whose replies are awaited a round later."""

from __future__ import annotations

from tests.support.programs.training.cases import Case
from tests.support.programs.training.rounds_cases import train_in_rounds

CASES = (
    Case(
        name="pipelined rounds",
        script=train_in_rounds,
        servers=2,
        groups=((0, 1), (2,)),
        settings={
            "mode": "ssp",
            "staleness": 2,
            "pipeline": 1,
            "local_steps": 2,
            "outer": "nesterov",
            "record": True,
        },
    ),
)
