"""Spares that take the places of servers and of workers, as the coordinator sees them: which of
both one is, by what id it is spoken to, and who hears of its death."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.errors import ProtocolError
from psdist.protocol.control import (
    Ack,
    Append,
    AppendAck,
    Begin,
    Begun,
    End,
    Enter,
    EvictAck,
    Finished,
    Gone,
    JoinReady,
    KeepCopy,
    LeaderChanged,
    Moved,
    Rejoined,
    Resumed,
    Stop,
    TakenOver,
    TakePlace,
)
from psdist.protocol.events import ControlArrived, PeerLost
from psdist.protocol.ids import COORDINATOR, server_id, spare_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.coordinator import Coordinator
from psdist.servers.protocol.failover.coordinator_log import CoordinatorLog
from psdist.servers.protocol.joins import Joined, Joins, SubstituteDeath
from psdist.servers.protocol.lobby import Lobby
from psdist.servers.protocol.replication.pairs import next_keeper
from psdist.servers.protocol.takeovers import SpareDeath, Takeovers
from tests.support.coordinators import assemble, part_of
from tests.support.virtual.job import Schedule, VirtualJob, spare_seat
from tests.unit.servers.test_coordinator_machine import tell

WORKERS, SERVERS = 2, 2
FIRST, SECOND = WORKERS, WORKERS + 1
"""What the two spares are as workers."""


def coordinator_of(num_spares: int = 2, num_workers: int = WORKERS) -> Coordinator:
    """All have prepared; server 1 has the second copy of server 0, and the other way round."""
    coordinator = assemble(
        num_workers=num_workers + num_spares,
        num_servers=SERVERS,
        max_deaths=9,
        buddies=(1, 0),
        num_spares=num_spares,
        num_substitutes=num_spares,
    )
    coordinator.is_ready = True
    return coordinator


def said(actions: Any) -> list[tuple[int, Any]]:
    return [(each.peer, each.message) for each in actions if isinstance(each, SendControl)]


def lose_worker(coordinator: Coordinator, worker: int) -> list[tuple[int, Any]]:
    """What is said when all servers have taken it in."""
    coordinator.on_lost(worker_id(worker), f"worker {worker}")
    generation = coordinator.membership.generation
    told = [EvictAck(generation=generation, server=server) for server in range(SERVERS)]
    return said(tell(coordinator, *told))


def lose_server(coordinator: Coordinator) -> list[tuple[int, Any]]:
    """Server 1 fails, and 0 continues in its place."""
    coordinator.on_server_lost(server_id(1), "server 1")
    return said(coordinator.handle(server_id(0), TakenOver(server=1)))


def asked(told: list[tuple[int, Any]]) -> list[tuple[int, int]]:
    return [(peer, each.worker) for peer, each in told if isinstance(each, TakePlace)]


def test_a_spare_is_asked_by_the_id_that_it_has_and_works_under_the_other() -> None:
    coordinator = coordinator_of()
    assert asked(lose_worker(coordinator, 1)) == [(spare_id(0), 1)]
    assert coordinator.num_idle_spares == 1
    coordinator.handle(worker_id(FIRST), JoinReady(worker=FIRST, num_sets=1))
    assert part_of(coordinator, Joins).ready == [FIRST]


def test_one_that_is_to_keep_a_copy_becomes_no_worker() -> None:
    coordinator = coordinator_of()
    keepers = [peer for peer, each in lose_server(coordinator) if isinstance(each, KeepCopy)]
    assert keepers == [spare_id(0), spare_id(0)]  # both, so that the other may become a worker
    assert coordinator.num_idle_spares == 1
    assert asked(lose_worker(coordinator, 1)) == [(spare_id(1), 1)]
    assert coordinator.num_idle_spares == 0


def test_one_that_is_a_worker_keeps_no_copy() -> None:
    coordinator = coordinator_of(num_spares=1)
    lose_worker(coordinator, 1)
    told = lose_server(coordinator)
    assert not any(isinstance(each, KeepCopy) for _, each in told)
    assert part_of(coordinator, Takeovers).alone == [0, 1]


def test_where_shards_are_hears_who_is_spoken_to_by_the_id_that_it_has() -> None:
    coordinator = coordinator_of()
    lose_worker(coordinator, 1)
    moved = [peer for peer, each in lose_server(coordinator) if isinstance(each, Moved)]
    living = [server_id(0), spare_id(1), worker_id(0), worker_id(1), worker_id(FIRST)]
    assert moved == living


def test_spares_that_become_workers_at_once_are_told_of_in_the_order_of_their_places() -> None:
    coordinator = coordinator_of(num_workers=3)
    for worker in range(2):
        coordinator.on_lost(worker_id(worker), f"worker {worker}")
    acks = [
        EvictAck(generation=view, server=server) for view in (1, 2) for server in range(SERVERS)
    ]
    told = said(tell(coordinator, *acks))
    assert asked(told) == [(spare_id(0), 0), (spare_id(1), 1)]
    moved = [peer for peer, each in lose_server(coordinator) if isinstance(each, Moved)]
    assert moved[-2:] == [worker_id(3), worker_id(4)]


@pytest.mark.parametrize("first", ["spare", "worker"])
def test_an_idle_one_dies_and_one_line_follows(first: str) -> None:
    """The network tells of both its ids, in any order."""
    coordinator = coordinator_of()
    tells = {
        "spare": lambda: coordinator.on_server_lost(spare_id(0), "spare 0"),
        "worker": lambda: coordinator.on_lost(worker_id(FIRST), "worker 2"),
    }
    actions = tells.pop(first)()
    (last,) = tells.values()
    assert [*actions, *last()] == [SpareDeath(0, "spare 0")]
    assert asked(lose_worker(coordinator, 1)) == [(spare_id(1), 1)]
    assert coordinator.num_idle_spares == 0


def test_one_that_was_asked_dies_as_a_worker_and_the_next_has_the_place() -> None:
    coordinator = coordinator_of()
    lose_worker(coordinator, 1)
    assert coordinator.on_server_lost(spare_id(0), "spare 0") == []
    lost, *more = coordinator.on_lost(worker_id(FIRST), "worker 2, a spare")
    assert lost == SubstituteDeath(FIRST, "worker 2, a spare")
    assert said(more) == [(spare_id(1), TakePlace(worker=1))]


def test_at_the_end_each_is_stopped_once_by_the_id_that_it_has() -> None:
    coordinator = coordinator_of()
    lose_worker(coordinator, 1)
    coordinator.done = {0: {}}
    coordinator.is_finishing = True
    told = said(
        tell(coordinator, *(Finished(server=each, statistics={}) for each in range(SERVERS)))
    )
    stopped = [peer for peer, each in told if isinstance(each, Stop)]
    assert stopped == [worker_id(0), worker_id(FIRST), server_id(1), spare_id(1)]


def test_a_copy_goes_to_a_spare_that_has_one_where_others_may_become_workers() -> None:
    peers = [server_id(0), server_id(1), spare_id(0), spare_id(1)]
    unknown = dict.fromkeys(peers, "")

    def found(load: list[int], *, saves_spares: bool) -> int:
        loads = dict(zip(peers, load, strict=True))
        more = {"hosts": unknown, "racks": unknown, "load": loads}
        return next_keeper(0, peers[1:], saves_spares=saves_spares, **more)

    assert found([2, 1, 1, 0], saves_spares=True) == spare_id(0)
    assert found([2, 1, 1, 0], saves_spares=False) == spare_id(1)
    assert found([2, 1, 0, 0], saves_spares=True) == spare_id(0)
    assert found([2, 1, 2, 0], saves_spares=True) == spare_id(1)  # it has what a server has
    assert found([2, 1, 2, 2], saves_spares=True) == server_id(1)


# -- the standby
# ------------------------------------------------------------------------------------


def coordinator_log(*, is_active: bool = True) -> CoordinatorLog:
    return CoordinatorLog(
        coordinator_of(),
        standby=server_id(1),
        num_workers=WORKERS + 2,
        num_servers=SERVERS,
        num_spares=2,
        num_substitutes=2,
        is_active=is_active,
    )


class Pair:
    """Coordinator and standby, who knows everything at once."""

    def __init__(self) -> None:
        self.first, self.second = coordinator_log(), coordinator_log(is_active=False)

    def tell(self, peer: int, message: Any) -> list[tuple[int, Any]]:
        return self.settle(self.first.handle(peer, message))

    def lose(self, peer: int, who: str) -> list[tuple[int, Any]]:
        return self.settle(self.first.on_lost(peer, who))

    def settle(self, actions: Any) -> list[tuple[int, Any]]:
        told = []
        for peer, message in said(actions):
            if isinstance(message, Append):
                self.second.note(message)
                answer = AppendAck(number=message.number)
                told += said(self.first.handle(server_id(1), answer))
            else:
                told.append((peer, message))
        return told

    def lose_worker(self) -> list[tuple[int, Any]]:
        self.lose(worker_id(1), "worker 1")
        self.tell(server_id(0), EvictAck(generation=1, server=0))
        return self.tell(server_id(1), EvictAck(generation=1, server=1))


def test_the_line_of_a_spare_goes_on_under_its_other_id() -> None:
    pair = Pair()
    assert asked(pair.lose_worker()) == [(spare_id(0), 1)]
    for each in (pair.first, pair.second):
        lines = each._lines
        assert [type(one) for one in lines._of(worker_id(FIRST)).kept] == [TakePlace]
    # What it has told before it heard that is of the same line.
    pair.tell(spare_id(0), Ack(count=1))
    assert not pair.second._lines._of(worker_id(FIRST)).kept
    pair.tell(worker_id(FIRST), JoinReady(worker=FIRST, num_sets=1))
    assert pair.second._lines.num_heard(worker_id(FIRST)) == 1
    assert spare_id(0) not in pair.second._lines._lines


def test_the_successor_speaks_to_each_spare_by_the_id_that_it_has() -> None:
    pair = Pair()
    told = [each.peer for each in pair.second.announcements()]
    assert told == [server_id(1), worker_id(0), worker_id(1), spare_id(0), spare_id(1)]
    pair.lose_worker()
    told = [each.peer for each in pair.second.announcements()]
    assert told == [server_id(1), worker_id(0), worker_id(FIRST), spare_id(1)]


@pytest.mark.parametrize("peer", [spare_id(0), worker_id(FIRST)])
def test_who_has_not_heard_that_it_is_asked_hears_it_of_the_successor(peer: int) -> None:
    """It follows under the id that it has until then, or the other one."""
    pair = Pair()
    pair.lose_worker()
    pair.second.succeed("server 0", lost={})
    again = said(pair.second.handle(peer, Rejoined(received=0)))
    assert again[:1] == [(peer, TakePlace(worker=1))]
    assert pair.second._lines.is_open(worker_id(FIRST))
    assert isinstance(pair.second.announcements()[0].message, LeaderChanged)


def test_a_spare_that_has_not_followed_is_asked_when_it_has() -> None:
    second = Pair().second
    second.succeed("server 0", lost={})
    second.on_lost(worker_id(1), "worker 1")
    told = [
        *said(second.handle(server_id(0), EvictAck(generation=1, server=0))),
        *said(second.handle(server_id(1), EvictAck(generation=1, server=1))),
    ]
    assert asked(told) == []
    assert second._now == {spare_id(0): worker_id(FIRST)}
    assert asked(said(second.handle(spare_id(0), Rejoined(received=0)))) == [(spare_id(0), 1)]


# -- between jobs ----------------------------------------------------------------------------------


def test_between_jobs_a_spare_is_told_once_and_who_has_joined_ends_by_itself() -> None:
    lobby = Lobby(
        num_workers=1,
        num_servers=2,
        spares=[spare_id(0), spare_id(1)],
        joining={1: spare_id(0), 2: spare_id(1)},
    )
    begun = lobby.handle(worker_id(0), Begin(worker=0, job=1, settings={}))
    peers = [peer for peer, each in said(begun) if isinstance(each, Begun)]
    assert peers == [server_id(1), spare_id(0), spare_id(1), worker_id(0)]
    lobby.admit([2])  # spare 1
    assert lobby.handle(worker_id(0), Gone(worker=0)) == []
    ended = lobby.handle(worker_id(2), Gone(worker=2))
    assert said(ended) == [(server_id(1), End()), (spare_id(0), End())]


# -- the spare itself ------------------------------------------------------------------------------


def idle_spare() -> Any:
    schedule = Schedule(
        seed=3, servers=2, spares=1, group_sizes=(1, 1, 1), iterations=(2, 2, 2), has_buddies=True
    )
    job = VirtualJob(schedule, is_watched=False, max_deaths=1, num_substitutes=1)
    return job.spares[0]


def test_a_spare_that_is_asked_ends_with_what_it_has_heard_of_servers() -> None:
    loop = idle_spare()
    heard = [
        PeerLost(server_id(1), "server 1"),
        ControlArrived(COORDINATOR, Moved(server=1, host=0)),
    ]
    for event in (*heard, PeerLost(worker_id(0), "worker 0")):
        loop.decide(event)
    assert not loop.is_finished
    loop.decide(ControlArrived(COORDINATOR, TakePlace(worker=0)))
    assert loop.is_finished
    spare = spare_seat(loop)
    assert (spare.replace, spare.heard) == (TakePlace(worker=0), heard)


def test_what_comes_behind_is_the_workers() -> None:
    loop = idle_spare()
    for message in (TakePlace(worker=0), Stop()):
        loop.transport._transport.inbox.append(ControlArrived(COORDINATOR, message))
    loop.turn()
    assert spare_seat(loop).replace == TakePlace(worker=0)
    assert loop.transport.poll() == ControlArrived(COORDINATOR, Stop())


def test_a_spare_with_a_copy_is_asked_by_nobody_nor_by_a_server() -> None:
    loop = idle_spare()
    with pytest.raises(ProtocolError, match="spare 0: server 1 sent TakePlace of worker 0"):
        loop.decide(ControlArrived(server_id(1), TakePlace(worker=0)))
    loop.decide(ControlArrived(COORDINATOR, KeepCopy(server=0, number=2)))
    with pytest.raises(ProtocolError, match=r"and here are those of servers \[0\]"):
        loop.decide(ControlArrived(COORDINATOR, TakePlace(worker=0)))
    assert spare_seat(loop).replace is None


def test_who_has_joined_is_reported_by_its_number_as_a_worker() -> None:
    coordinator = coordinator_of()
    lose_worker(coordinator, 1)
    coordinator.handle(worker_id(FIRST), JoinReady(worker=FIRST, num_sets=1))
    enter = Enter(worker=0, seq=1, name="join", payload=b"4/state-4-0-1")
    tell(coordinator, enter)
    actions = tell(coordinator, *(Resumed(seq=1, server=server) for server in range(SERVERS)))
    assert [each for each in actions if isinstance(each, Joined)] == [
        Joined(FIRST, 1, (4,), "state-4-0-1")
    ]
