"""psdist settings, and the help of psdist run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from psdist.commands import cli
from psdist.config.old_names import MERGED
from psdist.config.settings import FIELDS, KEYS, NAMES, TABLES, RunConfig
from psdist.config.sources import resolve


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PSDIST_CONFIG", "PSDIST_PROFILE", "PSDIST_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


def output_of(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words))
    assert caught.value.code == status
    found = capsys.readouterr()
    return found.err if status else found.out


def test_settings_and_the_help_of_run_import_neither_torch_nor_mpi() -> None:
    program = (
        "import sys\n"
        "from psdist.commands.cli import main\n"
        "for words in (['settings'], ['settings', '--conflicts'], ['run', '--help-all']):\n"
        "    try:\n"
        "        main(words)\n"
        "    except SystemExit as exit:\n"
        "        assert exit.code == 0, exit.code\n"
        "heavy = {'torch', 'mpi4py', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_list_has_a_line_for_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output_of(capsys, "settings").splitlines()
    assert [line.strip("[]") for line in lines if line.startswith("[")] == list(TABLES[1:])
    keys = [line.split()[0] for line in lines if line.startswith("  ")]
    assert keys == [name.rpartition(".")[2] for name in NAMES.values()]
    assert max(map(len, lines)) <= 100
    assert re.search(r"^  warn_s +30\.0 s +A wait longer", "\n".join(lines), re.MULTILINE)


def test_a_table_is_listed_and_a_setting_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(output_of(capsys, "settings", "codec").split("\n  ")) == 8
    told = output_of(capsys, "settings", "codec.pull-copies")
    assert told.startswith(
        f"codec.pull_copies: {RunConfig.model_fields['pull_copies'].description}"
    )
    assert "needs        mode = ssp or async" in told
    assert "environment  PSDIST_CODEC_PULL_COPIES" in told
    assert "old names    pull_copies" in told
    assert " excludes ssp or async (mode = ssp): " in output_of(capsys, "settings", "backup")


@pytest.mark.parametrize("name", [*MERGED, *KEYS, *FIELDS, *TABLES[1:]])
def test_every_name_is_found(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = output_of(capsys, "settings", name)
    instead = MERGED[name].instead if name in MERGED else NAMES.get(name, name)
    assert instead.startswith("codec.push and") or name in TABLES or f"{instead}: " in told


def test_an_unknown_name_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    told = output_of(capsys, "settings", "codec.psh", status=2)
    assert told == (
        "psdist: error: codec.psh is no setting and no table; did you mean codec.push?\n"
    )
    assert "call job.report(loss)" in output_of(capsys, "settings", "watch", status=2)
    assert "extra argument" in output_of(capsys, "settings", "mode", "seed", status=2)


def test_show_takes_the_words_of_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("seed = 5\n[local]\nsteps = 2\n")
    monkeypatch.setenv("PSDIST_CODEC_PUSH", "int4")
    words = ["-n", "3", "--config", str(file), "--profile", "study", "--set", "warn_s=3"]
    words += ["--trace", "train.py", "--lr", "1", "--json"]
    told = output_of(capsys, "settings", "--show", *words)
    assert re.sub(" +", " ", told).splitlines() == [
        f"seed = 5 ({file})",
        f"local.steps = 2 ({file})",
        "codec.push = int4 (environment PSDIST_CODEC_PUSH)",
        "failures.warn_s = 3.0 (command line)",
        "transfer.checksum = sampled (profile study)",
        "report.record = true (profile study)",
        "report.trace = true (command line)",
        "report.progress = lines (profile study)",
        "warning: flat names of settings are deprecated; write failures.warn_s for warn_s",
        f"{len(KEYS) - 8} settings have their defaults; --json --show prints all",
    ]
    facts = json.loads(output_of(capsys, "settings", "--json", "--show", *words))
    facts = facts["settings"]
    assert facts["seed"] == {"value": 5, "source": str(file)}
    assert set(facts) == set(FIELDS)
    of_table = output_of(capsys, "settings", "local", "--show", *words).splitlines()
    assert [" ".join(line.split()) for line in of_table[:3]] == [
        f"local.steps = 2 ({file})",
        "local.steps_by = count (default)",
        "local.outer = average (default)",
    ]
    shown = output_of(capsys, "settings", "--show", "--mode", "x", "train.py", status=2)
    assert shown.startswith("psdist: error: mode = x (command line): must be ")


@pytest.mark.parametrize("name", NAMES.values())
def test_an_explanation_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, output_of(capsys, "settings", name).splitlines())) <= 80


def test_the_template_is_toml_whose_lines_are_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(capsys, "settings", "--toml")
    assert not any(tables for tables in tomllib.loads(text).values())
    file = tmp_path / "run.toml"
    file.write_text(re.sub(r"^#(?=\w+ = )", "", text, flags=re.MULTILINE))
    assert resolve(command_line={}, environment={}, file=file).config == RunConfig()


def test_conflicts_have_a_reason_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = json.loads(output_of(capsys, "settings", "--conflicts", "--json"))[
        "conflicts"
    ]
    assert len(rows) > 30
    assert all(row["pair"] and row["reason"] and row["remedy"] for row in rows)
    of_backup = output_of(capsys, "settings", "backup", "--conflicts").splitlines()
    assert 0 < len(of_backup) < len(rows)


def test_the_help_of_run_is_short_and_the_whole_help_names_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = output_of(capsys, "run", "--help")
    options = re.findall(r"^  (--?[a-z].*?)(?:  |$)", short, re.MULTILINE)
    assert 20 <= len(options) <= 28
    whole = output_of(capsys, "run", "--help-all")
    for name in FIELDS:
        option = f"--{name.replace('.', '-').replace('_', '-')}"
        alias = f"--{FIELDS[name].replace('_', '-')}"
        assert any(f"  {each} " in whole for each in (name, option, alias)), name
