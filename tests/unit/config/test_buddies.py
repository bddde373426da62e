"""What second copies of shards go with, as the settings judge it and the document says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.config.beside import Other, table
from psdist.config.buddies import OTHERS
from psdist.config.settings import RunConfig, contradiction

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "replication.md"


def refused(**given: Any) -> str:
    return contradiction(RunConfig(**{"servers": 2, **given}, replication="buddy"))


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: "-".join(other.given))
def test_what_goes_with_it_and_what_does_not(other: Other) -> None:
    wrong = refused(**other.given)
    assert bool(wrong) == bool(other.why_not)
    assert other.why_not in wrong
    assert other.remedy in wrong
    given: dict[str, Any] = {"servers": 2, **other.given}
    if "spares" not in given:
        assert not contradiction(RunConfig(**given)), "without it it is right"


def test_values_other_than_the_tables_are_refused_too() -> None:
    assert "delay_compensation = 0.04" in refused(delay_compensation=0.04, mode="async")
    assert "server_device = cuda:1" in refused(server_device="cuda:1")
    assert "with servers = 1: a server's second copy" in refused(servers=1)


def test_the_documents_table_is_the_one_that_the_code_makes() -> None:
    assert table(OTHERS) in DOCUMENT.read_text(encoding="utf-8")
