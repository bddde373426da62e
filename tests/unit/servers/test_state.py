"""A server's state machine by itself: events in, actions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from psdist.errors import ProtocolError
from psdist.protocol.control import Leave, Register, Settings, Setup, Suspend
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered
from psdist.protocol.header import CodecCode, Flag, Header, Kind
from psdist.protocol.ids import worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.payloads import PayloadRule
from psdist.servers.protocol.actions import (
    Accept,
    Build,
    Built,
    Contribution,
    EmptyStep,
    Fail,
    Fold,
    Load,
    Reply,
    SendControl,
    SlotContent,
    StartSum,
    Step,
)
from psdist.servers.protocol.policy import policy_for
from psdist.servers.protocol.state import ServerCore

HYPER = pack_hyperparameters([{"lr": 0.1}])


def built(num_chunks: int, slots: Sequence[Frame]) -> Built:
    """Chunks of 4 bytes, which arrive as they are."""
    sizes = (4,) * num_chunks
    rule = PayloadRule(codec=CodecCode.RAW, name="raw", smallest=sizes, largest=sizes)
    return Built(range(num_chunks), slots, initials=rule, pushes=rule)


def core_of(mode: str, *, groups: int = 2, chunks: int = 1, slots: int = 4) -> ServerCore:
    """A server on which groups of one worker have registered and told their settings."""
    core = ServerCore(server=0, policy=policy_for(mode, staleness=1))
    core.handle(ControlArrived(0, Setup(partition=b"", optimizer="", hyper=b"")))
    core.handle(built(chunks, [Frame(capacity=4) for _ in range(slots)]))
    for group in range(groups):
        peer = worker_id(group)
        core.handle(ControlArrived(peer, Register(group=group, workers=[group], clock=0)))
        core.handle(ControlArrived(peer, Settings(version=1, hyper=HYPER, absent=[])))
    return core


def push(
    core: ServerCore,
    group: int,
    clock: int,
    *,
    weight: float = 1.0,
    is_empty: bool = False,
    settings: int = 1,
) -> list[Any]:
    """Actions that follow when the group's push of chunk 0 is offered and has arrived."""
    header = Header(
        kind=Kind.PUSH, sender=worker_id(group), group=group, chunk=0, clock=clock,
        length=0 if is_empty else 4, settings=settings, weight=weight,
    )  # fmt: skip
    if is_empty:
        return core.handle(Arrived(worker_id(group), header, None))
    (accept,) = core.handle(Offered(worker_id(group), Kind.PUSH, 0, 4, header))
    assert isinstance(accept, Accept)
    return core.handle(Arrived(worker_id(group), header, accept.slot))


def only(actions: list[Any], *kinds: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kinds)]


COMPUTING = (StartSum, Fold, Step, EmptyStep)


def test_on_arrival_a_step_is_told_that_its_slot_holds_a_gradient() -> None:
    core = core_of("ssp")
    (step,) = only(push(core, 0, 0), *COMPUTING)
    assert isinstance(step, Step)
    assert step.content is SlotContent.GRADIENT
    assert (step.gradient_scale, step.lr_scale) == (1.0, 0.5)
    assert step.contributions == (Contribution(0, 0, 1.0, False),)


def test_gathered_a_sum_is_started_added_to_and_stepped_by_name() -> None:
    core = core_of("sync")
    (start,) = only(push(core, 0, 0, weight=1.0), *COMPUTING)
    fold, step = only(push(core, 1, 0, weight=3.0), *COMPUTING)
    assert isinstance(start, StartSum)
    assert isinstance(fold, Fold)
    assert fold.accumulator is start.slot is step.gradient
    assert fold.slot is not start.slot
    assert step.content is SlotContent.SUM
    assert step.gradient_scale == 0.25


def test_gathered_only_pieces_without_a_gradient_in_every_group_are_absent() -> None:
    core = core_of("sync")
    for group, absent in enumerate(([1, 2], [2, 3])):
        settings = Settings(version=2, hyper=HYPER, absent=absent)
        core.handle(ControlArrived(worker_id(group), settings))
    steps = only([*push(core, 0, 0, settings=2), *push(core, 1, 0, settings=2)], Step)
    assert [step.absent for step in steps] == [frozenset([2])]


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_updates_without_gradients_are_logged_and_nothing_is_stepped(mode: str) -> None:
    core = core_of(mode)
    actions = [
        *push(core, 0, 0, weight=0.0, is_empty=True),
        *push(core, 1, 0, weight=0.0, is_empty=True),
    ]
    steps = only(actions, *COMPUTING)
    assert {type(step) for step in steps} == {EmptyStep}
    contained = [each for step in steps for each in step.contributions]
    assert contained == [Contribution(group, 0, 0.0, True) for group in range(2)]


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_gradient_without_weight_fails_the_job_naming_who_sent_it(
    mode: str, weight: float
) -> None:
    (fail,) = push(core_of(mode), 1, 0, weight=weight)
    assert isinstance(fail, Fail)
    assert str(fail.error) == f"server 0: worker 1 pushed a gradient of weight {weight}"


@pytest.mark.parametrize(
    ("changed", "sent"),
    [
        ({"codec": 9}, "4 bytes of chunk 0 by codec 9"),
        ({"length": 3}, "3 bytes of chunk 0 by codec 0"),
    ],
)
@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.INIT])
def test_a_payload_of_another_codec_or_size_fails_the_job_naming_who_sent_it(
    kind: Kind, changed: dict[str, int], sent: str
) -> None:
    core = core_of("ssp")
    header = Header(
        kind=kind, sender=worker_id(1), group=1, chunk=0, length=4, settings=1, weight=1.0
    )._replace(**changed)
    (accept,) = core.handle(Offered(worker_id(1), kind, 0, 4, "ticket"))
    (fail,) = core.handle(Arrived(worker_id(1), header, accept.slot))
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, ProtocolError)
    assert str(fail.error) == (
        f"server 0: worker 1 sent {sent}; 4 bytes by codec 0 (raw) are expected; do all ranks run "
        "the same version of psdist with the same settings?"
    )


def test_a_reply_names_the_pull_that_it_answers_and_no_pull_where_it_answers_a_push() -> None:
    core = core_of("async")
    init = Header(kind=Kind.INIT, sender=worker_id(0), chunk=0, length=4)
    (accept,) = core.handle(Offered(worker_id(0), Kind.INIT, 0, 4, "ticket"))
    core.handle(Arrived(worker_id(0), init, accept.slot))
    pull = Header(kind=Kind.PULL, sender=worker_id(0), chunk=0, clock=0, pull_number=7)
    (to_pull,) = core.handle(Arrived(worker_id(0), pull, None))
    (to_push,) = only(push(core, 0, 0), Reply)
    assert (to_pull.pull_number, to_pull.flags) == (7, Flag.FOR_PULL)
    assert (to_push.pull_number, to_push.flags) == (0, Flag.NONE)


SETUP = Setup(partition=b"p", optimizer="o", hyper=b"h")


def test_what_comes_before_the_shard_is_built_is_handled_when_it_is() -> None:
    core = ServerCore(server=0, policy=policy_for("ssp", staleness=1))
    pull = Header(kind=Kind.PULL, sender=worker_id(0), chunk=0)
    init = Header(kind=Kind.INIT, sender=worker_id(0), chunk=0, length=4)
    (build,) = core.handle(ControlArrived(worker_id(0), SETUP))
    assert build == Build(SETUP)
    assert core.handle(Offered(worker_id(0), Kind.INIT, 0, 4, "ticket")) == []
    assert core.handle(Arrived(worker_id(0), pull, None)) == []
    slot = Frame(capacity=4)

    assert core.handle(built(1, [slot])) == [Accept("ticket", slot)]
    load, reply = core.handle(Arrived(worker_id(0), init, slot))
    assert load == Load(0, slot)
    assert isinstance(reply, Reply)  # to the pull, which waited for the initial values


def test_a_second_model_is_refused_whether_or_not_the_first_is_built() -> None:
    core = ServerCore(server=3, policy=policy_for("ssp", staleness=1))
    core.handle(ControlArrived(worker_id(0), SETUP))
    for _ in range(2):
        (fail,) = core.handle(ControlArrived(worker_id(1), SETUP))
        assert isinstance(fail, Fail)
        assert str(fail.error) == "server 3: worker 1 sent a second Setup"
        core.handle(built(0, []))


def test_a_server_without_chunks_is_built_as_well() -> None:
    core = ServerCore(server=1, policy=policy_for("sync", staleness=0))
    core.handle(ControlArrived(worker_id(0), SETUP))
    assert core.handle(built(0, [])) == []
    register = Register(group=0, workers=[0], clock=0)
    _, answer = core.handle(ControlArrived(worker_id(0), register))
    assert isinstance(answer, SendControl)
    core.check_invariants()


def test_initial_values_that_come_a_second_time_undo_nothing() -> None:
    core = core_of("async")
    init = Header(kind=Kind.INIT, sender=worker_id(0), chunk=0, length=4)
    loads = []
    for _ in range(2):
        (accept,) = core.handle(Offered(worker_id(0), Kind.INIT, 0, 4, "ticket"))
        loads.append(only(core.handle(Arrived(worker_id(0), init, accept.slot)), Load))
    assert [len(each) for each in loads] == [1, 0]
    assert core.statistics().duplicates == 1
    core.check_invariants()


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([Leave(group=5, clock=0)], "group 5 was suspended or left before it registered"),
        ([Suspend(group=5, clock=0, seq=1)], "group 5 was suspended or left before it registered"),
        (
            [Leave(group=0, clock=0), Suspend(group=0, clock=0, seq=1)],
            "group 0 was suspended or left after it had left",
        ),
    ],
)
def test_membership_that_cannot_be_fails_the_job(messages: list[Any], what: str) -> None:
    core = core_of("ssp")
    *_, fail = [
        action for message in messages for action in core.handle(ControlArrived(0, message))
    ]
    assert isinstance(fail, Fail)
    assert str(fail.error) == what


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_a_push_that_overtakes_its_settings_waits_for_them(mode: str) -> None:
    core = core_of(mode, groups=1)
    header = Header(
        kind=Kind.PUSH, sender=worker_id(0), group=0, chunk=0, length=4, settings=2, weight=1.0
    )
    (accept,) = core.handle(Offered(worker_id(0), Kind.PUSH, 0, 4, header))
    assert only(core.handle(Arrived(worker_id(0), header, accept.slot)), *COMPUTING) == []
    newer = pack_hyperparameters([{"lr": 0.2}])
    settings = Settings(version=2, hyper=newer, absent=[3])
    actions = core.handle(ControlArrived(worker_id(0), settings))
    step = only(actions, Step)[0]
    assert (step.hyper, step.absent) == (newer, {3})


def test_a_group_that_registers_after_a_higher_one_keeps_its_turn() -> None:
    """No collective between: nothing but the registrations themselves comes before the pushes."""
    core = ServerCore(server=0, policy=policy_for("sync", staleness=0))
    core.handle(ControlArrived(worker_id(0), SETUP))
    core.handle(built(1, [Frame(capacity=4) for _ in range(4)]))
    for group in (1, 0):
        peer = worker_id(group)
        core.handle(ControlArrived(peer, Register(group=group, workers=[group], clock=0)))
        core.check_invariants()
        core.handle(ControlArrived(peer, Settings(version=1, hyper=HYPER, absent=[])))
    assert only(push(core, 1, 0), *COMPUTING) == []  # before its turn
    start, fold, step = only(push(core, 0, 0), *COMPUTING)
    assert [type(start), type(fold), type(step)] == [StartSum, Fold, Step]
    assert [each.group for each in step.contributions] == [0, 1]
