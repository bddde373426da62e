"""Workers fail and the job continues: what the coordinator declares, and what a server makes of
it."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.checkpoints import CHECKPOINT, WRITTEN, pack_clocks
from psdist.protocol.collected import PREPARED, Brought
from psdist.protocol.control import (
    Collected,
    Departed,
    Done,
    Enter,
    Evict,
    EvictAck,
    Finish,
    Finished,
    Held,
    Leave,
    MembershipChanged,
    Metrics,
    Paused,
    PauseRequest,
    Progress,
    Resume,
    Resumed,
    Stop,
    Suspend,
    TakenOver,
    Written,
)
from psdist.protocol.events import Arrived, ControlArrived, Offered, PeerLost
from psdist.protocol.header import Dtype, Flag, Header, Kind
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.servers.protocol.actions import (
    Accept,
    Fail,
    Fold,
    Inherit,
    MembershipEvent,
    Reply,
    SendControl,
    StartSum,
    Step,
)
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.checkpoints import (
    BeginCheckpoint,
    CompleteCheckpoint,
    DropCheckpoint,
)
from psdist.servers.protocol.coordinator import Coordinator
from psdist.servers.protocol.state import ServerCore
from psdist.servers.protocol.views import Death, Survived, Views
from tests.support.coordinators import assemble
from tests.unit.servers.test_coordinator_machine import sent, tell
from tests.unit.servers.test_state import core_of, only, push

WHO = "worker 1 (rank 3 on n2)"


def deaths_of(num_workers: int = 4, num_servers: int = 2, **limits: int) -> Views:
    groups = [(worker,) for worker in range(num_workers)]
    return Views(groups=groups, num_servers=num_servers, **{"max_deaths": 9, **limits})


def buried_by(deaths: Views, *servers: int) -> list[Any]:
    told = [
        deaths.on_ack(server, EvictAck(generation=deaths.generation, server=server))
        for server in servers
    ]
    return [action for actions in told for action in actions]


# -- declaring -------------------------------------------------------------------------------------


def test_every_server_takes_a_death_in_before_any_worker_hears_of_it() -> None:
    deaths = deaths_of()
    bury = Evict(generation=1, dead=[1])
    assert deaths.on_lost(1, WHO, is_ready=True) == [
        Death(1, WHO, generation=1, left=(), chief=0),
        *(SendControl(server_id(server), bury) for server in (0, 1)),
    ]
    assert (deaths.live, deaths.is_settling) == ([0, 2, 3], True)
    assert buried_by(deaths, 1) == []
    survive = MembershipChanged(generation=1, dead=[1], chief=0)
    assert buried_by(deaths, 0) == [
        *(SendControl(worker_id(worker), survive) for worker in range(4)),
        Survived(1),
    ]
    assert not deaths.is_settling


def test_deaths_that_come_meanwhile_are_the_next_generation_of_which_workers_hear_at_once() -> None:
    deaths = deaths_of(num_servers=1)
    deaths.on_lost(0, "worker 0", is_ready=True)
    assert deaths.on_lost(3, "worker 3", is_ready=True) == [
        Death(3, "worker 3", generation=2, left=(), chief=1)
    ]
    assert deaths.on_lost(2, "worker 2", is_ready=True) == [
        Death(2, "worker 2", generation=2, left=(), chief=1)
    ]
    assert buried_by(deaths, 0) == [SendControl(0, Evict(generation=2, dead=[0, 2, 3]))]
    *survive, survived = buried_by(deaths, 0)
    told = MembershipChanged(generation=2, dead=[0, 2, 3], chief=1)
    assert all(each.message == told for each in survive)
    assert survived == Survived(2)


def test_who_goes_on_for_a_dead_server_is_asked_what_that_one_owed() -> None:
    deaths = deaths_of()
    deaths.on_lost(1, WHO, is_ready=True)
    deaths.on_lost(2, "worker 2", is_ready=True)
    buried_by(deaths, 0)
    assert deaths.ask_again(0) == []
    bury = Evict(generation=1, dead=[1])
    assert deaths.ask_again(1) == [SendControl(server_id(1), bury)], "not who failed meanwhile"


def test_the_loss_of_whoever_is_out_already_is_no_death() -> None:
    deaths = Views(groups=[(0, 1, 2), (3,)], num_servers=1, max_deaths=1)
    death, _ = deaths.on_lost(1, WHO, is_ready=True)
    assert death == Death(1, WHO, generation=1, left=(0, 2), chief=3)
    assert deaths.live == [3]
    assert deaths.on_lost(0, "worker 0", is_ready=True) == []
    assert deaths.on_lost(1, WHO, is_ready=True) == []


@pytest.mark.parametrize(
    ("limits", "is_ready", "why"),
    [
        ({"max_deaths": 0}, True, "this job does not survive the failure of a rank "),
        ({}, False, "before training had begun, for which every worker is needed: restart the job"),
        (
            {"max_deaths": 1},
            True,
            "which is death 2, and failures.max_deaths = 1: restart the job, or set",
        ),
    ],
)
def test_a_death_that_the_job_cannot_do_without_is_one_error(
    limits: dict[str, int], is_ready: bool, why: str
) -> None:
    deaths = deaths_of(**limits)
    if limits and limits != {"max_deaths": 0}:
        deaths.on_lost(0, "worker 0", is_ready=True)
    with pytest.raises(PeerLostError) as caught:
        deaths.on_lost(1, WHO, is_ready=is_ready)
    assert str(caught.value).startswith(f"{WHO} has failed; {why}")


def test_the_last_group_cannot_die() -> None:
    deaths = Views(groups=[(0,), (1,)], num_servers=1, max_deaths=9)
    deaths.on_lost(0, "worker 0", is_ready=True)
    with pytest.raises(PeerLostError, match=f"{re.escape(WHO)} has failed; which leaves no group"):
        deaths.on_lost(1, WHO, is_ready=True)


@pytest.mark.parametrize(
    "message", [EvictAck(generation=2, server=0), EvictAck(generation=0, server=0)]
)
def test_an_answer_of_another_generation_is_refused_and_so_is_a_second_one(
    message: EvictAck,
) -> None:
    deaths = deaths_of()
    deaths.on_lost(1, WHO, is_ready=True)
    with pytest.raises(ProtocolError, match=r"server 0 sent EvictAck of view number \d in view"):
        deaths.on_ack(0, message)
    buried_by(deaths, 0)
    with pytest.raises(ProtocolError, match="in view 1, or twice"):
        buried_by(deaths, 0)


# -- the coordinator
# ---------------------------------------------------------------------------------


def coordinator_of(num_workers: int = 3, num_servers: int = 1, **settings: Any) -> Coordinator:
    """Whose workers have prepared, in collective 1."""
    coordinator = assemble(
        num_workers=num_workers, num_servers=num_servers, **{"max_deaths": 2, **settings}
    )
    for worker in range(num_workers):
        enter(coordinator, worker, seq=1, name="prepare", payload=PREPARED)
    for server in range(num_servers):
        tell(coordinator, Resumed(seq=1, server=server))
    return coordinator


def enter(
    coordinator: Coordinator, worker: int, seq: int, name: str = "mean", payload: bytes = b""
) -> list[Any]:
    values = struct.pack("<d", 10.0**worker) if name == "mean" else b""
    message = Enter(worker=worker, seq=seq, name=name, payload=payload, values=values)
    return tell(coordinator, message)


def lose(coordinator: Coordinator, worker: int, num_servers: int = 1) -> list[Any]:
    """What follows when all servers have taken it in."""
    generation = coordinator.membership.generation + 1
    coordinator.on_lost(worker_id(worker), f"worker {worker}")
    told = [EvictAck(generation=generation, server=server) for server in range(num_servers)]
    return [each for each in tell(coordinator, *told) if not isinstance(each, Survived)]


def but_survive(actions: list[Any]) -> list[Any]:
    return [
        each
        for each in actions
        if not (isinstance(each, SendControl) and isinstance(each.message, MembershipChanged))
    ]


def test_a_death_before_the_end_of_prepare_ends_the_job() -> None:
    coordinator = assemble(num_workers=2, num_servers=1, max_deaths=1)
    with pytest.raises(PeerLostError, match="before training had begun"):
        coordinator.on_lost(worker_id(1), WHO)


def test_a_death_while_another_model_is_prepared_ends_the_job() -> None:
    coordinator = coordinator_of()
    enter(coordinator, 0, seq=2, name="prepare")
    with pytest.raises(PeerLostError, match="before training had begun"):
        coordinator.on_lost(worker_id(1), WHO)


def test_the_death_of_a_server_ends_the_job() -> None:
    with pytest.raises(PeerLostError, match="server 1 has failed; this job does not survive"):
        coordinator_of().on_lost(server_id(1), "server 1")


def test_whoever_is_done_dies_unnoticed() -> None:
    coordinator = coordinator_of(max_deaths=1)
    tell(coordinator, Done(worker=1, statistics={}))
    assert coordinator.on_lost(worker_id(1), WHO) == []
    tell(coordinator, Done(worker=0, statistics={}), Done(worker=2, statistics={}))
    stops = sent(tell(coordinator, Finished(server=0, statistics={}))[:-1])
    assert [peer for peer, _ in stops] == [worker_id(worker) for worker in range(3)]


@pytest.mark.parametrize("is_taken_first", [False, True])
def test_who_goes_on_for_a_dead_server_hears_who_had_left_and_died(is_taken_first: bool) -> None:
    """Their word to the dead server nobody else would say again."""
    coordinator = coordinator_of(num_servers=3, buddies=(1, 2, 0))
    tell(coordinator, Done(worker=1, statistics={}, left=[4, 2]))
    taken = TakenOver(server=1)
    departed = SendControl(server_id(1), Departed(worker=1, left=[4, 2]))
    coordinator.on_server_lost(server_id(1), "server 1")
    if is_taken_first:
        coordinator.handle(server_id(2), taken)
        assert coordinator.on_lost(worker_id(1), WHO) == [departed]
    else:
        assert coordinator.on_lost(worker_id(1), WHO) == []
        assert departed in coordinator.handle(server_id(2), taken)
    assert coordinator.on_lost(worker_id(1), WHO) == []


def test_a_complete_collective_is_asked_again_before_a_death() -> None:
    coordinator = coordinator_of(num_servers=3, buddies=(1, 2, 0))
    lose(coordinator, 1, num_servers=3)
    for worker in (0, 2):
        enter(coordinator, worker, seq=2)
    coordinator.on_lost(worker_id(2), "worker 2")
    coordinator.on_server_lost(server_id(1), "server 1")
    actions = coordinator.handle(server_id(2), TakenOver(server=1))
    asked = [message for peer, message in sent_to(actions, server_id(1))]
    assert asked == [Resume(seq=2), Evict(generation=2, dead=[1, 2])]


def sent_to(actions: Sequence[Any], peer: int) -> list[tuple[int, Any]]:
    sends = [each for each in actions if isinstance(each, SendControl)]
    return [(each.peer, each.message) for each in sends if each.peer == peer]


@pytest.mark.parametrize("has_entered", [False, True])
def test_a_collective_that_lacked_the_dead_goes_on_with_the_living_alone(has_entered: bool) -> None:
    coordinator = coordinator_of()
    if has_entered:
        enter(coordinator, 1, seq=2)
    enter(coordinator, 0, seq=2)
    if not has_entered:
        assert enter(coordinator, 2, seq=2) == []
    actions = lose(coordinator, 1)
    if has_entered:
        assert but_survive(actions) == []
        actions = enter(coordinator, 2, seq=2)
    assert but_survive(actions) == [SendControl(server_id(0), Resume(seq=2))]
    told = sent(tell(coordinator, Resumed(seq=2, server=0)))
    assert [peer for peer, _ in told] == [worker_id(0), worker_id(2)]
    message = told[0][1]
    assert isinstance(message, Collected)
    brought = Brought.decode(message)
    assert (brought.num_workers, brought.values) == (2, struct.pack("<d", 101.0))
    assert [brought.of(worker) for worker in range(3)] == [b"", None, b""]
    assert brought.unlike(b"") == []


def test_no_collective_goes_on_between_a_death_and_its_last_answer() -> None:
    coordinator = coordinator_of(num_servers=2)
    enter(coordinator, 0, seq=2)
    coordinator.on_lost(worker_id(1), WHO)
    assert enter(coordinator, 2, seq=2) == []
    assert tell(coordinator, EvictAck(generation=1, server=1)) == []
    actions = tell(coordinator, EvictAck(generation=1, server=0))
    messages = [message for _, message in sent([x for x in actions if isinstance(x, SendControl)])]
    survive = MembershipChanged(generation=1, dead=[1], chief=0)
    assert messages == [survive] * 3 + [Resume(seq=2)] * 2


def test_a_collective_that_the_dead_alone_had_entered_has_never_begun() -> None:
    coordinator = coordinator_of()
    enter(coordinator, 1, seq=2, name="save")
    lose(coordinator, 1)
    assert enter(coordinator, 0, seq=2, name="barrier") == []
    assert sent(enter(coordinator, 2, seq=2, name="barrier")) == [(0, Resume(seq=2))]


def test_what_the_dead_had_brought_to_a_collective_that_was_complete_counts() -> None:
    coordinator = coordinator_of()
    for worker in range(3):
        enter(coordinator, worker, seq=2)
    lose(coordinator, 1)
    ((first, message), (second, _)) = sent(tell(coordinator, Resumed(seq=2, server=0)))
    assert (first, second) == (worker_id(0), worker_id(2))
    assert isinstance(message, Collected)
    assert message.values == struct.pack("<d", 111.0)


def test_the_job_finishes_when_all_who_live_are_done() -> None:
    coordinator = coordinator_of()
    tell(coordinator, Done(worker=0, statistics={}), Done(worker=2, statistics={}))
    assert but_survive(lose(coordinator, 1)) == [SendControl(server_id(0), Finish())]
    *stops, _ = tell(coordinator, Finished(server=0, statistics={}))
    assert sent(stops) == [(worker_id(0), Stop()), (worker_id(2), Stop())]


def test_what_the_dead_have_missed_is_no_missed_call() -> None:
    coordinator = coordinator_of(mode="ssp")
    tell(coordinator, Progress(worker=1, clock=9, samples=0))
    lose(coordinator, 1)
    tell(coordinator, Progress(worker=0, clock=2, samples=0))
    assert enter(coordinator, 0, seq=2) == []


def test_late_words_of_the_dead_are_not_heard() -> None:
    coordinator = coordinator_of()
    lose(coordinator, 1)
    assert tell(coordinator, Done(worker=1, statistics={})) == []
    assert coordinator.done == {}
    assert enter(coordinator, 1, seq=2) == []
    assert not coordinator.collectives


def test_the_next_chief_says_what_is_last() -> None:
    coordinator = coordinator_of()
    lose(coordinator, 0)
    tell(coordinator, Metrics(line={"worker": 1, "values": {"loss": 3.0}}))
    tell(coordinator, Metrics(line={"worker": 2, "values": {"loss": 4.0}}))
    assert coordinator.last == {"loss": 3.0}


def test_a_meeting_is_of_the_living() -> None:
    coordinator = coordinator_of()
    held = {"number": 1, "hold": 1, "what": "checkpoint", "clocks": [4]}
    told = sent(tell(coordinator, Held(worker=0, **held)))
    assert {message for _, message in told} == {PauseRequest(number=1)}
    tell(coordinator, Held(worker=2, **held))
    assert but_survive(lose(coordinator, 1)) == [
        SendControl(worker_id(worker), Paused(number=1, what="checkpoint")) for worker in (0, 2)
    ]


def test_who_held_and_died_is_not_counted_among_those_who_hold() -> None:
    coordinator = coordinator_of()
    held = {"number": 1, "hold": 1, "what": "checkpoint", "clocks": [4]}
    tell(coordinator, Held(worker=1, **held))
    assert but_survive(lose(coordinator, 1)) == []
    assert tell(coordinator, Held(worker=0, **held)) == []
    told = sent(tell(coordinator, Held(worker=2, **held)))
    assert [message for _, message in told] == [Paused(number=1, what="checkpoint")] * 2


def test_a_checkpoint_that_misses_a_file_of_the_dead_is_dropped() -> None:
    coordinator = coordinator_of()
    for worker in range(3):
        enter(coordinator, worker, seq=2, name=CHECKPOINT, payload=pack_clocks([4]))
    tell(coordinator, Resumed(seq=2, server=0))
    written = {"checkpoint": "step-00000004", "num_bytes": 1, "crc32": 1}
    for peer in (server_id(0), worker_id(0), worker_id(2)):
        coordinator.handle(peer, Written(**written))
    for worker in (0, 2):
        enter(coordinator, worker, seq=3, name=WRITTEN)
    actions = but_survive(lose(coordinator, 1))
    assert actions == [
        DropCheckpoint("step-00000004", {worker_id(1): "has failed"}),
        SendControl(server_id(0), Resume(seq=3)),
    ]


def test_a_checkpoint_behind_a_death_has_the_dead_where_the_lowest_of_the_others_is() -> None:
    coordinator = coordinator_of()
    lose(coordinator, 1)
    enter(coordinator, 0, seq=2, name=CHECKPOINT, payload=pack_clocks([6, 2]))
    begin, _ = enter(coordinator, 2, seq=2, name=CHECKPOINT, payload=pack_clocks([5, 3]))
    assert begin == BeginCheckpoint("step-00000005")
    tell(coordinator, Resumed(seq=2, server=0))
    written = Written(checkpoint="step-00000005", num_bytes=1, crc32=1)
    for peer in (server_id(0), worker_id(0)):
        coordinator.handle(peer, written)
    (complete,) = coordinator.handle(worker_id(2), written)
    assert isinstance(complete, CompleteCheckpoint)
    assert complete.clocks == [(6, 2), (5, 2), (5, 3)]
    assert sorted(complete.files) == [server_id(0), worker_id(0), worker_id(2)]


# -- a server --------------------------------------------------------------------------------------


def bury(core: ServerCore, *dead: int, generation: int = 1, peer: int = COORDINATOR) -> list[Any]:
    return core.handle(ControlArrived(peer, Evict(generation=generation, dead=list(dead))))


def survivor(mode: str, *, groups: int = 2, chunks: int = 1, slots: int = 4) -> ServerCore:
    core = core_of(mode, groups=groups, chunks=chunks, slots=slots, survives_workers=True)
    for chunk in core.chunk_states.values():
        chunk.is_loaded = True
    return core


def died(group: int, clock: int, workers: int = 1) -> MembershipEvent:
    return MembershipEvent("death", group, clock, workers)


def offer(core: ServerCore, group: int, clock: int = 0, chunk: int = 0) -> tuple[Header, list[Any]]:
    header = Header(
        kind=Kind.PUSH, sender=worker_id(group), group=group, chunk=chunk, clock=clock, length=4,
        settings=1, weight=1.0, dtype=Dtype.FLOAT32,
    )  # fmt: skip
    offered = Offered(worker_id(group), Kind.PUSH, chunk, 4, header, clock=clock)
    return header, core.handle(offered)


def test_a_step_that_has_waited_for_the_dead_is_made_without_him() -> None:
    core = survivor("sync")
    push(core, 0, 0)
    actions = bury(core, 1)
    core.check_invariants()
    assert only(actions, Inherit, MembershipEvent) == [died(1, 0)]
    (step,) = only(actions, Step)
    assert [each.group for each in step.contributions] == [0]
    (reply,) = only(actions, Reply)
    assert (reply.token.peer, reply.min_done) == (worker_id(0), 1)


@pytest.mark.parametrize("is_folded", [False, True], ids=["waiting", "folded"])
def test_an_update_of_the_dead_that_has_arrived_whole_is_in_the_step(is_folded: bool) -> None:
    """Folded into the sum, or in a slot, where it waits for its turn."""
    core = survivor("sync", groups=3)
    dead = 0 if is_folded else 1
    push(core, dead, 0)
    assert bury(core, dead) == [Inherit(0, dead, 0), died(dead, 0)]
    core.check_invariants()
    actions = [each for group in {0, 1, 2} - {dead} for each in push(core, group, 0)]
    (step,) = only(actions, Step)
    assert [each.group for each in step.contributions] == [0, 1, 2]
    assert {reply.token.peer for reply in only(actions, Reply)} == {
        worker_id(group) for group in {0, 1, 2} - {dead}
    }
    core.check_invariants()
    assert core.chunk_states[0].clock.draining == {}
    (step,) = only([each for g in {0, 1, 2} - {dead} for each in push(core, g, 1)], Step)
    assert dead not in [each.group for each in step.contributions]


def test_each_chunk_has_contributors_of_its_own() -> None:
    core = survivor("sync", chunks=2)
    push(core, 1, 0)
    assert only(bury(core, 1), Inherit, MembershipEvent) == [Inherit(0, 1, 0), died(1, 0)]
    (step,) = only(push(core, 0, 0), Step)
    assert [each.group for each in step.contributions] == [0, 1]
    header, (accept,) = offer(core, 0, chunk=1)
    (step,) = only(core.handle(Arrived(worker_id(0), header, accept.slot)), Step)
    assert [each.group for each in step.contributions] == [0]
    core.check_invariants()


def test_replies_that_were_parked_for_the_dead_go_out_and_his_own_never_do() -> None:
    core = survivor("ssp", groups=3)
    for clock in (0, 1):
        push(core, 0, clock)
    push(core, 2, 0)
    assert only(push(core, 2, 1), Reply) == []
    actions = bury(core, 1, 2)
    assert only(actions, MembershipEvent) == [died(1, 0), died(2, 2)]
    (reply,) = only(actions, Reply)
    assert (reply.token.peer, reply.clock, reply.min_done) == (worker_id(0), 1, 2)
    assert not core.chunk_states[0].parked
    core.check_invariants()


def test_lr_is_shared_among_the_living() -> None:
    core = survivor("async", groups=4)
    bury(core, 2)
    (step,) = only(push(core, 0, 0), Step)
    assert step.lr_scale == 1 / 3


def test_a_slot_that_waits_for_the_dead_is_free_when_the_network_has_lost_him() -> None:
    core = survivor("async", groups=3, slots=1)
    _, (accept,) = offer(core, 1)
    assert isinstance(accept, Accept)
    assert offer(core, 0)[1] == []
    assert offer(core, 1, clock=1)[1] == []
    (accepted,) = core.handle(PeerLost(worker_id(1), WHO))
    assert isinstance(accepted, Accept)
    assert accepted.ticket.sender == worker_id(0)
    core.check_invariants()
    assert bury(core, 1) == [died(1, 0)]


def test_what_is_declared_dead_and_still_arrives_frees_its_slot_and_changes_nothing() -> None:
    core = survivor("async", slots=1)
    header, (accept,) = offer(core, 1)
    bury(core, 1)
    core.check_invariants()
    assert core.handle(Arrived(worker_id(1), header, accept.slot)) == []
    assert offer(core, 1, clock=1)[1] == []
    assert core.rule.pool.num_free == 1
    assert core.handle(PeerLost(worker_id(1), WHO)) == []
    assert core.rule.pool.num_free == 1
    assert only(push(core, 0, 0), Step)


def test_the_dead_are_out_of_a_collective_too() -> None:
    core = survivor("sync")

    for group in (0, 1):
        suspend = Suspend(group=group, clock=0, seq=1)
        core.handle(ControlArrived(worker_id(group), suspend))
    assert bury(core, 1) == [died(1, 0)]
    core.check_invariants()
    (resumed,) = only(core.handle(ControlArrived(COORDINATOR, Resume(seq=1))), MembershipEvent)
    assert resumed.group == 0
    assert only(push(core, 0, 0), Step)


def test_a_group_that_has_left_does_not_die() -> None:
    core = survivor("sync")

    core.handle(ControlArrived(worker_id(1), Leave(group=1, clock=0)))
    assert only(bury(core, 1), MembershipEvent) == []
    core.check_invariants()


def test_a_group_dies_as_a_whole() -> None:
    core = core_of("ssp", sizes=(2, 1), survives_workers=True)
    assert only(bury(core, 1), MembershipEvent) == [died(0, 0, workers=2)]
    assert push_of(core, 0) == []
    assert core._membership.num_active_workers == 1
    core.check_invariants()


def push_of(core: ServerCore, worker: int) -> list[Any]:
    header = Header(kind=Kind.PUSH, sender=worker_id(worker), group=0, settings=1, weight=1.0)
    return core.handle(Arrived(worker_id(worker), header, None))


def test_a_generation_is_taken_in_once_and_is_the_coordinators_to_give() -> None:
    core = survivor("sync", groups=3)
    bury(core, 1)
    assert bury(core, 1) == []
    assert only(bury(core, 1, 2, generation=3), MembershipEvent) == [died(2, 0)]
    assert core.generation == 3
    (fail,) = bury(core, 0, generation=4, peer=worker_id(0))
    assert "sent Evict; server 0 decides who is evicted" in str(fail.error)
    (fail,) = bury(core, 7, generation=4)
    assert "evicted worker 7, which are not all in this run" in str(fail.error)


def test_nobody_knows_more_of_the_membership_than_the_coordinator_has_told() -> None:
    core = survivor("ssp")
    for kind, number in ((Kind.PUSH, 0), (Kind.PULL, 1)):
        header = Header(
            kind=kind, sender=worker_id(0), settings=1, weight=1.0, generation=1, pull_number=number
        )
        (fail,) = core.handle(Arrived(worker_id(0), header, None))
        assert isinstance(fail, Fail)
        assert "worker 0 sent view number 1; the coordinator's last one is 0" in (str(fail.error))


def test_the_next_chief_sets_values_and_counts_its_own_pulls() -> None:
    core = survivor("sync", groups=2)
    core.chunk_states[0].newest_load = 7
    bury(core, 0)
    assert core._membership.chief == worker_id(1)
    header = Header(
        kind=Kind.INIT, sender=worker_id(1), group=1, length=4, pull_number=2, dtype=Dtype.FLOAT32
    )
    offered = Offered(worker_id(1), Kind.INIT, 0, 4, header, pull_number=2)
    (accept,) = core.handle(offered)
    load, receipt = core.handle(Arrived(worker_id(1), header, accept.slot))
    assert (load.group, receipt.peer, receipt.pull_number) == (1, worker_id(1), 2)


def test_without_it_the_death_of_a_worker_is_an_error() -> None:
    core = assemble_core(server=0, make_rule=rule_for("sync", staleness=0), groups=[(0,), (1,)])
    (fail,) = core.handle(PeerLost(worker_id(1), WHO))
    assert isinstance(fail.error, PeerLostError)
    (fail,) = survivor("sync").handle(PeerLost(server_id(1), "server 1"))
    assert isinstance(fail.error, PeerLostError)


def test_a_pull_of_the_living_waits_for_nobody_who_is_dead() -> None:
    core = survivor("sync")
    push(core, 0, 0)
    pull = Header(kind=Kind.PULL, sender=worker_id(0), clock=1, pull_number=1)
    assert core.handle(Arrived(worker_id(0), pull, None)) == []
    actions = bury(core, 1)
    flags = [reply.flags for reply in only(actions, Reply)]
    assert sorted(flags) == [Flag.NONE, Flag.FOR_PULL]
    assert only(actions, StartSum, Fold) == []


def test_what_the_dead_has_offered_is_not_received_before_its_death_is_declared() -> None:
    core = survivor("async", slots=1)
    offer(core, 1)
    assert offer(core, 1, clock=1)[1] == []
    assert core.handle(PeerLost(worker_id(1), WHO)) == []
    assert core.rule.pool.num_free == 1


def test_by_set_the_farthest_of_the_failed_groups_is_what_a_server_tells() -> None:
    deaths = deaths_of()
    assert deaths.reached(EvictAck(generation=0, server=0, reached=[7])) == []
    deaths.on_lost(1, WHO, is_ready=True)
    assert deaths.reached(EvictAck(generation=1, server=0, reached=[7, 4])) == [7, 4]
    assert deaths.reached(EvictAck(generation=2, server=0, reached=[7, 4])) == []
    buried_by(deaths, 0, 1)
    deaths.on_lost(2, WHO, is_ready=True)
    assert deaths.reached(EvictAck(generation=2, server=0, reached=[7, 9, 4, 3])) == [9, 4]
    with pytest.raises(ProtocolError, match="server 0 sent EvictAck with 3 clocks of 2 workers"):
        deaths.reached(EvictAck(generation=2, server=0, reached=[3, 3, 3]))
