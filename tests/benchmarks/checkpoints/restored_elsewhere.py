"""A checkpoint continues on other numbers of servers: the same bits, exported and of the state.

    python -m tests.benchmarks.checkpoints.restored_elsewhere --mib 1024 --servers 4 --on 1 2 3 6

One worker and so many servers on this host train a model of random values with SGD's momentum for
two iterations, and make a checkpoint. Then the run continues on each of the other numbers, makes
the checkpoint of the same iteration again and ends. Each time `psdist export` must write the same
file as of the first, byte by byte, and `psdist checkpoint diff` find nothing: neither in a
parameter nor in the optimizer's state. The exit status is 1 where anything differs. Needs three
times the model in memory, and seven times on the disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

ITERATIONS = 2


def train(mib: int) -> None:
    """The script, under psdist run."""
    import psdist

    job = psdist.init()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)  # nothing is drawn where the run continues: what is kept of these is the same
    # Pieces that no number of servers cuts alike, and one that ends within a chunk.
    rows = [mib << 6] * 3 + [(mib << 6) - 37]
    model = torch.nn.ModuleList(torch.nn.Embedding(each, 1024) for each in rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _, served = job.prepare(model, optimizer)
    while job.clock < ITERATIONS:
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.01 + job.clock
        served.step()
    job.checkpoint()


def psdist_command(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "psdist", *words], check=True, stdout=sys.stderr)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run(run_dir: Path, mib: int, servers: int) -> dict[str, object]:
    begun_s = perf_counter()
    words = ["--workers", "1", "--servers", str(servers), "--run-dir", str(run_dir), "--resume"]
    words += ["--set", "checkpoint_keep=1", "--set", "progress=off"]
    words += [
        "-m",
        "tests.benchmarks.checkpoints.restored_elsewhere",
        "--script",
        "--mib",
        str(mib),
    ]
    psdist_command("run", *words)
    took_s = perf_counter() - begun_s
    (folder,) = (run_dir / "checkpoints").glob("step-*")
    written = len(list(folder.glob("server-*.safetensors")))
    if written != servers:
        raise SystemExit(f"{folder} has the files of {written} servers, not of {servers}")
    out = run_dir.parent / "exported.safetensors"
    psdist_command("export", str(folder), str(out))
    found = {"servers": servers, "run_s": round(took_s, 1), "exported": digest(out)}
    out.unlink()
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--on", type=int, nargs="+", default=[1, 2, 3, 6])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--script", action="store_true", help="be the script under psdist run")
    given = parser.parse_args()
    if given.script:
        train(given.mib)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run_dir, first = Path(folder) / "run", Path(folder) / "first"
        found = [run(run_dir, given.mib, given.servers)]
        shutil.copytree(run_dir / "checkpoints", first)
        for servers in given.on:
            found.append(run(run_dir, given.mib, servers))
            (kept,), (now,) = first.glob("step-*"), (run_dir / "checkpoints").glob("step-*")
            psdist_command("checkpoint", "diff", str(kept), str(now))
            attempts = json.loads((run_dir / "summary.json").read_text("utf-8"))["attempts"]
            if attempts != len(found):
                raise SystemExit(f"{servers} servers: attempt {attempts}, not {len(found)}")
    is_same = len({each["exported"] for each in found}) == 1
    told = {"model_mib": given.mib, "runs": found, "exported_files_are_equal": is_same}
    print(json.dumps(told, indent=2))
    if given.json:
        given.json.write_text(json.dumps(told, indent=2) + "\n")
    return 0 if is_same else 1


if __name__ == "__main__":
    raise SystemExit(main())
