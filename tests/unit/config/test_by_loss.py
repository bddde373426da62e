"""What local steps by the loss go with, as the settings judge it and the document says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.config.beside import Other, table
from psdist.config.by_loss import OTHERS, reads_losses
from psdist.config.settings import RunConfig, contradiction
from psdist.config.sources import resolve
from psdist.errors import ConfigError

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "local-steps.md"


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: "-".join(map(str, other.given)))
def test_what_goes_with_steps_by_loss_and_what_does_not(other: Other) -> None:
    given: dict[str, Any] = {"local_steps": 8, **other.given}
    wrong = contradiction(RunConfig(**given, steps_by="loss"))
    assert bool(wrong) == bool(other.why_not)
    assert other.why_not in wrong
    assert other.remedy in wrong
    assert not contradiction(RunConfig(**given)), "with equal steps it is right"


def test_a_run_that_cannot_be_is_refused_at_the_start() -> None:
    given = {"mode": "sync", "steps_by": "loss", "local_steps": "8"}
    said = (
        "steps_by = loss with max_deaths = 1: deaths were not tried with it yet; set "
        "max_deaths = 0, or steps_by = count"
    )
    with pytest.raises(ConfigError, match=said):
        resolve(command_line={**given, "max_deaths": "1"}, environment={})
    with pytest.raises(ConfigError, match="steps_by = loss with local_steps = 1: rounds become"):
        resolve(command_line={**given, "local_steps": "1"}, environment={})
    assert resolve(command_line=given, environment={}).config.steps_by == "loss"


def test_patience_with_the_loss_goes_with_codecs_that_psdist_chooses() -> None:
    guarded = {"mode": "sync", "codec": "auto", "loss_patience": "3"}
    assert resolve(command_line=guarded, environment={}).config.loss_patience == 3
    with pytest.raises(ConfigError, match="loss_patience = 3 with codec = int8: it is what codec"):
        resolve(command_line={**guarded, "codec": "int8"}, environment={})
    with pytest.raises(ConfigError, match="loss_patience = 3 with codec = none: it is what codec"):
        resolve(command_line={"mode": "sync", "loss_patience": "3"}, environment={})


def test_the_documents_table_is_the_one_that_the_code_makes() -> None:
    assert table(OTHERS) in DOCUMENT.read_text(encoding="utf-8")


def test_losses_are_read_where_something_is_decided_by_them() -> None:
    assert not reads_losses(RunConfig())
    assert reads_losses(RunConfig(steps_by="loss", local_steps=2))
    assert reads_losses(RunConfig(codec="auto", loss_patience=1))
