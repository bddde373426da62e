"""Waits of workers: made traces whose answer is known, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from psdist.tracing import NONE, Lane, Span
from psdist.tracing.covered import Covered
from psdist.tracing.exchange import Ways, exchanges
from psdist.tracing.files import Trace
from tests.support.traces import MS, about, made, server, span

Spans = list[dict[str, Any]]


def intervals(covered: Covered) -> list[tuple[float, float]]:
    """Those that have a length."""
    pairs = zip(covered.begins.tolist(), covered.ends.tolist(), strict=True)
    return [(begin / MS, end / MS) for begin, end in pairs if end > begin]


def waits(ways: Ways) -> dict[int, list[tuple[float, float]]]:
    found = {worker: intervals(covered) for worker, covered in ways.waiting.items()}
    return {worker: times for worker, times in found.items() if times}


def push(begin: int, end: int, **fields: Any) -> dict[str, Any]:
    return span(Span.PUSH, begin, end, **{"chunk": 3, "clock": 5, "num_bytes": 4, **fields})


def at_server(kind: Span, begin: int, end: int, other: int, **fields: Any) -> dict[str, Any]:
    return span(kind, begin, end, **{"chunk": 3, "clock": 5, "other": other, **fields})


def job(workers: Sequence[Spans], servers: Spans) -> list[Trace]:
    """Each worker is a group of its own."""
    traces = [made(about(rank), spans) for rank, spans in enumerate(workers)]
    return [*traces, made(server(len(workers)), servers)]


def test_in_ssp_a_reply_is_parked_from_its_step_to_the_push_that_releases_it() -> None:
    traces = job(
        [[push(0, 60)], [push(40, 55, clock=2)]],
        [
            at_server(Span.RECEIVE, 2, 6, 0),
            at_server(Span.APPLY, 8, 10, 0),
            at_server(Span.RECEIVE, 42, 46, 1, clock=2),
            at_server(Span.APPLY, 47, 50, 1, clock=2),
            at_server(Span.REPLY, 50, 56, 0),
            at_server(Span.REPLY, 51, 56, 1, clock=2),
        ],
    )
    ways = exchanges(traces)
    assert intervals(ways[0].moving) == [(0, 6), (50, 60)]
    assert waits(ways[0]) == {1: [(10, 46)]}
    assert intervals(ways[0].at_servers) == [(6, 50)]
    assert waits(ways[1]) == {}
    assert intervals(ways[1].moving) == [(40, 46), (51, 55)]


def test_in_sync_all_wait_for_the_last_push_of_the_iteration() -> None:
    traces = job(
        [[push(0, 60)], [push(10, 61)], [push(40, 62)]],
        [
            at_server(Span.RECEIVE, 2, 6, 0),
            at_server(Span.RECEIVE, 12, 16, 1),
            at_server(Span.RECEIVE, 42, 46, 2),
            at_server(Span.RECEIVE, 20, 21, 2, clock=4),  # of another iteration
            at_server(Span.APPLY, 47, 50, NONE),
            *(at_server(Span.REPLY, 51, 56, worker) for worker in range(3)),
        ],
    )
    ways = exchanges(traces)
    assert [waits(ways[worker]) for worker in range(3)] == [{2: [(6, 46)]}, {2: [(16, 46)]}, {}]
    assert intervals(ways[2].at_servers) == [(46, 51)]


def test_in_async_nobody_waits_for_others() -> None:
    """The server is busy with others' steps, but every reply follows its own step."""
    traces = job(
        [[push(0, 60)], [push(0, 61)]],
        [
            at_server(Span.RECEIVE, 2, 6, 0),
            at_server(Span.RECEIVE, 2, 7, 1),
            at_server(Span.APPLY, 8, 30, 1),
            at_server(Span.APPLY, 30, 50, 0),
            at_server(Span.REPLY, 30, 40, 1),
            at_server(Span.REPLY, 50, 55, 0),
        ],
    )
    ways = exchanges(traces)
    assert waits(ways[0]) == waits(ways[1]) == {}
    assert intervals(ways[0].at_servers) == [(6, 50)]


def test_a_reply_that_leaves_as_another_one_ends_has_not_waited_for_others() -> None:
    traces = job(
        [[push(0, 60), push(0, 60, chunk=4)], [push(10, 30)]],
        [
            at_server(Span.RECEIVE, 2, 6, 0),
            at_server(Span.RECEIVE, 2, 6, 0, chunk=4),
            at_server(Span.APPLY, 8, 10, 0),
            at_server(Span.REPLY, 10, 40, 0, chunk=4),
            at_server(Span.RECEIVE, 12, 14, 1),
            at_server(Span.APPLY, 14, 15, 1),
            at_server(Span.REPLY, 41, 50, 0),
        ],
    )
    ways = exchanges(traces)
    assert waits(ways[0]) == {}
    assert intervals(ways[0].moving) == [(0, 6), (10, 60)]


def test_a_push_without_a_gradient_is_waited_for_until_it_is_made() -> None:
    traces = job(
        [[push(0, 60)], [push(40, 60, num_bytes=0)]],
        [
            at_server(Span.RECEIVE, 2, 6, 0),
            at_server(Span.APPLY, 47, 50, NONE),
            *(at_server(Span.REPLY, 51, 56, worker) for worker in range(2)),
        ],
    )
    ways = exchanges(traces)
    assert waits(ways[0]) == {1: [(6, 40)]}
    assert waits(ways[1]) == {}


def test_a_group_of_several_waits_for_the_pushes_of_other_groups_alone() -> None:
    """Workers 0 and 1 are group 0: their slices are chunks of their own."""
    traces = [
        made(about(0, group=0), [push(0, 60)]),
        made(about(1, group=0), [push(0, 60, chunk=4)]),
        made(about(2, group=1), [push(30, 60), push(30, 60, chunk=4)]),
        made(server(3), [
            *(at_server(Span.RECEIVE, 2, 6, chunk - 3, chunk=chunk) for chunk in (3, 4)),
            *(at_server(Span.RECEIVE, 32, 36, 2, chunk=chunk) for chunk in (3, 4)),
            *(at_server(Span.APPLY, 36, 40, NONE, chunk=chunk) for chunk in (3, 4)),
            *(at_server(Span.REPLY, 40, 50, chunk - 3, chunk=chunk) for chunk in (3, 4)),
        ]),
    ]  # fmt: skip
    ways = exchanges(traces)
    assert waits(ways[0]) == waits(ways[1]) == {2: [(6, 36)]}
    assert waits(ways[2]) == {}


def test_a_push_that_is_late_for_a_slow_member_is_a_wait_for_that_member() -> None:
    """Worker 2 reduces with worker 1, which comes at 25, and pushes the sum at 30."""
    traces = [
        made(about(0, group=0), [push(0, 60)]),
        made(about(1, group=1), [span(Span.REDUCE, 25, 28, lane=Lane.GROUP)]),
        made(about(2, group=1), [
            span(Span.REDUCE, 5, 28, lane=Lane.GROUP),
            push(30, 60),
        ]),
        made(server(3), [
            at_server(Span.RECEIVE, 2, 6, 0),
            at_server(Span.RECEIVE, 32, 36, 2),
            at_server(Span.APPLY, 36, 40, NONE),
            *(at_server(Span.REPLY, 40, 50, worker) for worker in (0, 2)),
        ]),
    ]  # fmt: skip
    ways = exchanges(traces)
    assert waits(ways[0]) == {1: [(6, 25)], 2: [(25, 36)]}
    assert waits(ways[1]) == {}
    assert waits(ways[2]) == {1: [(5, 25)]}


@pytest.mark.parametrize("kind", [Span.AGREE, Span.REDUCE, Span.GATHER, Span.BROADCAST])
def test_an_operation_of_a_group_waits_for_its_last_member(kind: Span) -> None:
    def operations(*times: tuple[int, int], lane: Lane = Lane.GROUP) -> Spans:
        return [span(kind, *each, lane=lane) for each in times]

    traces = [
        made(about(0, group=7), operations((0, 12), (20, 26))),
        made(about(1, group=7), operations((10, 12), (20, 26))),
        made(about(2, group=8), operations((5, 6))),
    ]
    ways = exchanges(traces)
    assert waits(ways[0]) == {1: [(0, 10)]}
    assert intervals(ways[0].moving) == [(10, 12), (20, 26)]
    assert waits(ways[1]) == waits(ways[2]) == {}


def test_a_collective_waits_for_the_last_worker_and_moves_nothing() -> None:
    def called(*times: tuple[int, int]) -> Spans:
        return [span(Span.COLLECTIVE, *each, other=1) for each in times]

    traces = [made(about(0), called((0, 9), (20, 31))), made(about(1), called((8, 9), (20, 31)))]
    ways = exchanges(traces)
    assert waits(ways[0]) == {1: [(0, 8)]}
    assert intervals(ways[0].moving) == waits(ways[1]).get(0, []) == []


def test_what_was_not_recorded_at_a_server_counts_as_moving() -> None:
    ways = exchanges([made(about(0), [push(0, 60)])])
    assert intervals(ways[0].moving) == [(0, 60)]
    assert waits(ways[0]) == {}
