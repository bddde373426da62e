"""docs/staleness.svg: when three groups compute, and when they wait, in sync, ssp and async.

It is drawn from recorded runs of this very script, which is also the training script. Group 2
takes three times as long for an iteration as the others. To draw it again (needs matplotlib):

    for mode in sync ssp async; do
        psdist run -n 4 --servers 1 --group rank --mode $mode --staleness 2 --record \\
            --run-dir runs/picture-$mode docs/draw_staleness.py
    done
    python docs/draw_staleness.py runs/picture-sync runs/picture-ssp runs/picture-async

Given run directories it draws; without them it trains. Times are those of the machine's monotonic
clock, which all processes of a host share; the staleness of a use is recomputed from the history.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

NUM_ITERATIONS = 24
SHOWN_S = 1.0
COMPUTE_S = {0: 0.05, 1: 0.05, 2: 0.15}
"""Seconds that a group computes for one iteration (it sleeps, so that cores do not matter)."""

BLUES = ["#c6dbef", "#9ecae1", "#6baed6", "#3182bd", "#08519c"]
MORE = "#54278f"
"""Colours by staleness: 0 to 4, and more."""


def train() -> None:
    """A model of 64 parameters; what is computed does not matter here, when it is does."""
    import torch

    import psdist

    job = psdist.init()
    model = torch.nn.Linear(64, 1, bias=False)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    job.barrier()
    for _ in range(NUM_ITERATIONS):
        started_s = time.monotonic()
        optimizer.zero_grad()
        model(torch.ones(8, 64)).square().mean().backward()
        time.sleep(max(0.0, COMPUTE_S[job.group] - (time.monotonic() - started_s)))
        computed_s = time.monotonic()
        optimizer.step()
        job.log(started_s=started_s, computed_s=computed_s)


def draw(run_dirs: list[Path], target: Path) -> None:
    import matplotlib

    matplotlib.use("svg" if target.suffix == ".svg" else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "psdist"
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, panels = plt.subplots(
        len(run_dirs), 1, figsize=(9, 1.75 * len(run_dirs) + 0.5), sharex=True, layout="constrained"
    )
    for axes, run_dir in zip(panels, run_dirs, strict=True):
        blocks, title = read_run(run_dir)
        for group, iteration, start_s, end_s, staleness in blocks:
            if start_s > SHOWN_S:
                continue
            axes.barh(
                group,
                end_s - start_s,
                left=start_s,
                height=0.74,
                color=BLUES[staleness] if staleness < len(BLUES) else MORE,
                edgecolor="white",
                linewidth=0.8,
            )
            axes.text(
                (start_s + end_s) / 2,
                group,
                str(iteration),
                ha="center",
                va="center",
                fontsize=8,
                color="black" if staleness < 3 else "white",
                clip_on=True,
            )
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_yticks([0, 1, 2], ["group 0", "group 1", "group 2\n(slow)"], fontsize=9)
        axes.set_ylim(2.5, -0.5)
        axes.set_xlim(0, SHOWN_S)
        axes.tick_params(axis="both", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    panels[-1].set_xlabel("seconds", fontsize=9)
    labels = [*map(str, range(len(BLUES))), f"{len(BLUES)} or more"]
    figure.legend(
        handles=[
            Patch(color=color, label=label)
            for color, label in zip([*BLUES, MORE], labels, strict=True)
        ],
        title="block: a group computes the iteration with this number; gap: it waits.   "
        "Colour: staleness of the parameters that it uses",
        title_fontsize=9,
        fontsize=9,
        ncols=len(labels),
        loc="outside lower center",
        frameon=False,
    )
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=110)


def read_run(run_dir: Path) -> tuple[list[tuple[int, int, float, float, int]], str]:
    """(group, iteration, start, end of computing, staleness) of every iteration, and a title."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = {(line["group"], line["clock"] - 1): line for line in lines}
    first_s = min(line["started_s"] for line in lines)
    staleness, mode, bound = staleness_of_uses(run_dir)
    blocks = [
        (group, iteration, line["started_s"] - first_s, line["computed_s"] - first_s, seen)
        for (group, iteration), seen in staleness.items()
        if (line := times.get((group, iteration))) is not None
    ]
    within = [seen for (_, _, start_s, _, seen) in blocks if start_s <= SHOWN_S]
    done = sum(end_s <= SHOWN_S for (_, _, _, end_s, _) in blocks)
    says = {
        "sync": "sync: everybody waits for everybody",
        "ssp": f"ssp, staleness {bound}: the fast ones may be {bound} iterations ahead",
        "async": "async: nobody waits",
    }[mode]
    return blocks, f"{says}  ({done} iterations in {SHOWN_S:g} s, staleness up to {max(within)})"


def staleness_of_uses(run_dir: Path) -> tuple[dict[tuple[int, int], int], str, int | None]:
    """By (group, iteration): max(0, iteration - fewest updates of any group that was active)."""
    from psdist.history.writers import EventKind, read_history

    history = read_history(run_dir)
    events = history.servers[0].events
    num_groups = len(history.run.groups)
    seen: dict[tuple[int, int], int] = {}
    for group, workers in enumerate(history.run.groups):
        uses: Any = history.workers[workers[0]].uses
        for use in uses:
            before = events[: use["position"]]
            left = set(before["group"][before["kind"] == EventKind.LEAVE].tolist())
            counts = np.bincount(
                before["group"][before["kind"] == EventKind.APPLY], minlength=num_groups
            )
            active = [int(counts[other]) for other in range(num_groups) if other not in left]
            iteration = int(use["iteration"])
            seen[group, iteration] = max(0, iteration - min(active, default=iteration))
    return seen, history.run.mode, history.run.staleness


if __name__ == "__main__":
    if len(sys.argv) > 1:
        target = Path(__file__).with_name("staleness.svg")
        if sys.argv[1].endswith((".svg", ".png")):
            target = Path(sys.argv.pop(1))
        draw([Path(name) for name in sys.argv[1:]], target)
    else:
        train()
