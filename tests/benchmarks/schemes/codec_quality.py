"""Effect of codecs on learning: the character model in sync, 4 groups, on the virtual network.

    python -m tests.benchmarks.schemes.codec_quality --json docs/bench/codec-quality.json

A transformer of 75,984 parameters, gradients clipped by each worker, warm-up and cosine as in the
example, the same samples in every row. Each row is a run of the real trainer and servers, with
``topk`` with SGD with momentum, too. Bits are of held-out text, of what ``job.save``
would write; bytes are what the summary says. Rows that the JSON file has are not run again, and
every row is written when it is done, so a run that was ended continues. Not a measure of time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import load_file

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


class Scheme(NamedTuple):
    settings: dict[str, object]
    baseline: str = "none"
    """The row that has the same optimizer and no codec."""


_TOPK: Final = "sync topk:0.01"
_RISING: Final = "0: sync topk:0.25; 100: sync topk:0.1; 200: sync topk:0.04; 400: sync topk:0.01"
"""As Deep Gradient Compression warms up (Lin et al. 2018, section 3.3): sparser step by step."""
SCHEMES: Final = {
    "none": Scheme({}),
    "int8": Scheme({"codec": "int8"}),
    "int4/sign": Scheme({"codec": "int4/sign"}),
    "int2/sign": Scheme({"codec": "int2/sign"}),
    "H = 2, int4/sign": Scheme({"codec": "int4/sign", "local_steps": 2}),
    "sign": Scheme({"push_codec": "sign"}),
    "sign, no feedback": Scheme({"push_codec": "sign", "feedback": "off"}),
    "SGD": Scheme({}, "SGD"),
    "SGD, sign": Scheme({"push_codec": "sign"}, "SGD"),
    "SGD, sign, no feedback": Scheme({"push_codec": "sign", "feedback": "off"}, "SGD"),
    "SGD, topk:0.01": Scheme({"push_codec": "topk:0.01"}, "SGD"),
    "SGD, topk:0.01, no feedback": Scheme({"push_codec": "topk:0.01", "feedback": "off"}, "SGD"),
    "SGD, topk:0.01+burst:20": Scheme({"push_codec": "topk:0.01+burst:20"}, "SGD"),
    "topk:0.01": Scheme({"push_codec": "topk:0.01"}),
    "topk:0.01+burst:20": Scheme({"push_codec": "topk:0.01+burst:20"}),
    "SGD, topk:0.01 from 200 on": Scheme({"schedule": f"0: sync none; 200: {_TOPK}"}, "SGD"),
    "SGD, topk:0.01 from 500 on": Scheme({"schedule": f"0: sync none; 500: {_TOPK}"}, "SGD"),
    "SGD, topk:0.25 to 0.01 in 400": Scheme({"schedule": _RISING}, "SGD"),
    "SGD, topk:0.01 up to 1800": Scheme({"schedule": f"0: {_TOPK}; 1800: sync none"}, "SGD"),
    "SGD, topk:0.01 from 200 to 1800": Scheme(
        {"schedule": f"0: sync none; 200: {_TOPK}; 1800: sync none"}, "SGD"
    ),
    "SGD, lowrank:4": Scheme({"push_codec": "lowrank:4"}, "SGD"),
    "lowrank:4": Scheme({"push_codec": "lowrank:4"}),
    "SGD, skip:0.001": Scheme({"push_codec": "skip:0.001"}, "SGD"),
    "SGD, skip:0.01": Scheme({"push_codec": "skip:0.01"}, "SGD"),
    "frozen at 500": Scheme({"freeze_step": 500}, "frozen at 500"),
    "frozen at 500, sign from there on": Scheme(
        {"freeze_step": 500, "schedule": "0: sync none; 500: sync sign/sign"}, "frozen at 500"
    ),
    "frozen at 500, sign from there on, no feedback": Scheme(
        {"freeze_step": 500, "schedule": "0: sync none; 500: sync sign/sign", "feedback": "off"},
        "frozen at 500",
    ),
    "sign from 500 on": Scheme({"schedule": "0: sync none; 500: sync sign/sign"}),
}


def optimizer_of(scheme: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if SCHEMES[scheme].baseline == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(optimizer_groups(model, weight_decay=0.1), lr=4e-3)


def run(scheme: str, seed: int, steps: int, batch_size: int) -> dict[str, Any]:
    """Validation bits at the end, bytes, and what pushes have left out."""
    train, valid = load_text()
    valid_set = windows(valid[:40_000], LENGTH)

    def script(job: Job, stage: Stage) -> Result:
        torch.manual_seed(seed)
        model = CharTransformer(length=LENGTH, width=48)
        model, optimizer = job.prepare(model, optimizer_of(scheme, model))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, steps)
        )
        loader = job.loader(windows(train, LENGTH), batch_size=batch_size, shuffle=True)
        done = 0
        while done < steps:
            for x, y in loader:
                optimizer.zero_grad()
                bits_per_char(model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                schedule.step()
                done += 1
                if done == steps:
                    break
        file = stage.path / "model.safetensors"
        job.save(file)  # what servers have; what workers have lacks what a pull codec left out
        if not job.is_chief:
            return {"bits": 0.0}
        saved = CharTransformer(length=LENGTH, width=48)
        saved.load_state_dict(load_file(file))
        return {"bits": validation_bits(saved, valid_set, job.device)}

    # In so small a model embeddings and vectors, which codecs leave alone by default, are so large
    # a part that bytes would say little about larger ones: here codecs have all of it.
    settings = {"seed": seed, "chunk_bytes": "auto", "codec_exact": ()}
    settings |= SCHEMES[scheme].settings
    groups = tuple((worker,) for worker in range(GROUPS))
    case = Case(name="quality", script=script, servers=1, groups=groups, settings=settings)
    began_s = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_virtually(case, Path(folder) / "run")
        summary, bits = outcome.summary, outcome.results[0]["bits"]
    return {
        "scheme": scheme,
        "seed": seed,
        "steps": steps,
        "batch_size": batch_size,
        "bits": bits,
        "bytes_pushed": summary["bytes_pushed"],
        "bytes_pulled": summary["bytes_pulled"],
        "left_out": (summary.get("coding") or {}).get("error"),
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Medians over the seeds that a row and its baseline share; the spread is the baseline's."""
    lines = [
        "| scheme | seeds | bits | against its baseline | baseline's spread | times fewer bytes |",
        "|---|---|---|---|---|---|",
    ]
    by_scheme = {name: {row["seed"]: row for row in rows if row["scheme"] == name}
                 for name in SCHEMES}  # fmt: skip
    for name, scheme in SCHEMES.items():
        mine, base = by_scheme[name], by_scheme[scheme.baseline]
        seeds = sorted(mine.keys() & base.keys())
        if not seeds:
            continue
        against = [100 * (mine[seed]["bits"] / base[seed]["bits"] - 1) for seed in seeds]
        bits = [base[seed]["bits"] for seed in seeds]
        fewer = sent(base[seeds[0]]) / sent(mine[seeds[0]])
        each = ", ".join(f"{one:+.2f}" for one in against)
        lines.append(
            f"| {name} | {len(seeds)} | {statistics.median(mine[at]['bits'] for at in seeds):.4f} "
            f"| {statistics.median(against):+.2f} % ({each}) "
            f"| {100 * (max(bits) / min(bits) - 1):.2f} % | {fewer:.1f} |"
        )
    return "\n".join(lines)


def sent(row: dict[str, Any]) -> int:
    total: int = row["bytes_pushed"] + row["bytes_pulled"]
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the effect of codecs on learning.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=16, help="windows of each worker")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="has what is done, and gets more")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if given.json is not None and given.json.exists():
        rows = json.loads(given.json.read_text(encoding="utf-8"))
    done = {(row["scheme"], row["seed"], row["steps"], row["batch_size"]) for row in rows}
    for seed in given.seeds:
        for scheme in given.schemes:
            if (scheme, seed, given.steps, given.batch_size) in done:
                continue
            rows.append(run(scheme, seed, given.steps, given.batch_size))
            print(json.dumps(rows[-1]), flush=True)
            if given.json is not None:
                given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    like = given.steps, given.batch_size
    print(f"\n{table([row for row in rows if (row['steps'], row['batch_size']) == like])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
