"""No loader process is left when its rank has been killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from psdist.workers.data.processes import started_at

REPOSITORY = Path(__file__).resolve().parents[4]
PATIENCE_S = 60


def test_loader_processes_and_their_server_end_when_their_rank_is_killed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.programs.deaths.killed_loader"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    numbers = list(map(int, done.stdout.split()))
    assert len(set(numbers)) == 3
    until = time.monotonic() + PATIENCE_S
    while any(map(started_at, numbers)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(started_at, numbers))


def test_a_process_that_is_there_and_one_that_is_not() -> None:
    assert int(started_at(os.getpid())) > 0
    ended = subprocess.Popen([sys.executable, "-c", ""])
    while Path(f"/proc/{ended.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert started_at(ended.pid) == ""  # it waits to be asked how it ended, and runs no more
    ended.wait()
    assert started_at(ended.pid) == ""
