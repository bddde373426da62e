"""What a shard that is made anew goes with, as the settings judge it and the document says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.config.beside import Other, table
from psdist.config.on_server_death import OTHERS, survives_servers
from psdist.config.settings import RunConfig, contradiction
from psdist.config.sources import resolve
from psdist.errors import ConfigError

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "failures.md"


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: "-".join(other.given))
def test_what_goes_with_it_and_what_does_not(other: Other) -> None:
    given: dict[str, Any] = {**other.given}
    wrong = contradiction(RunConfig(**given, on_server_death="rebuild"))
    assert bool(wrong) == bool(other.why_not)
    assert other.why_not in wrong
    assert other.remedy in wrong
    assert not contradiction(RunConfig(**given)), "without it it is right"


def test_values_other_than_the_tables_are_refused_too() -> None:
    def refused(**given: Any) -> str:
        return contradiction(RunConfig(**given, on_server_death="rebuild"))

    assert "delay_compensation = 0.04" in refused(delay_compensation=0.04, mode="async")
    assert "server_device = cuda:1" in refused(server_device="cuda:1")
    assert "server_device = auto" in refused(server_device="auto")
    assert "codec" in refused(codec="int8")
    assert "servers = 1: another server makes" in refused(servers=1)
    assert not refused(servers=2)


def test_a_run_that_cannot_be_is_refused_at_the_start() -> None:
    given = {"on_server_death": "rebuild", "max_deaths": "2", "mode": "sync"}
    with pytest.raises(ConfigError, match=r"on_server_death = rebuild with max_deaths = 2: .* set"):
        resolve(command_line=given, environment={})
    with pytest.raises(ConfigError, match="on_server_death"):
        resolve(command_line={"on_server_death": "hope"}, environment={})


def test_which_runs_need_an_mpi_that_survives_a_rank() -> None:
    assert not survives_servers(RunConfig())
    assert survives_servers(RunConfig(on_server_death="rebuild"))
    assert survives_servers(RunConfig(replication="buddy"))


def test_the_documents_table_is_the_one_that_the_code_makes() -> None:
    assert table(OTHERS) in DOCUMENT.read_text(encoding="utf-8")
