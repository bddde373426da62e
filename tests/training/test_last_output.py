"""A script's output leaves its worker before the job learns that the worker has finished."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from psdist.job import Job
from psdist.workers.loop import WorkerLoop
from tests.support.programs.training.cases import Case, Result, Stage
from tests.support.programs.training.virtual_job import run_virtually


def test_buffered_output_goes_out_before_the_worker_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(raw, 4096)))
    seen: list[bytes] = []
    finish = WorkerLoop.finish

    def note(loop: WorkerLoop, statistics: dict[str, object]) -> None:
        seen.append(raw.getvalue())
        finish(loop, statistics)

    monkeypatch.setattr(WorkerLoop, "finish", note)

    def script(_job: Job, _stage: Stage) -> Result:
        print("last words")
        return {}

    run_virtually(Case(name="printing", script=script, groups=((0,),)), tmp_path / "run")
    assert seen == [b"last words\n"]
