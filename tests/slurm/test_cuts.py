"""Hosts of the test cluster that are cut off in the middle of training.

They take a minute each; `python -m tests.benchmarks.deaths.cut_hosts` plays the other ways to fail.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.mpirun import REPOSITORY, Completed
from tests.support.slurm import network
from tests.support.slurm.cluster import SlurmCluster
from tests.support.slurm.cut_jobs import is_training, played

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
            assert time.monotonic() < until_s, "nothing continues behind the stop"
            time.sleep(0.2)

    seen = played(
        slurm_cluster, folder, launcher=launcher, how="silent", where="h3",
        options=[f"--set failures.host_timeout_s={TIMEOUT_S}"], before=stop_for_a_while,
        limit_s=150,
    )  # fmt: skip
    assert seen.status not in (0, None), seen
    assert len(seen.ranks_s) == 8, seen
    (line,) = [each for each in seen.output if "has not answered for" in each]
    assert line.startswith("psdist: server 0 (rank 0 on h1): error: h3 (server 1 (rank 4 on h3)")
    assert "h3 (server 1" in json.loads((run_dir / "summary.json").read_text("utf-8"))["exit"]
    for rank in (4, 5):
        log = (run_dir / "logs" / f"rank-{rank}.log").read_text("utf-8")
        assert "h3 has been cut off from server 0 (rank 0 on h1) for 5 s" in log, log


def test_a_job_script_goes_on_with_the_hosts_that_are_left(slurm_cluster: SlurmCluster) -> None:
    """One of four is cut off for good; Slurm takes it for down after two minutes."""
    folder = slurm_cluster.directory("cut-requeue")
    run_dir = folder / "run"
    program = REPOSITORY / "tests" / "support" / "programs" / "resuming" / "resumable.py"
    done: list[Completed] = []

    def submit() -> None:
        done.append(
            slurm_cluster.sbatch(
                REPOSITORY / "slurm" / "requeue.sbatch",
                sbatch_args=["--nodes=2-4", "--ntasks-per-node=2"],
                script_args=[
                    *(str(program), str(folder / "out"), "--loader-processes=0"),
                    *("--epochs=60", "--pause-s=0.05"),
                ],
                env={
                    "RUN_DIR": str(run_dir),
                    "EVERY": "20",
                    "PSDIST_SERVERS": "2",
                    "PSDIST_MODE": "ssp",
                    "PSDIST_STALENESS": "3",
                    "PSDIST_HOST_TIMEOUT_S": str(TIMEOUT_S),
                },
                timeout_s=500,
            )
        )

    job = threading.Thread(target=submit)
    job.start()
    while not is_training(run_dir):
        assert job.is_alive(), done
        time.sleep(0.2)
    with network.cut("h3", "silent"):
        job.join()
    (ended,) = done
    assert ended.returncode == 0, ended.text
    assert "3 of 4 hosts answer: requeued at checkpoint step-" in ended.text
    first = json.loads((run_dir / "attempt-1" / "ranks.json").read_text())
    last = json.loads((run_dir / "ranks.json").read_text())
    assert {each["host"] for each in first} == {"h1", "h2", "h3", "h4"}
    assert {each["host"] for each in last} == {"h1", "h2", "h4"}
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["exit"], summary["attempts"]) == ("completed", 2)
    assert int(summary["resumed_from"].removeprefix("step-")) > 0
