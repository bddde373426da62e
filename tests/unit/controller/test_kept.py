"""What psdist has chosen goes into a checkpoint and comes back: the same is decided from there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psdist.controller import WINDOW, Observation
from psdist.controller.codec import FIRST, CodecControl
from psdist.controller.kept import KeptGuard, KeptSteps, are_starts, at_place, from_place
from psdist.controller.loss_guard import LossGuard
from psdist.controller.loss_steps import LossStepControl
from tests.unit.controller.test_codec import NAMES, SIZES, Run, link

STARTS = ((0, 2), (10, 3), (20, 1))


def test_what_rules_in_a_round_and_from_there_on() -> None:
    assert [at_place(STARTS, each) for each in (0, 9, 10, 19, 20, 99)] == [2, 2, 3, 3, 1, 1]
    assert from_place(STARTS, 9) == STARTS
    assert from_place(STARTS, 10) == ((0, 3), (20, 1))
    assert from_place([*STARTS], 25) == ((0, 1),)


@pytest.mark.parametrize(
    ("starts", "are"),
    [
        (STARTS, True),
        (((0, 1),), True),
        ((), False),
        (((1, 1),), False),
        (((0, 1), (5, 2), (5, 1)), False),
        (((0, 1), (5, 2), (4, 1)), False),
        (((0, 0),), False),
        (((0, 4),), False),
    ],
)
def test_starts_begin_with_round_0_and_ascend(
    starts: tuple[tuple[int, int], ...], *, are: bool
) -> None:
    assert are_starts(starts, least=1, most=3) == are


# -- codecs --------------------------------------------------------------------------------------


def trained(**given: Any) -> Run:
    run = Run(**given)
    run.train(link(100.0), windows=3)
    assert run.control.level
    return run


def another(run: Run, clock: int, **given: Any) -> Run:
    """A run that resumes from a checkpoint of the first."""
    next_run = Run(**given)
    next_run.control.go_on(run.control.kept(clock), clock)
    next_run.round = clock
    return next_run


@pytest.mark.parametrize("given", [{}, {"budget": 0.05}, {"patience": 3}])
def test_a_run_that_goes_on_decides_what_the_first_one_would_have(given: dict[str, Any]) -> None:
    run = trained(**given)
    clock = run.control.window.first
    again = another(run, clock, **given)
    assert again.control.level == run.control.level
    assert again.control.kept(clock) == run.control.kept(clock)
    assert again.control.window.first == clock + FIRST
    for each in (run, again):
        each.train(link(0.1), windows=12)
    said = [[(each.level, each.why.split(": ", 1)[1]) for each in one.said] for one in (run, again)]
    assert said[0][-len(said[1]) :] == said[1]
    assert said[1], "nothing was decided"
    assert run.control.level == again.control.level


def test_a_change_that_was_set_for_a_later_round_is_kept() -> None:
    run = trained()
    (*_, (last_round, level)) = run.control.starts
    kept = run.control.kept(last_round - 1)
    assert kept.starts[-1] == (last_round, level)
    assert kept.starts[0][0] == 0
    assert kept.starts[0][1] != level
    again = Run()
    again.control.go_on(kept, last_round - 1)
    assert again.control.level == level
    assert again.control.window.first == last_round + FIRST
    assert run.control.kept(last_round).starts == ((0, level),)


def test_what_single_groups_took_is_not_kept_nor_is_what_all_took_together_theirs() -> None:
    """In async; in ssp as in sync."""
    kept = trained().control.kept(200)
    assert kept.seen
    names = {"num_groups": 2, "names": NAMES}
    for mode, has_seen in (("ssp", True), ("async", False)):
        control = CodecControl(**names, mode=mode, staleness=2)  # type: ignore[arg-type]
        control.know_sizes(SIZES)
        control.go_on(kept, 200)
        assert control.level == kept.starts[-1][1]
        assert bool(control.kept(200).seen) == has_seen
        assert control.window.first == 200 + FIRST
        for group in range(2):
            told = [30_000] * WINDOW, [1_000] * WINDOW
            control.observe(Observation(group, 200, [1], [900_000]))
            control.observe(Observation(group, 200 + FIRST, *told))
        control.judge()
        assert bool(control.kept(230).seen) == has_seen
        assert [*control.times] == ([-1] if has_seen else [0, 1])


def test_a_moment_that_is_not_frozen_yet_is_waited_for_behind_a_checkpoint_too() -> None:
    kept = CodecControl(num_groups=1, names=NAMES, freeze_step=300).kept(100)
    for mode in ("sync", "ssp"):
        control = CodecControl(num_groups=1, names=NAMES, mode=mode, freeze_step=300)
        control.go_on(kept, 100)
        assert control.window.first == 300
        control.go_on(kept, 400)
        assert control.window.first == 400 + FIRST


def test_what_is_of_no_such_run_is_refused() -> None:
    kept = trained(patience=2).control.kept(100)
    assert kept.guard is not None
    wrong: list[dict[str, Any]] = [
        {"names": NAMES[:4]},
        {"starts": ((0, 5),)},
        {"lossiest": 5},
        {"lossiest": -1},
        {"came_from": 5},
        {"seen": ((5, 1, 1, 1),)},
        {"seen": ((1, 1, -1, 1),)},
        {"errors": ((5, 1, 1),)},
        {"errors": ((1, -1, 1),)},
        {"vain": ((5, 1),)},
        {"vain": ((1, 7),)},
        {"num_windows": -1},
        {"here": -1},
        {"fixed_us": -1.0},
        {"fixed_us": float("inf")},
        {"guard": replace(kept.guard, count=-1)},
        {"guard": replace(kept.guard, num_vain=-1)},
        {"guard": replace(kept.guard, total=float("nan"))},
        {"guard": replace(kept.guard, least=float("inf"))},
    ]
    for each in wrong:
        with pytest.raises(ValueError, match=r"of the codecs none, |reported losses"):
            Run(patience=2).control.go_on(replace(kept, **each), 100)
    Run(patience=2).control.go_on(kept, 100)
    Run(patience=2).control.go_on(replace(kept, vain=((1, 6),), lossiest=0), 100)


def test_what_the_loss_has_ruled_out_stays_so() -> None:
    control = CodecControl(num_groups=1, names=NAMES, loss_patience=2)
    control.know_sizes(SIZES)
    control.go_on(replace(control.kept(0), lossiest=1), 0)
    run = Run(groups=1, patience=2)
    run.control = control
    assert set(run.train(link(100.0), windows=6)[1:]) == {1}


def test_a_guard_goes_on_counting() -> None:
    guard, again = LossGuard(2), LossGuard(2)
    guard.report(2, 4.0)
    assert not guard.stands_still()
    guard.report(1, 2.5)
    assert not guard.stands_still()
    guard.report(1, 3.0)
    assert guard.kept() == KeptGuard(count=1, total=3.0, least=2.0, num_vain=1)
    again.go_on(guard.kept())
    assert again.stands_still()
    assert again.words == "the loss not below 2 for 2 windows"


# -- local steps by the loss ---------------------------------------------------------------------

KEPT = KeptSteps(starts=((0, 8), (2, 4)), num_fixed=3, first_loss=4.0, totals=(1.0, 2.0), count=3)


def steps(num_workers: int = 2) -> LossStepControl:
    return LossStepControl(num_workers=num_workers, num_groups=2, local_steps=8)


def test_steps_go_on_with_the_first_loss_and_what_was_reported() -> None:
    control = steps()
    control.go_on(KEPT)
    assert control.now == 4
    assert control.kept(KEPT.starts, 3) == KEPT
    control.report(1, 1, 1.0)
    choice = control.choose()  # 4 / 4 losses: a quarter of the first
    assert choice.steps == (4, 4)
    control.report(0, 1, 0.25)
    assert control.choose().steps == (2, 2)
    assert control.of_all(5) == (5, 5)


def test_other_workers_go_on_with_the_sum() -> None:
    control = steps(num_workers=3)
    control.go_on(KEPT)
    assert control.kept(KEPT.starts, 3).totals == (3.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"starts": ((0, 9),)},
        {"starts": ((0, 0),)},
        {"num_fixed": -1},
        {"count": -1},
        {"totals": (-1.0, 0.0)},
        {"totals": (float("inf"), 0.0)},
        {"first_loss": -1.0},
        {"first_loss": float("nan")},
    ],
)
def test_steps_of_no_such_run_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^of more than 8 local steps, or not whole$"):
        steps().go_on(replace(KEPT, **wrong))
