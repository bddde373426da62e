"""How many local steps all groups make, by the loss that scripts report."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.controller.loss_steps import MOST_LOSS, LossStepControl
from psdist.controller.steps import Choice


def control(local_steps: int = 16, *, num_workers: int = 2) -> LossStepControl:
    return LossStepControl(num_workers=num_workers, num_groups=3, local_steps=local_steps)


def chosen(losses: list[float], local_steps: int = 16) -> list[int]:
    """By decision, one loss before each."""
    machine, steps = control(local_steps), []
    for loss in losses:
        machine.report(0, 1, loss)
        steps.append(machine.choose().steps[0])
    return steps


def test_steps_fall_with_the_root_of_the_loss() -> None:
    assert chosen([4.0, 1.0, 0.25]) == [16, 8, 4]
    assert chosen([4.0, 3.9]) == [16, 16], "15.8, upwards"
    assert chosen([4.0, 3.5]) == [16, 15]
    assert chosen([4.0, 1e-9, 0.0]) == [16, 1, 1]


def test_steps_never_rise() -> None:
    assert chosen([4.0, 1.0, 2.0, 9.0, 1.0]) == [16, 8, 8, 8, 8]
    assert chosen([1.0, 4.0]) == [16, 16]


def test_all_groups_make_as_many_and_a_change_says_why() -> None:
    machine = control()
    machine.report(1, 1, 2.0)
    assert machine.choose() == Choice((16, 16, 16), "")
    machine.report(0, 1, 0.5)
    assert machine.choose() == Choice((8, 8, 8), "the loss is 0.5, 2 at first")
    machine.report(0, 1, 0.5)
    assert machine.choose() == Choice((8, 8, 8), ""), "it is said once"


def test_the_loss_is_the_mean_of_all_reports_since_the_last_decision() -> None:
    machine = control()
    machine.report(0, 3, 3 * 4.0)
    machine.report(1, 1, 8.0)
    machine.choose()  # 5 at first
    machine.report(0, 2, 2 * 1.0)
    machine.report(1, 2, 2 * 1.5)
    machine.report(0, 4, 4 * 1.25)
    assert machine.choose() == Choice((8, 8, 8), "the loss is 1.25, 5 at first")
    machine.report(0, 1, 5 / 16)
    assert machine.choose().steps[0] == 4, "what was decided before counts no more"


def test_without_reports_nothing_changes_and_the_first_one_is_the_first_loss() -> None:
    machine = control()
    assert machine.choose() == Choice((16, 16, 16), "")
    machine.report(0, 1, 8.0)
    assert machine.choose().steps[0] == 16
    assert machine.choose().steps[0] == 16
    machine.report(0, 1, 2.0)
    assert machine.choose() == Choice((8, 8, 8), "the loss is 2, 8 at first")
    assert machine.choose() == Choice((8, 8, 8), "")


def test_a_first_loss_of_nothing_leaves_the_steps() -> None:
    assert chosen([0.0, 0.0, 3.0]) == [16, 16, 16]


def test_the_order_of_workers_changes_no_bit() -> None:
    def decided(order: list[int]) -> Choice:
        machine, totals = control(1000, num_workers=3), [0.1, 1e16, 0.3]
        machine.report(0, 1, 1e17)
        machine.choose()
        for worker in order:
            machine.report(worker, 1, totals[worker])
        return machine.choose()

    assert decided([0, 1, 2]) == decided([2, 0, 1]) == decided([1, 2, 0])
    assert decided([0, 1, 2]).steps[0] == math.ceil(1000 * math.sqrt(1 / 30))


@given(st.lists(st.floats(0, MOST_LOSS), min_size=1, max_size=9), st.integers(2, 10**6))
def test_steps_fall_from_what_was_set_to_one_at_least(
    losses: list[float], local_steps: int
) -> None:
    steps = chosen(losses, local_steps)
    assert steps[0] == local_steps
    assert sorted(steps, reverse=True) == steps
    assert min(steps) >= 1


@pytest.mark.parametrize("count", [1, 10**9])
def test_the_largest_losses_that_there_are_have_a_mean(count: int) -> None:
    machine = control(num_workers=2)
    for worker in (0, 1):
        machine.report(worker, count, MOST_LOSS * count)
    machine.choose()
    machine.report(0, 1, MOST_LOSS / 4)
    assert machine.choose().steps[0] == 8
