"""A rank's side of its line to the coordinator: what is said again, and whom it obeys."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import pytest

from psdist.errors import ProtocolError, ServersLostError
from psdist.protocol.control import (
    Absent,
    Ack,
    AppendAck,
    Collected,
    Control,
    Enter,
    Failure,
    ForCoordinator,
    InstallSnapshot,
    LeaderChanged,
    MembershipChanged,
    Nominate,
    Progress,
    Rejoined,
    StandbyAck,
    Stop,
    WhoIsAbsent,
)
from psdist.protocol.coordinator_line import (
    TOLD_EVERY,
    CoordinatorLine,
    Follow,
    LineAction,
    Say,
    num_done,
)
from psdist.protocol.events import ControlArrived, PeerLost
from psdist.protocol.ids import COORDINATOR, server_id, spare_id, worker_id
from psdist.servers import protocol
from psdist.servers.protocol import coordinator_assembly  # noqa: F401 # all parts
from psdist.servers.protocol.coordinator import CoordinatorPart

STANDBY = server_id(2)
DEATH = PeerLost(COORDINATOR, "server 0 (rank 0 on n1)")
STANDBYS_DEATH = PeerLost(STANDBY, "server 2 (rank 2 on n2)")
ANSWER = Collected(seq=1, payloads=[], runs=[], values=b"", error="")


def line_of_worker() -> CoordinatorLine:
    return CoordinatorLine(me=worker_id(0), standby=STANDBY)


def progress(clock: int) -> Progress:
    return Progress(worker=0, clock=clock, samples=0)


def succeeds(
    heard: int, *, peer: int = STANDBY, host: int = STANDBY, is_over: bool = False
) -> ControlArrived:
    return ControlArrived(peer, LeaderChanged(heard=heard, is_over=is_over, host=host))


def hear(line: CoordinatorLine, message: Control, peer: int = COORDINATOR) -> list[LineAction]:
    return line.handle(ControlArrived(peer, message))


def test_what_is_for_the_coordinator_and_what_for_the_shard_of_server_0_are_told_apart() -> None:
    for module in iter_modules(protocol.__path__, f"{protocol.__name__}."):
        import_module(module.name)
    of_parts = {each for part in CoordinatorPart.__subclasses__() for each in part.TAKES}
    assert len(of_parts) > 10
    assert all(issubclass(each, ForCoordinator) for each in of_parts)


def test_while_nobody_dies_everything_passes() -> None:
    line = line_of_worker()
    assert line.say(progress(1))
    for message in (ANSWER, Absent(seq=1, workers=[], num_absent=0)):
        event = ControlArrived(COORDINATOR, message)
        assert line.handle(event) == [event]
    other = ControlArrived(server_id(1), StandbyAck(count=9))
    assert line.handle(other) == [other]
    assert line.handle(PeerLost(worker_id(1), "worker 1")) == [PeerLost(worker_id(1), "worker 1")]


@pytest.mark.parametrize("is_told_first", [False, True])
def test_whoever_goes_on_says_again_what_the_standby_does_not_know(is_told_first: bool) -> None:
    line = line_of_worker()
    for clock in range(3):
        line.say(progress(clock))
    hear(line, ANSWER)
    told = [Follow(STANDBY, COORDINATOR), Say(Rejoined(received=1)), Say(progress(2))]
    if is_told_first:
        assert line.handle(succeeds(2)) == []
        assert line.handle(DEATH) == [DEATH, *told]
    else:
        assert line.handle(DEATH) == [DEATH]
        assert not line.say(progress(3)), "nobody is there to hear it"
        assert line.handle(succeeds(2)) == [*told, Say(progress(3))]
    assert line.say(progress(4))
    assert line.num_kept == 2 + (not is_told_first), "there may be another standby"
    assert (line.coordinator_at, line.standby) == (STANDBY, None)


def test_what_is_not_counted_may_be_lost() -> None:
    line = line_of_worker()
    for message in (
        WhoIsAbsent(worker=0, seq=1),
        Failure(heading="", text="", exit_status=1),
        AppendAck(number=1),
    ):
        assert line.say(message)
    assert not line.num_kept


def test_what_the_standby_knows_is_kept_no_more() -> None:
    line = line_of_worker()
    for clock in range(20):
        line.say(progress(clock))
    assert hear(line, StandbyAck(count=16)) == []
    assert line.num_kept == 4
    line.handle(DEATH)
    assert line.handle(succeeds(18))[2:] == [Say(progress(18)), Say(progress(19))]


@pytest.mark.parametrize("count", [15, 21])
def test_a_count_that_cannot_be_is_refused(count: int) -> None:
    line = line_of_worker()
    for clock in range(20):
        line.say(progress(clock))
    hear(line, StandbyAck(count=16))
    with pytest.raises(ProtocolError, match="server 0 has heard"):
        hear(line, StandbyAck(count=count))


def test_the_coordinator_is_told_what_has_come() -> None:
    line = line_of_worker()
    for number in range(1, 2 * TOLD_EVERY + 1):
        event = ControlArrived(COORDINATOR, ANSWER)
        told = [] if number % TOLD_EVERY else [Say(Ack(count=number))]
        assert line.handle(event) == [event, *told]
    stop = ControlArrived(COORDINATOR, Stop())
    assert line.handle(stop) == [stop, Say(Ack(count=2 * TOLD_EVERY + 1))]


def test_the_end_is_told_by_the_standby_where_the_coordinator_could_not() -> None:
    line = line_of_worker()
    line.handle(DEATH)
    assert line.handle(succeeds(0, is_over=True)) == [ControlArrived(COORDINATOR, Stop())]
    assert line.handle(STANDBYS_DEATH) == [STANDBYS_DEATH], "which has ended, as this rank will"


def test_who_may_not_have_heard_that_it_is_out_hears_it_before_the_end() -> None:
    line = line_of_worker()
    line.handle(DEATH)
    told = LeaderChanged(heard=0, is_over=True, host=STANDBY, generation=2, dead=[1], chief=3)
    survive = MembershipChanged(generation=2, dead=[1], chief=3)
    ended = [ControlArrived(COORDINATOR, survive), ControlArrived(COORDINATOR, Stop())]
    assert hear(line, told, STANDBY) == ended


@pytest.mark.parametrize(("peer", "host"), [(1, 1), (1, STANDBY), (STANDBY, 1)])
def test_nobody_else_is_obeyed(peer: int, host: int) -> None:
    line = line_of_worker()
    with pytest.raises(ProtocolError, match=rf"worker 0: server {peer} says that it is the coord"):
        line.handle(succeeds(0, peer=server_id(peer), host=host))


@pytest.mark.parametrize("events", [(DEATH, STANDBYS_DEATH), (STANDBYS_DEATH, DEATH)])
def test_without_both_is_one_error_that_names_them(events: tuple[PeerLost, PeerLost]) -> None:
    line = line_of_worker()
    line.say(progress(0))
    first, second = events
    assert line.handle(first) == [first]
    with pytest.raises(
        ServersLostError, match="both copies of what the coordinator knows"
    ) as error:
        line.handle(second)
    assert str(error.value).startswith(f"{second.who} and {first.who} have failed")


def test_without_a_standby_all_is_kept_that_the_coordinator_has_not_heard() -> None:
    line = line_of_worker()
    line.say(progress(0))
    line.handle(STANDBYS_DEATH)
    assert line.say(Enter(worker=0, seq=1, name="mean", payload=b""))
    assert line.num_kept == 2
    assert hear(line, StandbyAck(count=1)) == []
    assert line.num_kept == 1


NEXT = spare_id(1)
NEXTS_DEATH = PeerLost(NEXT, "spare 1 (rank 7 on n3)")
APPOINT = ControlArrived(COORDINATOR, Nominate(deputy=NEXT))


def test_who_is_appointed_goes_on_where_the_standby_had_died() -> None:
    line = line_of_worker()
    line.handle(STANDBYS_DEATH)
    line.say(progress(0))
    assert line.handle(APPOINT) == [Say(Ack(count=1))]
    assert line.standby == NEXT
    assert line.handle(DEATH) == [DEATH]
    told = [Follow(NEXT, COORDINATOR), Say(Rejoined(received=1)), Say(progress(0))]
    assert line.handle(succeeds(0, peer=NEXT, host=NEXT)) == told


def test_a_coordinator_that_has_followed_another_one_dies() -> None:
    line = line_of_worker()
    line.say(progress(0))
    line.handle(DEATH)
    line.handle(succeeds(1))
    line.say(progress(1))
    line.handle(APPOINT)
    line.say(progress(2))
    assert hear(line, StandbyAck(count=2)) == []
    assert line.handle(STANDBYS_DEATH) == [STANDBYS_DEATH]
    assert not line.say(progress(3))
    told = [Follow(NEXT, STANDBY), Say(Rejoined(received=1)), Say(progress(2)), Say(progress(3))]
    assert line.handle(succeeds(2, peer=NEXT, host=NEXT)) == told
    assert (line.coordinator_at, line.standby) == (NEXT, None)
    assert line.say(progress(4))


def test_with_a_coordinator_that_nobody_can_follow_the_job_ends() -> None:
    line = line_of_worker()
    line.handle(DEATH)
    line.handle(succeeds(0))
    with pytest.raises(ServersLostError, match=r"server 2 .* and server 0 .* have failed"):
        line.handle(STANDBYS_DEATH)


def test_an_appointed_standby_that_has_died_is_not_waited_for() -> None:
    line = line_of_worker()
    line.handle(STANDBYS_DEATH)
    line.handle(APPOINT)
    assert line.handle(NEXTS_DEATH) == [NEXTS_DEATH]
    with pytest.raises(ServersLostError, match=r"server 0 .* and spare 1 .* have failed"):
        line.handle(DEATH)


def entrust(part: int, num_parts: int) -> InstallSnapshot:
    return InstallSnapshot(number=3, part=part, num_parts=num_parts, state=b"")


@pytest.mark.parametrize("num_parts_here", [0, 1])
def test_who_is_appointed_and_not_entrusted_says_that_nobody_goes_on(num_parts_here: int) -> None:
    line = CoordinatorLine(me=NEXT, standby=STANDBY)
    line.handle(STANDBYS_DEATH)
    line.handle(APPOINT)
    for part in range(num_parts_here):
        event = ControlArrived(COORDINATOR, entrust(part, 2))
        assert line.handle(event) == [event]
    with pytest.raises(ServersLostError, match=r"server 0 .* and server 2 .* have failed"):
        line.handle(DEATH)


def test_who_is_entrusted_goes_on() -> None:
    line = CoordinatorLine(me=NEXT, standby=STANDBY)
    line.handle(STANDBYS_DEATH)
    line.handle(APPOINT)
    for part in range(2):
        hear(line, entrust(part, 2))
    assert line.handle(DEATH) == [DEATH]
    told = [Follow(NEXT, COORDINATOR), Say(Rejoined(received=1))]
    assert line.handle(succeeds(0, peer=NEXT, host=NEXT)) == told


def test_who_goes_on_for_another_one_waits_until_a_later_coordinator_asks() -> None:
    """It knows what its process knows: here, that the coordinator has followed another one."""
    process = CoordinatorLine(me=server_id(1), standby=STANDBY)
    process.handle(DEATH)
    process.handle(succeeds(0))
    process.handle(APPOINT)
    line = CoordinatorLine(me=server_id(3), standby=None, before=process)
    assert (line.coordinator_at, line.standby) == (STANDBY, NEXT)
    assert not line.say(progress(0))
    again = succeeds(0, peer=COORDINATOR)
    told = [Follow(STANDBY, STANDBY), Say(Rejoined(received=0)), Say(progress(0))]
    assert line.handle(again) == told
    with pytest.raises(ProtocolError, match="says again that it is the coordinator's successor"):
        line.handle(again)
    assert line.say(progress(1))


def test_who_goes_on_in_the_process_of_who_is_appointed_leaves_the_end_to_that() -> None:
    process = CoordinatorLine(me=NEXT, standby=STANDBY)
    process.handle(STANDBYS_DEATH)
    process.handle(APPOINT)
    line = CoordinatorLine(me=server_id(3), standby=None, before=process)
    assert line.handle(DEATH) == [DEATH]


def test_who_had_died_before_a_rank_was_there_is_known_to_be_dead() -> None:
    line = CoordinatorLine(me=server_id(3), standby=None, before=line_of_worker())
    line.know_dead({COORDINATOR: DEATH.who})
    assert not line.say(progress(0))
    told = [Follow(STANDBY, COORDINATOR), Say(Rejoined(received=0)), Say(progress(0))]
    assert line.handle(succeeds(0, peer=COORDINATOR)) == told


@pytest.mark.parametrize(
    ("done", "wanted", "num"),
    [
        *(("", "", 0), ("abc", "", 0), ("", "ab", 0), ("abc", "cd", 1), ("abcb", "cbd", 2)),
        *(("ab", "cd", 0), ("aa", "aab", 2), ("abc", "abc", 3), ("b", "ab", 0)),
    ],
)
def test_how_many_of_the_last_are_done(done: str, wanted: str, num: int) -> None:
    assert num_done(done, wanted) == num
