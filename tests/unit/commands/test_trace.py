"""``psdist trace``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from psdist.commands.trace import main
from psdist.tracing import Lane, Span
from psdist.tracing.clocks import Offset
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


def a_run_with_a_straggler(folder: Path, *, num_steps: int) -> None:
    """Iterations of 20 ms. Both workers load data until 2 and compute until 6, worker 1 sleeps
    until 14, and both push then. The server steps at once, and answers worker 0 at 17."""
    fast, slow = (Tracer(folder, about(rank, num_ranks=3, start=START)) for rank in (0, 1))
    at_server = Tracer(folder, server(2, num_ranks=3, start=START))
    for clock in range(num_steps):
        at = 20 * clock * MS
        chunk = {"clock": clock, "chunk": 0, "lane": Lane.SERVER}
        for worker, (tracer, pushed) in enumerate(((fast, 6), (slow, 14))):
            tracer.add(Span.FORWARD, at + 2 * MS, at + 4 * MS, clock=clock)
            tracer.add(Span.BACKWARD, at + 4 * MS, at + 6 * MS, clock=clock)
            tracer.add(Span.PUSH, at + pushed * MS, at + 19 * MS, clock=clock, chunk=0, num_bytes=4)
            tracer.add(Span.STEP, at + pushed * MS, at + 20 * MS, clock=clock)
            here = at + (pushed + 1) * MS
            at_server.add(Span.RECEIVE, here - MS // 2, here, other=worker, **chunk)
            at_server.add(Span.APPLY, here, here + MS, other=worker, **chunk)
            at_server.add(Span.REPLY, at + 17 * MS, at + 18 * MS, other=worker, **chunk)
    for tracer in (fast, slow, at_server):
        tracer.close(end=END)


def rows(told: str) -> list[str]:
    """The cells of the table, row after row."""
    found = [line for line in told.splitlines() if line.startswith("│")]
    return [cell.strip() for line in found for cell in line.strip("│").split("│")]


def test_waiting_for_a_straggler_is_no_communication_and_the_straggler_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run_with_a_straggler(tmp_path, num_steps=8)
    assert main(tmp_path) == 0
    told = capsys.readouterr().out
    assert rows(told) == [
        *("0", "4", "20.00", "4.00", "2.00", "1.00", "3.00", "3.00", "7.00", "0.0 %"),
        *("1", "4", "20.00", "4.00", "10.00", "1.00", "3.00", "2.00", "0.00", "0.0 %"),
    ]
    assert (
        "waits for others: 17.5 % of the workers' time; most for worker 1: 100.0 % of that\n"
        in told
    )
    assert main(tmp_path, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    parts = {
        "step_s": 0.02, "passes_s": 0.004, "script_s": 0.002, "psdist_s": 0.001,
        "network_s": 0.003, "servers_s": 0.003, "waits_s": 0.007,
        "communication_s": 0.006, "hidden_s": 0.0,
    }  # fmt: skip
    fast, slow = report.pop("workers")
    assert fast == {
        "worker": 0,
        "steps": 4,
        "mean": pytest.approx(parts),
        "median": pytest.approx(parts),
        "hidden_share": 0.0,
    }
    assert (slow["worker"], slow["mean"]["waits_s"]) == (1, 0.0)
    assert report == {
        "format": "psdist trace",
        "version": 1,
        "notes": [],
        "clock_bound_us": 6.0,
        "waited_for": [{"worker": 1, "waits_s": pytest.approx(0.028)}],
    }


def test_it_says_for_each_worker_how_much_of_its_communication_was_hidden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path, num_steps=8)
    assert main(tmp_path) == 0
    told = capsys.readouterr().out
    assert "2 ranks on 1 host; clocks are those of rank 0, give or take 6 us\n" in told
    assert rows(told) == [
        *("0", "4", "10.00", "6.00", "0.00", "1.00", "3.00", "0.00", "0.00", "50.0 %"),
    ]
    assert "hidden behind computation: 50.0 % of all communication\n" in told
    assert "no worker waited for another one\n" in told
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


def test_a_straggler_whose_file_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run_with_a_straggler(tmp_path, num_steps=6)
    (tmp_path / "trace" / "rank-1.bin").unlink()
    assert main(tmp_path) == 0
    assert "most for worker 1: 100.0 % of that\n" in capsys.readouterr().out
