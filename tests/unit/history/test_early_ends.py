"""Records of runs that ended early: an attempt before it had a model, a server before a set was
described, or after the last event, with parts unwritten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from psdist.commands.check import Report, Verdict, check_run
from psdist.history import HEADER, MAGIC, OPEN, FileKind
from psdist.history.files import read_histories
from psdist.history.run_record import FORMAT_VERSION
from tests.support.history.toy_run import ToyRun

KINDS = ("events", "checksums")


def recorded(run_dir: Path) -> Path:
    ToyRun(seed=1, path_dir=run_dir / "history").run()
    return run_dir / "history"


def judged(run_dir: Path) -> Report:
    return check_run(run_dir, read_histories(run_dir))


def test_an_attempt_that_ended_before_it_had_a_model_is_a_note(tmp_path: Path) -> None:
    run = recorded(tmp_path) / "run.json"
    run.write_text(json.dumps({**json.loads(run.read_text()), "attempt": 2}))
    for _ in range(2):
        report = judged(tmp_path)
        assert report.proved, (report.violations, report.notes)
        assert "attempt 1 was not recorded, ended before it had a model" in report.notes[-1]
        (tmp_path / "attempt-1" / "history").mkdir(parents=True, exist_ok=True)


def test_a_set_that_was_described_behind_a_servers_death_is_in_its_buddys_record(
    tmp_path: Path,
) -> None:
    history = recorded(tmp_path)
    for kind in KINDS:
        (history / f"server-0.{kind}").rename(history / f"copy-0.{kind}")
    report = judged(tmp_path)
    assert report.proved, (report.violations, report.notes)


def test_a_server_that_dies_when_all_is_done_may_not_have_written_its_checksums(
    tmp_path: Path,
) -> None:
    history = recorded(tmp_path)
    shutil.copy(history / "server-0.events", history / "copy-0.events")
    empty(history / "copy-0.checksums", FileKind.CHECKSUMS, 0)  # the buddy has made no reply
    empty(history / "server-0.checksums", FileKind.CHECKSUMS, OPEN)
    empty(history / "server-0.events", FileKind.EVENTS, OPEN)
    report = judged(tmp_path)
    assert not report.violations
    assert not any("server 0" in note for note in report.notes), report.notes
    (history / "copy-0.events").unlink()
    assert any("server 0 ends early" in note for note in judged(tmp_path).notes)


@pytest.mark.parametrize("rule", ["local_steps_by_loss", "local_steps_by_speed"])
def test_a_run_that_ended_before_steps_were_fixed_is_incomplete_and_says_so(
    rule: str, tmp_path: Path
) -> None:
    run = recorded(tmp_path) / "run.json"
    run.write_text(json.dumps({**json.loads(run.read_text()), rule: 4}))
    (tmp_path / "summary.json").unlink(missing_ok=True)
    report = judged(tmp_path)
    assert report.verdict is Verdict.INCOMPLETE, report.violations
    assert any(
        note.startswith("no local steps were fixed: there is no steps.jsonl; the run ended before")
        for note in report.notes
    ), report.notes
    kind = "rounds" if rule.endswith("loss") else "hands"
    early = [f"the {kind} of worker {worker} end early" for worker in range(4)]
    assert [each for each in report.notes if each.startswith("the ")] == early


def empty(path: Path, kind: FileKind, num_closed: int) -> None:
    """Without records; ``num_closed``: as its header tells them."""
    path.write_bytes(HEADER.pack(MAGIC, FORMAT_VERSION, kind, 0, 0, num_closed))
