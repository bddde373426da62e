"""What spares for workers' places go with, as the settings judge it and the document says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.config.beside import Other, table
from psdist.config.settings import RunConfig, contradiction
from psdist.config.substitutes import OTHERS, take_servers_places, take_workers_places

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "spares.md"


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: "-".join(other.given))
def test_what_goes_with_spares_for_workers_and_what_does_not(other: Other) -> None:
    given: dict[str, Any] = {**other.given}
    wrong = contradiction(RunConfig(**given, spares=1, max_deaths=1))
    assert bool(wrong) == bool(other.why_not)
    assert other.why_not in wrong
    assert other.remedy in wrong
    assert not contradiction(RunConfig(**given)), "without spares it is right"


def test_spares_for_which_no_place_can_be_free_are_refused() -> None:
    found = contradiction(RunConfig(spares=2))
    assert found.startswith("spares = 2 with replication = none and max_deaths = 0: no place would")
    assert "set max_deaths = 1 or more" in found
    assert "or replication = buddy" in found
    assert contradiction(RunConfig(spares=2, max_deaths=1)) == ""


@pytest.mark.parametrize(
    ("given", "of_servers", "of_workers"),
    [
        ({"max_deaths": 1}, False, True),
        ({"replication": "buddy"}, True, False),
        ({"replication": "buddy", "max_deaths": 1}, True, True),
    ],
)
def test_whose_places_spares_take(
    given: dict[str, Any], of_servers: bool, of_workers: bool
) -> None:
    config = RunConfig(spares=1, **given)
    assert contradiction(config) == ""
    assert take_servers_places(config) == of_servers
    assert take_workers_places(config) == of_workers
    beside = contradiction(config.model_copy(update={"local_steps": 2}))
    assert bool(beside) == of_workers
    assert ("or max_deaths = 0" in beside) == (of_workers and of_servers)
    assert ("or spares = 0" in beside) == (of_workers and not of_servers)


def test_the_documents_table_is_the_one_that_the_code_makes() -> None:
    assert table(OTHERS) in DOCUMENT.read_text(encoding="utf-8")
