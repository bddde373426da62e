"""A server's state machine by itself: events in, actions out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from psdist.config.settings import MAX_CREDITS
from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.control import (
    BeginCodecs,
    Done,
    Leave,
    Register,
    Registered,
    Resume,
    Settings,
    Setup,
    Suspend,
    WhoIsMissing,
)
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered, PeerLost
from psdist.protocol.header import MOST_CREDITS, CodecCode, Dtype, Flag, Header, Kind
from psdist.protocol.ids import COORDINATOR, worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.payloads import PayloadRule
from psdist.servers.protocol.actions import (
    Accept,
    Build,
    Built,
    ChangeCodecs,
    Contribution,
    EmptyStep,
    Fail,
    Fold,
    HoldRounds,
    Load,
    Receipt,
    Reply,
    SendControl,
    SlotContent,
    StartSum,
    Step,
    Unchanged,
)
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.chunk_clock import ChunkClock, Limits
from psdist.servers.protocol.chunks import ChunkState, Push
from psdist.servers.protocol.membership import Membership
from psdist.servers.protocol.rules.arrivals import BY_WEIGHT
from psdist.servers.protocol.settings import PushSettings
from psdist.servers.protocol.state import ServerCore

HYPER = pack_hyperparameters([{"lr": 0.1}])


def built(num_chunks: int, slots: Sequence[Frame]) -> Built:
    """Chunks of 4 bytes, which arrive as they are."""
    sizes = (4,) * num_chunks
    rule = PayloadRule(
        codec=CodecCode.RAW,
        name="raw",
        dtypes=(Dtype.FLOAT32,) * num_chunks,
        smallest=sizes,
        largest=sizes,
    )
    return Built(
        range(num_chunks),
        slots,
        initials=rule,
        pushes=rule,
        num_pieces=8,
        num_optimizer_groups=1,
    )


def groups_of(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Groups of so many workers each, counted from 0."""
    first = [sum(sizes[:group]) for group in range(len(sizes))]
    return [tuple(range(at, at + size)) for at, size in zip(first, sizes, strict=True)]


def make_core(mode: str, *, groups: int = 2, server: int = 0, pipeline: int = 0) -> ServerCore:
    return assemble_core(
        server=server,
        make_rule=rule_for(mode, staleness=1),
        groups=[(worker,) for worker in range(groups)],
        pipeline=pipeline,
    )


def core_of(
    mode: str,
    *,
    groups: int = 2,
    chunks: int = 1,
    slots: int = 4,
    registered: int | None = None,
    sizes: tuple[int, ...] = (),
    order: tuple[int, ...] = (),
    survives_workers: bool = False,
) -> ServerCore:
    """A server on which groups, of one worker unless ``sizes`` says more, have registered and their
    leaders told their settings."""
    members = groups_of(sizes or (1,) * groups)
    rule = rule_for(mode, staleness=1)
    core = assemble_core(
        server=0, make_rule=rule, groups=members, survives_workers=survives_workers
    )
    setup = Setup(partition=b"", optimizer="", hyper=b"", order=list(order))
    core.handle(ControlArrived(worker_id(0), setup))
    core.handle(built(chunks, [Frame(capacity=4) for _ in range(slots)]))
    for group, workers in list(enumerate(members))[:registered]:
        peer = worker_id(workers[0])
        register = Register(group=group, workers=list(workers), clock=0)
        core.handle(ControlArrived(peer, register))
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
    version: int = 0,
) -> list[Any]:
    """Actions that follow when the group's push of chunk 0 is offered and has arrived."""
    header = Header(
        kind=Kind.PUSH, sender=worker_id(group), group=group, chunk=0, clock=clock,
        length=0 if is_empty else 4, settings=settings, weight=weight,
        dtype=Dtype.FLOAT32, chunk_version=version,
    )  # fmt: skip
    if is_empty:
        return core.handle(Arrived(worker_id(group), header, None))
    (accept,) = core.handle(Offered(worker_id(group), Kind.PUSH, 0, 4, header, clock=clock))
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
        ({"codec": 9}, "4 bytes of chunk 0 by codec 9, dtype 1"),
        ({"length": 3}, "3 bytes of chunk 0 by codec 0, dtype 1"),
        ({"dtype": 2}, "4 bytes of chunk 0 by codec 0, dtype 2"),
    ],
)
@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.INIT])
def test_a_payload_of_another_codec_or_size_fails_the_job_naming_who_sent_it(
    kind: Kind, changed: dict[str, int], sent: str
) -> None:
    core = core_of("ssp")
    header = Header(
        kind=kind,
        sender=worker_id(0),
        group=0,
        chunk=0,
        length=4,
        settings=1,
        weight=1.0,
        dtype=Dtype.FLOAT32,
    )._replace(**changed)
    (accept,) = core.handle(Offered(worker_id(0), kind, 0, 4, "ticket"))
    (fail,) = core.handle(Arrived(worker_id(0), header, accept.slot))
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, ProtocolError)
    assert str(fail.error) == (
        f"server 0: worker 0 sent {sent}; 4 bytes by codec 0 (raw), dtype 1 are expected; do all "
        "ranks run the same version of psdist with the same settings?"
    )


def test_a_reply_names_the_pull_that_it_answers_and_no_pull_where_it_answers_a_push() -> None:
    core = core_of("async")
    init = Header(kind=Kind.INIT, sender=worker_id(0), chunk=0, length=4, dtype=Dtype.FLOAT32)
    (accept,) = core.handle(Offered(worker_id(0), Kind.INIT, 0, 4, "ticket"))
    core.handle(Arrived(worker_id(0), init, accept.slot))
    pull = Header(kind=Kind.PULL, sender=worker_id(0), chunk=0, clock=0, pull_number=7)
    (to_pull,) = core.handle(Arrived(worker_id(0), pull, None))
    (to_push,) = only(push(core, 0, 0), Reply)
    assert (to_pull.pull_number, to_pull.flags) == (7, Flag.FOR_PULL)
    assert (to_push.pull_number, to_push.flags) == (0, Flag.NONE)


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_a_step_makes_a_version_and_an_update_without_gradient_makes_none(mode: str) -> None:
    core = core_of(mode)
    answers = [
        *push(core, 0, 0, is_empty=True, version=1),
        *push(core, 1, 0),
        *push(core, 0, 1, version=1),
        *push(core, 1, 1, is_empty=True, version=2),
        *push(core, 1, 2, is_empty=True, version=3),
    ]
    replies = only(answers, Reply, Unchanged)
    assert [(type(each), each.version) for each in replies] == [
        (Unchanged, 1),
        (Reply, 2),
        (Reply, 3),
        (Reply, 3),
        (Unchanged, 3),
    ]


def test_in_sync_a_round_makes_a_version_if_any_group_brings_a_gradient() -> None:
    core = core_of("sync")
    answers = [
        *push(core, 0, 0, version=1),
        *push(core, 1, 0, is_empty=True, version=1),
        *push(core, 0, 1, is_empty=True, version=2),
        *push(core, 1, 1, is_empty=True, version=1),
    ]
    replies = only(answers, Reply, Unchanged)
    assert [(type(each), each.version) for each in replies] == [
        (Reply, 2),
        (Reply, 2),
        (Unchanged, 2),
        (Reply, 2),
    ]
    assert core.statistics().replies == 4
    assert core.statistics().steps == 1


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.PULL])
def test_nobody_holds_a_version_that_there_has_not_been(kind: Kind) -> None:
    for version in (2, 3):
        core = core_of("async")
        push(core, 0, 0)
        header = Header(
            kind=kind, sender=worker_id(1), group=1, chunk=0, clock=0, settings=1, weight=1.0,
            pull_number=1, chunk_version=version,
        )  # fmt: skip
        actions = core.handle(Arrived(worker_id(1), header, None))
        if version == 2:
            assert not only(actions, Fail)
            continue
        (fail,) = actions
        assert str(fail.error) == (
            "server 0: worker 1 says that it holds version 3 of chunk 0; its newest version is 2"
        )


SETUP = Setup(partition=b"p", optimizer="o", hyper=b"h")


def test_what_comes_before_the_shard_is_built_is_handled_when_it_is() -> None:
    core = make_core("ssp")
    pull = Header(kind=Kind.PULL, sender=worker_id(0), chunk=0, pull_number=1)
    init = Header(kind=Kind.INIT, sender=worker_id(0), chunk=0, length=4, dtype=Dtype.FLOAT32)
    (build,) = core.handle(ControlArrived(worker_id(0), SETUP))
    assert build == Build(SETUP)
    assert core.handle(Offered(worker_id(0), Kind.INIT, 0, 4, "ticket")) == []
    assert core.handle(Arrived(worker_id(0), pull, None)) == []
    slot = Frame(capacity=4)

    assert core.handle(built(1, [slot])) == [Accept("ticket", slot)]
    load, reply = core.handle(Arrived(worker_id(0), init, slot))
    assert load == Load(0, slot)
    assert isinstance(reply, Reply)  # to the pull, which waited for the initial values


def test_what_comes_before_the_shard_is_built_is_handled_in_its_order() -> None:
    core = make_core("ssp")
    core.handle(ControlArrived(worker_id(0), SETUP))
    for worker in (1, 0):
        core.handle(Offered(worker_id(worker), Kind.PUSH, 0, 4, f"from {worker}"))
    slots = [Frame(capacity=4), Frame(capacity=4)]
    accepts = core.handle(built(1, slots))
    assert [each.ticket for each in accepts if isinstance(each, Accept)] == ["from 1", "from 0"]


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.INIT])
def test_initial_values_and_pushes_have_a_rule_each(kind: Kind) -> None:
    core = make_core("ssp")
    core.handle(ControlArrived(worker_id(0), SETUP))
    event = built(1, [Frame(capacity=8)])
    event.initials = replace(event.pushes, smallest=(8,), largest=(8,))
    core.handle(event)
    core.handle(ControlArrived(worker_id(0), Register(group=0, workers=[0], clock=0)))
    core.handle(ControlArrived(worker_id(0), Settings(version=1, hyper=HYPER, absent=[])))
    for length in (4, 8):
        (accept,) = core.handle(Offered(worker_id(0), kind, 0, length, "ticket"))
        header = Header(
            kind=kind, sender=worker_id(0), length=length, settings=1, weight=1.0,
            dtype=Dtype.FLOAT32,
        )  # fmt: skip
        actions = core.handle(Arrived(worker_id(0), header, accept.slot))
        is_right = length == (4 if kind == Kind.PUSH else 8)
        assert bool(only(actions, Fail)) == (not is_right)
        if is_right:
            assert only(actions, Load, Step)
            return
        core.rule.pool.release(accept.slot)


def test_a_second_model_is_refused_whether_or_not_the_first_is_built() -> None:
    core = make_core("ssp", server=3)
    core.handle(ControlArrived(worker_id(0), SETUP))
    for _ in range(2):
        (fail,) = core.handle(ControlArrived(worker_id(0), SETUP))
        assert isinstance(fail, Fail)
        assert str(fail.error) == "server 3: worker 0 sent a second Setup"
        core.handle(built(0, []))


def test_a_server_without_chunks_is_built_as_well() -> None:
    core = make_core("sync", server=1)
    core.handle(ControlArrived(worker_id(0), SETUP))
    assert core.handle(built(0, [])) == []
    register = Register(group=0, workers=[0], clock=0)
    _, answer = core.handle(ControlArrived(worker_id(0), register))
    assert isinstance(answer, SendControl)
    core.check_invariants()


def test_initial_values_that_come_a_second_time_undo_nothing() -> None:
    core = core_of("async")
    init = Header(kind=Kind.INIT, sender=worker_id(0), chunk=0, length=4, dtype=Dtype.FLOAT32)
    loads = []
    for _ in range(2):
        (accept,) = core.handle(Offered(worker_id(0), Kind.INIT, 0, 4, "ticket"))
        loads.append(only(core.handle(Arrived(worker_id(0), init, accept.slot)), Load))
    assert [len(each) for each in loads] == [1, 0]
    assert core.statistics().duplicates == 1
    core.check_invariants()


def test_initial_values_that_come_a_second_time_make_room_for_whoever_waits() -> None:
    core = core_of("async", slots=1)
    init = Header(kind=Kind.INIT, sender=worker_id(0), chunk=0, length=4, dtype=Dtype.FLOAT32)
    for is_second in (False, True):
        (accept,) = core.handle(Offered(worker_id(0), Kind.INIT, 0, 4, "initial"))
        if is_second:
            assert core.handle(Offered(worker_id(1), Kind.PUSH, 0, 4, "push")) == []
        actions = core.handle(Arrived(worker_id(0), init, accept.slot))
    (next_accept,) = actions
    assert next_accept == Accept("push", accept.slot)


@pytest.mark.parametrize("kind", [Kind.INIT, Kind.REPLY])
def test_headers_without_a_payload_are_pushes_or_pulls(kind: Kind) -> None:
    header = Header(kind=kind, sender=worker_id(0), dtype=Dtype.FLOAT32)
    (fail,) = core_of("ssp").handle(Arrived(worker_id(0), header, None))
    assert str(fail.error) == (
        f"server 0: worker 0 sent a message of kind {kind:d}, which no server takes from it"
    )


def test_an_offer_of_a_chunk_that_another_server_holds_fails_the_job() -> None:
    (fail,) = core_of("ssp").handle(Offered(worker_id(1), Kind.PUSH, 7, 4, "ticket"))
    assert str(fail.error).startswith(
        "server 0: worker 1 sent a message about chunk 7, which this server does not hold"
    )


def test_whoever_is_lost_ends_the_job() -> None:
    (fail,) = core_of("ssp").handle(PeerLost(worker_id(1), "worker 1 has failed"))
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, PeerLostError)
    assert "worker 1 has failed" in str(fail.error)


def test_every_error_names_the_server_that_found_it() -> None:
    core = make_core("sync", server=3, pipeline=1)
    pull = Header(kind=Kind.PULL, sender=worker_id(0), pull_number=1)
    second = pull._replace(pull_number=2)
    core.handle(ControlArrived(worker_id(0), SETUP))
    core.handle(built(1, [Frame(capacity=4)]))
    core.handle(Arrived(worker_id(0), pull, None))
    register = Register(group=0, workers=[0], clock=0)
    answer = core.handle(ControlArrived(worker_id(0), register))[1]
    assert answer == SendControl(worker_id(0), Registered(group=0, server=3))
    wrong = [
        ControlArrived(worker_id(0), SETUP),
        ControlArrived(worker_id(0), register),
        ControlArrived(worker_id(0), Settings(version=0, hyper=HYPER, absent=[])),
        Arrived(worker_id(0), second, None),
    ]
    fails = [core.handle(event)[0] for event in wrong]
    assert {str(each.error).partition(" sent")[0].partition(" reg")[0] for each in fails} == {
        "server 3: worker 0"
    }
    assert core.handle(ControlArrived(COORDINATOR, Resume(seq=1))) == []
    assert core.resumed_up_to == 1


@pytest.mark.parametrize("pipeline", [0, 1, 2])
def test_more_is_outstanding_and_kept_the_deeper_the_pipeline_is(pipeline: int) -> None:
    core = make_core("async", server=5, pipeline=pipeline)
    core.handle(ControlArrived(worker_id(0), SETUP))
    core.handle(built(1, [Frame(capacity=4)]))
    core.handle(ControlArrived(worker_id(1), Register(group=1, workers=[1], clock=0)))
    for clock in range(4):  # how far a worker may be ahead of its group
        pull = Header(kind=Kind.PULL, sender=worker_id(1), clock=clock, pull_number=1)
        actions = core.handle(Arrived(worker_id(1), pull, None))
        assert bool(only(actions, Fail)) == (clock > 1 + pipeline)
    for version in range(1, 9):  # under which settings it may still push
        core.handle(ControlArrived(worker_id(1), Settings(version=version, hyper=HYPER, absent=[])))
    known = [each for each in range(1, 9) if each in core._settings._known[worker_id(1)]]
    assert known == list(range(max(1, 6 - 2 * pipeline), 9))
    offer = Offered(worker_id(1), Kind.PUSH, 0, 4, "ticket")
    assert only(core.handle(offer), Accept)
    for _ in range(2 * (2 + pipeline)):
        assert core.handle(offer) == []
    (fail,) = core.handle(offer)
    assert isinstance(fail, Fail)


NEW_SETTINGS = Settings(version=2, hyper=HYPER, absent=[])
TWO_GROUPS = pack_hyperparameters([{"lr": 0.1}, {"lr": 0.2}])


@pytest.mark.parametrize(
    ("peer", "messages", "what"),
    [
        (1, [Leave(group=5, clock=0)], "took leave of group 5; this run has 3 groups"),
        (1, [Leave(group=-1, clock=0)], "took leave of group -1; this run has 3 groups"),
        (1, [Leave(group=0, clock=0)], "took leave of group 0, for which worker 0 speaks"),
        (
            2,
            [Suspend(group=2, clock=0, seq=1)],
            "suspended group 2, which has not registered",
        ),
        (
            1,
            [Leave(group=1, clock=0), Suspend(group=1, clock=0, seq=1)],
            "suspended group 1, which has left",
        ),
        (
            1,
            [Suspend(group=1, clock=0, seq=1), Leave(group=1, clock=0)],
            "took leave of group 1, which is suspended",
        ),
        (
            1,
            [Leave(group=1, clock=1)],
            "took leave of group 1 after 1 iterations; the 1 chunks here contain 0 updates of it",
        ),
        (
            1,
            [Suspend(group=1, clock=-1, seq=1)],
            "suspended group 1 after -1 iterations; the 1 chunks here contain 0 updates of it",
        ),
        (1, [Register(group=1, workers=[1], clock=0)], "registered group 1, which is active"),
        (
            2,
            [Register(group=2, workers=[2, 3], clock=0)],
            "registered group 2 with 2 workers that are not those of the plan, worker 2",
        ),
        (2, [Register(group=2, workers=[2], clock=1)], "registered group 2 at clock 1, not at 0"),
        (
            1,
            [Register(group=2, workers=[2], clock=0)],
            "registered group 2, for which worker 2 speaks",
        ),
        (1, [Resume(seq=1)], "sent Resume; server 0 decides what ends"),
        (1, [Setup(partition=b"", optimizer="", hyper=b"")],
         "sent Setup; worker 0 describes the model"),
        (9, [WhoIsMissing(chunk=0)],
         "sent what workers of this run send but is not one of them"),
        (2, [NEW_SETTINGS], "told its settings, but group 2 has not registered"),
        (1, [NEW_SETTINGS, Settings(version=2, hyper=HYPER, absent=[1])],
         "sent version 2 of its settings after version 2"),
        (1, [Settings(version=2, hyper=HYPER, absent=[8])],
         "named pieces 8 to 8 as absent; the model has 8"),
        (1, [Settings(version=2, hyper=HYPER, absent=[-1])],
         "named pieces -1 to -1 as absent; the model has 8"),
        (1, [Settings(version=2, hyper=TWO_GROUPS, absent=[])],
         "sent hyperparameters of 2 optimizer groups; the model has 1"),
        (1, [Settings(version=2, hyper=b"x", absent=[])],
         "sent malformed hyperparameters in a message: not a list of maps"),
        (1, [Done(worker=1, statistics={})], "sent Done, which this set does not take"),
    ],
)  # fmt: skip
def test_control_messages_that_cannot_be_fail_the_job_naming_who_sent_them(
    peer: int, messages: list[Any], what: str
) -> None:
    core = core_of("ssp", groups=3, registered=2)
    *_, fail = [
        action
        for message in messages
        for action in core.handle(ControlArrived(worker_id(peer), message))
    ]
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, ProtocolError)
    assert str(fail.error) == f"server 0: worker {peer} {what}"


def test_settings_of_a_group_that_has_left_are_no_mistake() -> None:
    """Another worker of the group has told them before: nothing of it had to be answered."""
    core = core_of("async", sizes=(2, 1))
    core.handle(ControlArrived(worker_id(0), Leave(group=0, clock=0)))
    settings = Settings(version=1, hyper=HYPER, absent=[])
    assert core.handle(ControlArrived(worker_id(1), settings)) == []
    assert worker_id(1) in core._settings._known


def test_settings_that_come_a_second_time_change_nothing() -> None:
    core = core_of("ssp")
    for _ in range(2):
        assert core.handle(ControlArrived(worker_id(1), NEW_SETTINGS)) == []
    assert only(push(core, 1, 0, settings=2), Step)


def test_collectives_end_one_after_the_other() -> None:
    core = core_of("ssp")
    assert core.handle(ControlArrived(COORDINATOR, Resume(seq=1))) == []
    for seq in (1, 3):
        (fail,) = core.handle(ControlArrived(COORDINATOR, Resume(seq=seq)))
        assert isinstance(fail, Fail)
        assert str(fail.error).endswith(f"resumed collective {seq} after collective 1")


@pytest.mark.parametrize("mode", ["sync", "ssp"])
@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"settings": 2},
         "pushed under version 2 of its settings; the newest that it has sent is 1"),
        ({"settings": 0},
         "pushed under version 0 of its settings; the newest that it has sent is 1"),
        ({"clock": 1}, "pushed iteration 1 of chunk 0 after -1"),
        ({"clock": -1}, "pushed iteration -1"),
        ({"group": 0}, "pushed for group 0, which is not its own"),
        ({"weight": math.inf}, "pushed a gradient of weight inf"),
        ({"kind": Kind.PULL}, "sent a message of kind 3, which no server takes from it"),
        ({"kind": Kind.REPLY}, "sent a message of kind 2, which no server takes from it"),
        ({"chunk": 1},
         "sent a message about chunk 1, which this server does not hold; run the same script and "
         "psdist version on all ranks"),
    ],
)  # fmt: skip
def test_pushes_that_cannot_be_fail_the_job_naming_who_sent_them(
    mode: str, changed: dict[str, Any], what: str
) -> None:
    core = core_of(mode)
    header = Header(
        kind=Kind.PUSH,
        sender=worker_id(1),
        group=1,
        chunk=0,
        length=4,
        settings=1,
        weight=1.0,
        dtype=Dtype.FLOAT32,
    )._replace(**changed)
    (accept,) = core.handle(Offered(worker_id(1), Kind.PUSH, 0, 4, "ticket"))
    (fail,) = core.handle(Arrived(worker_id(1), header, accept.slot))
    assert isinstance(fail, Fail)
    assert str(fail.error) == f"server 0: worker 1 {what}"


@pytest.mark.parametrize("weight", [-1.0, math.inf, math.nan])
def test_an_empty_push_has_a_weight_that_is_a_number(weight: float) -> None:
    (fail,) = push(core_of("ssp"), 1, 0, weight=weight, is_empty=True)
    assert str(fail.error) == f"server 0: worker 1 pushed no gradient, of weight {weight}"


def test_an_empty_push_out_of_the_chiefs_order_names_both_iterations_and_chunks() -> None:
    core = core_of("ssp", chunks=2)
    header = Header(
        kind=Kind.PUSH, sender=worker_id(1), group=1, chunk=0, settings=1, weight=1.0,
        dtype=Dtype.FLOAT32,
    )  # fmt: skip
    for chunk, clock in ((0, 0), (1, 0), (1, 1)):
        event = Arrived(worker_id(1), header._replace(chunk=chunk, clock=clock), None)
        assert not only(core.handle(event), Fail)
    (fail,) = core.handle(Arrived(worker_id(1), header._replace(clock=1), None))
    assert str(fail.error) == (
        "server 0: worker 1 pushed iteration 1 of chunk 0 after iteration 1 of chunk 1; all groups "
        "push in the chief's order"
    )


def test_a_group_steps_alone_where_no_group_counts() -> None:
    members = Membership(server=0, groups=[(0, 1, 2), (3,)])
    chunk, settings = ChunkState(0, ChunkClock(Limits([0, 0]))), PushSettings(b"", frozenset())
    push = Push(worker_id(0), 0, 0, weight=2.0, settings=settings, slot=None)
    assert BY_WEIGHT.lr_scale(chunk, push, members) == 2.0 / 3
    members.join(worker_id(3), Register(group=1, workers=[3], clock=0))
    assert BY_WEIGHT.lr_scale(chunk, push, members) == 2.0


def test_a_retransmitted_push_is_answered_once() -> None:
    chunk = ChunkState(0, ChunkClock(Limits([0, 0])))
    assert chunk.is_first_again(5, 3)
    assert not chunk.is_first_again(5, 3)
    assert chunk.is_first_again(6, 3)
    assert chunk.is_first_again(5, 4)
    assert not chunk.is_first_again(5, 3)


@pytest.mark.parametrize(
    ("peer", "kind"),
    [(1, Kind.INIT), (1, Kind.PULL), (1, Kind.REPLY), (0, Kind.REPLY)],
)
def test_offers_of_what_nobody_takes_fail_the_job(peer: int, kind: Kind) -> None:
    (fail,) = core_of("ssp").handle(Offered(worker_id(peer), kind, 0, 4, "ticket"))
    assert str(fail.error) == (
        f"server 0: worker {peer} sent a message of kind {kind:d}, which no server takes from it"
    )


def test_a_group_that_has_stopped_pushes_nothing_new() -> None:
    core = core_of("ssp")
    push(core, 1, 0)
    core.handle(ControlArrived(worker_id(1), Suspend(group=1, clock=1, seq=1)))
    assert push(core, 1, 0) == []  # a second delivery
    assert core.statistics().duplicates == 1
    (fail,) = push(core, 1, 1)
    assert str(fail.error) == "server 0: worker 1 pushed, but group 1 is suspended"


def test_a_suspension_that_its_resumption_overtook_is_forgotten_whatever_came_between() -> None:
    """Suspend is the leader's, Resume the coordinator's; another worker of the group may have
    pushed again by the time that the leader's message is here."""
    core = core_of("ssp", sizes=(2,))
    core.handle(ControlArrived(COORDINATOR, Resume(seq=1)))
    core.handle(ControlArrived(worker_id(1), Settings(version=1, hyper=HYPER, absent=[])))
    header = Header(kind=Kind.PUSH, sender=worker_id(1), settings=1, weight=0.0)
    assert only(core.handle(Arrived(worker_id(1), header, None)), EmptyStep)
    assert core.handle(ControlArrived(worker_id(0), Suspend(group=0, clock=0, seq=1))) == []
    core.check_invariants()


def test_after_a_collective_what_is_in_turn_is_received_as_before() -> None:
    core = core_of("sync", groups=1, chunks=2, slots=3)
    core.handle(ControlArrived(worker_id(0), Suspend(group=0, clock=0, seq=1)))
    core.handle(ControlArrived(COORDINATOR, Resume(seq=1)))
    assert only(core.handle(Offered(worker_id(0), Kind.PUSH, 1, 4, "ticket")), Accept)


@pytest.mark.parametrize("group", [0, 1])
def test_in_sync_a_push_too_far_ahead_takes_no_slot_in_turn_or_not(group: int) -> None:
    # 5 of 8 slots are there for what comes early: two chunks of each group.
    core = core_of("sync", chunks=4, slots=8)
    accepted = [
        bool(only(core.handle(Offered(worker_id(group), Kind.PUSH, chunk, 4, "ticket")), Accept))
        for chunk in range(4)
    ]
    assert accepted == [True, True, False, False]


def test_the_push_behind_one_that_had_to_wait_is_received_when_that_has_come() -> None:
    core = core_of("ssp", slots=1)
    header = Header(
        kind=Kind.PUSH, sender=worker_id(0), settings=1, weight=1.0, length=4, dtype=Dtype.FLOAT32
    )
    (accept,) = core.handle(Offered(worker_id(0), Kind.PUSH, 0, 4, "first"))
    for ticket in ("second", "third"):
        assert core.handle(Offered(worker_id(1), Kind.PUSH, 0, 4, ticket)) == []
    tickets = []
    for worker, clock in ((0, 0), (1, 0), (1, 1)):
        pushed = header._replace(sender=worker_id(worker), group=worker, clock=clock)
        accepts = only(core.handle(Arrived(worker_id(worker), pushed, accept.slot)), Accept)
        tickets += [each.ticket for each in accepts]
    assert tickets == ["second", "third"]


def test_who_stops_lets_chunks_go_on_in_the_order_in_which_they_came_to_wait() -> None:
    core = core_of("ssp", chunks=3, order=(2, 0, 1))
    for clock in (0, 1):
        for chunk in (2, 0, 1):
            header = Header(
                kind=Kind.PUSH, sender=worker_id(0), clock=clock, chunk=chunk, settings=1
            )
            replies = only(core.handle(Arrived(worker_id(0), header, None)), Reply)
            assert len(replies) == (clock == 0)
    actions = core.handle(ControlArrived(worker_id(1), Suspend(group=1, clock=0, seq=1)))
    assert [each.token.chunk for each in only(actions, Reply)] == [2, 0, 1]


def test_a_group_pushes_on_when_its_collective_is_over() -> None:
    core = core_of("ssp")
    core.handle(ControlArrived(worker_id(1), Suspend(group=1, clock=0, seq=1)))
    core.handle(ControlArrived(COORDINATOR, Resume(seq=1)))
    assert only(push(core, 1, 0), Step)


def test_offers_that_are_never_taken_are_counted() -> None:
    core = core_of("sync")
    offer = Offered(worker_id(1), Kind.PUSH, 0, 4, "ticket")
    accepted = [core.handle(offer) for _ in range(6)]
    assert [len(each) for each in accepted[:-1]] == [1, 0, 0, 0, 0]
    (fail,) = accepted[-1]
    assert str(fail.error) == "server 0: worker 1 offers chunk 0 more than 4 times"


@pytest.mark.parametrize(
    ("clock", "number", "is_taken"),
    [(0, 1, True), (1, 1, True), (2, 1, False), (-1, 1, False), (0, 0, False)],
)
def test_pulls_are_counted_and_of_no_iteration_beyond_the_next(
    clock: int, number: int, is_taken: bool
) -> None:
    core = core_of("ssp")
    pull = Header(kind=Kind.PULL, sender=worker_id(1), chunk=0, clock=clock, pull_number=number)
    actions = core.handle(Arrived(worker_id(1), pull, None))
    assert actions == [] if is_taken else isinstance(actions[0], Fail)


def test_a_group_that_registers_after_a_higher_one_keeps_its_turn() -> None:
    """No collective between: nothing but the registrations themselves comes before the pushes."""
    core = make_core("sync")
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


@pytest.mark.parametrize("clock", [0, 1])
def test_nobody_registers_behind_an_iteration_that_is_being_summed(clock: int) -> None:
    """Its own first one would have to come before."""
    core = core_of("sync", groups=3, registered=2)
    for each in range(clock):
        push(core, 0, each)
        push(core, 1, each)
    push(core, 0, clock)
    actions = core.handle(ControlArrived(worker_id(2), Register(group=2, workers=[2], clock=0)))
    if not clock:
        assert not only(actions, Fail)
        core.check_invariants()
        return
    (fail,) = actions
    assert str(fail.error) == "server 0: worker 2 registered group 2 in the middle of an iteration"


def test_before_there_is_a_model_as_much_is_kept_as_a_worker_has_credits() -> None:
    assert MAX_CREDITS == MOST_CREDITS
    core = make_core("ssp")
    pull = Header(kind=Kind.PULL, sender=worker_id(0), chunk=0, pull_number=1)
    for _ in range(MOST_CREDITS):
        assert core.handle(Arrived(worker_id(0), pull, None)) == []
    assert core.handle(Arrived(worker_id(1), pull, None)) == []
    (fail,) = core.handle(Arrived(worker_id(0), pull, None))
    assert str(fail.error) == "server 0: worker 0 sent 4097 messages before there was a model"


@pytest.mark.parametrize("dtype", Dtype)
def test_a_push_without_a_gradient_gets_the_receipt_that_it_asks_for(dtype: Dtype) -> None:
    """Whatever dtype it names."""
    core = core_of("sync")
    header = Header(
        kind=Kind.PUSH, sender=worker_id(0), chunk=0, settings=1, dtype=dtype, flags=Flag.RECEIPT
    )
    assert core.handle(Arrived(worker_id(0), header, None))[-1] == Receipt(worker_id(0), 0, 0)


def test_all_workers_hear_of_other_codecs_before_the_first_parameters_for_that_round() -> None:
    core = core_of("sync")
    assert core.handle(HoldRounds()) == []
    for group in range(2):
        assert only(push(core, group, 0), Reply) == [], "kept back"
    begin, *told, first, second = core.handle(ChangeCodecs(1, 1, 3))
    assert begin == ChangeCodecs(1, 1, 3)
    message = BeginCodecs(number=1, round=1, level=3)
    assert told == [SendControl(worker_id(worker), message) for worker in range(2)]
    assert isinstance(first, Reply)
    assert isinstance(second, Reply)
    for group in range(2):
        actions = push(core, group, 1)
    assert len(only(actions, Reply)) == 2, "nothing is kept back any more"
