"""``psdist trace RUN_DIR``: the spans of a run as Perfetto's file, in figures, and as a picture.

    main(run_dir, svg=Path("step.svg"), step=12)

Needs neither MPI nor torch: the files may have come from elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from psdist.commands import print_json
from psdist.errors import TraceError
from psdist.tracing.covered import Times
from psdist.tracing.files import Trace, read_traces
from psdist.tracing.perfetto import write_events
from psdist.tracing.picture import middling_step, picture
from psdist.tracing.shares import Steps, steps_of_all

WATCHED: Final = 4
"""First iterations to leave out, if there are more: ``overlap = auto`` watches them."""


COLUMNS: Final = {
    "step": "step",
    "forward, backward": "passes",
    "data, script": "script",
    "psdist": "psdist",
    "network": "network",
    "servers": "servers",
    "waits for others": "waits",
}
"""Columns of the table, and their names in the report: ``step`` is the sum of the others."""


def main(
    run_dir: Path,
    *,
    svg: Path | None = None,
    step: int | None = None,
    as_json: bool = False,
) -> int:
    """Write RUN_DIR/trace.json and print its figures; 0, or 2 with the reason in a line."""
    notes: list[str] = []
    try:
        traces = read_traces(run_dir, notes)
        num_events = write_events(traces, run_dir / "trace.json")
        steps = {worker: settled(each) for worker, each in steps_of_all(traces).items()}
        if svg is not None:
            number = middling_step(traces, from_clock=WATCHED) if step is None else step
            _write(svg, picture(traces, number))
    except TraceError as error:
        print(f"psdist trace: {error}", file=sys.stderr)
        return error.exit_status
    if as_json:
        print_json("trace", report(traces, steps, notes))
        return 0
    for note in notes:
        print(f"note: {note}")
    print(clocks_line(traces))
    if any(map(len, steps.values())):
        Console(width=None if sys.stdout.isatty() else 110).print(table(steps))
        print(hidden_line(steps))
        print(waits_line(steps))
    else:
        print("no worker has made two steps: there is nothing to compare")
    print(f"{num_events:,} events in {run_dir / 'trace.json'}: open it in https://ui.perfetto.dev")
    if svg is not None:
        print(f"iteration {number} is drawn in {svg}")
    return 0


def settled(steps: Steps) -> Steps:
    """The steps of a worker, without those in which overlap still watches."""
    later = steps.from_clock(WATCHED)
    return later if len(later) else steps


def clocks_line(traces: Sequence[Trace]) -> str:
    """How well the clocks of the ranks are known."""
    bound_us = max(each.bound_ns for each in traces) / 1e3
    hosts = len({each.about.host for each in traces})
    drift = "" if all(each.is_drift_known for each in traces) else "; their drift is not known"
    return (
        f"{len(traces)} rank{'s' * (len(traces) > 1)} on {hosts} host{'s' * (hosts > 1)}; clocks "
        f"are those of rank 0, give or take {bound_us:.0f} us{drift}"
    )


def table(steps: Mapping[int, Steps]) -> Table:
    """Return the mean step of each worker, in milliseconds."""
    made = Table(title="the mean step of each worker, in ms")
    for name in ("worker", "steps", *COLUMNS, "hidden"):
        made.add_column(name, justify="right")
    for worker, each in sorted(steps.items()):
        if len(each):
            parts = [f"{_of(each, name).mean() / 1e6:.2f}" for name in COLUMNS.values()]
            made.add_row(str(worker), str(len(each)), *parts, _percent(each.hidden_share))
    return made


def hidden_line(steps: Mapping[int, Steps]) -> str:
    """The figure for the whole run."""
    total = sum(int(each.communication.sum()) for each in steps.values())
    hidden = sum(int(each.hidden.sum()) for each in steps.values())
    if not total:
        return "nothing was communicated"
    return f"hidden behind computation: {_percent(hidden / total)} of all communication"


def waits_line(steps: Mapping[int, Steps]) -> str:
    """The worker for which the others waited most."""
    by_worker = waited_for(steps)
    if not by_worker:
        return "no worker waited for another one"
    total = sum(float(each.waits.sum()) for each in steps.values()) / 1e9
    of_all = sum(float((each.ends - each.begins).sum()) for each in steps.values()) / 1e9
    worker, seconds = max(by_worker.items(), key=lambda item: item[1])
    return (
        f"waits for others: {_percent(total / of_all)} of the workers' time; most for worker "
        f"{worker}: {_percent(seconds / total)} of that"
    )


def waited_for(steps: Mapping[int, Steps]) -> dict[int, float]:
    """Worker -> seconds that workers waited for it, of all workers together."""
    found: dict[int, float] = {}
    for each in steps.values():
        for worker, times in each.waits_for.items():
            found[worker] = found.get(worker, 0.0) + float(times.sum()) / 1e9
    return {worker: seconds for worker, seconds in sorted(found.items()) if seconds}


def report(
    traces: Sequence[Trace], steps: Mapping[int, Steps], notes: Sequence[str]
) -> dict[str, Any]:
    """Return what ``--json`` prints. Units are in the names; null where there is no figure."""
    names = [*COLUMNS.values(), "communication", "hidden"]
    return {
        "notes": list(notes),
        "clock_bound_us": max(each.bound_ns for each in traces) / 1e3,
        "workers": [
            {
                "worker": worker,
                "steps": len(each),
                "mean": {f"{name}_s": _of(each, name).mean() / 1e9 for name in names},
                "median": {f"{name}_s": float(np.median(_of(each, name))) / 1e9 for name in names},
                "hidden_share": None if np.isnan(each.hidden_share) else each.hidden_share,
            }
            for worker, each in sorted(steps.items())
            if len(each)
        ],
        "waited_for": [
            {"worker": worker, "waits_s": seconds} for worker, seconds in waited_for(steps).items()
        ],
    }


def _of(steps: Steps, name: str) -> Times:
    """Nanoseconds by step."""
    if name == "step":
        return steps.ends - steps.begins
    times: Times = getattr(steps, name)
    return times


def _percent(share: float) -> str:
    return "" if np.isnan(share) else f"{100 * share:.1f} %"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from error
