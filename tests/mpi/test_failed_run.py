"""Files of a failed run: every record up to the failure, and no claim beyond it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from psdist.commands.check import Verdict, check_run
from psdist.history.writers import EventKind, read_history
from tests.support.mpirun import run_mpi, run_program

ITERATIONS = 5
SCRIPT = f"""
import torch
import psdist

job = psdist.init()
model = torch.nn.Linear(4, 3)
model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for iteration in range({ITERATIONS}):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
if job.worker == job.num_workers - 1:
    raise RuntimeError("lost after the last step")
job.barrier()
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.mpi)])
def test_a_failing_run_leaves_every_record_and_is_not_called_complete(
    ranks: int, tmp_path: Path
) -> None:
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    words = ["-m", "psdist", "run", "--record", "--group", "rank", "--set", "progress=off"]
    words += ["--run-dir", str(run_dir), str(script)]
    if ranks == 1:
        done = run_program([sys.executable, *words], timeout_s=120)
    else:
        done = run_mpi(ranks, words, timeout_s=120)
    assert done.returncode == 1, done.text

    history = read_history(run_dir)
    failed = history.workers[-1]
    assert set(failed.uses["iteration"]) == set(range(ITERATIONS))
    (server,) = history.servers
    applies = server.events[server.events["kind"] == EventKind.APPLY]
    # The last step has returned on the worker that failed: its push is in the server's log.
    assert max(applies["clock"]) == ITERATIONS - 1
    assert not failed.is_complete
    assert not server.is_complete

    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["exit"] == "RuntimeError: lost after the last step"
    for unknown in ("max_staleness_seen", "updates_applied", "bytes_pushed", "bytes_pulled",
                    "samples_per_s"):  # fmt: skip
        assert summary[unknown] is None, unknown
    assert summary["clocks"] == [ITERATIONS] * max(1, ranks - 1)
    if ranks > 1:
        told = run_program([sys.executable, "-m", "psdist", "status", str(run_dir)], timeout_s=60)
        assert told.stdout.count(f", iteration {ITERATIONS};") == ranks - 1, told.text
        assert "outcome    RuntimeError: lost after the last step" in told.stdout
    assert check_run(run_dir, [history]).verdict == Verdict.INCOMPLETE
