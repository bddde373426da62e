"""What a learning rate by staleness goes with, as the settings judge it and the document says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.config.beside import Other, table
from psdist.config.settings import RunConfig, contradiction
from psdist.config.sources import resolve
from psdist.config.stale import OTHERS
from psdist.errors import ConfigError

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "stale.md"


@pytest.mark.parametrize("setting", [{"stale_lr": "inverse"}, {"delay_compensation": 0.25}])
@pytest.mark.parametrize("other", OTHERS, ids=lambda other: "-".join(other.given))
def test_what_goes_with_both_settings_and_what_does_not(
    other: Other, setting: dict[str, Any]
) -> None:
    given: dict[str, Any] = {**other.given}
    wrong = contradiction(RunConfig(**given, **setting))
    (name, value), *_ = setting.items()
    assert not wrong or wrong.startswith(f"{name} = {value} with ")
    assert bool(wrong) == bool(other.why_not)
    assert other.why_not in wrong
    assert other.remedy in wrong
    assert not contradiction(RunConfig(**given)), "without it it is right"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "sync"}, "with mode = sync: in sync no update is stale"),
        ({"mode": "auto"}, "with mode = auto: "),
        ({"schedule": "0: ssp:2; 9: sync"}, "with schedule = 0: ssp:2; 9: sync: "),
        ({"set_mode": "allowed", "mode": "ssp"}, "with set_mode = allowed: "),
    ],
)
def test_where_sync_may_come_it_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(command_line={**given, "stale_lr": "inverse"}, environment={})
    assert f"stale_lr = inverse {said}" in str(raised.value)
    assert "or stale_lr = off" in str(raised.value)


def test_a_schedule_without_sync_takes_it() -> None:
    given = {"schedule": "0: ssp:2; 9: async", "stale_lr": "inverse"}
    assert resolve(command_line=given, environment={}).config.stale_lr == "inverse"


@pytest.mark.parametrize(("codecs", "key"), [("int8", "push_codec"), ("none/fp16", "pull_codec")])
def test_codecs_of_a_schedule_are_refused_as_others_are(codecs: str, key: str) -> None:
    schedule = f"0: ssp:2 none; 9: async {codecs}"
    said = rf"stale_lr = inverse with schedule = 0: .*; set {key} = none in every part of the sched"
    with pytest.raises(ConfigError, match=said):
        resolve(command_line={"schedule": schedule, "stale_lr": "inverse"}, environment={})


def test_a_codec_is_told_by_the_setting_that_names_it() -> None:
    for given in ({"codec": "int8"}, {"codec": "int8", "schedule": "0: ssp:2; 9: async"}):
        wrong = contradiction(RunConfig(**{"mode": "ssp", "stale_lr": "inverse", **given}))
        assert wrong.startswith("stale_lr = inverse with codec = int8: ")
        assert "set push_codec = none, or" in wrong


def test_what_is_no_such_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stale_lr = half .*off or inverse"):
        resolve(command_line={"stale_lr": "half", "mode": "ssp"}, environment={})


def test_the_documents_table_is_the_one_that_the_code_makes() -> None:
    assert table(OTHERS) in DOCUMENT.read_text(encoding="utf-8")
