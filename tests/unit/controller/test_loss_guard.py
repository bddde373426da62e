"""Whether the reported loss stands still."""

from __future__ import annotations

import pytest

from psdist.controller.loss_guard import LEAST_FALL, LossGuard


def still(losses: list[float], patience: int = 2) -> list[bool]:
    """At the end of each window, with one loss in it."""
    guard, found = LossGuard(patience), []
    for loss in losses:
        guard.report(1, loss)
        found.append(guard.stands_still())
    return found


def test_it_stands_still_after_so_many_windows_without_a_lower_one() -> None:
    assert still([3.0, 2.0, 2.0, 2.5]) == [False, False, False, True]
    assert still([3.0, 3.0, 2.0, 2.0, 1.0]) == [False] * 5
    assert still([3.0, 3.0], patience=1) == [False, True]
    assert still([1.0, 2.0, 1.5, 0.9], patience=3) == [False] * 4, "above the least, not the last"


@pytest.mark.parametrize("least", [2.0, -2.0])
def test_lower_by_less_than_a_ten_thousandth_is_not_lower(least: float) -> None:
    step = LEAST_FALL * abs(least)
    assert still([least, least - step], patience=1) == [False, True]
    assert still([least, least - 1.1 * step], patience=1) == [False, False]


def test_a_window_is_the_mean_of_its_reports() -> None:
    guard = LossGuard(1)
    guard.report(2, 4.0)
    guard.report(1, 5.0)
    assert not guard.stands_still()  # 3
    guard.report(3, 6.0)
    guard.report(1, 5.0)
    assert not guard.stands_still()  # 2.75
    guard.report(1, 2.75)
    assert guard.stands_still()
    assert guard.words == "the loss not below 2.75 for 1 windows"


def test_a_window_without_reports_says_nothing() -> None:
    guard = LossGuard(2)
    for _ in range(4):
        assert not guard.stands_still()
    guard.report(1, 1.0)
    assert not guard.stands_still()
    guard.report(1, 1.0)
    assert not guard.stands_still()
    assert not guard.stands_still()
    guard.report(1, 1.0)
    assert guard.stands_still()


def test_under_another_level_it_is_counted_anew_and_the_least_one_stays() -> None:
    guard = LossGuard(2)
    for loss in (1.0, 1.0):
        guard.report(1, loss)
        assert not guard.stands_still()
    guard.report(1, 0.1)
    guard.begin()  # what was reported before it is left out
    for is_still in (False, True):
        guard.report(1, 1.0)
        assert guard.stands_still() == is_still
