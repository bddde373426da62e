"""A job that trains over all four hosts of the test cluster; one of them is cut off or killed.

seen = played(cluster, folder, launcher="srun", how="silent", where="h3", limit_s=60)
seen.ranks_s, seen.job_s, seen.status, seen.output
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.support.mpirun import REPOSITORY, Completed
from tests.support.slurm import network
from tests.support.slurm.cluster import SlurmCluster

How = Literal["down", "cable", "silent", "killed", "off"]
PSDIST = "python -m psdist run"
LAUNCHERS = {
    "parent": f"{PSDIST} -n 8",
    "mpirun": f"mpirun -n 8 --bind-to none {PSDIST}",
    "ulfm": f"mpirun -n 8 --bind-to none --with-ft ulfm {PSDIST}",
    "srun": f"srun --mpi=pmix {PSDIST}",
}
POLL_S = 0.1
AFTERWARDS_S = 15.0
"""From the end of the launcher to that of the last rank."""


@dataclass(kw_only=True)
class Seen:
    launcher: str
    how: How
    where: str
    training_s: float = 0.0
    """From the submission to the first iterations."""
    ranks_s: dict[str, float] = field(default_factory=dict)
    """From the cut to the end of each rank, by "host role rank"."""
    job_s: float | None = None
    """From the cut to the end of the job."""
    status: int | None = None
    output: list[str] = field(default_factory=list)


def played(
    cluster: SlurmCluster,
    folder: Path,
    *,
    launcher: str,
    how: How,
    where: str,
    options: Sequence[str] = (),
    given: Mapping[str, str] | None = None,
    before: Callable[[list[dict[str, Any]]], None] = lambda _ranks: None,
    limit_s: float,
) -> Seen:
    """``options``: of ``psdist run``; ``given``: of the environment; ``before``: called with what
    ranks.json says, while the job trains; ``limit_s``: seconds from the
    cut on, after which the job is cancelled."""
    run_dir, script, status = folder / "run", folder / "job.sbatch", folder / "status.txt"
    words = " ".join(["--servers 2 --mode sync --group rank --checkpoint-every 20", *options])
    script.write_text(
        "#!/bin/sh\n"
        'export PATH="$VENV/bin:$PATH"\n'
        f"{LAUNCHERS[launcher]} --run-dir {run_dir} {words} "
        f"-m tests.support.programs.deaths.long_training >{folder}/output.txt 2>&1\n"
        f"echo $? >{folder}/status.new; mv {folder}/status.new {status}\n"
    )
    env = {
        **(given or {}),
        "PYTHONPATH": str(REPOSITORY),
        "EPOCHS": "100000",
        "PSDIST_PROGRESS": "off",
    }
    done: list[Completed] = []

    def submit() -> None:
        sbatch_args = ["--nodes=4", "--ntasks-per-node=2"]
        with suppress(AssertionError):
            done.append(
                cluster.sbatch(
                    script,
                    sbatch_args=sbatch_args,
                    timeout_s=limit_s + 60,
                    env={**env, **(given or {})},
                )
            )

    begun = time.monotonic()
    job = threading.Thread(target=submit)
    job.start()
    while not is_training(run_dir):
        if not job.is_alive():
            raise SystemExit(done[0].text if done else "the job has not begun to train")
        time.sleep(POLL_S)
    time.sleep(2.0)
    seen = Seen(launcher=launcher, how=how, where=where)
    seen.training_s = round(time.monotonic() - begun, 1)
    places = json.loads((run_dir / "ranks.json").read_text("utf-8"))
    before(places)
    with ExitStack() as stack:
        if how in ("down", "cable", "silent"):
            stack.enter_context(network.cut(where, how))
        elif how == "off":
            stack.enter_context(network.cut(where, "silent"))
        if how in ("killed", "off"):
            for pid in jobs_processes(where):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        since = time.monotonic()
        until = since + limit_s
        while time.monotonic() < until and len(seen.ranks_s) + (seen.job_s is not None) <= 8:
            for place in places:
                who = f"{place['host']} {place['role']} {place['rank']}"
                if who not in seen.ranks_s and not is_alive(place["pid"]):
                    seen.ranks_s[who] = round(time.monotonic() - since, 1)
            if seen.job_s is None and status.exists():
                seen.job_s = round(time.monotonic() - since, 1)
                seen.status = int(status.read_text())
                until = min(until, time.monotonic() + AFTERWARDS_S)
            time.sleep(POLL_S)
    cluster.cancel_all()
    job.join()
    seen.output = (folder / "output.txt").read_text(errors="replace").splitlines()
    return seen


def jobs_processes(host: str) -> list[int]:
    """Processes that jobs have started on a host: all but its slurmd."""

    def words(pid: int) -> bytes:
        with suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        return b""

    return [pid for pid in network.processes_in(host) if not words(pid).startswith(b"slurmd\0")]


def is_training(run_dir: Path) -> bool:
    with suppress(OSError, ValueError):
        told = json.loads((run_dir / "status.json").read_text("utf-8"))
        return any((each["clock"] or 0) > 20 for each in told["workers"])
    return False


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
