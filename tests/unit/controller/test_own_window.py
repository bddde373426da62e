"""Windows of each group's own rounds."""

from __future__ import annotations

import pytest

from psdist.controller import WINDOW, Observation, Times
from psdist.controller.own_window import Latest, OwnWindow


def tell(window: OwnWindow, group: int, first: int, count: int) -> None:
    """Rounds whose own time is their number."""
    numbers = list(range(first, first + count))
    window.add(Observation(group, first, numbers, [0] * count))


def rounds(first: int) -> list[Times]:
    return [Times(each, 0) for each in range(first, first + WINDOW)]


def window_of(*, waits_for_all: bool = True, first: int = 5) -> OwnWindow:
    return OwnWindow(num_groups=2, first=first, waits_for_all=waits_for_all)


@pytest.mark.parametrize("waits_for_all", [True, False])
def test_of_each_group_what_it_told_last_counts(*, waits_for_all: bool) -> None:
    window = window_of(waits_for_all=waits_for_all)
    tell(window, 0, 1, 60)
    tell(window, 1, 1, WINDOW + 3)
    assert window.take() is None, "rounds before the first do not count"
    tell(window, 1, WINDOW + 4, 1)
    assert window.take() == {0: Latest(0, 41, rounds(41)), 1: Latest(0, 5, rounds(5))}
    tell(window, 0, 61, WINDOW)
    tell(window, 1, 25, WINDOW - 1)
    assert window.take() is None, "the next window begins behind"
    tell(window, 1, 44, 1)
    assert window.take() == {0: Latest(0, 61, rounds(61)), 1: Latest(0, 25, rounds(25))}


def test_behind_a_change_none_of_before_counts() -> None:
    window = window_of()
    tell(window, 0, 5, 12)
    tell(window, 1, 5, 5)
    window.change(17, first=19)
    assert window.first == 19
    tell(window, 0, 17, WINDOW + 1)
    tell(window, 1, 10, 40)
    assert window.take() is None
    tell(window, 0, 18 + WINDOW, 1)
    assert window.take() == {0: Latest(17, 19, rounds(19)), 1: Latest(17, 30, rounds(30))}


def test_who_is_behind_a_change_is_waited_for_where_others_wait_for_it() -> None:
    for waits_for_all in (True, False):
        window = window_of(waits_for_all=waits_for_all)
        window.change(100, first=102)
        tell(window, 1, 5, 40)
        tell(window, 0, 50, 40)
        assert window.take() is None, "nobody has come there"
        tell(window, 0, 90, 12 + WINDOW)
        found = window.take()
        if waits_for_all:
            assert found is None
        else:
            assert found == {0: Latest(100, 102, rounds(102)), 1: Latest(0, 25, rounds(25))}
            tell(window, 0, 122, WINDOW)
            tell(window, 1, 45, WINDOW - 1)
            assert window.take() is None, "and it tells of as many rounds as others"


def test_a_later_change_takes_the_place_of_one_that_nobody_had_come_to() -> None:
    window = window_of()
    window.change(30, first=32)
    window.change(30, first=33)
    window.change(50, first=52)
    window.change(40, first=42)
    for group in range(2):
        tell(window, group, 20, 22 + WINDOW)
    found = window.take()
    assert found == {group: Latest(40, 42, rounds(42)) for group in range(2)}


def test_the_dead_are_not_waited_for_and_who_joins_is_from_behind_its_first_round_on() -> None:
    window = window_of()
    tell(window, 0, 5, WINDOW)
    window.lose(1)
    window.admit(2, 30)
    assert window.groups == {0, 2}
    tell(window, 2, 30, WINDOW)
    assert window.take() is None
    tell(window, 2, 50, 1)
    assert window.take() == {0: Latest(0, 5, rounds(5)), 2: Latest(0, 31, rounds(31))}
