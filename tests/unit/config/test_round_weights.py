"""What weights of rounds by their steps go with, as the settings judge it and the document says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.config.beside import Other, table
from psdist.config.round_weights import MODES, OTHERS
from psdist.config.settings import RunConfig, contradiction

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "local-steps.md"


@pytest.mark.parametrize("rule", ["steps", "fednova"])
@pytest.mark.parametrize(
    "other", [*MODES, *OTHERS], ids=lambda other: "-".join(map(str, other.given))
)
def test_what_goes_with_weights_by_steps_and_what_does_not(other: Other, rule: Any) -> None:
    given: dict[str, Any] = {"local_steps": 8, **other.given}
    wrong = contradiction(RunConfig(**given, round_weights=rule))
    why_not = "" if rule == "steps" and other in MODES else other.why_not
    assert bool(wrong) == bool(why_not)
    assert why_not in wrong
    assert other.remedy in wrong or not why_not
    assert not contradiction(RunConfig(**given)), "with equal weights it is right"


def test_what_nothing_could_weigh_by_is_refused() -> None:
    assert "with local_steps = 1: all groups make" in contradiction(
        RunConfig(round_weights="fednova")
    )
    given: dict[str, Any] = {"local_steps": "epoch", "round_weights": "steps"}
    assert not contradiction(RunConfig(**given))
    assert "local_steps = epoch and mode = ssp" in contradiction(RunConfig(**given, mode="ssp"))


def test_the_documents_table_is_the_one_that_the_code_makes() -> None:
    assert table((*MODES, *OTHERS)) in DOCUMENT.read_text(encoding="utf-8")
