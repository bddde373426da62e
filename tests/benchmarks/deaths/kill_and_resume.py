"""Sync runs that lose a random rank at a random moment, and continue until they are done: do they
end with the bits of an undisturbed run?

    python -m tests.benchmarks.deaths.kill_and_resume --times 20 --seed 0 --json FILE

Two workers and a server of this host train tests/support/programs/resuming/resumable.py: dropout,
batch norm, augmentation in loader processes, two schedulers. A rank, worker or server, gets SIGKILL
at a random moment: in four of five runs after the first checkpoint, else from the start on; some
runs lose two. Compared are what every worker has seen, its model with buffers, its next random
number, and the saved file. Exit status 0 where all are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, sleep

REPOSITORY = Path(__file__).resolve().parents[3]
WORKERS, EVERY = 2, 3
ITERATIONS_OF_AN_EPOCH = 5
SECOND_KILL = 0.3
FROM_THE_START = 0.2
TIMEOUT_S = 600


@dataclass
class Found:
    """Of one run."""

    killed: list[str] = field(default_factory=list)
    """Which rank, and when: "server at 3.1 s"; "nobody": the run had ended by then."""
    resumed_from: list[int] = field(default_factory=list)
    is_equal: bool = False
    seconds: float = 0.0


def start(run_dir: Path, script: list[str]) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "psdist", "run", "--workers", str(WORKERS), "--servers", "1"]
    words += ["--checkpoint-every", str(EVERY), "--resume", "--run-dir", str(run_dir)]
    words += ["-m", "tests.support.programs.resuming.resumable", f"{run_dir}.out", *script]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PSDIST_PROGRESS": "off"}
    return subprocess.Popen(
        words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def ranks_of(run_dir: Path, launcher_of: int) -> list[tuple[int, str]]:
    """Process ids of the ranks that ``psdist run`` with this process id has started, by role."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True)
    parents = {
        int(pid): int(parent) for pid, parent in map(str.split, listed.stdout.splitlines()[1:])
    }
    launchers = {pid for pid, parent in parents.items() if parent == launcher_of}
    ranks = sorted(pid for pid, parent in parents.items() if parent in launchers)
    roles = {}
    if (run_dir / "ranks.json").exists():
        places = json.loads((run_dir / "ranks.json").read_text("utf-8"))
        roles = {each["pid"]: each["role"] for each in places}
    return [(pid, roles.get(pid, "a rank")) for pid in ranks]


def finish(process: subprocess.Popen[str], found: Found) -> tuple[int, str]:
    text, _ = process.communicate(timeout=TIMEOUT_S)
    if match := re.search(r"resumes from checkpoint step-([0-9]{8})", text):
        found.resumed_from.append(int(match[1]))
    return process.returncode, text


def wait_for_checkpoint(process: subprocess.Popen[str], run_dir: Path) -> None:
    """Until there is one, or the run has ended."""
    deadline = perf_counter() + TIMEOUT_S
    while process.poll() is None and perf_counter() < deadline:
        if (run_dir / "checkpoints" / "latest").exists():
            return
        sleep(0.01)


def kill_once(
    run_dir: Path, script: list[str], most_s: float, pick: random.Random, found: Found
) -> bool:
    """Whether the run has ended, nevertheless. ``most_s``: what the whole one has taken."""
    process, begun_s = start(run_dir, script), perf_counter()
    if pick.random() >= FROM_THE_START:
        wait_for_checkpoint(process, run_dir)
    waited_s = perf_counter() - begun_s
    after_s = waited_s + pick.random() * max(0.0, most_s - waited_s)
    killed = "nobody"
    try:
        process.wait(timeout=after_s - waited_s)
    except subprocess.TimeoutExpired:
        ranks = ranks_of(run_dir, process.pid)
        while not ranks and process.poll() is None:
            ranks = ranks_of(run_dir, process.pid)
        if ranks:
            pid, role = pick.choice(ranks)
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(pid, signal.SIGKILL)
                killed = f"{role} at {after_s:.1f} s"
    found.killed.append(killed)
    status, _ = finish(process, found)
    return status == 0


def results(run_dir: Path) -> list[bytes]:
    of_workers = [Path(f"{run_dir}.out-{worker}.json") for worker in range(WORKERS)]
    return [path.read_bytes() for path in (*of_workers, run_dir.with_suffix(".safetensors"))]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--pause-s", type=float, default=0.2, help="behind each iteration")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    script = ["--epochs", str(given.epochs), "--pause-s", str(given.pause_s)]
    runs: list[Found] = []
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        begun_s = perf_counter()
        status, text = finish(start(whole, script), Found())
        whole_s = perf_counter() - begun_s
        if status:
            print(text)
            return 1
        expected = results(whole)
        for number in range(given.times):
            pick = random.Random(f"{given.seed} {number}")
            run_dir, found = Path(folder) / f"run-{number}", Found()
            begun_s = perf_counter()
            is_over = kill_once(run_dir, script, whole_s, pick, found)
            if not is_over and pick.random() < SECOND_KILL:
                is_over = kill_once(run_dir, script, whole_s, pick, found)
            if not is_over:
                status, text = finish(start(run_dir, script), found)
                if status:
                    print(text)
            found.is_equal = not status and results(run_dir) == expected
            found.seconds = round(perf_counter() - begun_s, 1)
            runs.append(found)
            print(number, found, flush=True)
    told = {
        "seed": given.seed,
        "iterations": given.epochs * ITERATIONS_OF_AN_EPOCH,
        "checkpoint_every": EVERY,
        "whole_s": round(whole_s, 1),
        "times": len(runs),
        "equal": sum(each.is_equal for each in runs),
        "kills": sum(each != "nobody" for run in runs for each in run.killed),
        "resumed": sum(len(run.resumed_from) for run in runs),
        "runs": [asdict(each) for each in runs],
    }
    if given.json:
        given.json.write_text(json.dumps(told, indent=2) + "\n")
    print(f"{told['equal']} of {told['times']} runs equal; {told['kills']} kills")
    return 0 if told["equal"] == told["times"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
