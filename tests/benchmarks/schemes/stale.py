"""Stale updates: a character model's loss in async where one group is slow, with what is done
about it.

    python -m tests.benchmarks.schemes.stale --seeds 2 --json docs/bench/stale.json

Four groups of one worker on the virtual network, a transformer of 75,984 parameters. Three groups
make ``--steps`` steps each; the fourth takes ``--slow`` times as long for a step and makes so many
fewer; in the first row all are alike, and see more samples. Not a measure of time. Each row is a
run of the real trainer and servers; bits are of held-out text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, Final

import torch

from psdist.examples.chars import (
    CharTransformer,
    bits_per_char,
    learning_rate_factor,
    load_text,
    optimizer_groups,
    validation_bits,
    windows,
)
from psdist.job import Job
from tests.support.programs.training.cases import Case, Result, Stage
from tests.support.programs.training.virtual_job import run_virtually

GROUPS: Final = 4
LENGTH: Final = 64
STEP_S: Final = 1.0
"""Seconds of the network's virtual clock: long compared with any message."""
SCHEMES: Final[dict[str, dict[str, object]]] = {
    "all alike": {},
    "one slow": {},
    "one slow, stale_lr = inverse": {"stale_lr": "inverse"},
    "one slow, delay_compensation = 0.04": {"delay_compensation": 0.04},
    "one slow, delay_compensation = 2": {"delay_compensation": 2.0},
    "one slow, both (2)": {"stale_lr": "inverse", "delay_compensation": 2.0},
}


def run(scheme: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Validation bits at the end."""
    train, valid = load_text()
    valid_set = windows(valid[:40_000], LENGTH)
    slow_times = given.slow if scheme != "all alike" else 1

    def script(job: Job, stage: Stage) -> Result:
        torch.manual_seed(seed)
        model = CharTransformer(length=LENGTH, width=48)
        made: torch.optim.Optimizer
        if given.optimizer == "adamw":
            made = torch.optim.AdamW(optimizer_groups(model, weight_decay=0.1), lr=4e-3)
        else:
            made = torch.optim.SGD(model.parameters(), lr=0.2)
        model, optimizer = job.prepare(model, made, max_grad_norm=1.0)
        times = slow_times if job.group == GROUPS - 1 else 1
        steps = given.steps // times
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step * times, given.steps)
        )
        loader = job.loader(windows(train, LENGTH), batch_size=8, shuffle=True)
        for x, y in islice(chain.from_iterable(repeat(loader)), steps):
            stage.sleep(STEP_S * times)
            optimizer.zero_grad()
            bits_per_char(model(x), y).backward()
            optimizer.step()
            schedule.step()
        job.barrier()
        job.pull()
        bits = validation_bits(model, valid_set, job.device) if job.is_chief else 0.0
        return {"bits": bits}

    settings = {"seed": seed, "mode": "async", "chunk_bytes": "auto", **SCHEMES[scheme]}
    groups = tuple((worker,) for worker in range(GROUPS))
    case = Case(name="stale", script=script, servers=1, groups=groups, settings=settings)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_virtually(case, Path(folder) / "run")
        seen = outcome.summary["max_staleness_seen"]
        bits = outcome.results[0]["bits"]
    return {"scheme": scheme, "seed": seed, "bits": bits, "max_staleness": seen, **vars(given)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--slow", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    path, rows = given.json, []
    del given.json
    for scheme in SCHEMES:
        for seed in range(given.seeds):
            rows.append(run(scheme, seed, given))
            print(json.dumps(rows[-1]), flush=True)
    print("\n| scheme | bits | against one slow |\n|---|---|---|")
    medians = {
        scheme: statistics.median(each["bits"] for each in rows if each["scheme"] == scheme)
        for scheme in SCHEMES
    }
    for scheme, bits in medians.items():
        print(f"| {scheme} | {bits:.4f} | {100 * (bits / medians['one slow'] - 1):+.1f} % |")
    if path is not None:
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
