"""The picture of a step: which bars and lines it has, where, and in which colour."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from psdist.errors import TraceError
from psdist.tracing import Lane, Span
from psdist.tracing import picture as drawing
from psdist.tracing.picture import middling_step, picture
from tests.support.traces import about, made, server, span

SVG = "{http://www.w3.org/2000/svg}"


def a_run() -> list[Any]:
    pushed = {"clock": 1, "chunk": 3, "other": 0, "num_bytes": 64}
    return [
        made(server(0, host="n2"), [
            span(Span.RECEIVE, 122, 130, clock=1, chunk=3, other=0),
            span(Span.APPLY, 150, 160, clock=1, chunk=3),
            span(Span.REPLY, 160, 178, clock=1, chunk=3, other=0),
        ]),
        made(about(1, index=0), [
            span(Span.STEP, 90, 100, clock=0),
            span(Span.FORWARD, 100, 110, clock=1),
            span(Span.BACKWARD, 110, 160, clock=1),
            span(Span.PUSH, 120, 180, lane=Lane.LOOP, **pushed),
            span(Span.STEP, 160, 200, clock=1),
            span(Span.WAIT_REPLIES, 170, 180),
        ]),
    ]  # fmt: skip


def bars(svg: str) -> dict[str, tuple[float, float, str]]:
    """By what hovering shows: from, to (milliseconds of a window of 100), colour."""
    found = {}
    scale = (drawing.WIDTH - 128 - 24) / 100
    for rect in ET.fromstring(svg).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and title.text:
            x, width = float(rect.attrib["x"]), float(rect.attrib["width"])
            begin, end = (x - 128) / scale, (x + width - 128) / scale
            found[f"{title.text}@{rect.attrib['fill']}"] = (
                round(begin, 1),
                round(end, 1),
                rect.attrib["fill"],
            )
    return found


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_a_worker_has_bars_of_what_its_script_does() -> None:
    found = bars(picture(a_run(), 1))
    assert found[f"forward: 10.00 ms@{drawing.FORWARD}"][:2] == (0, 10)
    assert found[f"backward: 50.00 ms@{drawing.BACKWARD}"][:2] == (10, 60)
    assert found[f"step: 40.00 ms@{drawing.STALLED}"][:2] == (60, 100)
    assert not any(title.startswith("wait") for title in found)  # it lies in the step


def test_a_chunk_has_a_line_to_its_server_there_and_back() -> None:
    found = bars(picture(a_run(), 1))
    title = "push of chunk 3, iteration 1@"
    assert found[title + drawing.PUSH][:2] == (20, 30)
    assert found[title + drawing.HELD][:2] == (30, 60)
    assert found[title + drawing.PULL][:2] == (60, 80)


def test_a_reply_that_is_parked_behind_its_step_is_drawn_as_at_the_server() -> None:
    traces = a_run()
    at_server = [
        span(Span.RECEIVE, 122, 130, clock=1, chunk=3, other=0),
        span(Span.APPLY, 130, 140, clock=1, chunk=3, other=1),
        span(Span.REPLY, 175, 179, clock=1, chunk=3, other=0),
    ]
    found = bars(picture([made(server(0, host="n2"), at_server), *traces[1:]], 1))
    title = "push of chunk 3, iteration 1@"
    assert found[title + drawing.HELD][:2] == (30, 75)
    assert found[title + drawing.PULL][:2] == (75, 80)


def test_a_server_has_what_it_computes_and_what_it_receives() -> None:
    found = bars(picture(a_run(), 1))
    assert found[f"apply, chunk 3: 10.00 ms@{drawing.APPLY}"][:2] == (50, 60)
    assert found[f"receive, chunk 3: 8.00 ms@{drawing.RECEIVE}"][:2] == (22, 30)


def test_the_words_name_ranks_hosts_the_iteration_and_the_colours_in_use() -> None:
    told = words(picture(a_run(), 1))
    assert "Iteration 1: what each rank does" in told
    assert {"worker 0", "n1", "server 0", "n2", "0 ms", "40", "100"} <= set(told)
    assert {"forward", "backward", "push", "reply", "apply"} <= set(told)
    assert "in the group" not in told


def test_a_wait_outside_of_step_lies_over_what_it_interrupts() -> None:
    traces = a_run()
    late = made(about(2, index=1), [
        span(Span.STEP, 90, 100, clock=0),
        span(Span.FORWARD, 100, 140, clock=1),
        span(Span.WAIT_REPLIES, 120, 130),
        span(Span.STEP, 160, 200, clock=1),
    ])  # fmt: skip
    found = bars(picture([*traces, late], 1))
    assert found[f"wait: replies: 10.00 ms@{drawing.STALLED}"][:2] == (20, 30)


def test_an_iteration_that_nobody_made_is_refused_with_those_there_are() -> None:
    with pytest.raises(TraceError, match=r"--step 9: no worker has made it; .* iterations 1 to 1"):
        picture(a_run(), 9)
    with pytest.raises(TraceError, match="there is none to draw"):
        middling_step([made(server(0), [])], from_clock=0)


def test_the_middling_step_is_the_one_in_the_middle_of_those_from_a_clock_on() -> None:
    ends = [0, 100, 110, 130, 160, 161]
    spans = [span(Span.STEP, end, end, clock=clock) for clock, end in enumerate(ends)]
    assert middling_step([made(about(), spans)], from_clock=2) == 3
    assert middling_step([made(about(), spans)], from_clock=99) in range(1, 6)
