"""Hosts of the test cluster that are cut off in the middle of training.

They take a minute each; `python -m tests.benchmarks.cut_hosts` plays the other ways to fail.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.slurm.cluster import SlurmCluster
from tests.support.slurm.cut_jobs import played

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

TIMEOUT_S = 5


def clocks(run_dir: Path) -> int:
    told = json.loads((run_dir / "status.json").read_text("utf-8"))
    return min(each["clock"] for each in told["workers"])


@pytest.mark.parametrize("launcher", ["srun", "parent"])
def test_a_host_that_is_cut_off_ends_the_job_on_both_sides_and_one_that_is_stopped_does_not(
    slurm_cluster: SlurmCluster, launcher: str
) -> None:
    folder = slurm_cluster.directory(f"cut-{launcher}")
    run_dir = folder / "run"

    def stop_for_a_while(ranks: list[dict[str, Any]]) -> None:
        stopped = [each["pid"] for each in ranks if each["host"] == "h3"]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5 * TIMEOUT_S)
        before = clocks(run_dir)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        until_s = time.monotonic() + 30
        while clocks(run_dir) <= before:
            assert time.monotonic() < until_s, "nothing goes on behind the stop"
            time.sleep(0.2)

    seen = played(
        slurm_cluster, folder, launcher=launcher, how="silent", where="h3",
        options=[f"--set host_timeout_s={TIMEOUT_S}"], before=stop_for_a_while, limit_s=150,
    )  # fmt: skip
    assert seen.status not in (0, None), seen
    assert len(seen.ranks_s) == 8, seen
    (line,) = [each for each in seen.output if "has not answered for" in each]
    assert line.startswith("psdist: server 0 (rank 0 on h1): error: h3 (server 1 (rank 4 on h3)")
    assert "h3 (server 1" in json.loads((run_dir / "summary.json").read_text("utf-8"))["exit"]
    for rank in (4, 5):
        log = (run_dir / "logs" / f"rank-{rank}.log").read_text("utf-8")
        assert "h3 has been cut off from server 0 (rank 0 on h1) for 5 s" in log, log
