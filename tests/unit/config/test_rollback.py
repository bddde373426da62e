"""What a run lacks that is to go back to a checkpoint when its loss blows up."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.config.by_loss import reads_losses
from psdist.config.settings import RunConfig, contradiction

WHOLE: dict[str, Any] = {
    "rollback": 2.0,
    "codec": "auto",
    "checkpoint_every": "100",
    "run_dir": "runs/a",
    "on_nonfinite": "skip",
}


@pytest.mark.parametrize(
    "given", [WHOLE, {**WHOLE, "codec": None, "steps_by": "loss", "local_steps": 8}]
)
def test_a_run_that_has_all_goes_on_as_well(given: dict[str, Any]) -> None:
    config = RunConfig(**given)
    assert reads_losses(config)
    assert contradiction(config) == ""
    assert contradiction(RunConfig(**{**given, "resume": True})) == ""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"codec": "int8"},
            "rollback = 2 with codec = int8 and steps_by = count: there is nothing that psdist "
            "could make less lossy; set codec = auto or steps_by = loss, or leave rollback out",
        ),
        (
            {"codec": None, "steps_by": "loss", "local_steps": 8, "mode": "async"},
            "rollback = 2 with mode = async: which checkpoint is of before the loss rose is known "
            "only where all groups are in the same round; set mode = sync, or leave rollback out",
        ),
        (
            {"codec": None, "steps_by": "loss", "local_steps": 8, "mode": "ssp", "staleness": 3},
            "rollback = 2 with mode = ssp (staleness 3): which checkpoint is of before the loss "
            "rose is known only where all groups are in the same round; set mode = sync, or leave "
            "rollback out",
        ),
        (
            {"checkpoint_every": None},
            "rollback = 2 without checkpoint_every: there would be no checkpoint to go back to; "
            "set checkpoint_every, or leave rollback out",
        ),
        (
            {"run_dir": None},
            "rollback = 2 without run_dir: say which run goes on when it is started again "
            "(--run-dir RUN_DIR, with --resume), or leave rollback out",
        ),
        (
            {"on_nonfinite": "error"},
            "rollback = 2 with on_nonfinite = error: a step with NaN would end the job before it "
            "is known that the loss has blown up; set on_nonfinite = skip, or leave rollback out",
        ),
    ],
)
def test_what_is_lacking_is_one_line(changed: dict[str, Any], words: str) -> None:
    assert contradiction(RunConfig(**{**WHOLE, **changed})) == words


def test_without_it_nothing_is_lacking() -> None:
    assert contradiction(RunConfig(codec="int8")) == ""
    assert not reads_losses(RunConfig(codec="int8"))
