"""When psdist changes between sync and bounded staleness."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from psdist.controller.decisions import WINDOW, Decision, Observation
from psdist.controller.mode import ModeControl

MS = 1000
Times = Sequence[Sequence[int]]
"""By group, of each round, in microseconds."""


def alike(num_rounds: int, own_us: int = 10 * MS) -> Times:
    return [[own_us] * num_rounds for _ in range(4)]


def skewed(num_rounds: int, seed: int = 0) -> Times:
    """In each round another group takes ten times as long."""
    pick = random.Random(seed)
    slow = [pick.randrange(4) for _ in range(num_rounds)]
    return [[MS * (10 if each == group else 1) for each in slow] for group in range(4)]


def with_one_slow(num_rounds: int) -> Times:
    return [[MS * (10 if group == 2 else 1)] * num_rounds for group in range(4)]


def feed(control: ModeControl, times: Times, first: int = 0, exchange_us: int = 500) -> None:
    """In sync, where all wait for the slowest, and for the exchange."""
    slowest = [max(each) for each in zip(*times, strict=True)]
    for group, own in enumerate(times):
        waits = [most - mine + exchange_us for most, mine in zip(slowest, own, strict=True)]
        control.observe(Observation(group, first, own, waits))


def control_of(mode: str = "sync") -> ModeControl:
    control = ModeControl(num_groups=4, staleness=3)
    if mode == "ssp":
        control.committed(Decision("ssp", 3, ""), 0)
    return control


@pytest.mark.parametrize("times", [alike, with_one_slow])
def test_sync_stays_where_all_are_alike_and_where_one_is_always_slow(times: object) -> None:
    control = control_of()
    feed(control, times(WINDOW + 1))  # type: ignore[operator]
    assert control.judge() is None


def test_sync_gives_way_where_now_this_and_now_that_group_is_slow() -> None:
    control = control_of()
    feed(control, skewed(WINDOW + 1))
    decision = control.judge()
    assert decision is not None
    assert (decision.mode, decision.staleness) == ("ssp", 3)
    assert decision.why.startswith("iterations 1 to 20: 10.50 ms each in sync, ")


def test_what_is_said_is_the_arithmetic() -> None:
    control = ModeControl(num_groups=2, staleness=1)
    half = WINDOW // 2
    control.observe(Observation(0, 1, [3000, 1000] * half, [100, 2100] * half))
    control.observe(Observation(1, 1, [1000, 3000] * half, [2100, 100] * half))
    assert control.judge() == Decision(
        "ssp",
        1,
        "iterations 1 to 20: 3.10 ms each in sync, 2.10 ms with bounded staleness, 32 % less",
    )


@pytest.mark.parametrize(
    ("times", "mode"), [(alike, "sync"), (with_one_slow, "sync"), (skewed, "")]
)
def test_sync_comes_back_where_staleness_gains_nothing(times: object, mode: str) -> None:
    control = control_of("ssp")
    feed(control, times(WINDOW + 1))  # type: ignore[operator]
    decision = control.judge()
    assert (decision.mode if decision else "") == mode


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_a_gain_between_the_two_bounds_changes_nothing(mode: str) -> None:
    control = ModeControl(num_groups=2, staleness=3)
    control.committed(Decision(mode, 0, ""), 0)
    control.observe(Observation(0, 1, [1000, 1200] * (WINDOW // 2), [200, 0] * (WINDOW // 2)))
    control.observe(Observation(1, 1, [1200, 1000] * (WINDOW // 2), [0, 200] * (WINDOW // 2)))
    assert control.judge() is None  # 1.2 ms and 1.1 ms: 8 %


def test_a_window_waits_for_the_last_group_whatever_the_order_of_reports() -> None:
    control, times = control_of(), skewed(WINDOW)
    for group in (3, 1, 0):
        control.observe(Observation(group, 1, times[group], [0] * WINDOW))
        assert control.judge() is None
    control.observe(Observation(2, 1, times[2][:-1], [0] * (WINDOW - 1)))
    assert control.judge() is None
    control.observe(Observation(2, WINDOW, times[2][-1:], [0]))
    assert control.judge() is not None


def test_rounds_from_before_a_change_say_nothing_of_the_mode_of_now() -> None:
    control = control_of()
    feed(control, skewed(WINDOW + 1))
    decision = control.judge()
    assert decision is not None
    control.committed(decision, 25)
    feed(control, alike(WINDOW - 2), first=WINDOW + 1)  # to round 38: 14 of the window
    assert control.judge() is None
    feed(control, alike(6), first=2 * WINDOW - 1)
    back = control.judge()
    assert back is not None
    assert back.mode == "sync"
    assert back.why.startswith("iterations 25 to 44: ")


def test_a_round_is_looked_at_once() -> None:
    control = control_of()
    feed(control, alike(WINDOW + 1))
    assert control.judge() is None
    feed(control, skewed(WINDOW), first=WINDOW + 1)
    decision = control.judge()
    assert decision is not None
    assert decision.why.startswith("iterations 21 to 40: ")
    control.committed(decision, 30)  # from before the window's end on
    feed(control, alike(WINDOW), first=2 * WINDOW + 1)
    back = control.judge()
    assert back is not None
    assert back.why.startswith("iterations 41 to 60: ")


def test_rounds_that_nobody_else_reports_are_not_kept_for_ever() -> None:
    control = control_of()
    for first in range(0, 50_000, 100):
        control.observe(Observation(0, first, [1000] * 100, [0] * 100))
        assert len(control._window._rounds[0]) <= 10_000
    assert control.judge() is None


def test_groups_that_take_no_time_change_nothing() -> None:
    control = control_of()
    feed(control, alike(WINDOW + 1, own_us=0), exchange_us=0)
    assert control.judge() is None


def test_a_group_that_has_died_is_waited_for_no_more_and_what_it_told_is_dropped() -> None:
    control, times = control_of(), skewed(WINDOW)
    for group in range(3):
        control.observe(Observation(group, 1, times[group], [500] * WINDOW))
    assert control.judge() is None, "group 3 has told nothing"
    control.observe(Observation(3, 1, [10**9] * (WINDOW - 1), [10**9] * (WINDOW - 1)))
    control.lose(3)
    assert control.groups == {0, 1, 2}
    decision = control.judge()
    of_three = ModeControl(num_groups=3, staleness=3)
    for group in range(3):
        of_three.observe(Observation(group, 1, times[group], [500] * WINDOW))
    assert decision == of_three.judge()
    assert decision is not None
    assert decision.mode == "ssp"


def test_where_one_group_is_left_sync_comes_back() -> None:
    control, times = control_of("ssp"), skewed(WINDOW)
    for group in (0, 1, 2):
        control.lose(group)
    control.observe(Observation(3, 1, times[3], [500] * WINDOW))
    decision = control.judge()
    assert decision is not None
    assert decision.mode == "sync"


def test_a_group_that_has_joined_is_waited_for_from_the_round_behind_its_first_on() -> None:
    control, times = control_of(), skewed(WINDOW)
    control.lose(2)
    control.admit(7, 5)
    assert control.groups == {0, 1, 3, 7}
    for group, own in zip((0, 1, 3), times, strict=False):
        control.observe(Observation(group, 1, [1] * 5 + own, [0] * (WINDOW + 5)))
    assert control.judge() is None
    control.observe(Observation(7, 6, times[3], [0] * WINDOW))
    decision = control.judge()
    assert decision is not None
    assert decision.why.startswith(f"iterations 6 to {WINDOW + 5}: ")


def test_who_joins_behind_the_rounds_that_are_looked_at_moves_nothing() -> None:
    control, times = control_of(), skewed(WINDOW)
    control.committed(Decision("sync", 0, ""), 30)
    control.admit(4, 9)
    for group, own in enumerate([*times, times[0]]):
        control.observe(Observation(group, 30, own, [0] * WINDOW))
    decision = control.judge()
    assert decision is not None
    assert decision.why.startswith("iterations 30 to 49: ")
