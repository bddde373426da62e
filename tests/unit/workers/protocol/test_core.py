"""What the subjects of the worker's machine have to do with each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from psdist.codecs.wire import payload_rule
from psdist.errors import BuriedError, InvariantError, PeerLostError, ProtocolError
from psdist.protocol.control import (
    BeginCodecs,
    Collected,
    Control,
    MembershipChanged,
    Missing,
    Registered,
    Settings,
    Stop,
    WhoIsAbsent,
    WhoIsMissing,
)
from psdist.protocol.events import Arrived, PeerLost
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.protocol.partition import Partition, Piece
from psdist.protocol.rounds import Turns
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import (
    InitialSent,
    SendControl,
    SendPush,
    Warn,
)
from psdist.workers.protocol.core import TransferCounts, WorkerCore
from tests.support.virtual.worker_machine import (
    BYTES,
    OWNERS,
    PARTITION,
    RULE,
    SETUP,
    Network,
    collect,
    control,
    make_core,
    messages,
    push,
    reply_to,
)

# -- settings -----------------------------------------------------------------------------------


def test_settings_go_ahead_of_the_first_push_that_was_made_under_them_and_once() -> None:
    core = make_core(credits=9)
    network = Network(core, seed=0, duplicate_rate=0.0)
    seen: list[tuple[int, list[tuple[int, Control]]]] = []
    for hyper, absent in ((b"a", ()), (b"a", ()), (b"b", ()), (b"b", (1,)), (b"b", ()), (b"b", ())):
        actions = push(core, hyper=hyper, absent=absent)
        kinds = [isinstance(action, SendControl) for action in actions]
        assert kinds == sorted(kinds, reverse=True), "settings come behind a push"
        pushes = [action for action in actions if isinstance(action, SendPush)]
        (version,) = {action.header.settings for action in pushes}
        seen.append((version, messages(actions)))
        network.do(actions)
        network.run()
    assert [version for version, _ in seen] == [1, 1, 2, 3, 4, 4]
    assert [len(told) for _, told in seen] == [2, 0, 2, 2, 2, 0]
    assert seen[3][1] == [
        (server_id(server), Settings(version=3, hyper=b"b", absent=[1])) for server in (0, 1)
    ]


def test_rounds_are_skipped_when_nothing_is_under_way_and_never_backwards() -> None:
    core = make_core(credits=9)
    network = Network(core, seed=0, duplicate_rate=0.0)
    assert not core.is_awaiting
    network.do(push(core))
    assert core.is_awaiting
    with pytest.raises(InvariantError, match=r"continues with round 4 after 1, \d+ replies"):
        core.transfers.skip_to(4)
    network.run()
    assert not core.is_awaiting
    core.transfers.skip_to(4)
    assert core.clock == 4
    with pytest.raises(InvariantError, match="continues with round 3 after 4, 0 replies"):
        core.transfers.skip_to(3)


def test_settings_go_to_the_servers_of_the_workers_own_slice_only() -> None:
    seat = Seat(worker=0, group=0, members=(0, 1), num_servers=2)
    core = WorkerCore(seat)
    core.take_slice(PARTITION, owners=(0, 0, 0, 1, 1, 1), credits=2, replies=RULE)
    assert [peer for peer, _ in messages(push(core))] == [server_id(0)]


# -- what may not begin before what has ended -----------------------------------------------------


def in_a_collective(core: WorkerCore) -> None:
    core.begin_collective("mean", b"")


def answered(core: WorkerCore) -> None:
    core.begin_collective("mean", b"")
    collect(core, 1)


def in_a_push(core: WorkerCore) -> None:
    push(core)


def done(core: WorkerCore) -> None:
    core.begin_done({})


def nothing(_core: WorkerCore) -> None:
    pass


def second_slice(core: WorkerCore) -> None:
    core.take_slice(PARTITION, owners=OWNERS, credits=1, replies=RULE)


FORBIDDEN: list[tuple[str, Callable[[WorkerCore], None], Callable[[WorkerCore], Any]]] = [
    ("a push in a push", in_a_push, push),
    ("a pull in a push", in_a_push,
     lambda core: core.transfers.begin_pull(clock=1, chunks=[0], is_fresh=True)),
    ("a push in a collective", in_a_collective, push),
    ("a collective in a collective", in_a_collective, in_a_collective),
    ("a collective in a push", in_a_push, in_a_collective),
    ("done in a push", in_a_push, done),
    ("done in a collective", in_a_collective, done),
    ("a push after the end", done, push),
    ("a collective after the end", done, in_a_collective),
    ("done twice", done, done),
    ("a collective before the last one's answer was taken", answered, in_a_collective),
    ("an iteration left out", nothing, lambda core: push(core, clock=1)),
    ("a second slice", nothing, second_slice),
    ("an answer before it is here", in_a_collective, lambda core: core.collectives.take()),
    ("a registration twice", lambda core: core.begin_register(), WorkerCore.begin_register),
    ("a setup twice", lambda core: core.begin_setup(SETUP), lambda core: core.begin_setup(SETUP)),
    ("values that were not sent", nothing, lambda core: core.handle(InitialSent(0))),
]  # fmt: skip


@pytest.mark.parametrize(("before", "then"), [case[1:] for case in FORBIDDEN],
                         ids=[case[0] for case in FORBIDDEN])  # fmt: skip
def test_what_may_not_begin_now_is_refused_and_changes_nothing(
    before: Callable[[WorkerCore], None], then: Callable[[WorkerCore], Any]
) -> None:
    core = make_core()
    before(core)
    with pytest.raises(InvariantError):
        then(core)
    core.check_invariants()


def test_only_the_chief_describes_the_model_and_only_a_leader_registers() -> None:
    with pytest.raises(InvariantError, match="worker 1 described the model; the chief does"):
        make_core(1, members=(1,)).begin_setup(SETUP)
    with pytest.raises(InvariantError, match="worker 1 registered group 7; its leader, worker 0"):
        make_core(1, members=(0, 1)).begin_register()
    with pytest.raises(InvariantError, match="worker 0 has no slice yet"):
        WorkerCore(Seat(worker=0, group=0, members=(0,), num_servers=1)).begin_setup(SETUP)


def test_the_loss_of_a_peer_is_an_error_that_names_it() -> None:
    core = make_core()
    push(core)
    with pytest.raises(PeerLostError, match=r"^server 1 \(rank 3 on n2\) has failed; this job"):
        core.handle(PeerLost(server_id(1), "server 1 (rank 3 on n2)"))


def test_sizes_of_chunks_are_those_of_the_partition_one_by_one() -> None:
    uneven = Partition.cut(
        [Piece(name="p", shape=(192,), stride=(1,), dtype="float32", optimizer_group=0)],
        chunk_bytes=2 * BYTES,
    )
    core = WorkerCore(Seat(worker=0, group=0, members=(0,), num_servers=1))
    core.take_slice(uneven, owners=(0, 0), credits=2, replies=payload_rule(None, uneven))
    sent = [each.header.length for each in push(core) if isinstance(each, SendPush)]
    assert sent == [2 * BYTES, BYTES]


def test_what_has_left_and_what_has_come_is_counted_apart() -> None:
    core = make_core(credits=9)
    sent = sum(each.header.length for each in push(core) if isinstance(each, SendPush))
    core.transfers.count_coded(-100)
    core.transfers.count_coded(20)
    header = reply_to(Header(kind=Kind.PUSH, sender=worker_id(0), chunk=0))
    core.handle(Arrived(server_id(0), header, None))
    assert core.counts() == TransferCounts(bytes_pushed=sent - 80, bytes_pulled=BYTES, duplicates=0)


# -- long waits ---------------------------------------------------------------------------------


def test_a_long_wait_says_what_for_and_asks_whoever_knows_more() -> None:
    core = make_core()
    assert core.awaits() == "nothing"
    core.begin_setup(SETUP)
    core.begin_register()
    control(core, server_id(1), Registered(group=7, server=1))
    assert core.awaits() == "the servers"
    assert core.ask_who_is_missing() == [
        Warn("not registered yet with server 0"),
        Warn("6 chunks of initial values not taken yet"),
    ]
    control(core, server_id(0), Registered(group=7, server=0))
    for chunk in range(6):
        core.handle(InitialSent(chunk))
    core.begin_collective("save")
    assert core.awaits() == "the other workers in save"
    assert core.ask_who_is_missing() == [
        SendControl(COORDINATOR, WhoIsAbsent(worker=0, seq=1)),
    ]
    collect(core, 1)
    core.collectives.take()
    push(core)
    assert core.awaits() == "the replies to iteration 0"
    assert core.ask_who_is_missing() == [
        Warn("waiting for chunk 0 from server 0"),
        SendControl(server_id(0), WhoIsMissing(chunk=0)),
    ]


def test_a_long_wait_names_what_was_asked_for_and_nothing_else() -> None:
    core = make_core(num_servers=9)
    core.begin_setup(SETUP)
    assert core.ask_who_is_missing() == [Warn("6 chunks of initial values not taken yet")]
    core = make_core(num_servers=9)
    assert core.ask_who_is_missing() == []
    core.begin_register()
    for server in (0, 2, 3, 4, 5, 6, 7):
        control(core, server_id(server), Registered(group=7, server=server))
    assert core.ask_who_is_missing() == [Warn("not registered yet with server 1, 8")]
    for server in (1, 8):
        control(core, server_id(server), Registered(group=7, server=server))
    assert core.ask_who_is_missing() == []


def test_nothing_is_awaited_once_the_job_is_complete() -> None:
    core = make_core()
    core.begin_done({})
    control(core, COORDINATOR, Stop())
    assert core.awaits() == "nothing"


def test_a_long_wait_for_parameters_and_for_the_end_is_named() -> None:
    core = make_core()
    core.transfers.begin_pull(clock=0, chunks=[3], is_fresh=True)
    assert core.awaits() == "parameters"
    assert Warn("waiting for chunk 3 from server 1") in core.ask_who_is_missing()
    core = make_core()
    core.begin_done({})
    assert core.awaits() == "the other workers to finish"


def test_who_is_missing_is_said_while_the_chunk_is_awaited_and_not_afterwards() -> None:
    core = make_core(credits=9)
    push(core)
    answer = Missing(chunk=0, groups=[2, 3], clocks=[5, 6])
    assert control(core, server_id(0), answer) == [
        Warn("chunk 0 waits for group 2 on n2 at iteration 5; group 3 on n3 at iteration 6")
    ]
    assert control(core, server_id(0), Missing(chunk=0, groups=[], clocks=[])) == [
        Warn("chunk 0 waits for no group")
    ]
    with pytest.raises(ProtocolError, match="server 1 sent Missing about chunk 0"):
        control(core, server_id(1), answer)
    with pytest.raises(ProtocolError, match=r"server 0 sent Missing .* 1 groups and 0 clocks"):
        control(core, server_id(0), Missing(chunk=0, groups=[2], clocks=[]))
    header = reply_to(Header(kind=Kind.PUSH, sender=worker_id(0), chunk=0))
    core.handle(Arrived(server_id(0), header, None))
    assert control(core, server_id(0), answer) == []


# -- the invariants themselves ------------------------------------------------------------------


def break_credits(core: WorkerCore) -> None:
    core.transfers.outstanding[0] += 1


def lose_a_message(core: WorkerCore) -> None:
    core.transfers.queues[0].pop()


def forget_a_reply(core: WorkerCore) -> None:
    del core.transfers.awaited[0]


def leave_a_credit_unused(core: WorkerCore) -> None:
    transfers = core.transfers
    transfers.queues[0].appendleft(Header(kind=Kind.PUSH, sender=worker_id(0), chunk=0))
    transfers.outstanding[0] -= 1


def queue_out_of_order(core: WorkerCore) -> None:
    core.transfers.queues[0].reverse()


def await_another_iteration(core: WorkerCore) -> None:
    core.transfers.awaited[0] = (5, 0)


def go_back(core: WorkerCore) -> None:
    core.settings.version = 0


def invent_settings(core: WorkerCore) -> None:
    core.settings.version = 9


def answer_the_future(core: WorkerCore) -> None:
    core.collectives._num_answered = 4


def be_registered_unasked(core: WorkerCore) -> None:
    core.membership._registered.add(0)


def leave_unregistered(core: WorkerCore) -> None:
    core.membership.has_left = True


def stop_before_done(core: WorkerCore) -> None:
    core.membership.is_stopped = True


def be_done_in_a_push(core: WorkerCore) -> None:
    core.membership.is_done = True


def hold_an_old_answer(core: WorkerCore) -> None:
    core.collectives._answer = Collected(seq=3, payloads=[], runs=[], values=b"", error="")


BREAKS = [
    break_credits, lose_a_message, forget_a_reply, leave_a_credit_unused, queue_out_of_order,
    await_another_iteration, go_back, invent_settings, answer_the_future, be_registered_unasked,
    leave_unregistered, stop_before_done, be_done_in_a_push, hold_an_old_answer,
]  # fmt: skip


def test_a_worker_that_is_done_inside_a_collective_contradicts_itself() -> None:
    core = make_core()
    core.begin_collective("mean")
    core.check_invariants()
    be_done_in_a_push(core)
    with pytest.raises(InvariantError, match="is done and waits for the other workers in mean"):
        core.check_invariants()


def test_one_collective_at_a_time_is_not_answered() -> None:
    core = make_core()
    core.collectives.seq = 2
    with pytest.raises(InvariantError, match="0 collectives answered, 2 entered"):
        core.check_invariants()


def test_no_answer_is_kept_into_the_next_collective() -> None:
    core = make_core()
    answered(core)
    core.check_invariants()
    core.collectives.seq = 2
    with pytest.raises(InvariantError, match="holds the answer to collective 1, not to 2"):
        core.check_invariants()


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda each: each.__name__)
def test_a_state_that_contradicts_itself_is_caught(break_it: Callable[[WorkerCore], None]) -> None:
    core = make_core(credits=1)
    push(core)
    core.check_invariants()
    break_it(core)
    with pytest.raises(InvariantError):
        core.check_invariants()


def test_what_is_still_to_be_pushed_belongs_to_an_iteration() -> None:
    core = make_core()
    core.check_invariants()
    core.transfers.unpushed.append(3)
    core.transfers.is_pushing = False
    with pytest.raises(InvariantError, match=r"chunks \[3\] were never pushed"):
        core.check_invariants()


# -- deaths ----------------------------------------------------------------------------------------


def surviving(worker: int = 1, members: tuple[int, ...] = (1,)) -> WorkerCore:
    seat = Seat(worker=worker, group=0, members=members, num_servers=1)
    return WorkerCore(seat, survives_workers=True)


def survive(core: WorkerCore, *dead: int, generation: int = 1, chief: int = 0) -> None:
    control(
        core, COORDINATOR, MembershipChanged(generation=generation, dead=list(dead), chief=chief)
    )


def test_the_loss_of_another_worker_is_the_coordinators_matter() -> None:
    core = surviving()
    assert core.handle(PeerLost(worker_id(0), "worker 0")) == []
    with pytest.raises(PeerLostError, match="server 0"):
        core.handle(PeerLost(server_id(0), "server 0"))
    with pytest.raises(PeerLostError, match="worker 1"):
        make_core().handle(PeerLost(worker_id(1), "worker 1"))


def test_who_hears_of_a_death_knows_the_chief_and_says_so_in_every_set() -> None:
    core = make_core()
    core._survives_workers = True
    second = core.next_set()
    survive(core, 3, chief=2)
    assert (core.chief, second.chief, core.dead) == (2, 2, {3})
    assert core.transfers.generation == 1
    assert {each.header.generation for each in push(core) if isinstance(each, SendPush)} == {1}
    survive(core, 3, 4, chief=5, generation=1)  # a second delivery
    assert core.chief == 2
    assert core.counts().duplicates == 1


def test_a_worker_whose_group_is_out_ends_whatever_its_script_catches() -> None:
    core = surviving(members=(0, 1))
    with pytest.raises(BuriedError, match="worker 0 of group 0 has failed: worker 1, of the same"):
        survive(core, 0, chief=2)
    for begin in (lambda: core.begin_collective("mean"), lambda: core.begin_done({})):
        with pytest.raises(BuriedError):
            begin()
    with pytest.raises(BuriedError):
        core.begin_iteration(clock=0, hyper=b"", absent=(), weight=1.0)


def test_the_coordinator_alone_says_who_is_dead() -> None:
    with pytest.raises(
        ProtocolError, match="server 1 sent MembershipChanged; server 0 decides who is evicted"
    ):
        control(surviving(), server_id(1), MembershipChanged(generation=1, dead=[0], chief=1))


def test_the_next_chief_has_the_chiefs_rights_and_nobody_else() -> None:
    core = make_core(worker=1, members=(1,))
    with pytest.raises(InvariantError, match="worker 1 sets values; the chief does"):
        core.begin_load(clock=0)
    survive(core, 0, chief=1)
    assert core.begin_load(clock=0)


# -- codecs that change -------------------------------------------------------------------------


def laddered() -> tuple[WorkerCore, Turns]:
    turns = Turns([(0, 0)])
    core = WorkerCore(Seat(worker=0, group=0, members=(0,), num_servers=2))
    core.take_slice(PARTITION, owners=OWNERS, credits=2, replies=RULE, turns=turns, num_levels=3)
    return core, turns


def test_every_server_says_which_codecs_rule_and_one_may_be_late() -> None:
    core, turns = laddered()
    first, second = (BeginCodecs(number=n, round=5 * n, level=n) for n in (1, 2))
    for server, message in ((1, first), (1, second), (0, first), (0, second)):
        assert control(core, server_id(server), message) == []
    assert [turns.at(clock) for clock in (4, 5, 9, 10)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (worker_id(1), BeginCodecs(number=1, round=5, level=1)),
        (server_id(1), BeginCodecs(number=1, round=5, level=3)),
        (server_id(1), BeginCodecs(number=1, round=5, level=-1)),
        (server_id(1), BeginCodecs(number=2, round=5, level=1)),
    ],
)
def test_codecs_that_cannot_be_name_the_peer(peer: int, message: BeginCodecs) -> None:
    core, turns = laddered()
    with pytest.raises(ProtocolError, match=f"worker 0: .* sent BeginCodecs {message.number} of"):
        control(core, peer, message)
    assert turns.at(900) == 0
    with pytest.raises(ProtocolError, match="sent BeginCodecs"):
        control(make_core(), server_id(0), BeginCodecs(number=1, round=5, level=0))
