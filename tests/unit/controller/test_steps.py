"""How many local steps each group makes, by what its steps have taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.controller.kept import KeptPaces, KeptPass
from psdist.controller.steps import KEPT, Choice, StepControl, first_of, window_of


def chosen(paces: list[int], sizes: list[int], local_steps: int) -> tuple[int, ...]:
    control = StepControl(sizes=sizes, local_steps=local_steps)
    for group, pace in enumerate(paces):
        control.observe(group, pace)
    return control.choose().steps


def test_a_faster_group_makes_more_steps_in_the_same_time() -> None:
    assert chosen([3000, 3000, 3000, 1000], [1] * 4, 16) == (11, 11, 11, 33)
    assert chosen([1000, 1000, 1000, 3000], [1] * 4, 16) == (18, 18, 18, 6)
    assert chosen([3000, 1000], [1, 3], 8) == (3, 9)  # a step of the second is of three workers


def test_groups_that_are_alike_make_as_many_as_were_set() -> None:
    assert chosen([1000, 1010, 990], [2, 2, 2], 16) == (16, 16, 16)


def test_nothing_changes_until_all_groups_have_told_something() -> None:
    control = StepControl(sizes=[1, 1], local_steps=8)
    assert control.choose() == Choice((8, 8), "")
    control.observe(0, 100)
    assert control.choose() == Choice((8, 8), "")
    control.observe(1, 300)
    assert control.choose() == Choice((12, 4), "a step takes 0.15 ms in the mean, not 0.30 ms")
    assert control.choose() == Choice((12, 4), ""), "it is said once"


def test_small_gains_change_nothing() -> None:
    control = StepControl(sizes=[1, 1], local_steps=100)
    control.observe(0, 1000)
    control.observe(1, 1060)  # 3 % of a step's time
    assert control.choose() == Choice((100, 100), "")
    for _ in range(KEPT):
        control.observe(1, 1200)  # 9 %
    assert control.choose().steps == (109, 91)


def test_a_pace_is_the_median_of_the_last_rounds() -> None:
    control = StepControl(sizes=[1, 1], local_steps=8)
    for _ in range(5):
        control.observe(0, 100)
        control.observe(1, 100)
    control.observe(1, 10_000)  # an evaluation, say
    assert control.choose().steps == (8, 8)
    for _ in range(KEPT):
        control.observe(1, 300)
    assert control.choose().steps == (12, 4)


def test_steps_that_take_no_time_are_no_division_by_zero() -> None:
    assert chosen([0, 0], [1, 1], 8) == (8, 8)


def test_terms_are_of_one_hand_and_then_of_four_each() -> None:
    assert [window_of(number) for number in range(10)] == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert [first_of(block) for block in range(4)] == [0, 1, 5, 9]


@given(
    st.lists(st.tuples(st.integers(1, 10**7), st.integers(1, 8)), min_size=1, max_size=12),
    st.integers(2, 200),
)
def test_every_group_makes_a_step_and_none_comes_after_the_slowest(
    groups: list[tuple[int, int]], local_steps: int
) -> None:
    paces, sizes = map(list, zip(*groups, strict=True))
    steps = chosen(paces, sizes, local_steps)
    assert min(steps) >= 1
    if steps == (local_steps,) * len(steps):
        return  # nothing was to be gained
    times = [n * pace for n, pace in zip(steps, paces, strict=True)]
    slowest = paces.index(max(paces))
    assert max(times) == times[slowest]
    for group, time_us in enumerate(times):
        assert time_us + paces[group] > times[slowest], "one more would have been in time"


PACES = KeptPaces(sizes=(1, 2), total=24, steps=(3, 10), step_us=((900, 800), (2400,)))


PASS = KeptPass(loader=1, number=3, starts=((0, (8, 8)), (2, (3, 10))), num_fixed=4)


def test_a_pass_says_what_was_fixed_of_it() -> None:
    assert [PASS.steps_of(block) for block in range(5)] == [(8, 8)] * 2 + [(3, 10)] * 2 + [None]
    assert PASS.then(4, (3, 10)) == replace(PASS, num_fixed=5)
    more = PASS.then(4, (3, 9))
    assert (more.steps_of(3), more.steps_of(4)) == ((3, 10), (3, 9))
    assert replace(PASS, starts=((1, (8, 8)),)).steps_of(0) is None


def test_what_a_checkpoint_keeps_is_gone_on_with() -> None:
    mine = StepControl(sizes=[1, 2], local_steps=8)
    mine.go_on(PACES)
    assert mine.kept() == PACES
    for _ in range(2):
        assert mine.choose() == Choice((3, 10), ""), "a term may have begun"
    mine.observe(0, 800)
    assert mine.choose().why, "and is chosen again behind it"


def test_of_other_groups_nothing_is_known_and_of_other_steps_how_fast_groups_are() -> None:
    others = StepControl(sizes=[2, 1], local_steps=8)
    others.go_on(PACES)
    assert others.kept() == StepControl(sizes=[2, 1], local_steps=8).kept()
    more = StepControl(sizes=[1, 2], local_steps=80)
    more.go_on(PACES)
    assert more.kept() == replace(PACES, total=240, steps=(80, 80))
    assert more.choose().steps != (80, 80)


@pytest.mark.parametrize(
    "damage",
    [
        {"steps": (3,)},
        {"steps": (3, 0)},
        {"sizes": (1, 0)},
        {"step_us": ((900,),)},
        {"step_us": ((900,), (0,))},
        {"step_us": ((1,) * (KEPT + 1), ())},
        {"passes": (replace(PASS, starts=()),)},
        {"passes": (replace(PASS, starts=((0, (8,)),)),)},
        {"passes": (replace(PASS, starts=((0, (8, 0)),)),)},
        {"passes": (replace(PASS, starts=((2, (8, 8)), (0, (8, 8)))),)},
        {"passes": (replace(PASS, num_fixed=2),)},
        {"passes": (replace(PASS, loader=-1),)},
    ],
)
def test_speeds_that_there_cannot_be_are_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of groups that there cannot be, or not whole"):
        StepControl(sizes=[1, 2], local_steps=8).go_on(replace(PACES, **damage))
