"""Random skew: the time of a step in each mode against DDP's, and what ssp gains in training.

    python -m tests.benchmarks.schemes.skew sleeping --seeds 5 --json docs/bench/skew-sleeping.json
    python -m tests.benchmarks.schemes.skew chars --seeds 3 --json docs/bench/skew-chars.json

Four workers, each a group, sleep in every step; a tenth of the steps, drawn by seed and worker,
takes six times as long. *sleeping*: layers that do nothing else, in each mode and with DDP (gloo),
one after the other in the same processes; each seed begins with another one. The ideal is the
pattern itself, played with the bound of the mode and no time for communication. *chars*: a small
character transformer, plain SGD, the learning rate schedule of the example over each run: from when
on ssp's validation loss stays below what sync ends with. It is computed afterwards, of values that
the chief has put aside, and takes no time of the run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

WORKERS = 4
BOUND = 8
MODES = ("ssp", "sync")
"""The character model's."""
WAYS = ("ddp", "sync", "ssp", "async", "auto")
"""The sleeping layers'."""
EVERY = 10
"""Steps between values of the character model that the chief puts aside."""
SLOW_SHARE, SLOW_TIMES = 0.1, 6.0


def pattern(seed: int, worker: int, steps: int) -> list[float]:
    """How long each step of a worker takes, in steps of the usual length."""
    draw = random.Random(f"{seed} {worker}")
    return [SLOW_TIMES if draw.random() < SLOW_SHARE else 1.0 for _ in range(steps)]


def ideal(patterns: Sequence[Sequence[float]], bound: int) -> float:
    """When the last worker is done, if workers wait only for the rule of ssp: iteration c begins
    when all have finished iteration c - bound - 1."""
    ends = [[0.0] * len(patterns) for _ in patterns[0]]
    for clock, row in enumerate(ends):
        slowest = max(ends[clock - bound - 1]) if clock > bound else 0.0
        for worker, times in enumerate(patterns):
            before = ends[clock - 1][worker] if clock else 0.0
            row[worker] = max(before, slowest) + times[clock]
    return max(ends[-1])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("sleeping", "chars"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--usual", type=float, default=0.1, help="seconds of a usual step")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help="of chars")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    if options.kind == "sleeping":
        rows = sleeping(seeds, options.steps, options.usual)
    else:
        rows = chars(seeds, options.steps, options.usual, options.optimizer)
    for key in rows[0]:
        if key in {"of_ideal", "faster"} or key.endswith("_by_ddp"):
            values = sorted(row[key] for row in rows)
            print(f"{key}: {values[0]:.3f} to {values[-1]:.3f}, {statistics.median(values):.3f}")
    if options.json is not None:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": round(os.getloadavg()[0], 1),
            "workers": WORKERS,
            "bound": BOUND,
            "usual_s": options.usual,
            "steps": options.steps,
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


class Ended(NamedTuple):
    """A job that has ended."""

    lines: list[dict[str, Any]]
    """Logged by its workers."""
    modes: list[dict[str, Any]]
    """Of its summary."""


def run(seeds: Sequence[int], ways: Sequence[str], *words: str) -> list[dict[str, Ended]]:
    """Return the jobs by seed and way. They run one by one, in the same processes."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "psdist", "run", "-n", str(1 + WORKERS), "--servers", "1"),
            *("--group", "rank", "--run-dir", str(run_dir), "--set", "progress=off"),
            *("-m", "tests.benchmarks.schemes.skewed", "--store", str(Path(folder) / "store")),
            *("--seeds", *map(str, seeds), "--ways", *ways, *words),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, timeout=900)
        numbers = itertools.count(1)
        return [
            {way: ended(run_dir, next(numbers)) for way in in_turn(ways, seed)} for seed in seeds
        ]


def ended(run_dir: Path, number: int) -> Ended:
    path = run_dir if number == 1 else run_dir.with_name(f"run-{number}")
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    return Ended([json.loads(line) for line in lines], summary.get("modes", []))


def in_turn(ways: Sequence[str], seed: int) -> Sequence[str]:
    """Return the ways in the order of this seed: each seed begins with another one."""
    return [*ways[seed % len(ways) :], *ways[: seed % len(ways)]]


def sleeping(seeds: Sequence[int], steps: int, usual_s: float) -> list[dict[str, Any]]:
    rows = []
    for seed, jobs in zip(
        seeds, run(seeds, WAYS, "--steps", str(steps), "--usual", str(usual_s)), strict=True
    ):
        patterns = [pattern(seed, worker, steps) for worker in range(WORKERS)]
        took_s = {way: max(line["took_s"] for line in jobs[way].lines) for way in WAYS}
        row: dict[str, Any] = {"seed": seed}
        row |= {f"{way}_s": round(each_s, 3) for way, each_s in took_s.items()}
        for way, bound in (("sync", 0), ("ssp", BOUND), ("async", steps)):
            row[f"{way}_ideal_s"] = round(ideal(patterns, bound) * usual_s, 3)
        row |= {f"{way}_by_ddp": round(took_s[way] / took_s["ddp"], 3) for way in WAYS[1:]}
        row["of_ideal"] = round(row["ssp_ideal_s"] / took_s["ssp"], 3)
        row["faster"] = round(took_s["sync"] / took_s["ssp"], 3)
        row["auto_modes"] = {each["round"]: each["mode"] for each in jobs["auto"].modes}
        rows.append(row)
        print(row, flush=True)
    return rows


def chars(seeds: Sequence[int], steps: int, usual_s: float, optimizer: str) -> list[dict[str, Any]]:
    rows = []
    words = ["--model", "chars", "--steps", str(steps), "--usual", str(usual_s)]
    words += ["--optimizer", optimizer]
    for seed, jobs in zip(seeds, run(seeds, MODES, *words), strict=True):
        curves = {
            mode: [(line["at_s"], line["bits"]) for line in jobs[mode].lines] for mode in MODES
        }
        wanted = curves["sync"][-1][1]  # what sync has come to; ssp makes more steps, which count
        took = {mode: below_from(curve, wanted) for mode, curve in curves.items()}
        faster = took["sync"] / took["ssp"]
        by_step = [(EVERY * (1.0 + at), bits) for at, (_, bits) in enumerate(curves["ssp"])]
        needed = below_from(by_step, wanted)
        rows.append(
            {
                "seed": seed,
                "bits": round(wanted, 4),
                **{f"{mode}_s": in_json(seconds, 2) for mode, seconds in took.items()},
                "ssp_steps": in_json(needed, 1),
                "faster": round(faster, 3),
                "curves": {
                    mode: [[round(x, 3) for x in at] for at in its] for mode, its in curves.items()
                },
            }
        )
        what = f"seed {seed}: {wanted:.3f} bits a character after {took['sync']:.1f} s in sync"
        if faster:
            print(
                f"{what} and {took['ssp']:.1f} s and {needed:.0f} for {steps} steps in ssp "
                f"({BOUND}): {faster:.2f} times as fast"
            )
        else:
            print(f"{what}, and not within the steps of ssp ({BOUND})")
    return rows


def in_json(value: float, digits: int) -> float | None:
    """As JSON has it: what was not reached is null."""
    return None if math.isinf(value) else round(value, digits)


def below_from(curve: Sequence[tuple[float, float]], wanted: float) -> float:
    """From when on the curve stays as low as that, between two points of it in a line."""
    above = [number for number, (_, value) in enumerate(curve) if value > wanted]
    if not above:
        return curve[0][0]
    last = above[-1]
    if last + 1 == len(curve):
        return math.inf
    (at_s, value), (later_s, lower) = curve[last : last + 2]
    return at_s + (value - wanted) / (value - lower) * (later_s - at_s)


if __name__ == "__main__":
    sys.exit(main())
