"""When a loss has blown up, and what follows from that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psdist.controller.codec import CodecControl
from psdist.controller.kept import KeptSteps, Rollback, TuningState, rolled_back, within
from psdist.controller.rollback import HIGH, LOOK, KeptRise, Rise, RiseGuard

NAMES = ("none", "fp16", "int8", "int4", "int4/sign")


def looks(guard: RiseGuard, *losses: float, first: int = 1) -> list[Rise | None]:
    """One after the other, each of two reports."""
    return [
        guard.report(LOOK * number, 2, 2 * loss) for number, loss in enumerate(losses, start=first)
    ]


def test_three_looks_running_that_are_high_are_a_rise() -> None:
    guard = RiseGuard(2.0)
    assert looks(guard, 5.0, 4.0, 8.1, 8.1, 7.9, 8.1, 8.1, 9.0) == [
        *[None] * 7,
        Rise(9.0, 4.0, 2 * LOOK - 1),
    ]
    assert looks(guard, 9.0, first=9) == [None], "said once"
    assert HIGH == 3


def test_good_is_a_loss_a_quarter_of_the_way_at_most() -> None:
    guard = RiseGuard(3.0)
    looks(guard, 4.0)
    assert guard.kept() == KeptRise(best=4.0, good=0), "the first look is compared with none"
    looks(guard, 6.0, first=2)
    assert guard.kept() == KeptRise(best=4.0, good=2 * LOOK - 1)
    looks(guard, 6.1, first=3)
    assert guard.kept().good == 2 * LOOK - 1
    looks(guard, 3.0, first=4)
    assert guard.kept() == KeptRise(best=3.0, good=4 * LOOK - 1)
    looks(guard, 4.6, first=5)
    assert guard.kept() == KeptRise(best=3.0, good=4 * LOOK - 1)


def test_a_look_is_of_four_rounds_and_has_the_mean_of_all() -> None:
    guard = RiseGuard(2.0)
    for number, loss in enumerate((1.0, 2.0, 3.0, 6.0), start=1):
        guard.report(number, 1, loss)
    assert guard.kept().best == 3.0
    guard.report(2 * LOOK - 1, 1, 1.0)
    assert guard.kept().best == 3.0
    guard.report(2 * LOOK, 3, 7.0)
    assert guard.kept().best == 2.0


def test_a_run_that_goes_on_compares_with_the_least_loss_of_before() -> None:
    guard = RiseGuard(2.0)
    guard.go_on(KeptRise(best=1.0, good=50), 40)
    assert guard.kept() == KeptRise(best=1.0, good=40)
    assert guard.report(40 + LOOK - 1, 1, 9.0) is None
    for each in (1, 2):
        assert guard.report(40 + each * LOOK, 1, 9.0) is None
    assert guard.report(40 + 3 * LOOK, 1, 9.0) == Rise(9.0, 1.0, 40)


def test_a_run_in_which_nobody_had_looked_goes_on_from_what_is_taken_as_good() -> None:
    guard = RiseGuard(2.0)
    guard.go_on(None, 5000)
    assert guard.kept() == KeptRise(best=None, good=5000)
    assert guard.report(5000 + LOOK - 1, 1, 1.0) is None
    assert guard.kept().best is None, "no look has ended"
    assert [guard.report(5000 + each * LOOK, 1, 9.0**each) for each in (1, 2, 3, 4)][-1] == Rise(
        9.0**4, 5.0, 5000
    )


def test_a_loss_of_nothing_is_good_and_there_is_no_multiple_of_it() -> None:
    guard = RiseGuard(2.0)
    assert looks(guard, 0.0, 5.0, 4.0, 0.0, 4.1, 4.2, 4.3) == [None] * 7
    assert guard.kept() == KeptRise(best=4.0, good=7 * LOOK - 1)
    assert looks(guard, 0.0, 8.1, 8.1, 8.1, first=8)[-1] == Rise(8.1, 4.0, 8 * LOOK - 1)
    other = RiseGuard(2.0)
    other.go_on(KeptRise(best=0.0, good=40), 40)
    assert looks(other, 1.0, 1.0, 1.0, 1.0, first=11) == [None] * 4


@pytest.mark.parametrize(
    "wrong",
    [
        KeptRise(best=-1.0, good=0),
        KeptRise(best=float("inf"), good=0),
        KeptRise(best=float("nan"), good=0),
        KeptRise(best=1.0, good=-1),
    ],
)
def test_what_no_checkpoint_has_is_refused(wrong: KeptRise) -> None:
    with pytest.raises(ValueError, match=r"^of a loss that there is not$"):
        RiseGuard(2.0).go_on(wrong, 0)
    RiseGuard(2.0).go_on(KeptRise(best=None, good=0), 0)


RISE = Rise(9.0, 1.0, 40)


@pytest.mark.parametrize(("lossiest", "allowed"), [(4, 3), (1, 0), (0, -1)])
def test_codecs_go_up_a_level(lossiest: int, allowed: int) -> None:
    assert rolled_back(60, RISE, lossiest, names=NAMES) == Rollback(
        round=60, loss=9.0, best=1.0, good=40, names=NAMES, lossiest=lossiest, allowed=allowed
    )


@pytest.mark.parametrize(("steps", "allowed"), [(16, 8), (5, 2), (2, 1), (1, -1)])
def test_steps_are_halved(steps: int, allowed: int) -> None:
    found = rolled_back(60, RISE, steps)
    assert (found.names, found.lossiest, found.allowed) == ((), steps, allowed)


def test_what_was_kept_is_limited() -> None:
    control = CodecControl(num_groups=1, names=NAMES)
    kept = replace(
        control.kept(0), starts=((0, 1), (20, 4), (30, 3), (40, 1)), lossiest=4, came_from=4
    )
    found = within(TuningState(codecs=kept), rolled_back(60, RISE, 3, names=NAMES)).codecs
    assert found is not None
    assert (found.starts, found.lossiest, found.came_from) == (*(((0, 1), (20, 2), (40, 1)), 2, 2),)
    assert within(TuningState(codecs=found), rolled_back(60, RISE, 4, names=NAMES)).codecs == found
    other = rolled_back(60, RISE, 3, names=NAMES[:4])
    assert within(TuningState(codecs=kept), other).codecs == kept
    assert within(TuningState(codecs=kept), rolled_back(60, RISE, 2)).codecs == kept

    steps = KeptSteps(starts=((0, 9), (3, 6)), num_fixed=4, first_loss=1.0, totals=(), count=0)
    limited = within(TuningState(steps=steps), rolled_back(60, RISE, 9)).steps
    assert limited == replace(steps, starts=((0, 4),))
    assert within(TuningState(steps=steps), other).steps == steps


def test_the_lossiest_level_since_a_round() -> None:
    control = CodecControl(num_groups=1, names=NAMES)
    control.go_on(replace(control.kept(0), starts=((0, 1), (20, 4), (30, 3), (40, 1))), 0)
    assert [control.lossiest_since(each) for each in (0, 20, 29, 30, 39, 40, 99)] == [
        *(4, 4, 4, 3, 3, 1, 1),
    ]
    assert control.names == NAMES
