"""All spans of a run as one file that Perfetto opens (ui.perfetto.dev): Chrome's trace events.

    write_events(traces, run_dir / "trace.json")

A process for each rank, a track for each of its lanes. A span alone in its lane is a complete
event (``X``); chunks on their way and open replies are asynchronous ones (``b``, ``e``). An arrow
leads from the push of a chunk to the step that applies it, and from there to where its reply is
taken in. Times are microseconds on rank 0's clock, from the first span on; ``otherData`` says how
well the clocks are known. The file is written event by event: it is never whole in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from psdist.errors import TraceError
from psdist.tracing import IN_FLIGHT, LANE_NAMES, NONE, Lane, Span, name_of
from psdist.tracing.files import Trace
from psdist.version import VERSION

MAX_ARROWS: Final = 200_000
"""Pushes beyond these have none: Perfetto would take long to draw them, and so would this."""

Event: TypeAlias = "dict[str, Any]"
_Applied: TypeAlias = "dict[tuple[int, int, int, int], tuple[float, int]]"
"""(set, chunk, clock, group; NONE for all of them) -> when, and on which rank."""


def write_events(traces: Sequence[Trace], path: Path) -> int:
    """The number of events written; raises TraceError where that cannot be."""
    partial = path.with_name(f"{path.name}.partial")
    num_events = 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "otherData": ')
            json.dump(_other_data(traces), file)
            file.write(', "traceEvents": [')
            for event in events_of(traces):
                file.write(",\n" if num_events else "\n")
                file.write(json.dumps(event, separators=(",", ":")))
                num_events += 1
            file.write("\n]}\n")
        os.replace(partial, path)
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from error
    return num_events


def _other_data(traces: Sequence[Trace]) -> Event:
    return {
        "psdist": VERSION,
        "clocks": [
            {
                "rank": each.about.rank,
                "bound_us": each.bound_ns / 1e3,
                "drift": "measured" if each.is_drift_known else "unknown",
            }
            for each in traces
        ],
        "spans_left_out": sum(each.about.num_dropped for each in traces),
    }


def events_of(traces: Sequence[Trace]) -> Iterator[Event]:
    first_ns = min((int(each.spans["begin_ns"].min()) for each in traces if len(each.spans)),
                   default=0)  # fmt: skip

    def us(time_ns: Any) -> float:
        return (int(time_ns) - first_ns) / 1e3

    num_pushes = sum(int((each.spans["kind"] == Span.PUSH).sum()) for each in traces)
    applied = _applied(traces, us) if num_pushes <= MAX_ARROWS else {}
    for trace in traces:
        yield from _names(trace)
        yield from _spans(trace, us, applied)


def _names(trace: Trace) -> Iterator[Event]:
    about = trace.about
    pid = about.rank
    yield _named("process_name", pid, 0, {"name": about.who})
    yield _named("process_sort_index", pid, 0, {"sort_index": pid})
    for lane in Lane:
        if lane == Lane.SCRIPT or (trace.spans["lane"] == lane).any():
            yield _named("thread_name", pid, lane, {"name": LANE_NAMES[lane]})
            yield _named("thread_sort_index", pid, lane, {"sort_index": int(lane)})


def _named(name: str, pid: int, tid: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": int(tid), "args": args}


def _applied(traces: Sequence[Trace], us: Callable[[Any], float]) -> _Applied:
    found: _Applied = {}
    for trace in traces:
        for span in trace.of(Span.APPLY):
            key = (int(span["set_index"]), int(span["chunk"]), int(span["clock"]))
            found[*key, int(span["other"])] = (us(span["begin_ns"]), trace.about.rank)
    return found


def _spans(trace: Trace, us: Callable[[Any], float], applied: _Applied) -> Iterator[Event]:
    pid, group = trace.about.rank, trace.about.group
    for number, span in enumerate(trace.spans):
        kind, tid = int(span["kind"]), int(span["lane"])
        begin_us, end_us = us(span["begin_ns"]), us(span["end_ns"])
        chunk, other = int(span["chunk"]), int(span["other"])
        name = name_of(kind, other) + (f" {chunk}" if chunk != NONE else "")
        args = _args(span, kind)
        where = {"pid": pid, "tid": tid}
        if kind not in IN_FLIGHT:
            took_us = round(end_us - begin_us, 3)
            yield {"ph": "X", "name": name, "ts": begin_us, "dur": took_us, **where, "args": args}
            continue
        label = {"cat": name_of(kind), "id": f"{pid}.{number}", "name": name, **where}
        yield {"ph": "b", "ts": begin_us, **label, "args": args}
        yield {"ph": "e", "ts": end_us, **label}
        if kind not in (Span.PUSH, Span.PULL):
            continue
        sent_us, took_us = int(span["sent_ns"]) / 1e3, int(span["took_ns"]) / 1e3
        landed_us = round(end_us - took_us, 3)
        yield {"ph": "X", "name": f"send {chunk}", "ts": begin_us, "dur": sent_us, **where}
        yield {"ph": "X", "name": f"land {chunk}", "ts": landed_us, "dur": took_us, **where}
        key = (int(span["set_index"]), chunk, int(span["clock"]))
        at = applied.get((*key, NONE)) or applied.get((*key, NONE if group is None else group))
        if kind == Span.PUSH and at is not None:
            arrow = {"cat": "push", "name": "push to apply to reply", "id": f"{pid}.{number}"}
            yield {"ph": "s", "ts": begin_us, **arrow, **where}
            yield {"ph": "t", "ts": at[0], **arrow, "pid": at[1], "tid": int(Lane.SERVER)}
            yield {"ph": "f", "bp": "e", "ts": landed_us, **arrow, **where}


def _args(span: Any, kind: int) -> Event:
    args: Event = {}
    for key in ("clock", "chunk", "other"):
        if (value := int(span[key])) != NONE and not (key == "other" and kind == Span.COLLECTIVE):
            args[_other_name(kind) if key == "other" else key] = value
    if span["num_bytes"]:
        args["bytes"] = int(span["num_bytes"])
    if span["set_index"]:
        args["set"] = int(span["set_index"])
    return args


def _other_name(kind: int) -> str:
    return {Span.APPLY: "group", Span.PUSH: "server", Span.PULL: "server"}.get(Span(kind), "worker")
