"""What rounds of an epoch go with, as the settings judge it and the document says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.config.beside import Other, table
from psdist.config.by_epoch import OTHERS
from psdist.config.outer import has_rounds, steps_on_workers
from psdist.config.settings import RunConfig, contradiction
from psdist.config.sources import resolve
from psdist.errors import ConfigError

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "local-steps.md"


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: "-".join(map(str, other.given)))
def test_what_goes_with_rounds_of_an_epoch_and_what_does_not(other: Other) -> None:
    given: dict[str, Any] = other.given
    wrong = contradiction(RunConfig(**given, local_steps="epoch"))
    assert bool(wrong) == bool(other.why_not)
    assert other.why_not in wrong
    assert other.remedy in wrong
    assert not contradiction(RunConfig(**given, local_steps=8)), "with a number it is right"


def test_the_words_are_a_number_or_epoch() -> None:
    found = resolve(command_line={"mode": "sync", "local_steps": "epoch"}, environment={}).config
    assert found.local_steps == "epoch"
    assert has_rounds(found)
    assert steps_on_workers(found)
    said = (
        "local_steps = epoch with outer = accumulate: a round weighs by how many of its steps were "
        "made, and how many it has nobody knows before the pass is over; set outer = average, or "
        "local_steps = a number"
    )
    with pytest.raises(ConfigError, match=said):
        resolve(
            command_line={"mode": "sync", "local_steps": "epoch", "outer": "accumulate"},
            environment={},
        )
    for wrong in ("epochs", "0", "1.5"):
        with pytest.raises(ConfigError, match=r"local_steps = .* from 1 to \d+, or epoch"):
            resolve(command_line={"mode": "sync", "local_steps": wrong}, environment={})


def test_what_refuses_local_steps_refuses_an_epoch_of_them() -> None:
    wrong = contradiction(RunConfig(local_steps="epoch", backup=1))
    assert "with local_steps = epoch: local steps were not tried" in wrong
    assert "local_steps = epoch with mode = auto" in contradiction(
        RunConfig(local_steps="epoch", mode="auto")
    )


def test_the_documents_table_is_the_one_that_the_code_makes() -> None:
    assert table(OTHERS) in DOCUMENT.read_text(encoding="utf-8")
