"""Random skew that ends half way: sync, ssp, and a mode that psdist chooses, to a fixed loss.

    python -m tests.benchmarks.schemes.auto_mode --seeds 5 --jobs 2 --json docs/bench/auto-mode.json

Four groups of one worker on the virtual network train a character model with AdamW, warm-up and
cosine. A step takes ``STEP_S`` of the network's clock; in the first half of the iterations one
group, drawn for each of them, takes ``SLOW_TIMES`` as long, in the second half none. Every few
iterations the chief puts its values aside, with the time; the loss, bits of held-out
text, is computed afterwards and takes no time. The round times of workers, by which psdist
chooses, is by the network's clock, too, so that what else the machine does changes nothing.

*By hand* is ssp and, from the iteration on from which none is slow, sync: what a mode that psdist
chooses can come to at best.

*Seconds* of a half: until the loss is as low as in every mode at nine tenths of the first half, and
from then on until it is as low as in every mode at nine tenths of the second. The loss is the mean
of all seeds and of ``SPREAD`` points to either side, in all modes alike. How far it would be
another one with other seeds is told by leaving out each seed in turn (the jackknife). What the same
iterations take is told, too, and how much more the loss is after them. Every run is recorded and
proved.

The model and its learning rate are such that the loss falls all along. ``--width 48 --blocks 2
--length 64 --lr 4e-3`` is a transformer of 75,984 parameters that has learned most of it after a
quarter of the iterations: what its runs differ by from then on is chance.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, islice, product, repeat
from pathlib import Path
from typing import Any, Final

import torch

from psdist.commands.check import check_run
from psdist.examples.chars import (
    CharTransformer,
    bits_per_char,
    learning_rate_factor,
    load_text,
    optimizer_groups,
    validation_bits,
    windows,
)
from psdist.history.writers import read_histories
from psdist.job import Job
from tests.support.programs.training.cases import Case, Result, Stage
from tests.support.programs.training.virtual_job import run_virtually

GROUPS: Final = 4
STEP_S: Final = 0.1
SLOW_TIMES: Final = 10
EVERY: Final = 10
BOUND: Final = 4
MODES: Final = ("sync", "ssp", "auto", "by hand")
FAR: Final = (0.45, 0.95)
"""The parts of all iterations at which the highest loss is what all are to reach."""
SPREAD: Final = 5
"""Points to either side of one, with which its loss is the mean."""

Point = tuple[int, float, float]
"""Iteration, seconds, bits."""
Curves = dict[str, list[list[Point]]]
"""By mode, of each seed."""
Measure = Callable[[Curves, int], dict[str, list[float]]]
"""Function of curves and a number of iterations: by mode, values of each half."""


def step_s(seed: int, group: int, clock: int, steps: int) -> float:
    picked = random.Random(f"{seed} slow {clock}").randrange(GROUPS)
    return STEP_S * (SLOW_TIMES if picked == group and clock < steps // 2 else 1)


def run(mode: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    train, valid = load_text()
    valid_set = windows(valid[:20_000], given.length)
    curve: list[Point] = []

    def script(job: Job, stage: Stage) -> Result:
        torch.manual_seed(seed)
        model, scratch = (
            CharTransformer(length=given.length, width=given.width, num_blocks=given.blocks)
            for _ in range(2)
        )
        made = torch.optim.AdamW(optimizer_groups(model, weight_decay=0.1), lr=given.lr)
        model, optimizer = job.prepare(model, made)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, given.steps)
        )
        loader = job.loader(windows(train, given.length), batch_size=8, shuffle=True)
        began_s, kept = stage.now_s(), list[tuple[int, float, dict[str, torch.Tensor]]]()
        for x, y in islice(chain.from_iterable(repeat(loader)), given.steps):
            if job.is_chief and job.clock % EVERY == 0:
                values = {name: each.clone() for name, each in model.state_dict().items()}
                kept.append((job.clock, stage.now_s() - began_s, values))
            stage.sleep(step_s(seed, job.group, job.clock, given.steps))
            optimizer.zero_grad()
            bits_per_char(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            schedule.step()
        for clock, passed_s, values in kept:
            scratch.load_state_dict(values)
            loss = validation_bits(scratch, valid_set, job.device)
            curve.append((clock, round(passed_s, 3), round(loss, 5)))
        return {}

    settings: dict[str, Any] = {"seed": seed, "chunk_bytes": "auto", "record": True}
    settings |= {
        "sync": {"mode": "sync"},
        "by hand": {"schedule": f"0: ssp:{BOUND}; {given.steps // 2}: sync"},
        "auto": {"mode": "auto", "staleness": BOUND},
    }.get(mode, {"mode": "ssp", "staleness": BOUND})
    groups = tuple((worker,) for worker in range(GROUPS))
    case = Case(name="auto", script=script, servers=1, groups=groups, settings=settings)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_virtually(case, Path(folder) / "run", seed=seed)
        is_proved = check_run(outcome.path, read_histories(outcome.path)).proved
        modes = outcome.summary["modes"]
    return {"mode": mode, "seed": seed, "steps": given.steps, "is_proved": is_proved,
            "modes": modes, "curve": curve}  # fmt: skip


def mean_of(curves: list[list[Point]]) -> list[Point]:
    """The mean of these seeds, of seconds and of bits, smoothed."""
    means = [
        (clock, statistics.fmean(each[at][1] for each in curves),
         statistics.fmean(each[at][2] for each in curves))
        for at, (clock, *_) in enumerate(curves[0])
    ]  # fmt: skip
    smoothed = []
    for at, (clock, seconds, _) in enumerate(means):
        near = min(SPREAD, at, len(means) - 1 - at)
        bits = statistics.fmean(bits for *_, bits in means[at - near : at + near + 1])
        smoothed.append((clock, seconds, bits))
    return smoothed


def reached_s(curve: list[Point], bits: float) -> float:
    """When the loss was as low for the first time, by a line between two points."""
    before = curve[0]
    for point in curve:
        if point[2] <= bits:
            part = (before[2] - bits) / (before[2] - point[2]) if before[2] > point[2] else 0.0
            return before[1] + part * (point[1] - before[1])
        before = point
    return float("nan")


def halves(curves: Curves, steps: int) -> dict[str, list[float]]:
    """Seconds to the loss of each half, by mode."""
    means = {mode: mean_of(seeds) for mode, seeds in curves.items()}
    wanted = [
        max(
            min(bits for clock, _, bits in curve if clock <= part * steps)
            for curve in means.values()
        )
        for part in FAR
    ]
    found = {}
    for mode, curve in means.items():
        first, second = (reached_s(curve, bits) for bits in wanted)
        found[mode] = [first, second - first]
    return found


def iterations_s(curves: Curves, steps: int) -> dict[str, list[float]]:
    """Seconds of the iterations of each half, by mode."""
    found = {}
    for mode, seeds in curves.items():
        curve = mean_of(seeds)
        half = max(seconds for clock, seconds, _ in curve if clock <= steps // 2)
        found[mode] = [half, curve[-1][1] - half]
    return found


def bits(curves: Curves, steps: int) -> dict[str, list[float]]:
    """After the iterations of each half, by mode."""
    found = {}
    for mode, seeds in curves.items():
        curve = mean_of(seeds)
        found[mode] = [[b for clock, _, b in curve if clock <= steps // 2][-1], curve[-1][2]]
    return found


def over(took: dict[str, list[float]], mode: str, half: int) -> float:
    """Against the better fixed mode."""
    return took[mode][half] / min(took["sync"][half], took["ssp"][half])


def standard_error(curves: Curves, measure: Measure, steps: int, mode: str, half: int) -> float:
    """Of :func:`over`, by the jackknife."""
    num = len(curves[mode])
    without = []
    for left_out in range(num):
        others = {each: seeds[:left_out] + seeds[left_out + 1 :] for each, seeds in curves.items()}
        without.append(over(measure(others, steps), mode, half))
    return math.sqrt((num - 1) * statistics.pvariance(without))


def report(rows: list[dict[str, Any]], steps: int) -> None:
    curves: Curves = {mode: [row["curve"] for row in rows if row["mode"] == mode] for mode in MODES}
    print(f"| half | | {' | '.join(MODES)} |")
    print("|---|---|" + "---|" * len(MODES))
    measures: tuple[tuple[str, Measure], ...] = (
        ("seconds of the same iterations", iterations_s),
        ("seconds to a loss", halves),
        ("bits after the same iterations", bits),
    )
    for (half, name), (what, measure) in product(enumerate(("skewed", "alike")), measures):
        found = measure(curves, steps)
        cells = []
        for mode in MODES:
            error = standard_error(curves, measure, steps, mode, half)
            cells.append(f"{found[mode][half]:.4g} ({over(found, mode, half):.3f} +- {error:.3f})")
        print(f"| {name} | {what} | {' | '.join(cells)} |")
    print("in brackets: against the better one of sync and ssp, and its standard error")
    for row in rows:
        if row["mode"] == "auto" or not row["is_proved"]:
            print(f"{row['mode']}, seed {row['seed']}, proved: {row['is_proved']}: {row['modes']}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--length", type=int, default=32, help="characters of a window")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a core each")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    wanted = [(mode, seed, given) for mode, seed in product(MODES, range(given.seeds))]
    rows: list[dict[str, Any]] = []
    spawn = multiprocessing.get_context("spawn")  # torch has threads
    with ProcessPoolExecutor(given.jobs, mp_context=spawn) as pool:
        for row in pool.map(run, *zip(*wanted, strict=True)):
            rows.append(row)
            if given.json is not None:
                written = ",\n".join(map(json.dumps, rows))
                given.json.write_text(f"[\n{written}\n]\n", encoding="utf-8")
    report(rows, given.steps)
    return 0 if all(row["is_proved"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
