"""`psdist run --trace` on real ranks: what they record is put together and opens as one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from psdist.commands.trace import main
from psdist.tracing import Lane, Span
from psdist.tracing.files import read_traces
from psdist.tracing.shares import steps_of_all
from tests.support.mpirun import REPOSITORY, run_mpi

pytestmark = pytest.mark.mpi

PROGRAM = str(REPOSITORY / "tests" / "support" / "programs" / "overlap_script.py")


def test_every_rank_writes_its_spans_and_they_open_as_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {
        "PYTHONPATH": str(REPOSITORY),
        "PSDIST_RUN_DIR": str(tmp_path / "run"),
        "PSDIST_PROGRESS": "off",
        "PSDIST_CHUNK_BYTES": "4096",
    }
    words = ["-m", "psdist", "run", "--servers", "1", "--trace", PROGRAM]
    done = run_mpi(3, words, timeout_s=120, env=env)
    assert done.returncode == 0, done.text
    assert f"psdist trace {tmp_path / 'run'}" in done.stdout
    notes: list[str] = []
    traces = read_traces(tmp_path / "run", notes)
    assert not notes
    workers = [trace for trace in traces if trace.about.is_worker]
    (server,) = (trace for trace in traces if trace.about.is_server)
    for trace in traces:
        assert trace.is_drift_known
        assert 0 <= trace.bound_ns < 10**9
    all_steps = steps_of_all(traces)
    for trace in workers:
        kinds = {Span(kind) for kind in trace.spans["kind"]}
        assert kinds >= {
            *(Span.FORWARD, Span.BACKWARD, Span.STEP, Span.PUSH, Span.PULL, Span.COLLECTIVE),
            *(Span.AGREE, Span.REDUCE, Span.GATHER, Span.WAIT_COLLECTIVE, Span.WAIT_REPLIES),
        }
        assert (trace.of(Span.REDUCE)["lane"] == Lane.EARLY).any()  # overlap = auto
        steps = trace.of(Span.STEP)
        assert steps["clock"].tolist() == 3 * [*range(21)]  # without overlap, auto, full
        assert set(steps["set_index"].tolist()) == {0, 1, 2}
        # Each pass lies before its step: nothing is stamped with another iteration.
        assert len(trace.of(Span.BACKWARD)) == len(steps)
        times = all_steps[trace.about.index]
        assert times.communication.sum() > 0
        parts = (
            times.passes,
            times.script,
            times.psdist,
            times.network,
            times.servers,
            times.waits,
        )
        assert (sum(parts) == times.ends - times.begins).all()
        assert all((part >= 0).all() for part in parts)
        assert set(times.waits_for) <= {0, 1}
        assert not any(times.waits_for.get(trace.about.index, ()))  # no worker waits for itself
    pushed = sorted(
        (each["set_index"], each["chunk"], each["clock"])
        for trace in workers
        for each in trace.of(Span.PUSH)
    )
    applied = sorted(
        (each["set_index"], each["chunk"], each["clock"]) for each in server.of(Span.APPLY)
    )
    assert pushed == applied  # one group, whose workers push different chunks
    received = server.of(Span.RECEIVE)
    assert len(received) == len(pushed) + len({each[:2] for each in pushed})  # initial values
    assert main(tmp_path / "run", svg=tmp_path / "step.svg") == 0
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == set("MXbestf")
    assert sum(event["ph"] == "s" for event in events) == len(pushed)
    assert "hidden behind computation" in capsys.readouterr().out
