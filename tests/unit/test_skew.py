"""The ideal that skewed runs are compared with: the drawn pattern under the rule of the mode."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.schemes.skew import SLOW_TIMES, below_from, ideal, pattern

patterns = st.integers(1, 12).flatmap(
    lambda steps: st.lists(
        st.lists(st.sampled_from([1.0, SLOW_TIMES]), min_size=steps, max_size=steps),
        min_size=1,
        max_size=4,
    )
)


@given(patterns)
def test_without_a_bound_the_slowest_worker_counts_and_with_bound_0_the_slowest_of_each_step(
    times: list[list[float]],
) -> None:
    assert ideal(times, 99) == max(map(sum, times))
    assert ideal(times, 0) == sum(map(max, zip(*times, strict=True)))


@given(patterns, st.integers(0, 12))
def test_a_larger_bound_never_takes_longer(times: list[list[float]], bound: int) -> None:
    assert ideal(times, bound + 1) <= ideal(times, bound)


def test_with_bound_1_a_worker_is_a_step_ahead_at_most() -> None:
    fast, slow = [1.0] * 4, [6.0, 1.0, 1.0, 1.0]
    assert ideal([fast, slow], 1) == 9.0  # it makes steps 0 and 1, waits until 6, makes 2 and 3
    assert ideal([[1.0, 1.0, 6.0], [6.0, 1.0, 1.0]], 1) == 12.0
    assert ideal([[1.0, 1.0, 6.0], [6.0, 1.0, 1.0]], 2) == 8.0


def test_a_tenth_of_the_steps_is_slow_and_the_seed_decides_which() -> None:
    times = pattern(3, 1, 10_000)
    assert times == pattern(3, 1, 10_000)
    assert times != pattern(3, 2, 10_000) != pattern(4, 1, 10_000)
    assert 900 < sum(each == SLOW_TIMES for each in times) < 1100


def test_a_loss_is_reached_when_its_curve_stays_below_it_between_two_points() -> None:
    curve = [(10.0, 4.0), (20.0, 2.4), (30.0, 3.0), (40.0, 2.0)]
    assert below_from(curve, 2.5) == pytest.approx(35.0)
    assert below_from(curve, 2.0) == 40.0
    assert below_from(curve, 4.5) == 10.0
    assert below_from(curve, 1.0) == math.inf
