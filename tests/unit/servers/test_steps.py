"""The coordinator's local steps by speed and by the loss: fixed once, the same for all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psdist.controller.codec import CodecControl
from psdist.controller.kept import KeptPaces, KeptPass, KeptSteps, Rollback, TuningState
from psdist.controller.loss_steps import MOST_LOSS, LossStepControl
from psdist.controller.observed import LossHeard, StepsObserved
from psdist.controller.rollback import KeptRise
from psdist.controller.steps import StepControl, Term
from psdist.errors import ProtocolError
from psdist.protocol.checkpoints import CHECKPOINT, pack_clocks
from psdist.protocol.control import (
    AskSteps,
    Control,
    Done,
    Enter,
    LossReported,
    Progress,
    Resume,
    Resumed,
    RoundTook,
    StepsFixed,
)
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.checkpoints import BeginCheckpoint, KeepTuningState
from psdist.servers.protocol.coordinator import Coordinator, CoordinatorAction
from psdist.servers.protocol.losses import Losses
from psdist.servers.protocol.steps import FixedSteps, StepsChosen
from tests.support.coordinators import assemble, part_of


def coordinator(*, is_by_speed: bool = True) -> Coordinator:
    """Groups of one and of two workers."""
    steps = StepControl(sizes=[1, 2], local_steps=8) if is_by_speed else None
    return assemble(num_workers=3, num_servers=1, groups=((0,), (1, 2)), steps=steps)


def by_loss(mode: str = "sync") -> Coordinator:
    steps = LossStepControl(num_workers=3, num_groups=2, local_steps=8)
    return assemble(num_workers=3, num_servers=1, groups=((0,), (1, 2)), steps=steps, mode=mode)


def tell(
    machine: Coordinator, message: RoundTook | LossReported | AskSteps | Enter | Done
) -> list[CoordinatorAction]:
    return machine.handle(worker_id(message.worker), message)


def ask(worker: int, block: int) -> AskSteps:
    return AskSteps(worker=worker, loader=1, number=0, block=block)


def answer(worker: int, block: int, *steps: int) -> SendControl:
    fixed = StepsFixed(loader=1, number=0, block=block, steps=list(steps))
    return SendControl(worker_id(worker), fixed)


def loss(worker: int, total: float, *, count: int = 1, round: int = 1) -> LossReported:
    return LossReported(worker=worker, round=round, count=count, total=total)


def chosen(block: int, steps: int, why: str = "") -> StepsChosen:
    return StepsChosen(Term(1, 0, block), (steps, steps), why)


def test_the_first_one_that_asks_fixes_it_for_all() -> None:
    machine = coordinator()
    assert tell(machine, RoundTook(worker=0, round=0, step_us=900)) == [StepsObserved(0, 0, 900)]
    assert tell(machine, ask(0, 1)) == [
        StepsChosen(Term(1, 0, 1), (8, 8), ""),
        answer(0, 1, 8, 8),
    ]
    assert tell(machine, RoundTook(worker=1, round=0, step_us=300)) == [StepsObserved(1, 0, 300)]
    assert tell(machine, ask(2, 1)) == [answer(2, 1, 8, 8)], "it is fixed, whatever is known now"
    why = "a step takes 0.39 ms in the mean, not 0.90 ms"
    assert tell(machine, ask(2, 2)) == [
        StepsChosen(Term(1, 0, 2), (3, 9), why),
        answer(2, 2, 3, 9),
    ]
    assert tell(machine, ask(0, 2)) == [answer(0, 2, 3, 9)]
    assert tell(machine, ask(1, 1)) == [answer(1, 1, 8, 8)], "it comes late"
    assert tell(machine, ask(1, 2)) == [answer(1, 2, 3, 9)]


def test_a_pass_more_over_the_same_loader_is_another_term() -> None:
    machine = coordinator()
    tell(machine, ask(0, 0))
    again = AskSteps(worker=0, loader=1, number=1, block=0)
    assert isinstance(tell(machine, again)[0], StepsChosen)


@pytest.mark.parametrize(
    "message",
    [
        RoundTook(worker=2, round=0, step_us=900),  # leads no group
        RoundTook(worker=0, round=-1, step_us=900),
        RoundTook(worker=0, round=1, step_us=-1),
        AskSteps(worker=0, loader=-1, number=0, block=0),
        AskSteps(worker=0, loader=1, number=-1, block=0),
        AskSteps(worker=0, loader=1, number=0, block=-1),
    ],
)
def test_what_cannot_be_is_refused(message: RoundTook | AskSteps) -> None:
    with pytest.raises(ProtocolError, match=f"worker {message.worker} sent .*damaged"):
        tell(coordinator(), message)


def test_a_worker_asks_once_and_for_itself() -> None:
    machine = coordinator()
    tell(machine, ask(0, 0))
    with pytest.raises(ProtocolError, match="twice or damaged"):
        tell(machine, ask(0, 0))
    with pytest.raises(ProtocolError, match="sent AskSteps of worker 1"):
        machine.handle(worker_id(0), ask(1, 0))


def test_nobody_asks_where_all_make_as_many() -> None:
    machine = coordinator(is_by_speed=False)
    messages: list[Control] = [ask(0, 0), RoundTook(worker=0, round=0, step_us=1), loss(0, 1.0)]
    for message in messages:
        with pytest.raises(ProtocolError, match="unasked"):
            machine.handle(worker_id(0), message)
    assert machine.handle(worker_id(0), Progress(worker=0, clock=0, samples=0)) == []


# -- by the loss ------------------------------------------------------------------------------


def test_in_sync_the_last_one_that_asks_fixes_it_by_what_all_have_reported() -> None:
    machine = by_loss()
    assert tell(machine, loss(0, 8.0)) == [LossHeard(0, 1, 1, 8.0)]
    assert tell(machine, ask(0, 1)) == []
    assert tell(machine, ask(2, 1)) == []
    assert tell(machine, loss(1, 24.0, count=3)) == [LossHeard(1, 1, 3, 24.0)]
    answers = [answer(worker, 1, 8, 8) for worker in (0, 1, 2)]
    assert tell(machine, ask(1, 1)) == [chosen(1, 8), *answers]
    tell(machine, loss(2, 2.0, round=5))
    assert [tell(machine, ask(worker, 2)) for worker in (2, 1)] == [[], []]
    why = "the loss is 2, 8 at first"
    answers = [answer(worker, 2, 4, 4) for worker in (0, 1, 2)]
    assert tell(machine, ask(0, 2)) == [chosen(2, 4, why), *answers]


def test_a_term_for_which_all_have_asked_is_forgotten() -> None:
    together, alone = by_loss(), by_loss("ssp")
    for worker in (0, 1, 2):
        tell(together, ask(worker, 1))
        tell(alone, ask(worker, 1))
    assert tell(together, ask(0, 1)) == [], "as if it were another one"
    assert tell(alone, ask(0, 1)) == [chosen(1, 8), answer(0, 1, 8, 8)]


def test_elsewhere_the_first_one_that_asks_fixes_it() -> None:
    for mode in ("ssp", "async"):
        machine = by_loss(mode)
        tell(machine, loss(0, 8.0))
        assert tell(machine, ask(0, 1)) == [chosen(1, 8), answer(0, 1, 8, 8)]
        tell(machine, loss(0, 2.0))
        assert tell(machine, ask(1, 1)) == [answer(1, 1, 8, 8)]
        assert tell(machine, ask(0, 2))[0] == chosen(2, 4, "the loss is 2, 8 at first")


def enter(worker: int, seq: int = 1) -> Enter:
    return Enter(worker=worker, seq=seq, name="barrier", payload=b"")


def test_nobody_waits_for_who_waits_in_a_collective() -> None:
    machine = by_loss()
    assert tell(machine, ask(0, 0)) == []
    assert tell(machine, enter(1)) == []
    assert tell(machine, enter(2)) == [chosen(0, 8), answer(0, 0, 8, 8)]
    assert tell(machine, ask(0, 1)) == [chosen(1, 8), answer(0, 1, 8, 8)]
    resume = tell(machine, enter(0))
    assert resume == [SendControl(server_id(0), Resume(seq=1))]
    machine.handle(server_id(0), Resumed(seq=1, server=0))
    assert tell(machine, ask(1, 0)) == [answer(1, 0, 8, 8)], "it is fixed"
    assert tell(machine, ask(0, 2)) == [], "and everybody is waited for again"


def test_nobody_waits_for_who_is_done() -> None:
    machine = by_loss()
    assert tell(machine, Done(worker=2, statistics={})) == []
    assert tell(machine, ask(0, 0)) == []
    assert tell(machine, Done(worker=1, statistics={})) == [chosen(0, 8), answer(0, 0, 8, 8)]
    assert tell(machine, ask(0, 1)) == [chosen(1, 8), answer(0, 1, 8, 8)]


def test_who_was_in_a_collective_that_has_failed_is_waited_for() -> None:
    machine = by_loss()
    tell(machine, ask(0, 0))
    tell(machine, enter(1))
    failed = tell(machine, Enter(worker=2, seq=1, name="mean", payload=b""))
    assert not any(isinstance(action, StepsChosen) for action in failed)


@pytest.mark.parametrize(
    "message",
    [
        loss(0, 1.0, round=-1),
        loss(0, 0.0, count=0),
        loss(0, -1e-9),
        loss(0, float("nan")),
        loss(0, float("inf")),
        loss(0, 2 * MOST_LOSS),
        RoundTook(worker=0, round=0, step_us=900),
    ],
)
def test_losses_that_cannot_be_are_refused(message: LossReported | RoundTook) -> None:
    with pytest.raises(ProtocolError, match=r"worker 0 (sent|reported) .*damaged"):
        tell(by_loss(), message)


def test_the_largest_losses_are_taken() -> None:
    tell(by_loss(), loss(0, 3 * MOST_LOSS, count=3))


def test_nobody_reports_where_speeds_decide() -> None:
    with pytest.raises(ProtocolError, match="sent LossReported, unasked or damaged"):
        tell(coordinator(), loss(0, 1.0))


def test_codecs_are_guarded_by_what_is_reported_where_that_is_asked_for() -> None:
    def machine(patience: int | None) -> Coordinator:
        control = CodecControl(num_groups=2, names=("none", "int8"), loss_patience=patience)
        return assemble(num_workers=3, num_servers=1, groups=((0,), (1, 2)), control=control)

    assert tell(machine(2), loss(2, -3.0, count=2)) == [LossHeard(2, 1, 2, -3.0)]
    with pytest.raises(ProtocolError, match="unasked"):
        tell(machine(None), loss(2, 3.0))
    with pytest.raises(ProtocolError, match="reported 1 losses of inf, which is damaged"):
        tell(machine(2), loss(2, float("inf")))
    with pytest.raises(ProtocolError, match="sent LossReported of worker 1"):
        machine(2).handle(worker_id(0), loss(1, 3.0))


# -- from attempt to attempt ---------------------------------------------------------------------


def resumed(tuning_state: TuningState, mode: str = "sync") -> Coordinator:
    steps = LossStepControl(num_workers=3, num_groups=2, local_steps=8)
    return assemble(
        num_workers=3,
        num_servers=1,
        groups=((0,), (1, 2)),
        steps=steps,
        mode=mode,
        tuning_state=tuning_state,
        first_round=7,
    )


def of_block(worker: int, block: int) -> AskSteps:
    return AskSteps(worker=worker, loader=0, number=0, block=block)


def test_blocks_that_had_begun_are_not_decided_again() -> None:
    kept = KeptSteps(starts=((0, 6), (3, 4)), num_fixed=4, first_loss=4.0, totals=(1.0,), count=1)
    machine = resumed(TuningState(steps=kept))
    for worker, block, steps in ((0, 2, 6), (1, 3, 4), (2, 2, 6)):
        (answer,) = tell(machine, of_block(worker, block))
        assert isinstance(answer, SendControl)
        assert answer.message == StepsFixed(loader=0, number=0, block=block, steps=[steps] * 2)
    assert [tell(machine, of_block(worker, 4)) for worker in (0, 1)] == [[], []]
    chosen, *answers = tell(machine, of_block(2, 4))
    assert isinstance(chosen, StepsChosen)
    assert chosen.steps == (4, 4)  # a loss of 1, where it was 4
    assert len(answers) == 3
    assert machine.kept(13) == TuningState(
        steps=KeptSteps(
            starts=((0, 4),), num_fixed=5, first_loss=4.0, totals=(0.0, 0.0, 0.0), count=0
        )
    )


def test_what_was_fixed_is_kept_by_block() -> None:
    machine = by_loss("async")
    tell(machine, LossReported(worker=0, round=0, count=1, total=4.0))
    assert machine.kept(0) == TuningState(
        steps=KeptSteps(
            starts=((0, 8),), num_fixed=0, first_loss=None, totals=(4.0, 0.0, 0.0), count=1
        )
    )
    for block, loss in ((0, 1.0), (1, 4.0), (2, 1.0)):
        tell(machine, of_block(0, block))
        tell(machine, LossReported(worker=0, round=block, count=1, total=loss))
    found = machine.kept(1)
    assert found is not None
    assert found.steps is not None
    assert (found.steps.starts, found.steps.num_fixed) == (((0, 4),), 3)
    machine = by_loss("async")
    for block, loss in ((0, 4.0), (1, 4.0), (2, 1.0), (3, 1.0)):
        tell(machine, of_block(0, block))
        tell(machine, LossReported(worker=0, round=block, count=1, total=loss))
    found = machine.kept(1)
    assert found is not None
    assert found.steps is not None
    assert (found.steps.starts, found.steps.num_fixed) == (((0, 8), (3, 4)), 4)


def test_where_nothing_is_chosen_by_the_loss_nothing_is_kept() -> None:
    assert assemble(num_workers=3, num_servers=1).kept(3) == TuningState()


def test_steps_by_speed_go_on_with_nothing() -> None:
    kept = KeptSteps(starts=((0, 6),), num_fixed=4, first_loss=4.0, totals=(1.0,), count=1)
    steps = StepControl(sizes=[1, 2], local_steps=8)
    with pytest.raises(ValueError, match=r"^of local steps by the loss$"):
        assemble(num_workers=3, num_servers=1, steps=steps, tuning_state=TuningState(steps=kept))


def test_steps_by_speed_keep_what_was_heard_and_go_on_with_it() -> None:
    machine = coordinator()
    for worker, step_us in ((0, 3000), (1, 1000)):
        tell(machine, RoundTook(worker=worker, round=0, step_us=step_us))
    kept = machine.kept(1)
    assert kept == TuningState(
        paces=KeptPaces(sizes=(1, 2), total=24, steps=(8, 8), step_us=((3000,), (1000,)))
    )
    steps = StepControl(sizes=[1, 2], local_steps=8)
    groups = ((0,), (1, 2))
    again = assemble(num_workers=3, num_servers=1, steps=steps, tuning_state=kept, groups=groups)
    for block in (1, 2, 3):
        if block == 3:
            tell(again, RoundTook(worker=0, round=1, step_us=3000))
        (fixed, *_) = tell(again, ask(0, block))
        assert isinstance(fixed, StepsChosen)
        assert (fixed.steps == (8, 8)) == (block < 3), "what has begun continues"


def by_speed(kept: KeptPaces | None = None) -> FixedSteps:
    control = StepControl(sizes=[1, 2], local_steps=8)
    leaders = {0: 0, 1: 1}
    steps = FixedSteps(control, num_workers=3, leaders=leaders, keeps_passes=True)
    if kept is not None:
        steps.go_on_at_pace(kept)
    return steps


def passes_of(steps: FixedSteps) -> list[tuple[int, int, int]]:
    """Loader and number of those that are kept, and blocks that are fixed of them."""
    kept = steps.kept_paces()
    assert kept is not None
    return [(each.loader, each.number, each.num_fixed) for each in kept.passes]


def test_where_groups_are_apart_passes_are_kept_while_somebody_may_be_in_them() -> None:
    steps = by_speed()
    for number, block in ((0, 0), (0, 1), (1, 0)):
        for worker in (0, 1):
            steps.on_ask(AskSteps(worker=worker, loader=1, number=number, block=block))
    assert passes_of(steps) == [(1, 0, 2), (1, 1, 1)]
    for loader in (1, 2):
        steps.on_ask(AskSteps(worker=2, loader=loader, number=0, block=0))
    assert passes_of(steps) == [(1, 0, 2), (1, 1, 1), (2, 0, 1)]
    steps.on_ask(AskSteps(worker=2, loader=1, number=1, block=0))
    assert passes_of(steps) == [(1, 1, 1), (2, 0, 1)], "all have left the first one"


def test_terms_that_were_fixed_before_the_checkpoint_are_not_fixed_again() -> None:
    steps = by_speed()
    for block in (0, 1):
        steps.on_ask(AskSteps(worker=0, loader=1, number=0, block=block))
    steps.on_took(RoundTook(worker=0, round=0, step_us=3000))
    steps.on_took(RoundTook(worker=1, round=0, step_us=1000))
    (chosen, *_) = steps.on_ask(AskSteps(worker=0, loader=1, number=0, block=2))
    assert isinstance(chosen, StepsChosen)
    assert chosen.steps != (8, 8)
    again = by_speed(steps.kept_paces())
    assert passes_of(again) == passes_of(steps)
    for worker, block in ((1, 0), (2, 1), (0, 2), (1, 2)):
        (answer,) = again.on_ask(AskSteps(worker=worker, loader=1, number=0, block=block))
        assert isinstance(answer, SendControl)
        assert isinstance(answer.message, StepsFixed)
        assert tuple(answer.message.steps) == ((8, 8) if block < 2 else chosen.steps)
    (fixed, *_) = again.on_ask(AskSteps(worker=0, loader=1, number=0, block=3))
    assert isinstance(fixed, StepsChosen)
    assert passes_of(again) == [(1, 0, 4)]


def test_nothing_is_said_of_terms_between_that_nobody_has_asked_for() -> None:
    steps = by_speed()
    for block in (0, 3):
        steps.on_ask(AskSteps(worker=0, loader=0, number=0, block=block))
    kept = steps.kept_paces()
    assert kept is not None
    assert [kept.passes[0].steps_of(block) for block in range(5)] == [None] * 3 + [(8, 8), None]


def test_of_other_groups_no_pass_goes_on() -> None:
    kept = KeptPaces(
        sizes=(2, 1),
        total=24,
        steps=(8, 8),
        step_us=((), ()),
        passes=(KeptPass(loader=1, number=0, starts=((0, (8, 8)),), num_fixed=1),),
    )
    assert passes_of(by_speed(kept)) == []


def test_steps_by_the_loss_go_on_with_no_speeds() -> None:
    paces = KeptPaces(sizes=(1,), total=8, steps=(8,), step_us=((),))
    steps = LossStepControl(num_workers=3, num_groups=2, local_steps=8)
    with pytest.raises(ValueError, match=r"^of local steps by speed$"):
        assemble(num_workers=3, num_servers=1, steps=steps, tuning_state=TuningState(paces=paces))


def test_a_checkpoint_is_told_what_it_keeps_when_it_begins() -> None:
    control = CodecControl(num_groups=3, names=["none", "fp16"])
    machine = assemble(num_workers=3, num_servers=1, control=control, groups=((0,), (1,), (2,)))
    actions: list[CoordinatorAction] = []
    for worker in range(3):
        enter = Enter(worker=worker, seq=1, name=CHECKPOINT, payload=pack_clocks([7]))
        actions += tell(machine, enter)
    begin, keep, *_ = actions
    assert begin == BeginCheckpoint("step-00000007")
    assert keep == KeepTuningState("step-00000007", TuningState(codecs=control.kept(7)))


# -- a loss that blows up ------------------------------------------------------------------------

NAMES = ("none", "fp16", "int8")


def rises(machine: Coordinator, *, good: int = 2) -> list[CoordinatorAction]:
    """What the coordinator makes of looks that are good and then high."""
    losses = [1.0] * good + [9.0] * 3
    return [
        action
        for number, each in enumerate(losses, start=1)
        for action in tell(
            machine, LossReported(worker=0, round=4 * number, count=2, total=2 * each)
        )
    ]


def guarded(level: int, factor: float | None = 2.0) -> Coordinator:
    control = CodecControl(num_groups=3, names=NAMES)
    kept = replace(control.kept(0), starts=((0, 0), (9, level), (15, 0)))
    return assemble(
        num_workers=3,
        num_servers=1,
        groups=((0,), (1,), (2,)),
        control=control,
        rollback=factor,
        tuning_state=TuningState(codecs=kept),
    )


@pytest.mark.parametrize(("level", "allowed"), [(2, 1), (1, 0), (0, -1)])
def test_a_rise_leads_to_less_lossy_codecs(level: int, allowed: int) -> None:
    machine = guarded(level)
    *heard, last = rises(machine)
    assert {type(each) for each in heard} == {LossHeard}
    assert last == Rollback(
        round=20, loss=9.0, best=1.0, good=7, names=NAMES, lossiest=level, allowed=allowed
    )
    assert part_of(machine, Losses).good == 7
    kept = machine.kept(4)
    assert kept is not None
    assert kept.rise == KeptRise(best=1.0, good=7)


def test_a_rise_leads_to_half_as_many_steps() -> None:
    steps = LossStepControl(num_workers=3, num_groups=3, local_steps=8)
    machine = assemble(num_workers=3, num_servers=1, steps=steps, rollback=2.0)
    last = rises(machine)[-1]
    assert last == Rollback(round=20, loss=9.0, best=1.0, good=7, names=(), lossiest=8, allowed=4)


def test_where_nobody_looks_for_a_rise_losses_are_not_asked_for() -> None:
    machine = guarded(2, factor=None)
    assert machine.part(Losses) is None
    with pytest.raises(ProtocolError, match=r"sent LossReported, unasked"):
        rises(machine)


def test_a_run_that_goes_on_knows_the_least_loss() -> None:
    control = CodecControl(num_groups=3, names=NAMES)
    tuning_state = TuningState(codecs=control.kept(0), rise=KeptRise(best=1.0, good=0))
    machine = assemble(
        num_workers=3, num_servers=1, control=control, rollback=2.0, tuning_state=tuning_state
    )
    assert isinstance(rises(machine, good=0)[-1], Rollback)


@pytest.mark.parametrize(
    ("rise", "good"), [(None, 100), (KeptRise(best=2.0, good=90), 90), (False, 100)]
)
def test_a_checkpoint_of_a_run_in_which_nobody_looked_is_taken_as_good(
    rise: KeptRise | bool | None, good: int
) -> None:
    control = CodecControl(num_groups=3, names=NAMES)
    kept = None if isinstance(rise, bool) else TuningState(codecs=control.kept(0), rise=rise)
    machine = assemble(
        num_workers=3,
        num_servers=1,
        groups=((0,), (1,), (2,)),
        control=control,
        rollback=2.0,
        tuning_state=kept,
        first_round=100,
    )
    assert part_of(machine, Losses).good == good


def test_losses_that_are_none_say_nothing_but_that_the_loss_has_blown_up() -> None:
    """NaN counts as the largest loss: of the first one all others would be a nothing."""
    steps = LossStepControl(num_workers=1, num_groups=1, local_steps=8)
    machine = assemble(num_workers=1, num_servers=1, groups=((0,),), steps=steps, rollback=2.0)
    tell(machine, loss(0, MOST_LOSS, count=2))
    assert tell(machine, ask(0, 1))[0] == StepsChosen(Term(1, 0, 1), (8,), "")
    for block, total in ((2, 4.0), (3, 1.0)):
        tell(machine, loss(0, total, round=4 * block))
        chosen_now = tell(machine, ask(0, block))[0]
    assert chosen_now == StepsChosen(Term(1, 0, 3), (4,), "the loss is 1, 4 at first")
    for number in range(4, 7):
        *_, last = tell(machine, loss(0, MOST_LOSS, round=4 * number))
    assert isinstance(last, Rollback)


def test_losses_that_are_none_do_not_stand_still() -> None:
    control = CodecControl(num_groups=1, names=NAMES, loss_patience=1)
    told = {"num_workers": 1, "num_servers": 1, "groups": ((0,),)}
    machine = assemble(**told, control=control, rollback=2.0)
    tell(machine, loss(0, MOST_LOSS))
    guard = control.kept(0).guard
    assert guard is not None
    assert guard.count == 0
    machine = assemble(**told, control=control)
    tell(machine, loss(0, MOST_LOSS))
    guard = control.kept(0).guard
    assert guard is not None
    assert guard.count == 1, "without rollback it is a loss as others are"
