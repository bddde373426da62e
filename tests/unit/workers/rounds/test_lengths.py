"""When a round of local steps has ended, and what of its steps the coordinator is told."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from psdist.controller.steps import Term
from psdist.errors import UsageError
from psdist.workers.loop import Wait
from psdist.workers.rounds.lengths import EqualSteps, StepsByLoss, StepsBySpeed


class Rig:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.told: list[tuple[int, int]] = []
        self.asked: list[Term] = []
        self.length = StepsBySpeed(
            group=1,
            steps_of=self.steps_of,
            tell=lambda clock, step_us: self.told.append((clock, step_us)),
            now_s=lambda: self.now_s,
        )

    def steps_of(self, term: Term) -> Generator[Wait, None, tuple[int, ...]]:
        self.asked.append(term)
        yield Wait(lambda: True, lambda: "an answer")
        return (2, 3)

    def step(self, in_round: int, takes_s: float, *, clock: int = 0) -> bool:
        if in_round == 1:
            for _ in self.length.begin(clock):
                pass
        self.now_s += takes_s
        return self.length.end_step(in_round)

    def step_of_batch(self, in_round: int, takes_s: float, *, ends_assignment: bool) -> bool:
        self.length.begin_batch(ends_assignment=ends_assignment)
        self.length.use_batch()
        self.length.require_batches()
        return self.step(in_round, takes_s)


def test_equal_rounds_are_as_long_as_they_are_set() -> None:
    length = EqualSteps(3)
    assert not list(length.begin(0))
    length.use_batch()
    length.require_batches()
    assert [length.end_step(each) for each in (1, 2, 3)] == [False, False, True]
    length.end_round(0)
    length.exchanged()


def test_a_round_ends_with_the_hand_that_was_dealt() -> None:
    rig = Rig()
    ends = [rig.step_of_batch(each, 1.0, ends_assignment=each == 4) for each in (1, 2, 3, 4)]
    assert ends == [False, False, False, True]
    assert not rig.asked, "the loader has asked"


def test_batches_of_an_evaluation_end_no_round() -> None:
    rig = Rig()
    assert not rig.step_of_batch(1, 1.0, ends_assignment=False)
    rig.length.use_batch()
    rig.length.begin_batch(ends_assignment=True)  # of another loader, without gradients
    rig.length.require_batches()


def test_a_script_with_batches_of_its_own_asks_term_by_term() -> None:
    rig = Rig()
    for clock in range(6):
        ends = [rig.step(each, 1.0, clock=clock) for each in (1, 2, 3)]
        assert ends == [False, False, True]
    assert rig.asked == [Term(0, 0, 0), Term(0, 0, 1), Term(0, 0, 2)]


def test_the_first_step_of_a_round_does_not_count() -> None:
    rig = Rig()
    rig.step(1, 50.0)  # an evaluation was before it
    rig.step(2, 0.002)
    rig.step(3, 0.004)
    rig.length.end_round(7)
    assert rig.told == [(7, 3000)]


def test_the_only_step_of_a_round_is_counted_from_the_exchange_before_it() -> None:
    rig = Rig()
    rig.now_s += 5.0
    rig.length.exchanged()
    rig.step(1, 0.25, clock=1)
    rig.length.end_round(1)
    assert rig.told == [(1, 250_000)]


def test_a_step_takes_one_batch() -> None:
    rig = Rig()
    rig.length.require_batches()  # of the script's own
    rig.step_of_batch(1, 1.0, ends_assignment=False)
    with pytest.raises(UsageError, match="a step of 0 batches"):
        rig.length.require_batches()
    rig.length.use_batch()
    rig.length.use_batch()
    with pytest.raises(UsageError, match="a step of 2 batches"):
        rig.length.require_batches()


def test_rounds_by_the_loss_are_as_long_as_was_fixed_for_their_term() -> None:
    told: list[object] = []

    def steps_of(term: Term) -> Generator[Wait, None, tuple[int, ...]]:
        told.append(term)
        yield Wait(lambda: True, lambda: "an answer")
        return (9, 3 - term.block)

    length = StepsByLoss(
        group=1,
        steps_of=steps_of,
        tell=lambda clock: told.append(("reported", clock)),
        on_round=lambda clock, steps: told.append((clock, steps)),
    )
    for clock in range(6):
        assert len(list(length.begin(clock))) == (clock in (0, 1, 5))
        length.use_batch()
        length.require_batches()
        ends = [length.end_step(each) for each in range(1, 4)]
        assert ends == [each == (3, 2, 2, 2, 2, 1)[clock] for each in range(1, 4)]
        length.end_round(clock)
        length.exchanged()
    assert told == [
        *[("reported", 0), Term(0, 0, 0), (0, 3)],
        *[("reported", 1), Term(0, 0, 1), (1, 3), (2, 3), (3, 3), (4, 3)],
        *[("reported", 5), Term(0, 0, 2), (5, 3)],
    ]


def test_a_round_by_the_loss_that_is_cut_says_how_many_steps_it_had() -> None:
    told: list[tuple[int, int]] = []

    def steps_of(_term: Term) -> Generator[Wait, None, tuple[int, ...]]:
        yield Wait(lambda: True, lambda: "an answer")
        return (5,)

    length = StepsByLoss(
        group=0,
        steps_of=steps_of,
        tell=lambda _clock: None,
        on_round=lambda clock, steps: told.append((clock, steps)),
    )
    list(length.begin(0))
    assert not length.end_step(1)
    assert not length.end_step(2)
    length.end_round(0)
    assert told == [(0, 2)]
