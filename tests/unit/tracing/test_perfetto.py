"""Perfetto's file: events that say what the spans say, and arrows from push to apply to reply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from psdist.errors import TraceError
from psdist.tracing import Lane, Span
from psdist.tracing.perfetto import events_of, write_events
from tests.support.traces import about, made, server, span

MS = 1e3
"""Microseconds."""


def a_push(group: int) -> list[Any]:
    """A worker pushes chunk 3 of iteration 7; server 0 applies it."""
    sent = {"clock": 7, "chunk": 3, "other": 0, "sent_ns": 1_000_000, "took_ns": 2_000_000}
    return [
        made(server(0), [span(Span.APPLY, 120, 130, clock=7, chunk=3, other=group)]),
        made(about(1, index=0, group=4), [
            span(Span.BACKWARD, 100, 140, clock=7),
            span(Span.PUSH, 110, 150, **sent),
        ]),
    ]  # fmt: skip


def by_phase(traces: list[Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in events_of(traces) if event["ph"] == phase]


def test_every_rank_is_a_process_with_the_lanes_that_it_has() -> None:
    names = [
        (event["name"], event["pid"], event["args"].get("name"))
        for event in by_phase(a_push(-1), "M")
        if event["name"].endswith("_name")
    ]
    assert names == [
        ("process_name", 0, "server 0 (rank 0 on n1)"),
        ("thread_name", 0, "script"),
        ("thread_name", 0, "server"),
        ("process_name", 1, "worker 0 (rank 1 on n1)"),
        ("thread_name", 1, "script"),
    ]


def test_times_are_microseconds_from_the_first_span_on() -> None:
    complete = {event["name"]: event for event in by_phase(a_push(-1), "X")}
    assert (complete["backward"]["ts"], complete["backward"]["dur"]) == (0.0, 40 * MS)
    assert (complete["apply 3"]["ts"], complete["apply 3"]["pid"]) == (20 * MS, 0)
    assert (complete["send 3"]["ts"], complete["send 3"]["dur"]) == (10 * MS, 1 * MS)
    assert (complete["land 3"]["ts"], complete["land 3"]["dur"]) == (48 * MS, 2 * MS)


def test_a_chunk_on_its_way_is_an_asynchronous_event() -> None:
    (begin,), (end,) = by_phase(a_push(-1), "b"), by_phase(a_push(-1), "e")
    assert (begin["ts"], end["ts"]) == (10 * MS, 50 * MS)
    assert (begin["cat"], begin["id"]) == (end["cat"], end["id"])
    assert (begin["name"], begin["args"]) == ("push 3", {"clock": 7, "chunk": 3, "server": 0})


@pytest.mark.parametrize("group", [-1, 4])
def test_an_arrow_leads_from_the_push_to_its_step_and_to_where_its_reply_lands(group: int) -> None:
    traces = a_push(group)
    ends = [by_phase(traces, phase)[0] for phase in "stf"]
    assert [(each["ts"], each["pid"], each["tid"]) for each in ends] == [
        (10 * MS, 1, Lane.SCRIPT),
        (20 * MS, 0, Lane.SERVER),
        (48 * MS, 1, Lane.SCRIPT),
    ]
    assert len({each["id"] for each in ends}) == 1


def test_a_step_of_another_groups_update_has_no_arrow() -> None:
    assert not by_phase(a_push(5), "s")


def test_the_file_is_json_and_says_how_well_clocks_are_known(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    traces = a_push(-1)
    number = write_events(traces, path)
    told = json.loads(path.read_text())
    assert len(told["traceEvents"]) == number == len(list(events_of(traces)))
    assert told["otherData"]["clocks"] == [
        {"rank": 0, "bound_us": 0.0, "drift": "measured"},
        {"rank": 1, "bound_us": 0.0, "drift": "measured"},
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


def test_ranks_without_spans_are_processes_all_the_same(tmp_path: Path) -> None:
    assert write_events([made(about(), [])], tmp_path / "trace.json") == 4
    json.loads((tmp_path / "trace.json").read_text())


def test_where_it_cannot_be_written_the_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot write .*/missing/trace.json: No such file"):
        write_events([], tmp_path / "missing" / "trace.json")
