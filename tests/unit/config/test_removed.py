"""A setting that is gone ends a run with one line that names the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from psdist.config.old_names import REMOVED, why_removed
from psdist.config.settings import KEYS
from psdist.config.sources import resolve, script_settings
from psdist.errors import ConfigError

DECISIONS = Path(__file__).resolve().parents[3] / "docs" / "dev" / "decisions.md"


@pytest.mark.parametrize("key", REMOVED)
@pytest.mark.parametrize("source", ["command line", "environment", "file", "script"])
def test_each_source_of_a_removed_setting_gets_the_remedy(
    key: str, source: str, tmp_path: Path
) -> None:
    command_line = {key: "1"} if source == "command line" else {}
    environment = {f"PSDIST_{key.upper()}": "1"} if source == "environment" else {}
    file = None
    if source == "file":
        file = tmp_path / "run.toml"
        file.write_text(f'{key} = "1"\n')

    def give() -> object:
        if source == "script":
            return script_settings({key: "1"})
        return resolve(command_line=command_line, environment=environment, file=file)

    with pytest.raises(ConfigError) as caught:
        give()
    (line,) = str(caught.value).splitlines()
    assert line.endswith(f" is no setting any more: {REMOVED[key]}")
    assert key in line.lower()


def test_only_what_was_a_setting_is_called_removed() -> None:
    assert not REMOVED.keys() & set(KEYS)
    assert why_removed("stalenes") == ""


@pytest.mark.parametrize("key", REMOVED)
def test_the_log_of_decisions_says_why_a_setting_has_gone(key: str) -> None:
    text = DECISIONS.read_text(encoding="utf-8").split("## Removed", 1)[1].split("\n## ", 1)[0]
    assert f"`{key}" in text
