"""``codec = auto`` with ``loss_patience``: where the reported loss stands still, less lossy codecs
come, one after the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from psdist.commands.check import check_run
from psdist.history.rules.findings import Rule
from psdist.history.writers import read_histories
from tests.support.pretended_link import pretend_link
from tests.support.programs.training.by_loss_cases import training
from tests.support.programs.training.cases import Case, Outcome
from tests.support.programs.training.virtual_job import run_virtually


def run(path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, **options: Any) -> Outcome:
    pretend_link(monkeypatch)
    settings = {"codec": "auto", "loss_patience": 1, "record": True}
    script = training(num_steps=lambda _job: rounds, width=1024, **options)
    case = Case(name="guarded", script=script, servers=2, groups=((0,), (1,)), settings=settings)
    return run_virtually(case, path)


def chosen(outcome: Outcome) -> list[str]:
    return ["/".join((each["push"], each["pull"])) for each in outcome.summary["codecs"]]


def test_a_loss_that_stands_still_leads_to_less_lossy_codecs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run(tmp_path, monkeypatch, 82, loss_of=lambda _clock: 2.0)
    outcome.checked()
    assert chosen(outcome) == ["none/none", "int4/sign", "int4/int4", "int8/int8"]
    assert "the loss not below 2 for 1 windows" in outcome.summary["codecs"][-1]["why"]

    path = tmp_path / "decisions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    place = next(n for n, line in enumerate(lines) if line.get("changed", {}).get("level") == 3)
    for line in [line["reported"] for line in lines[:place] if "reported" in line][-9:]:
        line["total"] /= 2
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = check_run(tmp_path, read_histories(tmp_path))
    assert set(report.violations_by_rule) == {Rule.MODES.value}


def test_a_loss_that_falls_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(tmp_path, monkeypatch, 58, loss_of=lambda clock: 2.0 - clock)
    outcome.checked()
    assert chosen(outcome) == ["none/none", "int4/sign"]
