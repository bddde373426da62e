"""Backup groups: time per step with one slow group at a time, and with one that is always slow.

    python -m tests.benchmarks.schemes.backup_groups --json docs/bench/backup-groups.json

Four workers, each a group, and a server, under mpirun; a step sleeps. *now and then*: in every
twelve rounds one group, drawn at random, takes ten times as long, once. *always*: one takes ten
times as long in every step. The script is tests/support/programs/schemes/backup_script.py. Rows of
one seed come one after the other; every run is recorded, and what ``psdist check`` says of it is
told.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from psdist.commands.check import check
from psdist.history.files import read_history
from tests.support.mpirun import REPOSITORY

WORKERS = 4
SCRIPT = REPOSITORY / "tests" / "support" / "programs" / "schemes" / "backup_script.py"
ROWS = (
    ("none slow", "nobody", 0),
    ("none slow, backup = 1", "nobody", 1),
    ("one slow now and then", "random", 0),
    ("one slow now and then, backup = 1", "random", 1),
    ("one always slow", "always", 0),
    ("one always slow, backup = 1", "always", 1),
)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--usual", type=float, default=0.03, help="seconds of a usual step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for label, who, backup in ROWS:
        seeds = [
            run(who, backup, seed=seed, rounds=options.rounds, usual_s=options.usual)
            for seed in range(options.seeds)
        ]
        step_s = statistics.median(each["step_s"] for each in seeds)
        rows.append({"row": label, "backup": backup, "step_s": step_s, "seeds": seeds})
        print(
            f"{label}: {1e3 * step_s:.1f} ms a step, {step_s / rows[0]['step_s']:.2f} times the "
            f"first; contributed {seeds[0]['contributed']}, proved "
            f"{all(each['is_proved'] for each in seeds)}",
            flush=True,
        )
    if options.json is not None:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": round(os.getloadavg()[0], 1),
            "rounds": options.rounds,
            "usual_s": options.usual,
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def run(who: str, backup: int, *, seed: int, rounds: int, usual_s: float) -> dict[str, Any]:
    """Seconds of a step, and each group's share of the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = [
            *(sys.executable, "-m", "psdist", "run", "-n", str(1 + WORKERS), "--servers", "1"),
            *("--group", "rank", "--run-dir", str(run_dir), "--set", "progress=off", "--record"),
            *("--seed", str(seed), "--backup", str(backup)),
            *(str(SCRIPT), folder, str(rounds), str(usual_s), who, f"seed={seed}"),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=environment, timeout=600)
        told = [json.loads(path.read_text()) for path in Path(folder).glob("seen.*")]
        summary = json.loads((run_dir / "summary.json").read_text())
        missed = summary["rounds_missed"] or [0] * WORKERS  # null without backup
        return {
            "seed": seed,
            "step_s": max(each["took_s"] for each in told) / rounds,
            "contributed": [round(1 - each / rounds, 3) for each in missed],
            "is_proved": check(read_history(run_dir)).proved,
        }


if __name__ == "__main__":
    sys.exit(main())
