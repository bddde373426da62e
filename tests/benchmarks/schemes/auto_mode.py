"""Random skew that ends half way: sync, ssp, and a mode that psdist chooses, to a fixed loss.

    python -m tests.benchmarks.schemes.auto_mode --seeds 3 --json docs/bench/auto-mode.json

Four groups of one worker on the virtual network train a character transformer of 75,984 parameters
with AdamW, warm-up and cosine. A step takes ``STEP_S`` of the network's clock; in the first half of
the iterations one group, drawn for each of them, takes ``SLOW_TIMES`` as long, in the second half
none. Every few iterations the chief puts its values aside, with the time; the loss, bits of text
that nobody trains on, is computed afterwards and takes no time. What workers tell of their rounds,
by which psdist chooses, is by the network's clock, too. *Seconds* of a half: until the loss, the
mean of three points, is as low as in every mode at nine tenths of the first half, and from then on
until it is as low as in every mode at the end. What the same iterations take is told, too. Every
run is recorded and proved.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from itertools import chain, islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

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
from psdist.workers import standing, trainer
from tests.support.programs.training.cases import Case, Result, Stage
from tests.support.programs.training.virtual_job import run_virtually

GROUPS: Final = 4
LENGTH: Final = 64
STEP_S: Final = 0.1
SLOW_TIMES: Final = 10
EVERY: Final = 10
BOUND: Final = 4
MODES: Final = ("sync", "ssp", "auto")
FAR: Final = 0.45
"""The part of all iterations at which the highest loss is what all are to reach first."""

Point = tuple[int, float, float]
"""Iteration, seconds, bits."""


def step_s(seed: int, group: int, clock: int, steps: int) -> float:
    picked = random.Random(f"{seed} slow {clock}").randrange(GROUPS)
    return STEP_S * (SLOW_TIMES if picked == group and clock < steps // 2 else 1)


def run(mode: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    train, valid = load_text()
    valid_set = windows(valid[:20_000], LENGTH)
    curve: list[Point] = []
    clocks = ExitStack()

    def script(job: Job, stage: Stage) -> Result:
        if job.is_chief:  # these would tell of all threads' real time, which nobody waits for
            network = SimpleNamespace(monotonic=stage.now_s)
            for module in (standing, trainer):
                clocks.enter_context(mock.patch.object(module, "time", network))
        torch.manual_seed(seed)
        model = CharTransformer(length=LENGTH, width=48)
        scratch = CharTransformer(length=LENGTH, width=48)
        made = torch.optim.AdamW(optimizer_groups(model, weight_decay=0.1), lr=4e-3)
        model, optimizer = job.prepare(model, made)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, given.steps)
        )
        loader = job.loader(windows(train, LENGTH), batch_size=8, shuffle=True)
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
            curve.append((clock, passed_s, validation_bits(scratch, valid_set, job.device)))
        return {}

    settings = {"seed": seed, "chunk_bytes": "auto", "mode": mode, "record": True}
    if mode != "sync":
        settings["staleness"] = BOUND
    groups = tuple((worker,) for worker in range(GROUPS))
    case = Case(name="auto", script=script, servers=1, groups=groups, settings=settings)
    with clocks, tempfile.TemporaryDirectory() as folder:
        outcome = run_virtually(case, Path(folder) / "run")
        is_proved = check_run(outcome.path, read_histories(outcome.path)).proved
        modes = outcome.summary["modes"]
    return {"mode": mode, "seed": seed, "steps": given.steps, "is_proved": is_proved,
            "modes": modes, "curve": smoothed(curve)}  # fmt: skip


def smoothed(curve: list[Point]) -> list[Point]:
    """The mean of three neighbouring losses, at the middle one."""
    return [
        (clock, round(seconds, 3), statistics.fmean(bits for *_, bits in curve[at - 1 : at + 2]))
        for at, (clock, seconds, _) in enumerate(curve[1:-1], start=1)
    ]


def reached_s(curve: list[Point], bits: float) -> float:
    """When the loss was as low for the first time, by a line between two points."""
    before = curve[0]
    for point in curve:
        if point[2] <= bits:
            part = (before[2] - bits) / (before[2] - point[2]) if before[2] > point[2] else 0.0
            return before[1] + part * (point[1] - before[1])
        before = point
    return float("nan")


def halves(rows: dict[str, dict[str, Any]], steps: int) -> dict[str, list[float]]:
    """Seconds to the loss of each half, by mode."""
    wanted = [
        max(
            min(bits for clock, _, bits in row["curve"] if clock <= part * steps)
            for row in rows.values()
        )
        for part in (FAR, 1.0)
    ]
    found = {}
    for mode, row in rows.items():
        first, second = (reached_s(row["curve"], bits) for bits in wanted)
        found[mode] = [first, second - first]
    return found


def iterations_s(curve: list[Point], steps: int) -> list[float]:
    """Seconds of the iterations of each half."""
    half = max(seconds for clock, seconds, _ in curve if clock <= steps // 2)
    return [half, curve[-1][1] - half]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    print("| seed | half | | sync | ssp | auto | auto / the better | proved |")
    print("|---|---|---|---|---|---|---|---|")
    for seed in range(given.seeds):
        rows = {mode: run(mode, seed, given) for mode in MODES}
        is_proved = all(row["is_proved"] for row in rows.values())
        to_a_loss = halves(rows, given.steps)
        same = {mode: iterations_s(row["curve"], given.steps) for mode, row in rows.items()}
        found.extend(row | {"halves_s": to_a_loss[mode], "iterations_s": same[mode]}
                     for mode, row in rows.items())  # fmt: skip
        for half, name in enumerate(("skewed", "alike")):
            for what, took in (("to a loss", to_a_loss), ("same iterations", same)):
                sync, ssp, auto = (took[mode][half] for mode in MODES)
                print(
                    f"| {seed} | {name} | {what} | {sync:.1f} s | {ssp:.1f} s | {auto:.1f} s "
                    f"| {auto / min(sync, ssp):.2f} | {'yes' if is_proved else 'NO'} |",
                    flush=True,
                )
        print(f"modes of auto: {rows['auto']['modes']}", file=sys.stderr)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
