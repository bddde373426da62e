"""Where the time of steps went: against a count of single milliseconds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.tracing import Lane, Span
from psdist.tracing.covered import Covered
from psdist.tracing.files import Trace
from psdist.tracing.shares import Steps, steps_of_all
from tests.support.traces import MS, about, made, server, span

intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda each: (each[0], sum(each))),
    max_size=8,
)
LENGTH = 60


def steps_of(trace: Trace) -> Steps:
    return steps_of_all([trace])[0]


def covered(found: list[tuple[int, int]]) -> Covered:
    begins, ends = (np.array([each[side] for each in found], np.int64) for side in (0, 1))
    return Covered(begins, ends)


def units(found: list[tuple[int, int]]) -> set[int]:
    return {at for begin, end in found for at in range(begin, end)}


@given(intervals)
def test_a_union_is_as_long_before_each_time_as_the_units_that_it_covers(
    found: list[tuple[int, int]],
) -> None:
    inside = units(found)
    wanted = [len([at for at in inside if at < time]) for time in range(LENGTH)]
    assert covered(found).until(np.arange(LENGTH)).tolist() == wanted


@given(moves=intervals, stalls=intervals, cuts=st.sets(st.integers(0, LENGTH), min_size=2))
def test_what_is_hidden_is_what_moves_while_the_script_is_not_stalled(
    moves: list[tuple[int, int]], stalls: list[tuple[int, int]], cuts: set[int]
) -> None:
    ends = sorted(cuts)
    trace = made(
        about(),
        [
            *(span(Span.PUSH, *each, chunk=1) for each in moves),
            *(span(Span.WAIT_REPLIES, *each) for each in stalls),
            *(span(Span.STEP, end, end, clock=clock) for clock, end in enumerate(ends)),
        ],
    )
    steps = steps_of(trace)
    moving, stalled = units(moves), units(stalls)
    for number, (begin, end) in enumerate(pairwise(ends)):
        window = set(range(begin, end))
        assert steps.communication[number] == len(moving & window) * MS
        assert steps.passes[number] + steps.script[number] == len(window - stalled) * MS
        assert steps.network[number] == len(moving & stalled & window) * MS
        assert steps.psdist[number] == len((stalled - moving) & window) * MS
        assert steps.hidden[number] == len((moving - stalled) & window) * MS


def test_what_leaves_in_step_is_not_hidden_and_what_leaves_before_it_is() -> None:
    trace = made(
        about(),
        [
            span(Span.STEP, 0, 10, clock=0),
            span(Span.BACKWARD, 10, 30, clock=1),
            span(Span.PUSH, 20, 34, clock=1, chunk=0, lane=Lane.LOOP),
            span(Span.STEP, 30, 40, clock=1),
            span(Span.REDUCE, 32, 38, lane=Lane.GROUP),
        ],
    )
    steps = steps_of(trace)
    assert steps.clocks.tolist() == [1]
    assert (steps.communication[0], steps.hidden[0]) == (18 * MS, 10 * MS)
    assert steps.hidden_share == pytest.approx(10 / 18)


def test_what_other_threads_wait_for_stalls_nobody() -> None:
    trace = made(
        about(),
        [
            span(Span.STEP, 0, 0, clock=0),
            span(Span.STEP, 30, 30, clock=1),
            span(Span.WAIT_GROUP, 5, 9, lane=Lane.LOOP),
            span(Span.STEP, 40, 50, clock=0, set_index=1),
        ],
    )
    steps = steps_of(trace)
    assert steps.script.tolist() == [30 * MS]
    assert np.isnan(steps.hidden_share)


def test_iterations_before_a_clock_can_be_left_out() -> None:
    steps = steps_of(made(about(), [span(Span.STEP, at, at + 1, clock=at) for at in range(6)]))
    assert steps.from_clock(4).clocks.tolist() == [4, 5]
    assert len(steps_of(made(about(), []))) == 0


CAUSES = ("passes", "script", "psdist", "network", "servers", "waits")


@given(
    passes=intervals, stalls=intervals, moves=intervals, parked=intervals,
    cuts=st.sets(st.integers(0, LENGTH), min_size=2),
)  # fmt: skip
def test_each_moment_of_a_step_has_one_cause(
    passes: list[tuple[int, int]],
    stalls: list[tuple[int, int]],
    moves: list[tuple[int, int]],
    parked: list[tuple[int, int]],
    cuts: set[int],
) -> None:
    """``parked``: begin and end of pushes that lie at the server until worker 1 has come, in the
    middle of that time. An end that lies beyond is one of the reply."""
    ends = sorted(cuts)
    worker, others, at_server = [], [], []
    for chunk, (begin, end) in enumerate(parked, 10):
        middle = (begin + end) // 2
        push = {"chunk": chunk, "clock": 0, "num_bytes": 4}
        worker.append(span(Span.PUSH, begin, end, **push))
        others.append(span(Span.PUSH, middle, end, **push))
        at_server += [
            span(Span.RECEIVE, begin, begin, chunk=chunk, clock=0, other=0),
            span(Span.RECEIVE, middle, middle, chunk=chunk, clock=0, other=1),
            span(Span.APPLY, end, end, chunk=chunk, clock=0),
            span(Span.REPLY, end, end, chunk=chunk, clock=0, other=0),
        ]
    worker += [
        *(span(Span.REDUCE, *each, lane=Lane.GROUP) for each in moves),
        *(span(Span.FORWARD, *each) for each in passes),
        *(span(Span.WAIT_REPLIES, *each) for each in stalls),
        *(span(Span.STEP, end, end, clock=clock) for clock, end in enumerate(ends)),
    ]
    traces = [made(about(0), worker), made(about(1), others), made(server(2), at_server)]
    steps = steps_of_all(traces)[0]
    moving, stalled, passing = units(moves), units(stalls), units(passes)
    waiting = units([(begin, (begin + end) // 2) for begin, end in parked])
    held = units([((begin + end) // 2, end) for begin, end in parked])
    for number, (begin, end) in enumerate(pairwise(ends)):
        window = set(range(begin, end))
        expected = {
            "passes": (passing - stalled) & window,
            "script": window - passing - stalled,
            "network": moving & stalled & window,
            "waits": (waiting - moving) & stalled & window,
            "servers": (held - waiting - moving) & stalled & window,
            "psdist": (stalled - moving - waiting - held) & window,
        }
        found = {name: int(getattr(steps, name)[number]) // MS for name in CAUSES}
        assert found == {name: len(expected[name]) for name in CAUSES}
        assert sum(found.values()) == end - begin
        communicated = (moving | (held - waiting)) & window
        assert steps.communication[number] == len(communicated) * MS
        assert steps.hidden[number] == len(communicated - stalled) * MS
        for other, times in steps.waits_for.items():
            assert times[number] == (len(expected["waits"]) * MS if other == 1 else 0)
