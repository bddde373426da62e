"""What a script passes to psdist.init: below every other source, and five settings only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.config.settings import KEYS, NAMES
from psdist.config.sources import (
    SCRIPT_KEYS,
    Resolved,
    describe_script,
    resolve,
    script_settings,
    with_script,
)
from psdist.errors import ConfigError, UsageError


def resolved(**command_line: Any) -> Resolved:
    return resolve(command_line=command_line, environment={})


def test_the_script_decides_where_nobody_else_has() -> None:
    passed = script_settings({"mode": "ssp", "staleness": 5, "seed": None})
    assert passed == {"mode": "ssp", "staleness": 5}
    after = with_script(resolved(), passed)
    assert (after.config.mode, after.config.staleness, after.config.seed) == ("ssp", 5, 0)
    assert after.sources["mode"] == after.sources["staleness"] == "psdist.init"
    assert describe_script(after) == ["mode = ssp  (psdist.init)", "staleness = 5  (psdist.init)"]


def test_every_other_source_wins_over_the_script(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("seed = 1\n")
    before = resolve(
        command_line={"mode": "sync"}, environment={"PSDIST_STALENESS": "2"}, file=file
    )
    passed = script_settings({"mode": "ssp", "staleness": 5, "seed": 6, "checksum_every": 7})
    after = with_script(before, passed)
    # Also where what they say is the default: it was chosen.
    assert (after.config.mode, after.config.staleness, after.config.seed) == ("sync", 2, 1)
    assert after.config.checksum_every == 7
    assert describe_script(after) == ["transfer.checksum_every = 7  (psdist.init)"]


def test_a_script_that_passes_nothing_changes_nothing() -> None:
    before = resolved(mode="async")
    assert with_script(before, script_settings({"mode": None})) == before


@pytest.mark.parametrize("key", sorted(set(KEYS) - set(SCRIPT_KEYS)))
def test_settings_that_must_be_known_earlier_say_where_they_are_set(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        script_settings({"mode": "ssp", key: 2})
    name = NAMES[key]
    assert str(caught.value) == (
        f"psdist.init({key}=2): {name} is decided before scripts run, so it is set on the command "
        f"line (--set {key}=2), by PSDIST_{key.upper()}=2 or in the TOML file; psdist.init takes "
        "mode, staleness, consistency.pipeline, training.on_nonfinite, seed, "
        "transfer.checksum_every"
    )
    table, _, last = name.rpartition(".")
    with pytest.raises(UsageError, match=f"{name} is decided before scripts run"):
        script_settings({table: {last: 2}} if table else {name: 2})


def test_the_script_passes_a_table_as_a_mapping() -> None:
    passed = script_settings({"consistency": {"pipeline": 1}, "transfer": {"checksum_every": None}})
    assert passed == {"pipeline": 1}
    with pytest.raises(ConfigError, match=r"codec\.psuh = int8 .*did you mean codec\.push\?"):
        script_settings({"codec": {"psuh": "int8"}})


@pytest.mark.parametrize(
    ("passed", "told"),
    [
        ({"mode": "bsp"}, "mode = bsp (psdist.init): must be sync, ssp, async or auto"),
        (
            {"staleness": -1},
            "staleness = -1 (psdist.init): must be a whole number from 0 to 2147483647",
        ),
        (
            {"staleness": "4"},
            "staleness = 4 (psdist.init): must be a whole number from 0 to 2147483647",
        ),
        (
            {"seed": True},
            "seed = True (psdist.init): must be a whole number from 0 to 9223372036854775807",
        ),
        ({"on_nonfinite": 1}, "on_nonfinite = 1 (psdist.init): must be error or skip"),
        (
            {"stalenes": 3},
            "stalenes = 3 (psdist.init) is no setting; did you mean staleness?",
        ),
    ],
)
def test_a_mistake_has_the_words_of_every_source(passed: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        script_settings(passed)
    assert str(caught.value) == told


def test_all_mistakes_of_a_call_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        script_settings({"mode": "bsp", "checksum_every": 0})
    first, *mistakes = str(caught.value).splitlines()
    assert first == "2 mistakes in the configuration:"
    assert [line.split()[0] for line in mistakes] == ["mode", "checksum_every"]


def test_a_value_that_a_stronger_source_overrides_must_be_right_as_well() -> None:
    # with_script never sees it.
    with pytest.raises(ConfigError, match="must be sync, ssp, async or auto"):
        script_settings({"mode": "later"})
