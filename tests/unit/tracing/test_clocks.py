"""Clocks of ranks against rank 0's: what round trips prove of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from psdist.tracing.clocks import Line, Offset, RoundTrip, best

ways = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=8)
"""Nanoseconds there and back."""


def trips_at(
    at_ns: int, offset_ns: float, there_and_back: list[tuple[int, int]]
) -> list[RoundTrip]:
    """Asked one after the other, of a clock that rank 0's is ``offset_ns`` ahead of."""
    found = []
    for there, back in there_and_back:
        found.append((at_ns, round(at_ns + there - offset_ns), at_ns + there + back))
        at_ns += there + back
    return found


@given(ways=ways, offset_ns=st.integers(-(10**15), 10**15))
def test_the_offset_is_within_its_bound_however_uneven_the_ways(
    ways: list[tuple[int, int]], offset_ns: int
) -> None:
    found = best(trips_at(10**16, offset_ns, ways))
    assert abs(found.offset_ns - offset_ns) <= found.bound_ns
    assert found.bound_ns <= min(sum(way) for way in ways) // 2 + 1


@given(
    first=ways,
    last=ways,
    drift=st.floats(-1e-4, 1e-4),
    offset_ns=st.integers(-(10**12), 10**12),
    at=st.floats(0, 1),
)
def test_between_start_and_end_a_drifting_clock_is_aligned_within_the_bound(
    first: list[tuple[int, int]],
    last: list[tuple[int, int]],
    drift: float,
    offset_ns: int,
    at: float,
) -> None:
    begin, length = 10**15, 10**12

    def ahead(true_ns: float) -> float:
        return offset_ns + drift * (true_ns - begin)

    start = best(trips_at(begin, ahead(begin), first))
    end = best(trips_at(begin + length, ahead(begin + length), last))
    line = Line.through(start, end)
    true_ns = begin + at * length
    seen = np.array([round(true_ns - ahead(true_ns))])
    # The clock drifts during the round trips, too.
    slack = 1 + 2 * abs(drift) * 10**7 + 4
    assert abs(int(line.aligned(seen)[0]) - true_ns) <= line.bound_ns + slack
    assert line.is_drift_known


def test_without_an_end_the_offset_of_the_start_stands_and_drift_is_unknown() -> None:
    line = Line.through(Offset(at_ns=5, offset_ns=100, bound_ns=3), None)
    assert line.aligned(np.array([5, 1005])).tolist() == [105, 1105]
    assert (line.bound_ns, line.is_drift_known) == (3, False)


def test_an_end_before_the_start_is_not_believed() -> None:
    start = Offset(at_ns=50, offset_ns=100, bound_ns=3)
    line = Line.through(start, Offset(at_ns=40, offset_ns=-900, bound_ns=1))
    assert (line.offset_ns, line.slope, line.is_drift_known) == (100, 0.0, False)
