"""``psdist trace``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from psdist.commands.trace import main
from psdist.tracing.clocks import Offset
from psdist.tracing.spans import Lane, Span
from psdist.tracing.tracer import Tracer
from tests.support.traces import MS, about, server

START = Offset(at_ns=0, offset_ns=0, bound_ns=4000)
END = Offset(at_ns=10**9, offset_ns=0, bound_ns=6000)


def a_run(folder: Path, *, num_steps: int, is_over: bool = True) -> None:
    """A worker whose every iteration is 10 ms: backward to 6, a chunk away from 3 to 9."""
    tracer = Tracer(folder, about(0, num_ranks=2, start=START))
    for clock in range(num_steps):
        at = 10 * clock * MS
        tracer.add(Span.BACKWARD, at, at + 6 * MS, clock=clock)
        tracer.add(Span.PUSH, at + 3 * MS, at + 9 * MS, clock=clock, chunk=0, lane=Lane.LOOP)
        tracer.add(Span.STEP, at + 6 * MS, at + 10 * MS, clock=clock)
    tracer.close(end=END if is_over else None)
    other = Tracer(folder, server(1, num_ranks=2, start=START))
    other.close(end=END if is_over else None)


def test_it_says_for_each_worker_how_much_of_its_communication_was_hidden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path, num_steps=8)
    assert main(tmp_path) == 0
    told = capsys.readouterr().out
    assert "2 ranks on 1 host; clocks are those of rank 0, give or take 6 us\n" in told
    (row,) = [line for line in told.splitlines() if "0.0100" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        *("0", "4", "0.0100", "0.0060", "0.0060", "50.0 %"),
    ]
    assert "hidden behind computation: 50.0 % of all communication\n" in told
    num_events = len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert f"{num_events} events in {tmp_path / 'trace.json'}" in told


def test_it_draws_the_step_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path, num_steps=8)
    assert main(tmp_path, svg=tmp_path / "step.svg", step=5) == 0
    assert f"iteration 5 is drawn in {tmp_path / 'step.svg'}\n" in capsys.readouterr().out
    assert "Iteration 5: what each rank does" in (tmp_path / "step.svg").read_text()
    assert main(tmp_path, svg=tmp_path / "step.svg") == 0
    assert "Iteration 6" in (tmp_path / "step.svg").read_text()


def test_a_run_that_failed_early_still_gets_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path, num_steps=1, is_over=False)
    assert main(tmp_path) == 0
    told = capsys.readouterr().out
    assert "give or take 4 us; their drift is not known\n" in told
    assert "no worker has made two steps: there is nothing to compare\n" in told
    assert (tmp_path / "trace.json").exists()


@pytest.mark.parametrize(
    ("step", "words"),
    [(9, "--step 9: no worker has made it; there are the iterations 1 to 7")],
)
def test_a_step_that_is_not_there_is_refused_in_one_line(
    step: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path, num_steps=8)
    assert main(tmp_path, svg=tmp_path / "step.svg", step=step) == 2
    assert capsys.readouterr().err == f"psdist trace: {words}\n"


def test_a_picture_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path, num_steps=8)
    assert main(tmp_path, svg=tmp_path / "no" / "step.svg") == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_folder_without_spans_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tmp_path) == 2
    assert "made without --trace" in capsys.readouterr().err
