"""From SIGKILL to the next update that is applied, in sync, on this host.

    python -m tests.benchmarks.deaths.after_a_death --times 5 --json FILE
    python -m tests.benchmarks.deaths.after_a_death --who worker

Three workers and two servers with buddies train tests/support/programs/deaths/dies.py under
``mpirun --with-ft ulfm``. A worker, server 1, or server 0, the coordinator, is killed in iteration
12, which cannot end without the death being taken in; what counts is when the first of the others
has made that step.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from pathlib import Path
from typing import Literal, get_args

from tests.support.mpirun import REPOSITORY, run_mpi

PROGRAM = REPOSITORY / "tests" / "support" / "programs" / "deaths" / "dies.py"
AT = 12
TIMEOUT_S = 240

Who = Literal["worker", "server", "registrar"]


def seconds(who: Who, folder: Path) -> float:
    words = ["-m", "psdist", "run", "--mode", "sync", "--group", "rank", "--servers", "2"]
    survives = ["--set=max_deaths=1", "--set=replication=buddy"]
    words += [*survives, "--set=progress=off", str(PROGRAM)]
    env = {"PSDIST_RUN_DIR": str(folder / "run"), "ITERATIONS": "20"}
    if who == "worker":
        env["DIES"] = f"1 forward {AT}"
    else:
        env["KILLS"] = f"{int(who != 'registrar')} {AT}"
    done = run_mpi(5, words, timeout_s=TIMEOUT_S, env=env, launcher_args=("--with-ft", "ulfm"))
    if done.returncode:
        raise SystemExit(done.text)
    (killed,) = re.findall(r"^killed at ([0-9.]+)$", done.stdout, re.MULTILINE)
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines())
    dead = 1 if who == "worker" else None
    behind = [each["at"] for each in lines if each["clock"] > AT and each["worker"] != dead]
    return round(min(behind) - float(killed), 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--who", choices=get_args(Who))
    given = parser.parse_args()
    whos: tuple[Who, ...] = get_args(Who) if given.who is None else (given.who,)
    told: dict[str, list[float]] = {who: [] for who in whos}
    for _ in range(given.times):
        for who in whos:
            with tempfile.TemporaryDirectory() as folder:
                told[who].append(seconds(who, Path(folder)))
    for who, found in told.items():
        print(f"{who}: median {statistics.median(found)} s, most {max(found)} s of {found}")
    if given.json:
        given.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
