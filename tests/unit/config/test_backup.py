"""What backup groups go with, as the settings judge it and the document says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.config.backup import OTHERS
from psdist.config.beside import Other, table
from psdist.config.settings import RunConfig, contradiction
from psdist.config.sources import resolve
from psdist.errors import ConfigError

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "backup.md"


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: "-".join(other.given))
def test_what_goes_with_backup_groups_and_what_does_not(other: Other) -> None:
    given: dict[str, Any] = {**other.given}
    wrong = contradiction(RunConfig(**given, backup=1))
    assert bool(wrong) == bool(other.why_not)
    assert other.why_not in wrong
    assert other.remedy in wrong
    assert not contradiction(RunConfig(**given)), "without backup groups it is right"


def test_a_codec_for_both_directions_is_one_of_pushes_too() -> None:
    assert "push_codec" in contradiction(RunConfig(backup=1, codec="int8"))
    assert not contradiction(RunConfig(backup=1, codec="none/sign"))


def test_a_run_that_cannot_be_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"backup = 1 with mode = ssp: .* set mode = sync, or"):
        resolve(command_line={"backup": "1", "mode": "ssp"}, environment={})
    with pytest.raises(ConfigError, match=r"backup = -1 \(command line\)"):
        resolve(command_line={"backup": "-1"}, environment={})
    with pytest.raises(ConfigError, match="backup_every"):
        resolve(command_line={"backup_every": "1"}, environment={})
    config = resolve(command_line={"backup": "2"}, environment={}).config
    assert (config.backup, config.backup_every) == (2, 20)


def test_the_documents_table_is_the_one_that_the_code_makes() -> None:
    assert table(OTHERS) in DOCUMENT.read_text(encoding="utf-8")
