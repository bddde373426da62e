"""A picture of one step of all ranks: when each computes, what is on its way, what servers do.

    svg = picture(traces, middling_step(traces, from_clock=4))

A worker has a bar of what its script does, and below it a line for each chunk that is on its way:
until it is at its server, while it waits there for others' gradients and its step, and while the
new parameters come back. A server has a bar of what it computes, and lines of what it receives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from psdist.errors import TraceError
from psdist.topology.draw.svg_canvas import INK, MUTED, Axis, Canvas, text_width
from psdist.tracing import NONE, WAITS, Lane, Span, name_of
from psdist.tracing.exchange import AtServers, Row, rows
from psdist.tracing.files import Spans, Trace
from psdist.tracing.shares import windows_of

FORWARD, BACKWARD = "#a9d0ee", "#5b9bd0"
STALLED = "#e3e6ec"
GROUP = "#b7a6d9"
PUSH, HELD, PULL = "#e69f00", "#f6dfae", "#4f9d69"
APPLY, FOLD, RECEIVE = "#1f3a5f", "#7f93ad", "#e69f00"
_FRAME: Final = "#c3cad5"

WIDTH: Final = 960
_LEFT: Final = 128
_RIGHT: Final = 24
_BAR: Final = 16
_GROUP_BAR: Final = 6
_LINE: Final = 2.0
_BETWEEN: Final = 0.6
_MOST_LINES: Final = 32
_GAP: Final = 12
_TITLE: Final = 46
_BELOW: Final = 52
"""Under the last rank: the times, and what colours mean."""
MAX_RANKS: Final = 64

LEGEND: Final = (
    (FORWARD, "forward", Span.FORWARD),
    (BACKWARD, "backward", Span.BACKWARD),
    (STALLED, "step() and waits", Span.STEP),
    (GROUP, "in the group", Span.REDUCE),
    (PUSH, "push", Span.PUSH),
    (HELD, "at the server", Span.PUSH),
    (PULL, "reply", Span.PUSH),
    (FOLD, "sum", Span.FOLD),
    (APPLY, "apply", Span.APPLY),
)
"""Colours and their meaning, shown if such a span exists."""


@dataclass(frozen=True)
class Window:
    begin_ns: int
    end_ns: int

    def x(self, time_ns: int) -> float:
        share = (time_ns - self.begin_ns) / max(1, self.end_ns - self.begin_ns)
        return _LEFT + min(max(share, 0.0), 1.0) * (WIDTH - _LEFT - _RIGHT)

    def of(self, spans: Spans) -> Spans:
        """Those that lie in it, at least in part, the first first."""
        inside = spans[(spans["end_ns"] > self.begin_ns) & (spans["begin_ns"] < self.end_ns)]
        return inside[np.argsort(inside["begin_ns"], kind="stable")]


def middling_step(traces: Sequence[Trace], *, from_clock: int) -> int:
    """The iteration of the first worker whose step took the middle time of all from there on."""
    for trace in traces:
        clocks, begins, ends = windows_of(trace)
        if trace.about.is_worker and len(clocks):
            later = clocks >= from_clock
            kept = later if later.any() else np.ones(len(clocks), bool)
            order = np.argsort((ends - begins)[kept], kind="stable")
            return int(clocks[kept][order[len(order) // 2]])
    raise TraceError("no worker has made two steps: there is none to draw")


def window_of(traces: Sequence[Trace], step: int) -> Window:
    """From the first worker's end of the step before to the last one's end of this one."""
    begins, ends, last = [], [], NONE
    for trace in traces:
        if trace.about.is_worker:
            clocks, began, ended = windows_of(trace)
            begins += began[clocks == step].tolist()
            ends += ended[clocks == step].tolist()
            last = max(last, int(clocks.max(initial=NONE)))
    if not begins:
        raise TraceError(
            f"--step {step}: no worker has made it; there are the iterations 1 to {last}"
            if last > 0
            else f"--step {step}: no worker has made two steps"
        )
    return Window(min(begins), max(ends))


def picture(traces: Sequence[Trace], step: int) -> str:
    """Return SVG. Raises :class:`TraceError` if no rank has made that step."""
    window = window_of(traces, step)
    shown = sorted(traces, key=lambda each: (not each.about.is_worker, each.about.index))[
        :MAX_RANKS
    ]
    canvas = Canvas()
    y = float(_TITLE)
    at_servers = AtServers(traces)
    used = set[Span]()
    for trace in shown:
        y = _rank(canvas, trace, window, y, at_servers) + _GAP
        used.update(Span(kind) for kind in np.unique(window.of(trace.spans)["kind"]))
    _axis(canvas, window, y)
    left_out = f"; {len(traces) - MAX_RANKS} ranks more" if len(traces) > MAX_RANKS else ""
    canvas.text(_LEFT, 20, f"Iteration {step}: what each rank does{left_out}", size=14, bold=True)
    _legend(canvas, y + 38, used)
    title = f"Activity of each rank in iteration {step}"
    return canvas.document(WIDTH, y + _BELOW, title=title)


# -- one rank ----------------------------------------------------------------------------------


def _rank(canvas: Canvas, trace: Trace, window: Window, y: float, at_servers: AtServers) -> float:
    """Draws a rank from ``y`` on; where it ends."""
    about = trace.about
    name = "one process" if about.role == "both" else f"{about.role} {about.index}"
    canvas.text(8, y + 12, name, size=12, bold=True, room=_LEFT - 16)
    canvas.text(8, y + 25, about.host, size=10, fill=MUTED, room=_LEFT - 16, is_name=True)
    top = y
    if about.is_worker:
        y = _worker(canvas, trace, window, y, at_servers)
    if about.is_server:
        y = _server(canvas, trace, window, y)
    return max(y, top + 28)


def _worker(canvas: Canvas, trace: Trace, window: Window, y: float, at_servers: AtServers) -> float:
    _lane(canvas, window, y, _BAR)
    script = trace.spans[trace.spans["lane"] == Lane.SCRIPT]
    # In this order: who waits in a pass does not compute then.
    layers = (
        ((Span.FORWARD, Span.EVALUATION), FORWARD),
        ((Span.BACKWARD,), BACKWARD),
        ((Span.STEP, Span.COLLECTIVE, *WAITS), STALLED),
    )
    for kinds, colour in layers:
        spans = window.of(script[np.isin(script["kind"], kinds)])
        for span in spans:
            inside = span["kind"] in WAITS and _lies_in_step(span, script)
            if not inside:
                _bar(canvas, window, span, y, _BAR, colour)
    # Autograd may have a thread of its own, on a GPU.
    for span in window.of(trace.of(Span.BACKWARD)):
        if span["lane"] != Lane.SCRIPT:
            _bar(canvas, window, span, y, _BAR, BACKWARD)
    y += _BAR + 2
    in_group = window.of(trace.of(Span.REDUCE, Span.GATHER))
    if len(in_group):
        for span in in_group:
            _bar(canvas, window, span, y, _GROUP_BAR, GROUP)
        y += _GROUP_BAR + 2
    moving = window.of(trace.of(Span.PUSH, Span.PULL))
    lines = _lines(moving)
    for row, line in zip(rows(moving), lines, strict=True):
        _chunk(canvas, trace, window, row, y + line * (_LINE + _BETWEEN), at_servers)
    return y + (max(lines, default=-1) + 1) * (_LINE + _BETWEEN)


def _lies_in_step(span: np.void, script: Spans) -> bool:
    steps = script[script["kind"] == Span.STEP]
    begins, ends = steps["begin_ns"], steps["end_ns"]
    return bool(((begins <= span["begin_ns"]) & (span["end_ns"] <= ends)).any())


def _chunk(
    canvas: Canvas, trace: Trace, window: Window, row: Row, y: float, at_servers: AtServers
) -> None:
    """Draw a line of three parts: to the server, there, and back."""
    here, done = at_servers.times(trace, row)
    title = f"{name_of(row.kind)} of chunk {row.chunk}, iteration {row.clock}"
    parts = (row.begin_ns, here, PUSH), (here, done, HELD), (done, row.end_ns, PULL)
    for start, stop, colour in parts:
        if stop > window.begin_ns and start < window.end_ns and stop > start:
            x = window.x(start)
            canvas.rect(x, y, max(window.x(stop) - x, 0.5), _LINE, fill=colour, title=title)


def _server(canvas: Canvas, trace: Trace, window: Window, y: float) -> float:
    _lane(canvas, window, y, _BAR)
    for kind, colour in ((Span.FOLD, FOLD), (Span.APPLY, APPLY)):
        for span in window.of(trace.of(kind)):
            _bar(canvas, window, span, y, _BAR, colour)
    y += _BAR + 2
    receiving = window.of(trace.of(Span.RECEIVE))
    lines = _lines(receiving)
    for span, line in zip(receiving, lines, strict=True):
        _bar(canvas, window, span, y + line * (_LINE + _BETWEEN), _LINE, RECEIVE)
    return y + (max(lines, default=-1) + 1) * (_LINE + _BETWEEN)


def _lines(spans: Spans) -> list[int]:
    """For each, which come by their begin, the first line that is free then; beyond the most, by
    turns."""
    free_at: list[int] = []
    found = []
    for number, span in enumerate(spans):
        begin, end = int(span["begin_ns"]), int(span["end_ns"])
        line = next((at for at, free in enumerate(free_at) if free <= begin), len(free_at))
        if line >= _MOST_LINES:
            line = number % _MOST_LINES
        if line == len(free_at):
            free_at.append(end)
        free_at[line] = max(end, free_at[line])
        found.append(line)
    return found


# -- shapes ------------------------------------------------------------------------------------


def _lane(canvas: Canvas, window: Window, y: float, height: float) -> None:
    left, right = window.x(window.begin_ns), window.x(window.end_ns)
    canvas.rect(left, y, right - left, height, fill="#ffffff", stroke=_FRAME, stroke_width=0.6)


def _bar(
    canvas: Canvas, window: Window, span: np.void, y: float, height: float, colour: str
) -> None:
    begin, end = window.x(int(span["begin_ns"])), window.x(int(span["end_ns"]))
    took_ms = (int(span["end_ns"]) - int(span["begin_ns"])) / 1e6
    title = f"{name_of(span['kind'], int(span['other']))}"
    if span["chunk"] != NONE:
        title += f", chunk {int(span['chunk'])}"
    canvas.rect(begin, y, max(end - begin, 0.5), height, fill=colour,
                title=f"{title}: {took_ms:.2f} ms")  # fmt: skip


def _axis(canvas: Canvas, window: Window, y: float) -> None:
    total_ms = (window.end_ns - window.begin_ns) / 1e6
    canvas.rect(_LEFT, y, WIDTH - _LEFT - _RIGHT, 0.8, fill=MUTED)
    axis = Axis(0.0, total_ms, start=_LEFT, stop=WIDTH - _RIGHT)
    for tick_ms in axis.ticks():
        x = axis.place(tick_ms)
        canvas.rect(x - 0.4, y, 0.8, 4, fill=MUTED)
        words = f"{tick_ms:g}" + (" ms" if not tick_ms else "")
        canvas.text(x, y + 16, words, size=10, fill=MUTED, anchor="middle")


def _legend(canvas: Canvas, y: float, used: Collection[Span]) -> None:
    x = float(_LEFT)
    for colour, words, kind in LEGEND:
        if kind not in used:
            continue
        canvas.rect(x, y - 9, 12, 10, fill=colour, stroke=_FRAME, stroke_width=0.6)
        canvas.text(x + 16, y, words, size=11, fill=INK)
        x += 16 + text_width(words, 11) + 8
