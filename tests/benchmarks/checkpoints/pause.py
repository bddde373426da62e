"""Time that ``job.checkpoint()`` keeps training waiting, and its cost for later iterations,
compared with a copy of a shard in memory.

    python -m tests.benchmarks.checkpoints.pause --mib 1024 --servers 4 --json FILE

One worker and so many servers on this host; SGD with momentum, so a shard is its parameters and as
much state. The copies are those of as many processes at the same time as there are servers, each of
the largest shard with its state: into memory that is new, as that of a first checkpoint is which
was not announced, and into memory that was used before. They are measured between the
checkpoints, while the job stands. ``--announced``: with an interval, so servers make memory before
the first one. Medians; the time of files, written in the background, is no part of the pause.

Iterations are timed before each checkpoint, while nothing else happens, and directly after it: the
*extra* is the additional time of the pause and those after it over the same number of others. It
contains the copies that servers make after the pause and the files that they begin to write.
``--add``: to the rounds that are in FILE.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch

ROUNDS = 5
COPIES = 3
ITERATIONS = 3
"""So many in a row are timed."""
SETTLED_S = 1.5
"""So long nothing else happens: servers make memory, files are on the disk."""


def train(mib: int, servers: int, num_rounds: int, out: Path) -> None:
    """The script, under psdist run."""
    import psdist

    job = psdist.init()
    rows = mib << 8  # of 1,024 float32
    model = torch.nn.Embedding(rows, 1024, _weight=torch.zeros(rows, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, served = job.prepare(model, optimizer)

    def timed_iterations(count: int = ITERATIONS) -> list[float]:
        times = []
        for _ in range(count):
            begun_s = perf_counter()
            served.zero_grad()
            (model.weight[:2].sum() * 1.0).backward()
            served.step()
            times.append(perf_counter() - begun_s)
        return times

    rounds = []
    for _ in range(num_rounds + 1):
        timed_iterations(1)
        usual = timed_iterations()
        job.barrier()
        sleep(SETTLED_S)
        begun_s = perf_counter()
        job.checkpoint()
        pause_s = perf_counter() - begun_s
        behind = timed_iterations()
        job._checkpoints.finish()
        job._collective("written")
        sleep(SETTLED_S)
        in_memory = measured_apart(2 * (mib << 20) // servers, servers)
        rounds.append({"pause_s": pause_s, "usual_s": usual, "behind_s": behind, **in_memory})
    out.write_text(json.dumps(rounds))


def measured_apart(num_bytes: int, at_once: int) -> dict[str, float]:
    """Copies in processes of their own, which this one cannot fork: MPI has started in it."""
    words = [sys.executable, "-m", "tests.benchmarks.checkpoints.pause"]
    words += ["--copies", str(num_bytes), "--servers", str(at_once)]
    env = {key: value for key, value in os.environ.items() if "MPI" not in key}
    done = subprocess.run(words, env=env, check=True, stdout=subprocess.PIPE, text=True)
    new_s, used_s = json.loads(done.stdout)
    return {"new_s": new_s, "used_s": used_s}


def copy(num_bytes: int, barrier: Barrier, results: multiprocessing.Queue[list[float]]) -> None:
    torch.set_num_threads(1)
    source = torch.ones(num_bytes // 4)
    used = torch.ones_like(source)
    times = []
    for run in (source.clone, lambda: used.copy_(source)):
        each = []
        for _ in range(COPIES):
            barrier.wait()
            begun_s = perf_counter()
            kept = run()
            each.append(perf_counter() - begun_s)
            del kept
        times.append(median(each))
    results.put(times)


def copies(num_bytes: int, at_once: int) -> list[float]:
    """Seconds of the slowest process: into new memory, into used memory."""
    fork = multiprocessing.get_context("fork")
    barrier, results = fork.Barrier(at_once), fork.Queue()
    processes = [
        fork.Process(target=copy, args=(num_bytes, barrier, results)) for _ in range(at_once)
    ]
    for each in processes:
        each.start()
    found = [results.get() for _ in processes]
    for each in processes:
        each.join()
    return [max(column) for column in zip(*found, strict=True)]


def pause(of_round: dict[str, Any]) -> float:
    seconds: float = of_round["pause_s"]
    return seconds


def extra(of_round: dict[str, Any]) -> float:
    """Seconds that the checkpoint has cost the training: its pause, and what the iterations behind
    it took longer."""
    usual: float = median(of_round["usual_s"])
    return pause(of_round) + sum(of_round["behind_s"]) - ITERATIONS * usual


def rounded(value: float | list[float]) -> float | list[float]:
    return [round(each, 4) for each in value] if isinstance(value, list) else round(value, 4)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="behind the first")
    parser.add_argument("--announced", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", action="store_true", help="to the rounds in that file")
    parser.add_argument("--script", type=Path, help="be the script under psdist run")
    parser.add_argument("--copies", type=int, help="be what measures copies of so many bytes")
    given = parser.parse_args()
    if given.script:
        train(given.mib, given.servers, given.rounds, given.script)
        return 0
    if given.copies:
        print(json.dumps(copies(given.copies, given.servers)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rounds.json"
        words = [sys.executable, "-m", "psdist", "run", "--workers", "1"]
        words += ["--servers", str(given.servers), "--run-dir", f"{folder}/run"]
        if given.announced:
            words += ["--checkpoint-every", "1000000"]
        words += ["--set", "checkpoint_keep=1", "-m", "tests.benchmarks.checkpoints.pause"]
        words += ["--mib", str(given.mib), "--servers", str(given.servers)]
        words += ["--rounds", str(given.rounds), "--script", str(out)]
        subprocess.run(words, check=True, stdout=sys.stderr)
        runs: list[list[dict[str, Any]]] = [json.loads(out.read_text())]
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    checkpoints = summary["checkpoints"]
    if given.add and given.json and given.json.exists():
        before = json.loads(given.json.read_text())
        runs, checkpoints = before["runs"] + runs, before["checkpoints"] + checkpoints
    first = [each[0] for each in runs]
    later = [each for run in runs for each in run[1:]]

    def in_copies(some: list[dict[str, Any]], of: str, take: Callable[..., float] = pause) -> float:
        """Median of each value over the copies of its own round."""
        return round(median(take(each) / each[of] for each in some), 2)

    found = {
        "machine": platform.machine(),
        "model_mib": given.mib,
        "servers": given.servers,
        "shard_with_state_mib": (2 * given.mib) // given.servers,
        "is_announced": given.announced,
        "checkpoints": checkpoints,
        "runs": [
            [{key: rounded(value) for key, value in each.items()} for each in run] for run in runs
        ],
        "first_pauses_in_copies_to_new_memory": in_copies(first, "new_s"),
        "first_pauses_in_copies_to_used_memory": in_copies(first, "used_s"),
        "later_pauses_in_copies_to_new_memory": in_copies(later, "new_s"),
        "later_pauses_in_copies_to_used_memory": in_copies(later, "used_s"),
        "later_pauses_s": rounded(sorted(map(pause, later))),
        "usual_iteration_s": rounded(median(median(each["usual_s"]) for each in later)),
        "iterations_behind_s": rounded(
            [median(each["behind_s"][number] for each in later) for number in range(ITERATIONS)]
        ),
        "extra_s": rounded(median(map(extra, later))),
        "extra_in_copies_to_used_memory": in_copies(later, "used_s", extra),
    }
    print(json.dumps(found, indent=2))
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
