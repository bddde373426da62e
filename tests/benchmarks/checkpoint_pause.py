"""How long ``job.checkpoint()`` keeps training waiting, beside a copy of a shard in memory.

    python -m tests.benchmarks.checkpoint_pause --mib 1024 --servers 4 --json FILE

One worker and so many servers on this host; SGD with momentum, so a shard is its parameters and as
much state. The copies are those of as many processes at the same time as there are servers, each of
the largest shard with its state: into memory that is new, as a snapshot's is, and into memory that
was used before. Medians; time of files, written beside the training, is no part of the pause.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import subprocess
import sys
import tempfile
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

ROUNDS = 5


def train(mib: int, out: Path) -> None:
    """The script, under psdist run."""
    import psdist

    job = psdist.init()
    rows = mib << 8  # of 1,024 float32
    model = torch.nn.Embedding(rows, 1024, _weight=torch.zeros(rows, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, served = job.prepare(model, optimizer)
    pauses = []
    for _ in range(ROUNDS + 1):
        served.zero_grad()
        (model.weight[:2].sum() * 1.0).backward()
        served.step()
        job._checkpoints.finish()
        job.barrier()
        begun_s = perf_counter()
        job.checkpoint()
        pauses.append(perf_counter() - begun_s)
        job._checkpoints.finish()
        job._collective("written")
    out.write_text(json.dumps(pauses[1:]))


def copy(num_bytes: int, barrier: Barrier, results: multiprocessing.Queue[list[float]]) -> None:
    torch.set_num_threads(1)
    source = torch.ones(num_bytes // 4)
    used = torch.ones_like(source)
    times = [0.0, 0.0]
    for place, run in enumerate((source.clone, lambda: used.copy_(source))):
        each = []
        for _ in range(ROUNDS):
            barrier.wait()
            begun_s = perf_counter()
            kept = run()
            each.append(perf_counter() - begun_s)
            del kept
        times[place] = median(each)
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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--script", type=Path, help="be the script under psdist run")
    given = parser.parse_args()
    if given.script:
        train(given.mib, given.script)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pauses.json"
        words = [sys.executable, "-m", "psdist", "run", "--workers", "1"]
        words += ["--servers", str(given.servers), "--run-dir", f"{folder}/run"]
        words += ["--set", "checkpoint_keep=1", "-m", "tests.benchmarks.checkpoint_pause"]
        subprocess.run([*words, "--mib", str(given.mib), "--script", str(out)], check=True)
        pauses: list[float] = json.loads(out.read_text())
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    shard = 2 * (given.mib << 20) // given.servers
    (new_s, used_s), (alone_new_s, alone_used_s) = copies(shard, given.servers), copies(shard, 1)
    pause_s = median(pauses)
    found = {
        "machine": platform.machine(),
        "model_mib": given.mib,
        "servers": given.servers,
        "shard_with_state_mib": shard >> 20,
        "checkpoints": summary["checkpoints"],
        "pauses_s": [round(each, 4) for each in pauses],
        "pause_s": round(pause_s, 4),
        "copies_at_once_new_memory_s": round(new_s, 4),
        "copies_at_once_used_memory_s": round(used_s, 4),
        "copy_alone_new_memory_s": round(alone_new_s, 4),
        "copy_alone_used_memory_s": round(alone_used_s, 4),
        "pause_in_copies_at_once": round(pause_s / new_s, 2),
        "pause_in_copies_at_once_used_memory": round(pause_s / used_s, 2),
    }
    print(json.dumps(found, indent=2))
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
