"""Who is killed, when, and in which mode: each cell a training of its own over four hosts.

    python -m tests.benchmarks.kill_matrix --modes sync,ssp --json FILE
    python -m tests.benchmarks.kill_matrix --cells "worker pushing" "registrar training"

On the Slurm test cluster (root; docs/tests.md) eight ranks, three of them servers with buddies,
train tests/support/programs/dies.py under ``mpirun --with-ft ulfm``, with ``max_deaths = 1``. Of
each cell is told how the job has ended, whether `psdist check` proves its record, and the seconds
that it took. Exit status 0 where every job has ended with status 0 and is proved.
"""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from psdist.commands.check import check_run
from psdist.errors import PsdistError
from psdist.history.writers import read_histories
from tests.support.mpirun import REPOSITORY
from tests.support.slurm.cluster import SlurmCluster

PROGRAM = REPOSITORY / "tests" / "support" / "programs" / "dies.py"
WORKER_PHASES = {"forward": 12, "pushing": 12, "parked": 12, "collective": 9, "finishing": 0}
CELLS = {
    **{f"worker {phase}": {"DIES": f"2 {phase} {at}"} for phase, at in WORKER_PHASES.items()},
    **{f"chief {phase}": {"DIES": f"0 {phase} {at}"} for phase, at in WORKER_PHASES.items()},
    "chief setting": {"DIES": "0 setting 0"},
    "chief saving": {"DIES": "0 saving 0"},
    "server training": {"KILLS": "1 12"},
    "registrar training": {"KILLS": "0 12"},
}
MODES = {"sync": "--mode sync", "ssp": "--mode ssp --staleness 2", "async": "--mode async"}
LIMIT_S = 90


@dataclass(frozen=True)
class Played:
    cell: str
    mode: str
    status: int
    proved: bool
    seconds: int
    said: str
    """The last line of a job that has not ended with status 0."""


def job_script(folder: Path, plays: list[tuple[str, str]]) -> str:
    lines = ["#!/bin/sh", 'export PATH="$VENV/bin:$PATH" ITERATIONS=20']
    for number, (cell, mode) in enumerate(plays):
        place = folder / str(number)
        env = [f"{name}={value}" for name, value in CELLS[cell].items()]
        words = [
            *("env", *env, f"PSDIST_RUN_DIR={place / 'run'}"),
            *(f"timeout -k 5 {LIMIT_S} mpirun -n 8 --bind-to none --with-ft ulfm".split()),
            *(f"python -m psdist run {MODES[mode]} --group rank --servers 3 --record".split()),
            *("--set=max_deaths=1", "--set=replication=buddy", "--set=progress=off", str(PROGRAM)),
        ]
        lines += [
            f"mkdir {place}; began=$(date +%s)",
            f"{shlex.join(words)} >{place}/output.txt 2>&1",
            f'echo "$? $(($(date +%s) - began))" >{place}/ended.txt',
        ]
    return "\n".join([*lines, ""])


def judged(place: Path, cell: str, mode: str) -> Played:
    status, seconds = map(int, (place / "ended.txt").read_text().split())
    proved = False
    try:
        proved = check_run(place / "run", read_histories(place / "run")).proved
    except PsdistError as error:
        print(f"{cell}, {mode}: {error}")
    lines = (place / "output.txt").read_text(errors="replace").strip().splitlines()
    said = next((each for each in reversed(lines) if each.startswith("psdist:")), "")
    return Played(cell, mode, status, proved, seconds, said if status else "")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    parser.add_argument("--modes", default="sync,ssp,async")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    plays = [(cell, mode) for mode in given.modes.split(",") for cell in given.cells]
    cluster = SlurmCluster()
    folder = cluster.directory("matrix")
    script = folder / "job.sbatch"
    script.write_text(job_script(folder, plays))
    done = cluster.sbatch(
        script,
        sbatch_args=["--nodes=4", "--ntasks-per-node=2"],
        timeout_s=60 + LIMIT_S * len(plays),
        env={"PYTHONPATH": str(REPOSITORY)},
    )
    if done.returncode:
        print(done.text)
    found = [judged(folder / str(number), *play) for number, play in enumerate(plays)]
    for each in found:
        print(each, flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    return int(any(each.status or not each.proved for each in found))


if __name__ == "__main__":
    raise SystemExit(main())
