"""How hybrid training and admission learn, against sync: area under the ROC curve on a click log.

    python -m tests.benchmarks.tables.learning --json docs/bench/tables-learning.json

DLRM on 2 million impressions of the planted log, Zipf 1.05, two workers and two servers. Each way
trains with the same seeds; --seeds and --ways make a part of the table. The planted model's own
area is the most that any model can reach.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS: dict[str, tuple[list[str], list[str]]] = {
    "sync": (["mode=sync"], []),
    "hybrid": (["mode=sync", "tables.mode=ssp:4"], []),
    "admit": (["mode=sync"], ["--admit", "2"]),
}
"""Settings of psdist, and words for the script."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--samples", type=int, default=2_000_000)
    parser.add_argument("--scale", type=float, default=0.01, help="of Criteo-Kaggle's rows")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--admit", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options)
        return 0
    rows = []
    for seed in options.seeds:
        for way in options.ways:
            rows.append({"way": way, "seed": seed, **run(way, seed, options)})
            print(rows[-1], flush=True)
    for way in options.ways:
        areas = [each["auc"] for each in rows if each["way"] == way]
        print(f"{way:8} {statistics.mean(areas):.4f}")
    if options.json is not None:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "samples": options.samples,
            "scale": options.scale,
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def run(way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    settings, words = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "psdist", "run", "-n", "4", "--servers", "2"),
            *("--group", "rank", "--run-dir", f"{folder}/run"),
            *(f"--set={each}" for each in ("report.progress=off", *settings)),
            *("-m", "tests.benchmarks.tables.learning", "--train", "--seeds", str(seed), *words),
            *("--samples", str(options.samples), "--scale", str(options.scale)),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        began_s = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, timeout=900)
        summary = json.loads(Path(folder, "run", "summary.json").read_text(encoding="utf-8"))
    last: dict[str, Any] = summary["last"]
    return {**last, "took_s": round(time.monotonic() - began_s)}


def train(options: argparse.Namespace) -> None:
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    import psdist
    from examples.dlrm import CARDINALITIES, DLRM, Clicks, area_under_curve, evaluate, make_loader

    (seed,) = options.seeds
    torch.manual_seed(seed)
    job = psdist.init()
    rows = [max(2, round(each * options.scale)) for each in CARDINALITIES]
    model = DLRM(rows, 16, (64,), (64,), **({"admit": options.admit} if options.admit else {}))
    model, optimizer, loader = job.prepare(
        model,
        torch.optim.Adagrad(model.parameters(), lr=0.07),
        make_loader(Clicks(options.samples, rows, seed=seed), 512),
    )
    for dense, ids, clicks in loader:
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(dense, ids), clicks).backward()
        optimizer.step()
    job.barrier()
    job.pull()
    if job.is_chief:
        test = Clicks(100_000, rows, first=options.samples, seed=seed)
        dense, ids, clicks = test.__getitems__(range(len(test)))
        best = torch.from_numpy(test.logits(dense.double().numpy(), ids.T.numpy()))
        job.log(auc=evaluate(model, test, job.device), best_auc=area_under_curve(best, clicks))


if __name__ == "__main__":
    sys.exit(main())
