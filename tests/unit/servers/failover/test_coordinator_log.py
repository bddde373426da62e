"""The coordinator's coordinator log and its second: what waits for the standby, and what the
standby knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import pytest

from psdist.errors import PeerLostError, ProtocolError, ServersLostError
from psdist.protocol.collected import PREPARED
from psdist.protocol.control import (
    Ack,
    Append,
    AppendAck,
    Collected,
    Control,
    CopyFilled,
    Done,
    Enter,
    EvictAck,
    Failure,
    Finished,
    KeepCopy,
    KeepsCopy,
    LeaderChanged,
    MembershipChanged,
    Metrics,
    Nominate,
    Progress,
    Rejoined,
    Resume,
    Resumed,
    StandbyAck,
    Stop,
    TakenOver,
    TakeOver,
    WhoIsAbsent,
    encode_control,
)
from psdist.protocol.coordinator_line import TOLD_EVERY
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.coordinator import Complete, EndJob, WriteMetrics
from psdist.servers.protocol.failover.coordinator_log import (
    CoordinatorLog,
    InstallAll,
    LogAction,
    Over,
    StandbyInstalled,
)
from psdist.servers.protocol.takeovers import ShardAlone
from tests.support.coordinators import assemble

NUM_WORKERS, NUM_SERVERS = 2, 3
STANDBY = server_id(1)
DEAD = "server 0 (rank 0 on n1)"


def coordinator_log(
    *, is_active: bool = True, groups: Sequence[Sequence[int]] = ()
) -> CoordinatorLog:
    """With ``groups`` workers may fail."""
    num_workers = sum(map(len, groups)) or NUM_WORKERS
    coordinator = assemble(
        num_workers=num_workers,
        num_servers=NUM_SERVERS,
        buddies=(1, 2, 0),
        groups=groups,
        max_deaths=len(groups),
    )
    return CoordinatorLog(
        coordinator,
        standby=STANDBY,
        num_workers=num_workers,
        num_servers=NUM_SERVERS,
        is_active=is_active,
    )


class Pair:
    """Coordinator and standby; the network between them is as fast as a test wants."""

    def __init__(self, groups: Sequence[Sequence[int]] = ()) -> None:
        self.first, self.second = (
            coordinator_log(groups=groups),
            coordinator_log(is_active=False, groups=groups),
        )
        self.notes: list[Append] = []
        self.done: list[LogAction] = []

    def tell(self, peer: int, message: Control) -> list[LogAction]:
        """Return the actions of the coordinator at once, without log entries."""
        actions = self.first.handle(peer, message)
        self.notes += [each.message for each in sent(actions) if isinstance(each.message, Append)]
        return [each for each in actions if not is_note(each)]

    def lose(self, peer: int) -> list[LogAction]:
        """``peer`` has failed."""
        (note,) = sent(self.first.on_lost(peer, f"peer {peer}"))
        assert isinstance(note.message, Append)
        self.notes = [note.message]
        return self.settle()

    def settle(self) -> list[LogAction]:
        """Return the actions when the standby has answered all."""
        actions = []
        for note in self.notes:
            self.done += self.second.note(note)
            actions += self.first.handle(STANDBY, AppendAck(number=note.number))
        self.notes.clear()
        return actions

    def say(self, peer: int, message: Control) -> list[LogAction]:
        assert self.tell(peer, message) == []
        return self.settle()


def sent(actions: list[LogAction]) -> list[SendControl]:
    return [each for each in actions if isinstance(each, SendControl)]


def is_note(action: LogAction) -> bool:
    return isinstance(action, SendControl) and isinstance(action.message, Append)


def enter(worker: int, seq: int = 1) -> Enter:
    return Enter(worker=worker, seq=seq, name="barrier", payload=b"")


def metrics(worker: int, value: int) -> Metrics:
    return Metrics(line={"worker": worker, "clock": value, "values": {}})


def run_collective(pair: Pair) -> list[LogAction]:
    for worker in range(NUM_WORKERS):
        pair.say(worker_id(worker), enter(worker))
    for server in range(NUM_SERVERS - 1):
        pair.say(server_id(server), Resumed(seq=1, server=server))
    last = NUM_SERVERS - 1
    return pair.say(server_id(last), Resumed(seq=1, server=last))


def finish(pair: Pair, workers: Sequence[int] = range(NUM_WORKERS)) -> list[LogAction]:
    for worker in workers:
        pair.say(worker_id(worker), Done(worker=worker, statistics={}))
    for server in range(NUM_SERVERS - 1):
        pair.say(server_id(server), Finished(server=server, statistics={}))
    last = NUM_SERVERS - 1
    return pair.say(server_id(last), Finished(server=last, statistics={}))


def test_what_follows_waits_for_the_standby() -> None:
    pair = Pair()
    pair.say(worker_id(0), enter(0))
    assert pair.tell(worker_id(1), enter(1)) == []
    resumes = [SendControl(server_id(each), Resume(seq=1)) for each in range(NUM_SERVERS)]
    assert pair.settle() == resumes


def test_what_changes_nothing_waits_for_nobody() -> None:
    pair = Pair()
    pair.say(worker_id(0), enter(0))
    (absent,) = pair.tell(worker_id(0), WhoIsAbsent(worker=0, seq=1))
    assert isinstance(absent, SendControl)
    failure = Failure(heading="worker 0", text="no", exit_status=1)
    assert pair.tell(worker_id(0), failure) == [EndJob(failure)]


def test_an_answer_to_no_note_is_refused() -> None:
    pair = Pair()
    pair.say(worker_id(0), enter(0))
    for number in (1, 2):
        with pytest.raises(ProtocolError, match=r"acknowledged .* log entries"):
            pair.first.handle(STANDBY, AppendAck(number=number))
    pair.tell(worker_id(1), enter(1))
    with pytest.raises(ProtocolError, match="server 2 acknowledged"):
        pair.first.handle(server_id(2), AppendAck(number=2))


def test_a_note_that_is_missing_is_noticed() -> None:
    pair = Pair()
    pair.tell(worker_id(0), enter(0))
    pair.tell(worker_id(1), enter(1))
    with pytest.raises(ProtocolError, match="log entry 2, of which 0 are done, after entry 0"):
        pair.second.note(pair.notes[1])


def test_without_its_standby_the_coordinator_goes_on() -> None:
    pair = Pair()
    pair.say(worker_id(0), enter(0))
    pair.tell(worker_id(1), enter(1))
    actions = sent(pair.first.on_lost(STANDBY, "server 1"))
    resumed = [each.peer for each in actions if isinstance(each.message, Resume)]
    assert resumed == [server_id(each) for each in range(NUM_SERVERS)]
    assert actions[-1] == SendControl(server_id(2), TakeOver(server=1)), "after the held messages"
    assert pair.first.on_lost(STANDBY, "server 1") == []
    line = pair.first.handle(worker_id(0), metrics(0, 1))
    assert line == [WriteMetrics({"worker": 0, "clock": 1})]


def test_ranks_are_told_how_far_the_standby_knows_what_they_say() -> None:
    pair = Pair()
    for number in range(1, TOLD_EVERY + 1):
        actions = pair.say(worker_id(0), Progress(worker=0, clock=number, samples=0))
        told = [SendControl(worker_id(0), StandbyAck(count=number))] * (number == TOLD_EVERY)
        assert actions == told


def succeed(pair: Pair, **lost: Any) -> tuple[list[LogAction], list[LogAction]]:
    return pair.second.succeed(DEAD, lost=lost.get("lost", {}))


def test_the_standby_goes_on_with_the_collective() -> None:
    pair = Pair()
    pair.say(worker_id(0), enter(0))
    heard = {each.peer: each.message for each in pair.second.announcements()}
    assert heard[worker_id(0)] == LeaderChanged(heard=1, is_over=False, host=STANDBY)
    assert heard[worker_id(1)] == LeaderChanged(heard=0, is_over=False, host=STANDBY)
    assert heard.keys() == {*map(server_id, (1, 2)), *map(worker_id, (0, 1))}
    undone, actions = succeed(pair)
    alone = ShardAlone(server=2, host=2)
    assert (undone, actions) == ([], [alone]), "no rank has the new coordinator yet"
    for peer in heard:
        again = pair.second.handle(peer, Rejoined(received=0))
        assert again == [SendControl(peer, TakeOver(server=0))] * (peer == STANDBY)
    resumed = sent(pair.second.handle(worker_id(1), enter(1)))
    assert {each.peer for each in resumed} == {server_id(1), server_id(2)}, (
        "and 0 when it is served"
    )
    taken = sent(pair.second.handle(STANDBY, TakenOver(server=0)))
    assert SendControl(COORDINATOR, Resume(seq=1)) in taken


def test_answers_are_told_again_to_who_lacks_them() -> None:
    pair = Pair()
    answers = sent(run_collective(pair))
    assert [type(each.message) for each in answers] == [Collected, Collected]
    succeed(pair)
    assert pair.second.handle(worker_id(0), Rejoined(received=1)) == []
    assert pair.second.handle(worker_id(1), Rejoined(received=0)) == [answers[1]]


def test_what_concerns_people_is_done_by_one_of_them() -> None:
    pair = Pair()
    lines = [WriteMetrics({"worker": 0, "clock": each}) for each in range(3)]
    for clock in range(3):
        pair.say(worker_id(0), metrics(0, clock))
    assert pair.done == lines[:2], "what the coordinator has said with the third"
    undone, _ = succeed(pair)
    assert undone == lines[2:]


def test_whoever_was_known_to_have_died_is_declared_dead() -> None:
    pair = Pair()
    with pytest.raises(PeerLostError, match="worker 1"):
        succeed(pair, lost={worker_id(1): "worker 1 (rank 4 on n2)"})
    pair = Pair()
    with pytest.raises(ServersLostError, match=r"server 2 .* server 0"):
        succeed(pair, lost={server_id(2): "server 2 (rank 2 on n1)"})


def test_the_end_of_the_job_is_the_coordinator_s_to_tell_while_it_lives() -> None:
    pair = Pair()
    done = Done(worker=0, statistics={})
    pair.say(worker_id(0), done)
    with pytest.raises(ProtocolError, match="Done twice"):
        pair.tell(worker_id(0), done)
    note = Append(number=2, peer=worker_id(0), message=encode_control(done), who="", done=0)
    assert pair.second.note(note) == []
    with pytest.raises(ProtocolError, match="Done twice"):
        succeed(pair)


def test_all_are_stopped_the_standby_last() -> None:
    pair = Pair()
    actions = finish(pair)
    assert isinstance(actions[0], Complete), "people first"
    stopped = {worker_id(0): 1, worker_id(1): 1, server_id(2): 2}
    assert sent(actions) == [SendControl(peer, Stop()) for peer in stopped]
    for peer, count in stopped.items():
        assert not any(isinstance(each, Over) for each in actions)
        actions = pair.say(peer, Ack(count=count))
    assert actions == [SendControl(STANDBY, Stop()), Over()]


def test_whoever_dies_at_the_end_is_not_waited_for() -> None:
    pair = Pair()
    finish(pair)
    pair.say(worker_id(0), Ack(count=1))
    pair.say(server_id(2), Ack(count=2))
    assert pair.lose(worker_id(1)) == [SendControl(STANDBY, Stop()), Over()]


GROUPS = ((0, 1), (2,))
OUT = worker_id(1)
"""Lives when worker 0 has failed."""
LIVE = worker_id(2)
SURVIVE = MembershipChanged(generation=1, dead=[0], chief=2)


def bury_one() -> Pair:
    """Two groups: worker 0 has failed, and worker 1 with it is out."""
    pair = Pair(GROUPS)
    for worker in range(3):
        enter_prepare = Enter(worker=worker, seq=1, name="prepare", payload=PREPARED)
        pair.say(worker_id(worker), enter_prepare)
    for server in range(NUM_SERVERS):
        pair.say(server_id(server), Resumed(seq=1, server=server))
    pair.lose(worker_id(0))
    for server in range(NUM_SERVERS):
        told = pair.say(server_id(server), EvictAck(generation=1, server=server, reached=[0]))
    assert SendControl(OUT, SURVIVE) in told
    return pair


def test_who_is_out_is_waited_for_until_it_has_heard_so() -> None:
    pair = bury_one()
    assert not any(isinstance(each, Over) for each in finish(pair, workers=[2]))
    pair.say(LIVE, Ack(count=3))
    assert pair.say(server_id(2), Ack(count=4)) == [], "it may have heard of nothing"
    assert pair.lose(OUT) == [SendControl(STANDBY, Stop()), Over()], "its process has ended"


def test_who_is_out_and_has_ended_is_owed_nothing() -> None:
    pair = bury_one()
    pair.lose(OUT)
    finish(pair, workers=[2])
    pair.say(LIVE, Ack(count=3))
    told = pair.say(server_id(2), Ack(count=4))
    assert told == [SendControl(STANDBY, Stop()), Over()]


def test_who_is_out_hears_so_of_the_standby() -> None:
    """Before the standby ends: the line was closed at the first report."""
    pair = bury_one()
    second = pair.second
    told_of_all = {each.peer: each.message for each in second.announcements()}
    assert told_of_all[OUT] == LeaderChanged(heard=1, is_over=False, host=STANDBY), (
        "the rest is still to be said"
    )
    succeed(pair)
    for peer in (STANDBY, server_id(2), LIVE):
        second.handle(peer, Rejoined(received=second._lines._of(peer).num_received))
    second.handle(STANDBY, TakenOver(server=0))
    second.handle(LIVE, Done(worker=2, statistics={}))
    for server in range(NUM_SERVERS):
        ended = second.handle(server_id(server), Finished(server=server, statistics={}))
    assert any(isinstance(each, Complete) for each in ended)
    assert not any(isinstance(each, Over) for each in ended), "worker 1 does not know whom to ask"
    told = second.handle(OUT, Rejoined(received=1))
    assert told[0] == SendControl(OUT, SURVIVE)
    assert told[-2:] == [SendControl(STANDBY, Stop()), Over()]


def test_who_is_out_hears_so_where_the_job_was_complete() -> None:
    pair = bury_one()
    finish(pair, workers=[2])
    told = {each.peer: each.message for each in pair.second.announcements()}
    assert told[OUT] == LeaderChanged(
        heard=1, is_over=True, host=STANDBY, generation=1, dead=[0], chief=2
    )
    assert told[LIVE] == LeaderChanged(heard=2, is_over=True, host=STANDBY)
    assert worker_id(0) not in told


def test_without_its_standby_the_coordinator_ends() -> None:
    pair = Pair()
    finish(pair)
    assert pair.first.on_lost(STANDBY, "server 1") == [Over()]


def test_the_standby_stops_all_where_the_coordinator_could_not() -> None:
    pair = Pair()
    finish(pair)
    said = pair.second.announcements()
    assert len(said) == NUM_WORKERS + NUM_SERVERS - 1
    assert all(each.message == LeaderChanged(heard=1, is_over=True, host=STANDBY) for each in said)
    undone, actions = succeed(pair)
    assert any(isinstance(each, Complete) for each in undone)
    assert actions == []


# -- another standby
# --------------------------------------------------------------------------------


NEXT = server_id(2)
LAST_DEAD = "server 1 (rank 1 on n1)"


def filled(number: int, server: int) -> CopyFilled:
    return CopyFilled(server=server, number=number)


def appointing() -> CoordinatorLog:
    """The coordinator: its standby has failed, and server 2 has a whole copy of the shard of server
    0, and all ranks are being informed."""
    first = coordinator_log()
    first.on_lost(STANDBY, LAST_DEAD)
    told = sent(first.handle(server_id(2), TakenOver(server=1)))
    keep = [each for each in told if isinstance(each.message, KeepCopy)]
    assert SendControl(NEXT, KeepCopy(server=0, number=2)) in keep
    first.handle(NEXT, KeepsCopy(server=0, number=2))
    said = sent(first.handle(COORDINATOR, filled(2, server=0)))
    appointed = [each.peer for each in said if each.message == Nominate(deputy=NEXT)]
    assert appointed == [NEXT, server_id(1), worker_id(0), worker_id(1)], "who is named knows first"
    assert first.standby is None
    return first


def receive(first: CoordinatorLog, peers: Sequence[int]) -> list[LogAction]:
    """All that was said to each of ``peers``; what follows of the last."""
    actions: list[LogAction] = []
    for peer in peers:
        num_said = first._lines._of(peer).num_said
        actions = first.handle(peer, Ack(count=num_said))
    return actions


ALL = (server_id(1), worker_id(0), worker_id(1), NEXT)
"""The first two are one process: server 1 continues in that of server 2."""


def entrusting() -> tuple[CoordinatorLog, CoordinatorLog, InstallAll]:
    first = appointing()
    assert receive(first, ALL[:-1]) == []
    (entrust,) = receive(first, ALL[-1:])
    assert isinstance(entrust, InstallAll)
    return first, restored(entrust.state), entrust


def restored(state: bytes) -> CoordinatorLog:
    third = coordinator_log(is_active=False)
    third.from_snapshot(state)
    return third


def test_who_has_another_copy_of_the_coordinator_s_shard_is_its_standby_when_all_know_that() -> (
    None
):
    first, third, entrust = entrusting()
    assert (entrust.standby, first.standby, third.standby) == (NEXT, NEXT, NEXT)
    (note,) = sent(first.handle(worker_id(0), enter(0)))
    assert isinstance(note.message, Append)
    assert note.peer == NEXT
    assert third.note(note.message) == []
    answered = first.handle(NEXT, AppendAck(number=entrust.number))
    assert answered == [StandbyInstalled(NEXT)]
    assert first.handle(NEXT, AppendAck(number=note.message.number)) == []
    first.check_invariants()
    third.check_invariants()


def test_until_who_is_entrusted_has_answered_nothing_leaves() -> None:
    first, _, entrust = entrusting()
    first.handle(worker_id(0), enter(0))
    told = first.handle(worker_id(1), enter(1))
    assert all(is_note(each) for each in told), "and no Resume"
    answered = first.handle(NEXT, AppendAck(number=entrust.number + 2))
    resumed = [each.peer for each in sent(answered) if isinstance(each.message, Resume)]
    assert resumed == [server_id(each) for each in range(NUM_SERVERS)]


def test_while_somebody_does_not_know_who_is_appointed_nobody_is_entrusted() -> None:
    first = appointing()
    assert receive(first, ALL[1:]) == []
    line = first.handle(worker_id(0), metrics(0, 1))
    assert line == [WriteMetrics({"worker": 0, "clock": 1})], "as without a standby"
    (entrust,) = receive(first, ALL[:1])
    assert isinstance(entrust, InstallAll)


def test_who_has_died_needs_not_know_who_is_appointed() -> None:
    first = coordinator_log(groups=GROUPS)
    for worker in range(3):
        enter_prepare = Enter(worker=worker, seq=1, name="prepare", payload=PREPARED)
        first.handle(worker_id(worker), enter_prepare)
    first.on_lost(STANDBY, LAST_DEAD)
    for server in range(NUM_SERVERS):
        first.handle(server_id(server), Resumed(seq=1, server=server))
    first.handle(server_id(2), TakenOver(server=1))
    first.handle(NEXT, KeepsCopy(server=0, number=2))
    first.handle(COORDINATOR, filled(2, server=0))
    receive(first, [server_id(1), NEXT, LIVE, worker_id(0)])
    actions = first.on_lost(OUT, "worker 1")
    assert isinstance(actions[-1], InstallAll)


def test_who_is_appointed_dies_and_nobody_is_entrusted() -> None:
    first = appointing()
    receive(first, ALL[:-1])
    with pytest.raises(ServersLostError):  # it served server 1 as well
        first.on_lost(NEXT, "server 2 (rank 2 on n1)")
    assert receive(first, [worker_id(0)]) == []


def test_who_is_entrusted_dies_before_it_has_answered() -> None:
    first, _, _ = entrusting()
    first.handle(worker_id(0), metrics(0, 1))
    with pytest.raises(ServersLostError):
        first.on_lost(NEXT, "server 2 (rank 2 on n1)")
    assert first.standby is None
    assert not any(
        isinstance(each, StandbyInstalled) for _, all_ in first._pending for each in all_
    )


def test_who_goes_on_for_another_one_is_told_again_who_is_appointed() -> None:
    first = coordinator_log()
    first.on_lost(STANDBY, LAST_DEAD)
    first._nominee = NEXT
    told = sent(first.handle(server_id(2), TakenOver(server=1)))
    assert SendControl(server_id(1), Nominate(deputy=NEXT)) in told
    assert not first._lines.has_received_wanted([server_id(1)])


def test_the_next_standby_knows_what_was_said_and_heard() -> None:
    first, third, _ = entrusting()
    heard = {each.peer: each.message for each in third.announcements()}
    for peer in ALL:
        num_heard = first._lines.num_heard(peer)
        assert heard[peer] == LeaderChanged(heard=num_heard, is_over=False, host=NEXT)
    assert third.coordinator_at == COORDINATOR


def test_it_goes_on_and_without_a_whole_copy_of_what_it_has_the_job_ends() -> None:
    """That of server 1, which it serves, is not whole: the coordinator was the only one left."""
    _, third, _ = entrusting()
    with pytest.raises(ServersLostError, match=r"server 0 .* server 1"):
        third.succeed(DEAD, lost={server_id(1): LAST_DEAD, server_id(2): "server 2"})
    assert third.coordinator_at == NEXT


def test_damaged_knowledge_is_refused() -> None:
    _, _, entrust = entrusting()
    version, state = msgpack.unpackb(entrust.state)
    for data, why in (
        (entrust.state[:-1], "incomplete input"),
        (msgpack.packb({"not": "an coordinator log"}), "not enough values"),
        (msgpack.packb([version, 7]), "not msgpack"),
        (msgpack.packb([version + 1, state]), "of version 2; this psdist reads 1"),
        (msgpack.packb([version, state[:-1]]), "not msgpack"),
    ):
        with pytest.raises(ProtocolError, match=f"^the coordinator's snapshot is damaged.*{why}"):
            restored(data)
