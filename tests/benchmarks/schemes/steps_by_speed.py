"""Local steps by speed over MPI: how much of the time groups wait, with equal steps and by speed.

    python -m tests.benchmarks.schemes.steps_by_speed --json docs/bench/steps-by-speed.json

Four workers, each a group, and a server, under mpirun; a step sleeps, on worker 3 three times as
long (*one slow*) or on all others (*one fast*). tests/support/programs/schemes/speeds_script.py is
their script. The time in ``optimizer.step()`` counts as waiting, so the exchange counts as waiting,
too. Runs of one repeat come one after the other, and what ``psdist check`` says of each is told.
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
from collections import Counter
from pathlib import Path
from typing import Any

from psdist.commands.check import check
from psdist.history.files import read_history
from tests.support.mpirun import REPOSITORY

SCRIPT = REPOSITORY / "tests" / "support" / "programs" / "schemes" / "speeds_script.py"
TIMES = 3
ROWS = tuple(
    (f"{label}, {steps_by}", steps_by, slow)
    for label, slow in (("one slow", (0, 0, 0, 1)), ("one fast", (0, 1, 1, 1)))
    for steps_by in ("count", "speed")
)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--local-steps", type=int, default=8)
    parser.add_argument("--step", type=float, default=0.01, help="seconds of a fast step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seen: dict[str, list[dict[str, Any]]] = {label: [] for label, *_ in ROWS}
    for _ in range(options.repeats):
        for label, steps_by, slow in ROWS:
            seen[label].append(run(steps_by, slow, options))
    rows = []
    for label, *_ in ROWS:
        share, took_s = (
            statistics.median(each[key] for each in seen[label]) for key in ("waiting", "took_s")
        )
        rows.append({"row": label, "waiting": share, "took_s": took_s, "runs": seen[label]})
        print(
            f"{label}: {share:.1%} waited, {took_s:.1f} s; steps {seen[label][0]['steps']} in "
            f"{seen[label][0]['rounds']} rounds; every sample once a pass "
            f"{all(each['is_every_sample_once'] for each in seen[label])}, proved "
            f"{all(each['is_proved'] for each in seen[label])}",
            flush=True,
        )
    if options.json is not None:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": round(os.getloadavg()[0], 1),
            "local_steps": options.local_steps,
            "step_s": options.step,
            "passes": options.passes,
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def run(steps_by: str, slow: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        steps_s = [str(options.step * (TIMES if is_slow else 1)) for is_slow in slow]
        words = [
            *(sys.executable, "-m", "psdist", "run", "-n", str(1 + len(slow)), "--servers", "1"),
            *("--group", "rank", "--run-dir", str(run_dir), "--set", "progress=off", "--record"),
            *("--local-steps", str(options.local_steps), "--set", f"steps_by={steps_by}"),
            *(str(SCRIPT), folder, str(options.passes), *steps_s),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=environment, timeout=600)
        told = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("seen.*"))]
        counts = Counter(each for worker in told for each in worker["samples"])
        return {
            "waiting": sum(each["waited_s"] for each in told)
            / sum(each["took_s"] for each in told),
            "took_s": max(each["took_s"] for each in told),
            "steps": [each["steps"] for each in told],
            "rounds": told[0]["clock"],
            "is_every_sample_once": set(counts.values()) == {options.passes},
            "is_proved": check(read_history(run_dir)).proved,
        }


if __name__ == "__main__":
    sys.exit(main())
