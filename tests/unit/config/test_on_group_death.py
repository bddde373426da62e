"""What groups that go on without their dead go with, as the settings judge it and the document
says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.config.beside import Other, table
from psdist.config.on_group_death import OTHERS, reforms_groups, refuse_with_reforming
from psdist.config.settings import RunConfig, contradiction
from psdist.config.sources import resolve
from psdist.errors import ConfigError

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "failures.md"


@pytest.mark.parametrize(
    "other", OTHERS, ids=lambda other: "-".join(f"{k}-{v}" for k, v in other.given.items())
)
def test_what_goes_with_it_and_what_does_not(other: Other) -> None:
    given: dict[str, Any] = {**other.given}
    wrong = contradiction(RunConfig(**given, on_group_death="reform", max_deaths=1))
    assert bool(wrong) == bool(other.why_not)
    assert other.why_not in wrong
    assert other.remedy in wrong


def test_it_says_nothing_without_deaths_that_are_survived() -> None:
    wrong = contradiction(RunConfig(on_group_death="reform"))
    assert wrong.startswith("on_group_death = reform with max_deaths = 0: ")
    assert "set max_deaths = 1 or more, or on_group_death = leave" in wrong


def test_it_has_to_be_asked_for() -> None:
    assert not reforms_groups(RunConfig(max_deaths=1))
    assert reforms_groups(RunConfig(max_deaths=1, on_group_death="reform"))


def test_a_run_that_cannot_be_is_refused_at_the_start() -> None:
    given = {"on_group_death": "reform", "max_deaths": "2", "local_steps": "2", "mode": "sync"}
    with pytest.raises(ConfigError, match=r"on_group_death = reform with local_steps = 2: .* set"):
        resolve(command_line=given, environment={})
    with pytest.raises(ConfigError, match="on_group_death"):
        resolve(command_line={"on_group_death": "hope"}, environment={})


def test_a_call_that_does_not_go_with_it_is_named() -> None:
    said = str(refuse_with_reforming("job.pull"))
    assert said.startswith("job.pull with on_group_death = reform was not tried with it yet")
    assert said.endswith("or set on_group_death = leave")


def test_the_documents_table_is_the_one_that_the_code_makes() -> None:
    assert table(OTHERS) in DOCUMENT.read_text(encoding="utf-8")
