"""The bound of ssp that moves, by what rounds have taken."""

from __future__ import annotations

from psdist.config.settings import MOST_STALENESS_TO
from psdist.controller import WINDOW, Decision, Observation
from psdist.controller.bound import BoundControl, bounded_us


def test_when_the_last_group_has_made_its_rounds_follows_from_the_bound() -> None:
    first, second = [4, 4, 1, 1], [1, 1, 4, 4]
    assert bounded_us([first, second], 0) == 4 + 4 + 4 + 4
    assert bounded_us([first, second], 1) == 4 + 4 + 4
    assert bounded_us([first, second], 2) == 10
    assert bounded_us([first, second], 9) == 10
    assert bounded_us([[3, 3, 3], [1, 1, 1]], 0) == bounded_us([[3, 3, 3], [1, 1, 1]], 9) == 9


def test_no_bound_is_higher_than_a_window_can_tell() -> None:
    assert MOST_STALENESS_TO == WINDOW


def bound_of(control: BoundControl, own_us: list[list[int]], first: int = 1) -> Decision | None:
    for group, mine in enumerate(own_us):
        control.observe(Observation(group, first, mine, [0] * len(mine)))
    return control.judge()


def pairs() -> list[list[int]]:
    """Three slow rounds of one group, then three of the other: a bound of 3 waits for none."""
    first = ([5000] * 3 + [1000] * 3) * WINDOW
    return [first[:WINDOW], first[3 : WINDOW + 3]]


def test_the_bound_goes_up_to_the_least_that_is_nearly_as_fast_as_the_highest() -> None:
    control = BoundControl(num_groups=2, lowest=1, highest=8)
    decision = bound_of(control, pairs())
    assert decision is not None
    took_us = [bounded_us(pairs(), each) for each in range(9)]
    wanted = min(each for each in range(1, 9) if took_us[each] <= 1.02 * took_us[8])
    assert 1 < wanted < 8
    assert (decision.mode, decision.staleness) == ("ssp", wanted)
    shown = [f"{took_us[each] / WINDOW / 1e3:.2f} ms" for each in (1, wanted, 8)]
    assert decision.why == (
        f"iterations 1 to 20: {shown[0]} each with staleness 1, {shown[1]} with {wanted}, "
        f"{shown[2]} with 8"
    )
    control.committed(decision, 25)
    assert control.bound == wanted
    assert bound_of(control, pairs(), first=25) is None


def test_the_bound_comes_down_where_all_are_alike() -> None:
    control = BoundControl(num_groups=2, lowest=2, highest=8)
    control.committed(Decision("ssp", 6, ""), 1)
    decision = bound_of(control, [[1000] * WINDOW] * 2)
    assert decision is not None
    assert decision.staleness == 2


def test_one_group_that_is_always_slow_raises_no_bound() -> None:
    control = BoundControl(num_groups=2, lowest=0, highest=8)
    assert bound_of(control, [[1000] * WINDOW, [9000] * WINDOW]) is None


def test_what_is_between_nearly_as_fast_and_too_slow_changes_nothing() -> None:
    control = BoundControl(num_groups=2, lowest=0, highest=4)
    first = [1000 + 80 * (number % 2) for number in range(WINDOW)]  # 1.08 ms and 1.04 ms: 4 %
    assert bound_of(control, [first, first[::-1]]) is None
    first = [1000 + 200 * (number % 2) for number in range(WINDOW)]
    decision = bound_of(control, [first, first[::-1]], first=WINDOW + 1)
    assert decision is not None
    assert decision.staleness == 1


def test_the_exchange_is_a_part_of_every_round() -> None:
    control = BoundControl(num_groups=2, lowest=0, highest=4)
    first = [1000 + 200 * (number % 2) for number in range(WINDOW)]  # 9 % without it
    for group, mine in enumerate((first, first[::-1])):
        waits_us = [9000 + 100 * (number % 3) for number in range(WINDOW)]
        control.observe(Observation(group, 1, mine, waits_us))
    assert control.judge() is None
