"""Substitutes join a running job: what the coordinator decides, and what a server makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.checkpoints import CHECKPOINT, pack_clocks
from psdist.protocol.collected import JOIN, PREPARED, pack_join
from psdist.protocol.control import (
    AdmitWorker,
    Blocked,
    Collected,
    Done,
    Enter,
    Evict,
    EvictAck,
    Failure,
    Finished,
    Held,
    JoinAccepted,
    JoinReady,
    Leave,
    MembershipChanged,
    Metrics,
    PauseAborted,
    Paused,
    PauseRequest,
    Progress,
    Register,
    Resume,
    Resumed,
    Settings,
    Setup,
    Stop,
    TakenOver,
    TakePlace,
    Written,
)
from psdist.protocol.events import ControlArrived
from psdist.protocol.header import NEVER
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.servers.protocol.actions import (
    AdmitGroup,
    Fail,
    Inherit,
    MembershipEvent,
    SendControl,
    Step,
)
from psdist.servers.protocol.assembly import assemble_core, rule_for
from psdist.servers.protocol.checkpoints import CompleteCheckpoint
from psdist.servers.protocol.chunk_clock import ChunkClock, Limits
from psdist.servers.protocol.collectives import Warn
from psdist.servers.protocol.coordinator import Complete, Coordinator, EndJob
from psdist.servers.protocol.joins import Joined, Joins, SubstituteDeath
from psdist.servers.protocol.pauses import Pauses, waits_within
from psdist.servers.protocol.state import ServerCore
from tests.support.coordinators import assemble
from tests.unit.servers.test_coordinator_machine import sent, tell
from tests.unit.servers.test_state import HYPER, Frame, built, only, push

WORKERS, SUBSTITUTE, STATE = 3, 3, "state-5-1"


# -- who waits to join -----------------------------------------------------------------------------


def asked(*dead: int, substitutes: tuple[int, ...] = (3, 4)) -> Joins:
    joins = Joins(substitutes)
    for worker in dead:
        joins.on_died(worker)
    joins.ask()
    return joins


def are_ready(joins: Joins, *workers: int, num_sets: int = 1) -> None:
    for worker in workers:
        joins.on_ready(worker_id(worker), JoinReady(worker=worker, num_sets=num_sets))


def test_substitutes_are_asked_one_for_each_place_as_long_as_there_are_some() -> None:
    joins = Joins([3, 4])
    assert joins.ask() == []
    for worker in (1, 0, 2):
        joins.on_died(worker)
    assert sent(joins.ask()) == [  # type: ignore[arg-type]
        (worker_id(3), TakePlace(worker=1)),
        (worker_id(4), TakePlace(worker=0)),
    ]
    assert joins.ask() == []


def test_all_who_are_ready_join_where_the_farthest_is_in_each_set() -> None:
    joins = asked(1, 0)
    are_ready(joins, 4, 3, num_sets=2)
    assert joins.ready == [4, 3]
    joined = [Joined(4, 0, (9, 5), STATE), Joined(3, 1, (9, 5), STATE)]
    assert joins.admit(7, [(9, 2), (4, 5)], state=STATE) == joined
    assert joins.ready == []
    assert joins.take_welcome(6) == []
    assert joins.take_welcome(7) == joined
    assert joins.take_welcome(7) == []


def test_nobody_joins_before_one_who_lives_is_where_the_dead_have_come() -> None:
    joins = asked(1)
    are_ready(joins, 3)
    for reached in ([4], [6], [], [5]):
        joins.on_evict_ack(reached)
    assert joins.admit(7, [(5,)], state=STATE) == []
    assert joins.ready == [3]
    assert [joins.may_join([clock]) for clock in (5, 6, 7)] == [False, True, True]
    assert joins.admit(8, [(6,), (2,)], state=STATE) == [Joined(3, 1, (6,), STATE)]


def test_without_an_iteration_anywhere_a_substitute_may_join_at_once() -> None:
    joins = asked(1)
    assert joins.may_join([])
    joins.on_evict_ack([1])
    assert not joins.may_join([])


def test_nobody_joins_where_the_chief_could_not_write_its_state() -> None:
    joins = asked(1)
    are_ready(joins, 3)
    assert joins.admit(7, [(5,)], state="") == []
    assert joins.admit(8, [(6,)], state=STATE) == [Joined(3, 1, (6,), STATE)]


def test_where_it_still_cannot_the_others_hold_ever_more_rarely() -> None:
    joins = asked(1)
    are_ready(joins, 3)
    first = []
    for seq, clock in enumerate((5, 6, 22, 54)):
        assert joins.may_join([clock])
        assert joins.admit(seq, [(clock, clock - 1)], state="") == []
        first.append(next(each for each in range(200) if joins.may_join([each])))
    assert first == [5, 22, 54, 118]
    assert joins.admit(8, [(118,)], state=STATE) == [Joined(3, 1, (118,), STATE)]


def test_of_several_sets_the_living_say_where_since_the_dead_may_be_between_two_steps() -> None:
    joins = asked(1)
    are_ready(joins, 3, num_sets=2)
    joins.on_evict_ack([4, 3])
    assert joins.may_join([1])
    assert joins.admit(7, [(3, 3)], state=STATE) == [Joined(3, 1, (3, 3), STATE)]


@pytest.mark.parametrize("is_ready", [False, True])
def test_the_place_of_a_substitute_that_dies_before_it_joins_is_anothers(is_ready: bool) -> None:
    joins = asked(1)
    if is_ready:
        are_ready(joins, 3)
    assert joins.on_lost(3)
    assert not joins.on_lost(3)
    assert joins.ready == []
    assert sent(joins.ask()) == [(worker_id(4), TakePlace(worker=1))]  # type: ignore[arg-type]


def test_the_place_of_a_substitute_that_dies_behind_that_is_the_one_that_it_had_taken() -> None:
    joins = asked(1)
    are_ready(joins, 3)
    joins.admit(7, [(5,)], state=STATE)
    joins.on_died(3)
    assert sent(joins.ask()) == [(worker_id(4), TakePlace(worker=1))]  # type: ignore[arg-type]


def test_who_dies_while_it_idles_is_not_asked() -> None:
    joins = Joins([3, 4])
    joins.on_lost(3)
    joins.on_died(1)
    assert sent(joins.ask()) == [(worker_id(4), TakePlace(worker=1))]  # type: ignore[arg-type]


def test_places_are_taken_in_the_order_in_which_they_became_free() -> None:
    joins = asked(1)
    joins.on_died(0)
    joins.on_lost(3)
    assert sent(joins.ask()) == [(worker_id(4), TakePlace(worker=0))]  # type: ignore[arg-type]


@pytest.mark.parametrize(("worker", "num_sets"), [(4, 1), (3, 0)], ids=["not asked", "no set"])
def test_none_is_ready_but_who_was_asked(worker: int, num_sets: int) -> None:
    with pytest.raises(ProtocolError, match=r"would join with .* of substitutes \[3\] were asked"):
        are_ready(asked(1), worker, num_sets=num_sets)


def test_who_has_prepared_another_number_of_sets_does_not_join() -> None:
    joins = asked(1, 0)
    are_ready(joins, 3)
    are_ready(joins, 4, num_sets=2)
    assert joins.refuse(num_sets=2) == [3]
    assert joins.admit(7, [(1, 1)], state=STATE) == [Joined(4, 0, (1, 1), STATE)]
    assert joins.ask() == []


# -- the coordinator
# ---------------------------------------------------------------------------------


def coordinator_of(num_servers: int = 1, num_substitutes: int = 2, **settings: Any) -> Coordinator:
    """Of workers 0 to 2, which have prepared in collective 1, and substitutes 3 and 4."""
    coordinator = assemble(
        num_workers=WORKERS + num_substitutes,
        num_servers=num_servers,
        num_substitutes=num_substitutes,
        **{"max_deaths": 4, **settings},
    )
    for worker in range(WORKERS):
        enter(coordinator, worker, 1, name="prepare", payload=PREPARED)
    for server in range(num_servers):
        tell(coordinator, Resumed(seq=1, server=server))
    return coordinator


def enter(
    coordinator: Coordinator, worker: int, seq: int, *, name: str = JOIN, payload: bytes = b""
) -> list[Any]:
    message = Enter(worker=worker, seq=seq, name=name, payload=payload, values=b"")
    return tell(coordinator, message)


def join(
    coordinator: Coordinator, *clocks: int, workers: tuple[int, ...], seq: int = 2
) -> list[Any]:
    """What follows when these have come to the collective."""
    each = zip(workers, clocks, strict=True)
    told = [
        enter(coordinator, worker, seq, payload=pack_join([clock], "" if worker else STATE))
        for worker, clock in each
    ]
    return [action for actions in told for action in actions]


def lose(coordinator: Coordinator, worker: int, num_servers: int = 1) -> list[Any]:
    generation = coordinator.membership.generation + 1
    coordinator.on_lost(worker_id(worker), f"worker {worker}")
    told = [EvictAck(generation=generation, server=server) for server in range(num_servers)]
    return tell(coordinator, *told)


def ready(coordinator: Coordinator, worker: int = SUBSTITUTE, num_sets: int = 1) -> list[Any]:
    return tell(coordinator, JoinReady(worker=worker, num_sets=num_sets))


def messages(actions: list[Any]) -> list[tuple[int, Any]]:
    return sent([each for each in actions if isinstance(each, SendControl)])


def test_servers_hear_who_joins_in_front_of_the_collectives_end_and_he_behind_it() -> None:
    coordinator = coordinator_of(num_servers=2)
    told = messages(lose(coordinator, 1, num_servers=2))
    assert told[-1] == (worker_id(SUBSTITUTE), TakePlace(worker=1))  # behind MembershipChanged
    assert messages(ready(coordinator)) == [
        (worker_id(worker), PauseRequest(number=1)) for worker in (0, 2)
    ]
    actions = join(coordinator, 5, 8, workers=(0, 2))
    admit = AdmitWorker(worker=SUBSTITUTE, clocks=[8])
    assert sent(actions) == [
        *((server_id(server), admit) for server in range(2)),
        *((server_id(server), Resume(seq=2)) for server in range(2)),
    ]
    assert tell(coordinator, Resumed(seq=2, server=1)) == []
    actions = tell(coordinator, Resumed(seq=2, server=0))
    assert Joined(SUBSTITUTE, 1, (8,), STATE) in actions
    (first, second, third, fourth) = messages(actions)
    assert [first[0], second[0]] == [worker_id(0), worker_id(2)]
    assert isinstance(first[1], Collected)
    welcome = JoinAccepted(
        worker=SUBSTITUTE,
        clocks=[8],
        state=STATE,
        seq=2,
        generation=1,
        dead=[1],
        chief=0,
        meeting=0,
    )
    assert third == (worker_id(SUBSTITUTE), welcome)
    assert fourth == (worker_id(SUBSTITUTE), PauseRequest(number=1))  # which is open


def test_who_has_joined_is_waited_for_in_the_next_collective() -> None:
    coordinator = joined()
    for worker in (0, 2):
        assert enter(coordinator, worker, 3, name="barrier") == []
    assert coordinator.open_collectives() == [(3, "barrier", [0, 2], [SUBSTITUTE])]
    assert sent(enter(coordinator, SUBSTITUTE, 3, name="barrier")) == [(0, Resume(seq=3))]
    told = sent(tell(coordinator, Resumed(seq=3, server=0)))
    assert [peer for peer, _ in told] == [worker_id(worker) for worker in (0, 2, SUBSTITUTE)]


def joined(**settings: Any) -> Coordinator:
    coordinator = coordinator_of(**settings)
    lose(coordinator, 1)
    ready(coordinator)
    join(coordinator, 5, 8, workers=(0, 2))
    assert coordinator.open_collectives() == [(2, JOIN, [0, 2], [])]
    tell(coordinator, Resumed(seq=2, server=0))
    return coordinator


def test_the_job_ends_when_who_has_joined_is_done_too() -> None:
    coordinator = joined()
    told = messages(tell(coordinator, Done(worker=0, statistics={}), Done(worker=2, statistics={})))
    assert {message for _, message in told} == {PauseAborted(number=1)}
    tell(coordinator, Done(worker=SUBSTITUTE, statistics={}))
    *stops, last = tell(coordinator, Finished(server=0, statistics={}))
    assert last == Complete()
    # Who waits to join waits for nothing any more.
    assert [peer for peer, _ in sent(stops)] == [worker_id(each) for each in (0, 2, 3, 4)]


def test_the_death_of_who_has_joined_is_one_like_another_and_leaves_a_place() -> None:
    coordinator = joined()
    actions = coordinator.on_lost(worker_id(SUBSTITUTE), "worker 3")
    assert messages(actions) == [(0, Evict(generation=2, dead=[1, 3]))]
    told = messages(tell(coordinator, EvictAck(generation=2, server=0)))
    heard = [peer for peer, message in told if isinstance(message, MembershipChanged)]
    assert heard == [worker_id(worker) for worker in range(4)]  # not who is outside
    assert told[-1] == (worker_id(4), TakePlace(worker=1))
    ready(coordinator, 4)
    (admit, resume) = sent(join(coordinator, 9, 9, workers=(0, 2), seq=3))
    assert admit == (0, AdmitWorker(worker=4, clocks=[9]))
    assert resume == (0, Resume(seq=3))


def test_the_last_who_lives_may_be_a_substitute() -> None:
    coordinator = joined()
    lose(coordinator, 0)
    lose(coordinator, 2)
    assert coordinator.membership.chief == SUBSTITUTE
    with pytest.raises(PeerLostError, match="leaves no group"):
        coordinator.on_lost(worker_id(SUBSTITUTE), "worker 3")


def test_a_substitute_that_dies_before_it_has_joined_is_no_death() -> None:
    coordinator = coordinator_of(max_deaths=1)
    lose(coordinator, 1)
    ready(coordinator)
    lost, *asked = coordinator.on_lost(worker_id(SUBSTITUTE), "worker 3")
    assert lost == SubstituteDeath(SUBSTITUTE, "worker 3")
    assert sent(asked) == [(worker_id(4), TakePlace(worker=1))]
    assert coordinator.on_lost(worker_id(SUBSTITUTE), "worker 3") == []
    assert (coordinator.num_idle_spares, coordinator.membership.waiting) == (0, {3, 4})
    assert coordinator.out == {1, 3, 4}
    assert sent(join(coordinator, 5, 8, workers=(0, 2))) == [(0, Resume(seq=2))]


def test_a_substitute_that_dies_between_admit_and_the_collectives_end_is_a_death() -> None:
    coordinator = coordinator_of()
    lose(coordinator, 1)
    ready(coordinator)
    join(coordinator, 5, 8, workers=(0, 2))
    actions = coordinator.on_lost(worker_id(SUBSTITUTE), "worker 3")
    assert messages(actions) == [(0, Evict(generation=2, dead=[1, 3]))]
    told = messages(tell(coordinator, Resumed(seq=2, server=0)))
    assert [peer for peer, _ in told if _.__class__ is Collected] == [worker_id(0), worker_id(2)]


def test_nobody_joins_while_a_death_is_being_taken_in() -> None:
    coordinator = coordinator_of()
    lose(coordinator, 1)
    ready(coordinator)
    coordinator.on_lost(worker_id(2), "worker 2")
    assert join(coordinator, 5, workers=(0,)) == []
    told = messages(tell(coordinator, EvictAck(generation=2, server=0)))
    assert told[-2:] == [(0, AdmitWorker(worker=SUBSTITUTE, clocks=[5])), (0, Resume(seq=2))]


def test_nobody_joins_where_nobody_has_died() -> None:
    with pytest.raises(ProtocolError, match=r"of substitutes \[\] were asked"):
        ready(coordinator_of())


def test_nobody_is_asked_where_a_script_has_finished() -> None:
    coordinator = coordinator_of()
    tell(coordinator, Done(worker=0, statistics={}))
    assert not [each for _, each in messages(lose(coordinator, 1)) if isinstance(each, TakePlace)]


def told_of(clock: int, worker: int = 2) -> Progress:
    return Progress(worker=worker, clock=clock, samples=0, loader_batches=0, loader_until=0)


def test_who_waits_to_join_does_so_when_one_who_lives_is_where_the_dead_has_come() -> None:
    coordinator = coordinator_of()
    coordinator.on_lost(worker_id(1), "worker 1")
    tell(coordinator, EvictAck(generation=1, server=0, reached=[11]))
    assert len(ready(coordinator)) == 2  # nobody has told where it stands
    hold_all(coordinator)
    assert tell(coordinator, told_of(5)) == []  # the collective of that meeting comes
    assert sent(join(coordinator, 5, 8, workers=(0, 2))) == [(0, Resume(seq=2))]
    told = messages(tell(coordinator, Resumed(seq=2, server=0)))
    assert [type(message) for _, message in told] == [Collected, Collected]
    proposed = [(worker_id(worker), PauseRequest(number=2)) for worker in (0, 2)]
    assert tell(coordinator, told_of(10)) == []
    assert sent(tell(coordinator, told_of(11))) == proposed
    assert tell(coordinator, told_of(11, worker=0)) == []  # which is open
    (admit, _) = sent(join(coordinator, 10, 11, workers=(0, 2), seq=3))
    assert admit == (0, AdmitWorker(worker=SUBSTITUTE, clocks=[11]))


def test_no_other_meeting_is_called_between_one_and_its_collective() -> None:
    coordinator = coordinator_of()
    lose(coordinator, 1)
    ready(coordinator)
    hold_all(coordinator)
    assert tell(coordinator, told_of(4)) == []
    join(coordinator, 4, workers=(0,))
    assert tell(coordinator, told_of(4)) == []


def hold_all(coordinator: Coordinator) -> None:
    for worker in (0, 2):
        tell(coordinator, Held(worker=worker, number=1, hold=1, what=JOIN, clocks=[4]))


def test_who_goes_on_for_a_dead_server_hears_again_who_joins() -> None:
    coordinator = coordinator_of(num_servers=3, buddies=(1, 2, 0))
    lose(coordinator, 1, num_servers=3)
    ready(coordinator)
    join(coordinator, 5, 8, workers=(0, 2))
    coordinator.on_server_lost(server_id(1), "server 1")
    actions = messages(coordinator.handle(server_id(2), TakenOver(server=1)))
    again = [message for peer, message in actions if peer == server_id(1)]
    assert again[-2:] == [AdmitWorker(worker=SUBSTITUTE, clocks=[8]), Resume(seq=2)]


def test_a_substitute_says_nothing_else_before_it_has_joined() -> None:
    coordinator = coordinator_of()
    lose(coordinator, 1)
    with pytest.raises(ProtocolError, match=r"worker 3 sent Done before it had joined"):
        tell(coordinator, Done(worker=SUBSTITUTE, statistics={}))
    with pytest.raises(ProtocolError, match=r"worker 4 sent JoinReady of worker 3"):
        coordinator.handle(worker_id(4), JoinReady(worker=SUBSTITUTE, num_sets=1))
    failure = Failure(heading="worker 3", text="no such file", exit_status=1)
    assert coordinator.handle(worker_id(SUBSTITUTE), failure) == [EndJob(failure)]


def test_what_its_script_logs_on_the_way_is_left_out() -> None:
    """A job.log in front of job.prepare, which the others' scripts have called long ago."""
    coordinator = coordinator_of()
    lose(coordinator, 1)
    line = {"worker": SUBSTITUTE, "values": {"parameters": 7}}
    assert tell(coordinator, Progress(worker=SUBSTITUTE, clock=0, samples=0)) == []
    assert coordinator.handle(worker_id(SUBSTITUTE), Metrics(line=line)) == []
    assert SUBSTITUTE not in coordinator.progress
    assert coordinator.last == {}


def test_who_joins_is_told_of_the_deaths_that_all_servers_know() -> None:
    """Another one, that servers are being told of, it hears of with the others: what it sends under
    a newer generation a server could refuse."""
    coordinator = coordinator_of()
    lose(coordinator, 1)
    ready(coordinator)
    join(coordinator, 5, 8, workers=(0, 2))
    coordinator.on_lost(worker_id(0), "worker 0")
    told = messages(tell(coordinator, Resumed(seq=2, server=0)))
    (welcome,) = (each for _, each in told if isinstance(each, JoinAccepted))
    assert (welcome.generation, welcome.dead, welcome.chief) == (1, [1], 0)
    told = messages(tell(coordinator, EvictAck(generation=2, server=0)))
    survive = MembershipChanged(generation=2, dead=[0, 1], chief=2)
    assert (worker_id(SUBSTITUTE), survive) in told


def test_who_has_prepared_otherwise_is_stopped_with_a_line_and_the_job_goes_on() -> None:
    coordinator = coordinator_of()
    lose(coordinator, 1)
    ready(coordinator, num_sets=2)
    warning, *told = join(coordinator, 5, 8, workers=(0, 2))
    assert isinstance(warning, Warn)
    assert "worker 3, which was to join, has prepared another number of" in warning.text
    assert sent(told) == [(worker_id(SUBSTITUTE), Stop()), (0, Resume(seq=2))]


def test_workers_of_different_numbers_of_sets_cannot_be_joined() -> None:
    coordinator = coordinator_of()
    lose(coordinator, 1)
    ready(coordinator)
    enter(coordinator, 0, 2, payload=pack_join([5], STATE))
    ((_, answer), _) = sent(enter(coordinator, 2, 2, payload=pack_join([5, 1])))
    assert isinstance(answer, Collected)
    assert "workers called join with different numbers of prepared optimizers: 1, 2" in (
        answer.error
    )
    with pytest.raises(ProtocolError, match="entered join with an invalid payload"):
        enter(coordinator_of(), 0, 2, payload=b"five")


def test_who_has_joined_writes_files_of_checkpoints() -> None:
    coordinator = joined()
    for worker in (0, 2, SUBSTITUTE):
        enter(coordinator, worker, 3, name=CHECKPOINT, payload=pack_clocks([9]))
    written = Written(checkpoint="step-00000009", num_bytes=1, crc32=0)
    actions = []
    for peer in (server_id(0), *map(worker_id, (0, 2, SUBSTITUTE))):
        assert not only(actions, CompleteCheckpoint)
        actions = coordinator.handle(peer, written)
    (complete,) = only(actions, CompleteCheckpoint)
    assert sorted(complete.files) == [0, worker_id(0), worker_id(2), worker_id(SUBSTITUTE)]


def test_a_meeting_is_called_again_where_another_one_was_for_something_else() -> None:
    coordinator = coordinator_of()
    lose(coordinator, 1)
    assert len(ready(coordinator)) == 2
    for worker, what in ((0, "checkpoint"), (2, JOIN)):
        held = Held(worker=worker, number=1, hold=1, what=what, clocks=[4])
        actions = tell(coordinator, held)
    assert sent(actions) == [(worker_id(w), Paused(number=1, what="checkpoint")) for w in (0, 2)]
    for worker in (0, 2):
        enter(coordinator, worker, 2, name="barrier")
    told = messages(tell(coordinator, Resumed(seq=2, server=0)))
    assert told[2:] == [(worker_id(worker), PauseRequest(number=2)) for worker in (0, 2)]


# -- meetings --------------------------------------------------------------------------------------


def meetings_of(num_workers: int = 4) -> Pauses:
    return Pauses(num_workers=num_workers, groups=(), waits=[waits_within(0)], substitutes=(3,))


def hold(meetings: Pauses, worker: int, *, number: int = 1, hold: int = 1) -> list[Any]:
    message = Held(worker=worker, number=number, hold=hold, what=JOIN, clocks=[4])
    return meetings.on_told(worker, message, is_collecting=False)


def test_a_meeting_that_is_called_is_of_those_who_are_in_the_job() -> None:
    meetings = meetings_of()
    assert sent(meetings.call()) == [
        (worker_id(worker), PauseRequest(number=1)) for worker in range(3)
    ]  # type: ignore[arg-type]
    assert meetings.call() == []
    for worker in range(2):
        assert hold(meetings, worker) == []
    assert sent(hold(meetings, 2)) == [
        (worker_id(worker), Paused(number=1, what=JOIN)) for worker in range(3)
    ]
    assert meetings.admit(3) == []
    assert len(meetings.call()) == 4
    for worker in range(3):
        assert hold(meetings, worker, number=2, hold=2) == []
    assert len(hold(meetings, 3, number=2)) == 4


def test_no_meeting_is_called_where_a_script_has_finished() -> None:
    meetings = meetings_of()
    meetings.on_done(1)
    assert meetings.call() == []


def test_who_joins_while_a_meeting_is_open_hears_of_it() -> None:
    meetings = meetings_of()
    hold(meetings, 0)
    assert meetings.admit(3) == [SendControl(worker_id(3), PauseRequest(number=1))]
    busy = Blocked(worker=3, number=1, set_index=0, clock=4)
    assert len(meetings.on_told(3, busy, is_collecting=False)) == 1


# -- clocks ----------------------------------------------------------------------------------------


def test_a_group_begins_in_the_middle_and_counts_from_there() -> None:
    limits = Limits([0, 0, 0])
    clocks = [ChunkClock(limits) for _ in range(2)]
    for group in range(2):
        limits.count(group)
    for clock in clocks:
        clock.catch_up()
        for _ in range(3):
            clock.advance(0)
            clock.advance(1)
    limits.begin(2, 3)
    assert limits.first == (0, 0, 3)
    for clock in clocks:
        clock.begin(2)
        clock.check_invariants()
        assert clock.min_done == 3
    limits.count(2)
    limits.check_invariants()
    for clock in clocks:
        clock.catch_up()
        for group in (0, 1):
            clock.advance(group)
        clock.check_invariants()
        assert (clock.min_done, clock.missing()) == (3, [2])
        clock.advance(2)
        assert clock.min_done == 4
    assert limits.contained == [8, 8, 2]


# -- a server --------------------------------------------------------------------------------------


def core_of(mode: str, *, groups: int = 2, chunks: int = 1) -> ServerCore:
    """On which ``groups`` have registered, and one more is a substitute's."""
    core = assemble_core(
        server=0,
        make_rule=rule_for(mode, staleness=1),
        groups=[(group,) for group in range(groups + 1)],
        survives_workers=True,
        num_substitutes=1,
    )
    core.handle(ControlArrived(worker_id(0), Setup(partition=b"", optimizer="", hyper=b"")))
    core.handle(built(chunks, [Frame(capacity=4) for _ in range(4)]))
    for chunk in core.chunk_states.values():
        chunk.is_loaded = True
    for group in range(groups):
        register = Register(group=group, workers=[group], clock=0)
        core.handle(ControlArrived(worker_id(group), register))
        settings(core, group)
    return core


def settings(core: ServerCore, group: int) -> None:
    core.handle(ControlArrived(worker_id(group), Settings(version=1, hyper=HYPER, absent=[])))


def bury(core: ServerCore, *dead: int, generation: int = 1) -> list[Any]:
    return core.handle(ControlArrived(COORDINATOR, Evict(generation=generation, dead=list(dead))))


def admit(core: ServerCore, clock: int, worker: int = 2) -> list[Any]:
    actions = core.handle(AdmitGroup(worker, clock))
    if not only(actions, Fail):
        core.check_invariants()
        settings(core, worker)
    return actions


def test_nobody_waits_for_a_substitute_before_it_joins_and_all_do_from_its_round_on() -> None:
    core = core_of("sync")
    for group in (0, 1):
        actions = push(core, group, 0)
    assert len(only(actions, Step)) == 1
    bury(core, 1)
    assert admit(core, 1) == [MembershipEvent("join", 2, 1, 1)]
    assert only(push(core, 0, 1), Step) == []
    (step,) = only(push(core, 2, 1), Step)
    assert [each.group for each in step.contributions] == [0, 2]
    core.check_invariants()
    assert core.statistics().updates == 1 + 1 + 1 + 1  # of groups 0, 0, 1 and 2


def test_lr_is_shared_with_a_substitute() -> None:
    core = core_of("async")
    bury(core, 1)
    assert only(push(core, 0, 0), Step)[0].lr_scale == 1.0
    admit(core, 1)
    assert only(push(core, 0, 1), Step)[0].lr_scale == 0.5
    assert only(push(core, 2, 1), Step)[0].lr_scale == 0.5


def test_a_server_tells_how_far_the_dead_have_come() -> None:
    core = core_of("sync", groups=3, chunks=2)
    assert core.reached_by([0]) == [0]
    push(core, 0, 0)  # of one chunk alone
    bury(core, 0)
    assert core.reached_by([0, 1]) == [1, 0]
    core = core_of("async", groups=3)
    for clock in range(3):
        push(core, 1, clock)
    push(core, 0, 0)
    assert core.reached_by([1]) == [0]
    bury(core, 0, 1)
    assert core.reached_by([1, 0]) == [3, 1]


def test_who_goes_on_for_a_dead_server_may_know_the_substitute_by_its_copy() -> None:
    core = core_of("ssp")
    admit(core, 4)
    core._membership._is_of_dead = True
    assert core.handle(AdmitGroup(2, 4)) == []
    core.check_invariants()


def test_a_substitute_joins_beside_what_is_inherited_of_the_dead() -> None:
    core = core_of("sync", groups=3)
    push(core, 0, 0)
    assert only(bury(core, 0), Inherit) == [Inherit(0, 0, 0)]
    admit(core, 0, worker=3)
    for group in (1, 2):
        assert only(push(core, group, 0), Step) == []
    (step,) = only(push(core, 3, 0), Step)
    assert [each.group for each in step.contributions] == [0, 1, 2, 3]
    core.check_invariants()


def test_the_chief_may_be_a_substitute_that_has_joined_but_none_that_waits() -> None:
    core = core_of("ssp")
    bury(core, 0, 1)
    assert core.chief == worker_id(0)  # nobody lives: as before
    admit(core, 0)
    assert core.chief == worker_id(2)


@pytest.mark.parametrize(
    ("worker", "clock"), [(0, 0), (9, 0), (2, -1)], ids=["no substitute", "nobody", "no clock"]
)
def test_none_but_substitutes_are_admitted(worker: int, clock: int) -> None:
    (failed,) = only(admit(core_of("ssp"), clock, worker), Fail)
    assert "it admits the workers of groups that wait, now [2], each of them once" in str(
        failed.error
    )


def test_a_substitute_is_admitted_once_and_does_not_come_back_from_death() -> None:
    core = core_of("ssp")
    admit(core, 0)
    assert only(admit(core, 0), Fail)
    core = core_of("ssp")
    admit(core, 0)
    bury(core, 2)
    assert only(admit(core, 0), Fail)


def test_a_substitute_does_not_register_itself() -> None:
    register = Register(group=2, workers=[2], clock=0)
    (failed,) = core_of("ssp").handle(ControlArrived(worker_id(2), register))
    assert isinstance(failed, Fail)
    assert "registered group 2, which waits until the coordinator admits it" in str(failed.error)


def test_a_substitute_is_not_admitted_to_a_round_that_is_over() -> None:
    core = core_of("sync")
    for group in (0, 1):
        push(core, group, 0)
    push(core, 0, 1)
    (failed,) = only(admit(core, 0), Fail)
    assert "chunk 0 is in a later iteration" in str(failed.error)


def test_a_substitute_leaves_after_what_it_has_pushed_from_its_clock_on() -> None:
    core = core_of("ssp")
    assert core._limits.of == [NEVER, NEVER, 0]
    admit(core, 4)
    push(core, 2, 4)
    for clock, is_right in ((4, False), (6, False), (5, True)):
        actions = core.handle(ControlArrived(worker_id(2), Leave(group=2, clock=clock)))
        assert bool(only(actions, Fail)) is not is_right
    assert only(actions, MembershipEvent) == [MembershipEvent("leave", 2, 5, 1)]
    assert not core._membership.pushing & {worker_id(2)}
