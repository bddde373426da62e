"""Signals that ranks get when one is sent to their job: a table, on the Slurm test cluster.

    python -m tests.benchmarks.deaths.signals

Ranks are plain Python programs that note each signal that reaches them. Needs root; uses the
cluster if it is up, else brings it up and takes it down.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.slurm.cluster import SlurmCluster
from tests.support.slurm.hosts import Cluster, state_directory, why_unavailable

RANK = """
import os, signal, sys, time
folder = sys.argv[1]
name = f"{folder}/{os.uname().nodename}-{os.getpid()}"
def note(number, frame):
    with open(name, "a") as file:
        file.write(signal.Signals(number).name + " ")
    if number in (signal.SIGTERM, signal.SIGINT):
        sys.exit(128 + number)
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT):
    signal.signal(number, note)
open(name, "a").close()
time.sleep(6)
"""

JOB = """#!/usr/bin/env bash
export PATH="$VENV/bin:$PATH"
{launch} python {folder}/rank.py {folder}/noted &
child=$!
trap 'echo "the batch script got USR1"' USR1
trap 'echo "the batch script got TERM"' TERM
for _ in $(seq 200); do [[ $(ls {folder}/noted | wc -l) == 4 ]] && break; sleep 0.1; done
{send}
status=0; wait $child || status=$?
while kill -0 $child 2>/dev/null; do wait $child; status=$?; done
echo "launcher's status $status"
"""

LAUNCH = {
    "mpirun": "mpirun --allow-run-as-root --oversubscribe --map-by ppr:2:node -n 4",
    "srun": "srun --mpi=pmix -n 4",
}
SEND = {
    "USR1 to the launcher": "kill -USR1 $child",
    "TERM to the launcher": "kill -TERM $child",
    "scancel --signal=USR1 JOB": "scancel --signal=USR1 $SLURM_JOB_ID",
    "scancel --signal=USR1 --batch JOB": "scancel --signal=USR1 --batch $SLURM_JOB_ID",
    "scancel --signal=TERM JOB": "scancel --signal=TERM $SLURM_JOB_ID",
    "scancel JOB": "scancel $SLURM_JOB_ID",
}


def main() -> int:
    if reason := why_unavailable():
        print(reason, file=sys.stderr)
        return 1
    cluster = Cluster(directory=state_directory())
    was_up = cluster.is_up()
    try:
        if not was_up:
            cluster.up(shape=None, keep=True)
        for launcher in LAUNCH:
            for what in SEND:
                print(f"{launcher} | {what} | {measure(launcher, what)}", flush=True)
    finally:
        if not was_up:
            cluster.down()
    return 0


def measure(launcher: str, what: str) -> str:
    slurm = SlurmCluster()
    folder: Path = slurm.directory("signals")
    (folder / "noted").mkdir()
    (folder / "rank.py").write_text(RANK)
    script = folder / "job.sh"
    script.write_text(JOB.format(launch=LAUNCH[launcher], send=SEND[what], folder=folder))
    nodes = ["--nodes=2", "--ntasks-per-node=2"]
    try:
        done = slurm.sbatch(script, sbatch_args=nodes, timeout_s=60)
        said, status = done.stdout, f"job {done.returncode}"
    except AssertionError as error:  # processes that outlive their job, too, are a finding
        said, status = str(error), "ranks outlived the job"
    noted = [path.read_text().strip() or "nothing" for path in sorted((folder / "noted").iterdir())]
    lines = [
        line for line in said.splitlines() if "script got" in line or line.startswith("launcher's")
    ]
    return f"ranks got {noted}; {'; '.join(lines)}; {status}"


if __name__ == "__main__":
    raise SystemExit(main())
