"""``psdist trace RUN_DIR``: the spans of a run as Perfetto's file, in figures, and as a picture.

    main(run_dir, svg=Path("step.svg"), step=12)

Needs neither MPI nor torch: the files may have come from elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from psdist.errors import TraceError
from psdist.tracing.files import Trace, read_traces
from psdist.tracing.perfetto import write_events
from psdist.tracing.picture import middling_step, picture
from psdist.tracing.shares import Steps, steps_of

WATCHED: Final = 4
"""So many iterations are left out where there are more: ``overlap = auto`` watches them."""


def main(run_dir: Path, *, svg: Path | None = None, step: int | None = None) -> int:
    """Write RUN_DIR/trace.json and print what it comes to; 0, or 2 with the reason in a line."""
    notes: list[str] = []
    try:
        traces = read_traces(run_dir, notes)
        num_events = write_events(traces, run_dir / "trace.json")
        steps = {each.about.index: settled(each) for each in traces if each.about.is_worker}
        if svg is not None:
            number = middling_step(traces, from_clock=WATCHED) if step is None else step
            _write(svg, picture(traces, number))
    except TraceError as error:
        print(f"psdist trace: {error}", file=sys.stderr)
        return error.exit_status
    for note in notes:
        print(f"note: {note}")
    print(clocks_line(traces))
    if any(map(len, steps.values())):
        Console(width=None if sys.stdout.isatty() else 110).print(table(steps))
        print(hidden_line(steps))
    else:
        print("no worker has made two steps: there is nothing to compare")
    print(f"{num_events:,} events in {run_dir / 'trace.json'}: open it in https://ui.perfetto.dev")
    if svg is not None:
        print(f"iteration {number} is drawn in {svg}")
    return 0


def settled(trace: Trace) -> Steps:
    """The steps of a worker, without those in which overlap still watches."""
    steps = steps_of(trace)
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


def table(steps: dict[int, Steps]) -> Table:
    made = Table(title="the median step of each worker")
    for name in ("worker", "steps", "seconds", "computation", "communication", "of it hidden"):
        made.add_column(name, justify="right", no_wrap=True)
    for worker, each in sorted(steps.items()):
        if len(each):
            made.add_row(
                str(worker),
                str(len(each)),
                *(
                    f"{float(np.median(column)) / 1e9:.4f}"
                    for column in (each.ends - each.begins, each.computation, each.communication)
                ),
                _percent(each.hidden_share),
            )
    return made


def hidden_line(steps: dict[int, Steps]) -> str:
    """The figure for the whole run."""
    total = sum(int(each.communication.sum()) for each in steps.values())
    hidden = sum(int(each.hidden.sum()) for each in steps.values())
    if not total:
        return "nothing was communicated"
    return f"hidden behind computation: {_percent(hidden / total)} of all communication"


def _percent(share: float) -> str:
    return "" if np.isnan(share) else f"{100 * share:.1f} %"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from error
