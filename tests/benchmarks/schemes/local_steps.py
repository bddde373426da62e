"""Rounds of local steps: a character model's loss, bytes and time, against an exchange every step.

    python -m tests.benchmarks.schemes.local_steps --seeds 3 --json docs/bench/local-steps.json
    python -m tests.benchmarks.schemes.local_steps --schemes "16 by loss, average"
    python -m tests.benchmarks.schemes.local_steps --steps 480 --schemes "16, ssp" "16, ssp, late"

Four groups of one worker on the virtual network, sync, a transformer of 75,984 parameters, AdamW
with the schedule of the example, the same samples in every row. Each row is a run of the real
trainer and servers; bits are of held-out text. Seconds are those of the virtual
network: a step takes 10 ms, a message its bytes at 1 MB/s, whatever others are under way, and
nothing else any time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
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
from tests.support.jobs import rank_of
from tests.support.programs.training.cases import Case, Result, Stage
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import LinkModel

GROUPS: Final = 4
LENGTH: Final = 64
STEP_S: Final = 0.01
LINK: Final = LinkModel(latency_s=1e-3, jitter_s=1e-4, bytes_per_s=1e6)
SSP: Final[dict[str, object]] = {"mode": "ssp", "staleness": 2}
SCHEMES: Final[dict[str, dict[str, object]]] = {
    "every step": {},
    "16 local steps, average": {"local_steps": 16},
    "16 local steps, nesterov": {"local_steps": 16, "outer": "nesterov"},
    "16 by loss, average": {"local_steps": 16, "steps_by": "loss"},
    "16 by loss, nesterov": {"local_steps": 16, "steps_by": "loss", "outer": "nesterov"},
    "11 local steps, average": {"local_steps": 11},
    "11 local steps, nesterov": {"local_steps": 11, "outer": "nesterov"},
    "64 local steps, average": {"local_steps": 64},
    "64 by loss, average": {"local_steps": 64, "steps_by": "loss"},
    "16, ssp": {**SSP, "local_steps": 16},
    "16, ssp, late": {**SSP, "local_steps": 16, "pipeline": 1},
    "16, ssp, nesterov": {**SSP, "local_steps": 16, "outer": "nesterov"},
    "16, ssp, nesterov, late": {
        **SSP,
        "local_steps": 16,
        "outer": "nesterov",
        "pipeline": 1,
    },
}
AVERAGED: Final = "averaged state"
"""At the end of the name of a scheme in which the script averages the state of its optimizers over
all groups, between rounds and past the network: what that would bring, with bytes to be added."""
SCHEMES.update(
    {
        "16, averaged state": {"local_steps": 16},
        "16, nesterov, averaged state": {"local_steps": 16, "outer": "nesterov"},
    }
)
BY_DEFAULT: Final = tuple(SCHEMES)[:3]


def run(scheme: str, seed: int, steps: int, *, batch_size: int = 16) -> dict[str, Any]:
    """Validation bits at the end, bytes and rounds."""
    train, valid = load_text()
    valid_set = windows(valid[:40_000], LENGTH)
    board: dict[int, list[torch.Tensor]] = {}

    def average(job: Job, optimizer: torch.optim.Optimizer) -> None:
        """Average AdamW's first and second moments over all groups."""
        mine = [
            value
            for state in optimizer.state.values()
            for key, value in sorted(state.items())
            if key != "step"
        ]
        board[job.worker] = [each.clone() for each in mine]
        job.barrier()
        for place, each in enumerate(mine):
            each.copy_(torch.stack([board[worker][place] for worker in range(GROUPS)]).mean(0))
        job.barrier()

    def script(job: Job, stage: Stage) -> Result:
        torch.manual_seed(seed)
        model = CharTransformer(length=LENGTH, width=48)
        adamw = torch.optim.AdamW(optimizer_groups(model, weight_decay=0.1), lr=4e-3)
        model, optimizer = job.prepare(model, adamw, max_grad_norm=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, steps)
        )
        loader = job.loader(windows(train, LENGTH), batch_size=batch_size, shuffle=True)
        done, began_s = 0, rank_of(job).now_s()
        while done < steps:
            for x, y in loader:
                optimizer.zero_grad()
                loss = bits_per_char(model(x), y)
                loss.backward()
                job.report(loss)
                stage.sleep(STEP_S)
                optimizer.step()
                schedule.step()
                done += 1
                if scheme.endswith(AVERAGED) and done % 16 == 0:
                    average(job, optimizer)
                if done == steps:
                    break
        job.barrier()
        took_s = rank_of(job).now_s() - began_s
        job.pull()
        bits = validation_bits(model, valid_set, job.device) if job.is_chief else 0.0
        return {"bits": bits, "clock": job.clock, "seconds": took_s}

    settings = {"seed": seed, "chunk_bytes": "auto", **SCHEMES[scheme]}
    groups = tuple((worker,) for worker in range(GROUPS))
    case = Case(name="rounds", script=script, servers=1, groups=groups, settings=settings)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_virtually(case, Path(folder) / "run", link=LINK)
        summary = outcome.summary
        result = outcome.results[0]
    return {
        "scheme": scheme,
        "seed": seed,
        "steps": steps,
        "bits": result["bits"],
        "rounds": result["clock"],
        "seconds": max(each["seconds"] for each in outcome.results),
        "rounds_cut": summary["rounds_cut"],
        "bytes": summary["bytes_pushed"] + summary["bytes_pulled"],
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=BY_DEFAULT)
    given = parser.parse_args()
    rows = []
    for scheme in given.schemes:
        for seed in range(given.seeds):
            rows.append(run(scheme, seed, given.steps))
            print(json.dumps(rows[-1]), flush=True)
    base = rows[: given.seeds]
    bits = statistics.median(each["bits"] for each in base)
    num_bytes = statistics.median(each["bytes"] for each in base)
    print(
        f"\n| scheme | bits | against {given.schemes[0]} | bytes | times fewer | seconds |\n"
        "|---|---|---|---|---|---|"
    )
    for scheme in given.schemes:
        mine = [each for each in rows if each["scheme"] == scheme]
        its = statistics.median(each["bits"] for each in mine)
        sent = statistics.median(each["bytes"] for each in mine)
        print(
            f"| {scheme} | {its:.4f} | {100 * (its / bits - 1):+.1f} % | {sent:.3g} | "
            f"{num_bytes / sent:.1f} | {statistics.median(each['seconds'] for each in mine):.1f} |"
        )
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
