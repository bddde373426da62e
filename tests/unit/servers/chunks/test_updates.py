"""A server whose state contradicts itself says so, whatever it is that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from psdist.errors import HyperparameterError, InvariantError
from psdist.protocol.control import Register, Resume, Settings, Setup, Suspend
from psdist.protocol.events import Arrived, ControlArrived, Frame, Offered
from psdist.protocol.header import CodecCode, Dtype, Flag, Header, Kind
from psdist.protocol.ids import COORDINATOR, worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.protocol.payloads import PayloadRule
from psdist.servers.protocol.actions import (
    Accept,
    Built,
    EmptyStep,
    Fail,
    Fold,
    MembershipEvent,
    ReplySent,
    StartSum,
    Step,
)
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.chunks import ChunkState, PendingReply
from psdist.servers.protocol.chunks.receive_pool import ADDS, EARLY, FRONTIER
from psdist.servers.protocol.state import ServerCore


def server(mode: str) -> ServerCore:
    """Two groups, two chunks. Group 1's push of chunk 0 waits (sync: for group 0 in turn), and a
    second one of its is held."""
    core = assemble_core(server=0, make_rule=rule_for(mode, staleness=0), groups=[(0,), (1,)])
    core.handle(ControlArrived(worker_id(0), Setup(partition=b"", optimizer="", hyper=b"")))
    rule = PayloadRule(
        codec=CodecCode.RAW, name="raw", dtypes=(Dtype.FLOAT32,) * 2, smallest=(4, 4),
        largest=(4, 4),
    )  # fmt: skip
    slots = [Frame(capacity=4) for _ in range(4)]
    core.handle(
        Built([0, 1], slots, initials=rule, pushes=rule, num_pieces=1, num_optimizer_groups=1)
    )
    hyper = pack_hyperparameters([{"lr": 0.1}])
    for group in (0, 1):
        peer = worker_id(group)
        core.handle(ControlArrived(peer, Register(group=group, workers=[group], clock=0)))
        core.handle(ControlArrived(peer, Settings(version=1, hyper=hyper, absent=[])))
    (accept,) = core.handle(Offered(worker_id(1), Kind.PUSH, 0, 4, "first"))
    assert isinstance(accept, Accept)
    header = Header(
        kind=Kind.PUSH, sender=worker_id(1), group=1, chunk=0, length=4, settings=1, weight=1.0,
        dtype=Dtype.FLOAT32,
    )  # fmt: skip
    core.handle(Arrived(worker_id(1), header, accept.slot))
    if mode == "sync":
        assert core.handle(Offered(worker_id(1), Kind.PUSH, 0, 4, "second")) == []
    core.check_invariants()
    return core


def forget_what_is_blocked(core: ServerCore) -> None:
    core.rule.replies.blocked.clear()


def forget_where_an_offer_waits(core: ServerCore) -> None:
    core.chunk_states[0].pushes.clear()
    core.rule.replies.blocked.clear()


def forget_where_a_push_waits(core: ServerCore) -> None:
    core.rule.pool._held.clear()
    for queue in core.rule.pool._queues.values():
        queue.clear()
    core.rule.replies.blocked.clear()


def forget_where_a_reply_waits(core: ServerCore) -> None:
    core.chunk_states[1].parked[5] = [PendingReply(worker_id(0), 5, 0)]


def free_a_slot_in_use(core: ServerCore) -> None:
    core.rule.pool._free.append(Frame(capacity=4))


def turn_to_who_has_pushed(core: ServerCore) -> None:
    core.chunk_states[0].gathering.pushes[0] = core.chunk_states[0].pushes[1][0]


def turn_to_the_first_of_two_that_have_pushed(core: ServerCore) -> None:
    core.chunk_states[0].pushes[0] = core.chunk_states[0].pushes[1]


def forget_in_which_queue_an_offer_waits(core: ServerCore) -> None:
    for queue in core.rule.pool._queues.values():
        queue.clear()


def have_gathered_all_and_not_step(core: ServerCore) -> None:
    chunk = core.chunk_states[0]
    push = chunk.take_push(1)
    chunk.gathering.pushes.update({0: push, 1: push})


def lose_the_frontier(core: ServerCore) -> None:
    for group in (0, 1):
        core.chunk_states[1].clock.advance(group)
    core.rule._frontier._at = 1  # type: ignore[attr-defined]


def contradict_its_pool(core: ServerCore) -> None:
    core.rule.pool._held[1] = {}


def contradict_its_chunks(core: ServerCore) -> None:
    core.chunk_states[1].open_replies[0] = 1


def contradict_its_membership(core: ServerCore) -> None:
    core._membership.pushing.clear()


@pytest.mark.parametrize(
    ("mode", "break_it"),
    [
        ("sync", forget_what_is_blocked),
        ("sync", forget_where_an_offer_waits),
        ("sync", forget_where_a_push_waits),
        ("ssp", forget_where_a_reply_waits),
        ("sync", free_a_slot_in_use),
        ("sync", turn_to_who_has_pushed),
        ("sync", turn_to_the_first_of_two_that_have_pushed),
        ("sync", forget_in_which_queue_an_offer_waits),
        ("sync", have_gathered_all_and_not_step),
        ("sync", lose_the_frontier),
        ("ssp", contradict_its_pool),
        ("ssp", contradict_its_chunks),
        ("ssp", contradict_its_membership),
    ],
)
def test_a_server_that_contradicts_itself_is_caught(
    mode: str, break_it: Callable[[ServerCore], None]
) -> None:
    core = server(mode)
    break_it(core)
    with pytest.raises(InvariantError):
        core.check_invariants()


def loaded(mode: str, *, groups: int = 2, staleness: int = 0) -> ServerCore:
    """One chunk with its initial values, nothing pushed."""
    core = assemble_core(
        server=0,
        make_rule=rule_for(mode, staleness=staleness),
        groups=[(group,) for group in range(groups)],
    )
    core.handle(ControlArrived(worker_id(0), Setup(partition=b"", optimizer="", hyper=b"")))
    rule = PayloadRule(
        codec=CodecCode.RAW, name="raw", dtypes=(Dtype.FLOAT32,), smallest=(4,), largest=(4,)
    )
    slots = [Frame(capacity=4) for _ in range(4)]
    core.handle(Built([0], slots, initials=rule, pushes=rule, num_pieces=1, num_optimizer_groups=1))
    hyper = pack_hyperparameters([{"lr": 0.1}])
    for group in range(groups):
        peer = worker_id(group)
        core.handle(ControlArrived(peer, Register(group=group, workers=[group], clock=0)))
        core.handle(ControlArrived(peer, Settings(version=1, hyper=hyper, absent=[])))
    send(core, Kind.INIT, 0)
    return core


def send(core: ServerCore, kind: int, group: int, **fields: Any) -> list[Any]:
    """Return the actions when a payload of 4 bytes, or a pull, has arrived."""
    header = Header(
        kind=kind, sender=worker_id(group), group=group, chunk=0, settings=1, weight=1.0,
        length=0 if kind == Kind.PULL else 4, dtype=Dtype.FLOAT32,
    )._replace(**fields)  # fmt: skip
    slot = None
    if kind != Kind.PULL:
        (accept,) = core.handle(Offered(worker_id(group), kind, 0, 4, header))
        slot = accept.slot
    return core.handle(Arrived(worker_id(group), header, slot))


def test_a_push_proves_that_the_reply_it_was_computed_on_has_arrived() -> None:
    """The network gives nothing back here, and yet no step needs the second buffer."""
    core = loaded("sync")
    for clock in range(4):
        for group in (0, 1):
            send(core, Kind.PUSH, group, clock=clock)
    assert core.statistics().steps == 4
    assert core.statistics().copies_on_write == 0


def test_a_pull_is_not_proved_to_have_been_answered_by_a_push_of_before() -> None:
    core = loaded("sync", groups=1)
    send(core, Kind.PULL, 0, clock=1, pull_number=1, flags=Flag.FRESH)
    (_, step, *_) = send(core, Kind.PUSH, 0, clock=0)
    assert (step.source, step.target) == (0, 1)


def test_steps_that_had_to_wait_for_a_buffer_are_made_in_the_order_of_their_pushes() -> None:
    core = loaded("ssp", groups=5)
    (first,) = send(core, Kind.PULL, 3, pull_number=1, flags=Flag.FRESH)
    (step,) = send(core, Kind.PUSH, 0, clock=0)
    assert (step.source, step.target) == (0, 1)
    (second,) = send(core, Kind.PULL, 4, pull_number=1, flags=Flag.FRESH)
    assert (first.token.buffer, second.token.buffer) == (0, 1)
    for group in (2, 1):
        assert send(core, Kind.PUSH, group, clock=0) == []
    steps = core.handle(ReplySent(second.token))
    assert [(each.contributions[0].group, each.source, each.target) for each in steps] == [
        *((2, 1, 1), (1, 1, 1)),
    ]


def without_a_free_buffer(mode: str) -> tuple[ServerCore, ReplySent]:
    """Replies read both parameter buffers; the event frees one of them."""
    core = loaded(mode, groups=8)
    (reply,) = send(core, Kind.PULL, 6, pull_number=1, flags=Flag.FRESH)
    send(core, Kind.PUSH, 0, clock=0)
    send(core, Kind.PULL, 7, pull_number=1, flags=Flag.FRESH)
    return core, ReplySent(reply.token)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunk of each attempt to find a free buffer."""
    found: list[int] = []
    honest = ChunkState.target_buffer

    def counted(chunk: ChunkState) -> int | None:
        found.append(chunk.index)
        return honest(chunk)

    monkeypatch.setattr(ChunkState, "target_buffer", counted)
    return found


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_one_push_is_tried_while_no_buffer_is_free_however_many_wait(
    mode: str, tries: list[int]
) -> None:
    core, freed = without_a_free_buffer(mode)
    for group in (4, 2, 5, 3):
        tries.clear()
        assert send(core, Kind.PUSH, group, clock=0) == []
        assert len(tries) == 1
    tries.clear()
    stepped = [each.contributions[0].group for each in core.handle(freed) if type(each) is Step]
    # In ssp their replies are parked. In async the reply to group 4 reads the buffer again.
    assert stepped == {"ssp": [4, 2, 5, 3], "async": [4]}[mode]
    assert len(tries) == {"ssp": 4, "async": 2}[mode]
    core.check_invariants()


def test_an_update_without_a_gradient_overtakes_gradients_of_other_groups_that_wait() -> None:
    core, freed = without_a_free_buffer("async")
    for group in (2, 1):
        assert send(core, Kind.PUSH, group, clock=0) == []
    empty = Header(kind=Kind.PUSH, sender=worker_id(3), group=3, chunk=0, settings=1, weight=1.0)
    step, reply = core.handle(Arrived(worker_id(3), empty, None))
    assert isinstance(step, EmptyStep)
    assert (step.contributions[0].group, reply.clock) == (3, 0)
    core.check_invariants()
    # After a gradient of its own group it waits for that gradient.
    empty = empty._replace(sender=worker_id(2), group=2, clock=1)
    assert core.handle(Arrived(worker_id(2), empty, None)) == []
    core.check_invariants()
    steps = [each for each in core.handle(freed) if isinstance(each, Step | EmptyStep)]
    assert [each.contributions[0][:2] for each in steps] == [(2, 0), (2, 1)]
    core.check_invariants()


def test_a_sum_is_in_a_slot_as_much_as_what_waits_for_its_turn() -> None:
    core = loaded("sync")
    send(core, Kind.PUSH, 0, clock=0)
    core.check_invariants()
    core.rule.pool._free.append(Frame(capacity=4))
    with pytest.raises(InvariantError, match="1 receive slots in use, more than were taken"):
        core.check_invariants()


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_one_chunk_is_checked_without_looking_at_the_others(mode: str) -> None:
    core = server(mode)
    core.chunk_states[1].open_replies[0] = 1
    core.check_invariants(0)
    core.check_invariants(7)
    with pytest.raises(InvariantError):
        core.check_invariants(1)
    core = server(mode)
    core.rule.pool._free.append(core.rule.pool._free[0])  # the pool is no chunk's
    core._membership.pushing.clear()  # nor are the workers
    core.check_invariants(0)
    with pytest.raises(InvariantError):
        core.check_invariants()


def test_what_waits_on_one_chunk_is_no_matter_of_another() -> None:
    core = server("sync")
    core.chunk_states[1].pushes[0] = core.chunk_states[0].pushes[1]
    core.check_invariants(0)
    with pytest.raises(InvariantError, match="chunk 1 is blocked and not listed in blocked"):
        core.check_invariants(1)


def test_the_frontier_is_checked_with_all_chunks_only() -> None:
    core = server("sync")
    lose_the_frontier(core)
    core.check_invariants(0)
    core.check_invariants(1)
    with pytest.raises(InvariantError, match="the frontier, chunk 1"):
        core.check_invariants()


def test_in_sync_all_groups_have_the_same_schedule() -> None:
    core = loaded("sync", groups=3)
    send(core, Kind.PUSH, 0, clock=0)
    hyper = pack_hyperparameters([{"lr": 0.2}])
    core.handle(ControlArrived(worker_id(2), Settings(version=2, hyper=hyper, absent=[])))
    assert [type(each) for each in send(core, Kind.PUSH, 1, clock=0)] == [Fold]
    (fail,) = send(core, Kind.PUSH, 2, clock=0, settings=2)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, HyperparameterError)
    assert str(fail.error).startswith(
        "sync iteration 0: groups 0 and 2 disagree on hyperparameters: "
    )


def test_of_a_push_that_was_offered_twice_one_offer_is_received_when_its_turn_comes() -> None:
    core = loaded("sync")
    (first,) = core.handle(Offered(worker_id(0), Kind.PUSH, 0, 4, "first"))
    held = [core.handle(Offered(worker_id(1), Kind.PUSH, 0, 4, f"{each}")) for each in range(2)]
    assert held == [[], []]
    header = Header(
        kind=Kind.PUSH, sender=worker_id(0), settings=1, weight=1.0, length=4, dtype=Dtype.FLOAT32
    )
    actions = core.handle(Arrived(worker_id(0), header, first.slot))
    assert [each.ticket for each in actions if isinstance(each, Accept)] == ["0"]


def suspend(core: ServerCore, group: int, clock: int = 0) -> list[Any]:
    message = Suspend(group=group, clock=clock, seq=1)
    return core.handle(ControlArrived(worker_id(group), message))


def test_a_chunk_on_which_nothing_waits_any_more_is_forgotten() -> None:
    core = loaded("sync", groups=3)
    send(core, Kind.PUSH, 0, clock=0)
    assert [*core.rule.replies.blocked] == [0]
    for group in (1, 2):
        send(core, Kind.PUSH, group, clock=0)
    suspend(core, 0, 1)
    assert [*core.rule.replies.blocked] == []


def test_who_stops_makes_those_chunks_go_on_that_stand_where_it_has_stopped() -> None:
    core = loaded("sync", groups=3)
    for group in (0, 1, 2):
        send(core, Kind.PUSH, group, clock=0)
    send(core, Kind.PUSH, 0, clock=1)
    assert core.rule._waiting_at(0) == ()
    assert core.rule._waiting_at(1) == (core.chunk_states[0],)
    assert core.rule._waiting_at(2) == ()


def test_a_group_that_comes_while_a_step_waits_for_a_buffer_is_waited_for() -> None:
    """It registers before anything was done without it."""
    core = assemble_core(server=0, make_rule=rule_for("sync"), groups=[(0,), (1,), (2,)])
    core.handle(ControlArrived(worker_id(0), Setup(partition=b"", optimizer="", hyper=b"")))
    rule = PayloadRule(
        codec=CodecCode.RAW, name="raw", dtypes=(Dtype.FLOAT32,), smallest=(4,), largest=(4,)
    )
    slots = [Frame(capacity=4) for _ in range(4)]
    core.handle(Built([0], slots, initials=rule, pushes=rule, num_pieces=1, num_optimizer_groups=1))
    register(core, 0)
    send(core, Kind.INIT, 0)
    chunk = core.chunk_states[0]
    chunk.open_replies[:] = [1, 1]  # both buffers have a reader
    assert [type(each) for each in send(core, Kind.PUSH, 0, clock=0)] == [StartSum]
    register(core, 1)
    chunk.open_replies[:] = [0, 1]
    token = chunk.open_reply(worker_id(2), implied_by=9)
    assert core.handle(ReplySent(token)) == []
    chunk.open_replies[:] = [0, 0]
    _, step, *_ = send(core, Kind.PUSH, 1, clock=0)
    assert [each.group for each in step.contributions] == [0, 1]


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_a_reply_that_was_sent_matters_where_a_step_waits_for_its_buffer_only(mode: str) -> None:
    core = loaded(mode)
    (reply,) = send(core, Kind.PULL, 0, pull_number=1, flags=Flag.FRESH)

    def proceed(_: Any) -> list[Any]:
        raise AssertionError

    core.rule.proceed = proceed  # type: ignore[method-assign]
    assert core.handle(ReplySent(reply.token)) == []


def test_who_stops_may_make_the_next_chunk_the_one_that_a_slot_is_kept_for() -> None:
    """Chunk 0 waits for group 1 alone, chunk 1 for both; two slots serve the lower one."""
    core = assemble_core(server=0, make_rule=rule_for("sync", staleness=0), groups=[(0,), (1,)])
    core.handle(ControlArrived(worker_id(0), Setup(partition=b"", optimizer="", hyper=b"")))
    rule = PayloadRule(
        codec=CodecCode.RAW, name="raw", dtypes=(Dtype.FLOAT32,) * 2, smallest=(4, 4),
        largest=(4, 4),
    )  # fmt: skip
    slots = [Frame(capacity=4), Frame(capacity=4)]
    core.handle(
        Built([0, 1], slots, initials=rule, pushes=rule, num_pieces=1, num_optimizer_groups=1)
    )
    register(core, 0)
    send(core, Kind.PUSH, 0, clock=0)
    register(core, 1)
    assert core.handle(Offered(worker_id(0), Kind.PUSH, 1, 4, "next")) == []
    event, accept = suspend(core, 1)
    assert event == MembershipEvent("suspend", 1, 0, 1)
    assert accept.ticket == "next"


def register(core: ServerCore, group: int) -> None:
    peer = worker_id(group)
    hyper = pack_hyperparameters([{"lr": 0.1}])
    core.handle(ControlArrived(peer, Register(group=group, workers=[group], clock=0)))
    core.handle(ControlArrived(peer, Settings(version=1, hyper=hyper, absent=[])))


def test_what_changes_is_recorded_before_the_coordinator_is_answered() -> None:
    core = loaded("ssp")
    for group in (1, 0):
        message = Suspend(group=group, clock=0, seq=1)
        (event,) = core.handle(ControlArrived(worker_id(group), message))
        assert event == MembershipEvent("suspend", group, 0, 1)
    assert core.handle(ControlArrived(COORDINATOR, Resume(seq=1))) == [
        MembershipEvent("resume", 0, 0, 1),
        MembershipEvent("resume", 1, 0, 1),
    ]


def test_what_was_summed_is_told_although_the_step_must_wait_for_a_buffer() -> None:
    core = loaded("sync", groups=4)
    for group in (2, 3):
        message = Suspend(group=group, clock=0, seq=1)
        core.handle(ControlArrived(worker_id(group), message))
    send(core, Kind.PULL, 2, pull_number=1, flags=Flag.FRESH)
    for group in (0, 1):
        send(core, Kind.PUSH, group, clock=0)
    send(core, Kind.PULL, 3, pull_number=1, flags=Flag.FRESH)
    assert [type(each) for each in send(core, Kind.PUSH, 0, clock=1)] == [StartSum]
    assert [type(each) for each in send(core, Kind.PUSH, 1, clock=1)] == [Fold]
    core.check_invariants()


def test_a_push_that_comes_while_the_one_before_is_being_summed_is_no_duplicate() -> None:
    core = loaded("sync")
    send(core, Kind.PUSH, 0, clock=0)
    header = Header(kind=Kind.PUSH, sender=worker_id(0), clock=1, settings=1, weight=1.0)
    for num_duplicates in (0, 1):
        assert core.handle(Arrived(worker_id(0), header, None)) == []
        assert core.statistics().duplicates == num_duplicates


def test_a_suspension_that_is_too_late_is_the_leaders_all_the_same() -> None:
    core = loaded("ssp")
    core.handle(ControlArrived(COORDINATOR, Resume(seq=1)))
    late = Suspend(group=0, clock=0, seq=1)
    (fail,) = core.handle(ControlArrived(worker_id(1), late))
    assert isinstance(fail, Fail)
    assert core.handle(ControlArrived(worker_id(0), late)) == []


def test_a_push_that_the_chunk_contains_takes_a_slot_out_of_its_turn() -> None:
    """It is repeated after the failure of the server that it was sent to, and is received at
    once."""
    core = server("sync")
    needed = core.rule.slots_needed
    assert needed(0, 1) == EARLY
    core.chunk_states[0].duplicate_offers.add(1)
    assert needed(0, 1) == ADDS
    assert needed(0, 0) == FRONTIER
