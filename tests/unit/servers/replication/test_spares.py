"""Spares as the coordinator sees them, whom a copy is filled on, and what a spare takes from
whom."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.errors import InvariantError, ProtocolError, ServersLostError
from psdist.protocol.control import (
    CopyFilled,
    CopyLost,
    FillCopy,
    Finish,
    KeepCopy,
    KeepsCopy,
    Moved,
    SaidByCoordinator,
    Setup,
    TakenOver,
    TakeOver,
)
from psdist.protocol.events import ControlArrived, PeerLost
from psdist.protocol.ids import COORDINATOR, server_id, spare_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.replication.pairs import next_keeper
from psdist.servers.protocol.takeovers import ShardAlone, SpareDeath, Takeovers
from psdist.servers.set_store import BuiltSet
from psdist.transport.waiting import Waiting
from tests.support.coordinators import part_of
from tests.support.virtual.job import Schedule, VirtualJob, replication_of, spare_seat
from tests.support.virtual.schedule import small_partition
from tests.unit.servers.replication.test_refills import sent

SPARE = spare_id(0)


def with_spares(num_spares: int = 1, **more: Any) -> Takeovers:
    return Takeovers(num_workers=1, buddies=(1, 2, 0), num_spares=num_spares, **more)


def after_a_death(num_spares: int = 1) -> Takeovers:
    """Server 2 has failed, 0 has its place, and the spare is to have two copies: of 1 and 2."""
    takeovers = with_spares(num_spares)
    takeovers.on_server_lost(server_id(2), "server 2")
    asked = sent(takeovers.on_taken_over(server_id(0), TakenOver(server=2)), KeepCopy)
    expected = [SPARE, SPARE] if num_spares == 1 else [SPARE, spare_id(1)]
    assert [peer for peer, _ in asked] == expected
    assert [message.server for _, message in asked] == [1, 2]
    return takeovers


def fill(takeovers: Takeovers, server: int, keeper: int = SPARE) -> list[Any]:
    number = takeovers.shards[server].num_copies
    takeovers.on_keeps_copy(keeper, KeepsCopy(server=server, number=number))
    return list(
        takeovers.on_copy_filled(server_id(server), CopyFilled(server=server, number=number))
    )


def test_a_spare_is_filled_first_and_takes_the_next_place() -> None:
    takeovers = after_a_death()
    assert takeovers.idle_spares == []
    answer = KeepsCopy(server=1, number=2)
    assert takeovers.on_keeps_copy(SPARE, answer) == [
        SendControl(server_id(1), FillCopy(server=1, keeper=SPARE, number=2))
    ]
    fill(takeovers, 2)
    takeovers.on_copy_filled(server_id(1), CopyFilled(server=1, number=2))
    assert takeovers.alone == []
    lost = takeovers.on_server_lost(server_id(1), "server 1")
    assert sent(lost, TakeOver) == [(SPARE, TakeOver(server=1))]
    actions = takeovers.on_taken_over(SPARE, TakenOver(server=1))
    moved = sent(actions, Moved)
    assert [peer for peer, _ in moved] == [server_id(0), SPARE, worker_id(0)]
    assert {message for _, message in moved} == {Moved(server=1, host=SPARE)}
    assert takeovers.taken == [1, 2]
    assert takeovers.alive == [server_id(0), SPARE]


def test_each_spare_gets_a_copy_where_none_of_them_may_become_a_worker() -> None:
    assert after_a_death(2).idle_spares == []


def test_an_idle_spare_dies_and_nothing_follows_but_a_line() -> None:
    takeovers = with_spares(2)
    assert takeovers.idle_spares == [SPARE, spare_id(1)]
    assert takeovers.on_server_lost(SPARE, "spare 0") == [SpareDeath(0, "spare 0")]
    assert takeovers.idle_spares == [spare_id(1)]
    assert (takeovers.alone, takeovers.taken) == ([], [])


def test_a_spare_dies_while_its_copy_is_filled_and_another_one_is_asked() -> None:
    takeovers = after_a_death()
    fill(takeovers, 2)
    actions = takeovers.on_server_lost(SPARE, "spare 0")
    assert actions[0] == SpareDeath(0, "spare 0")
    assert sent(actions, CopyLost) == [
        (server_id(1), CopyLost(server=1)),
        (server_id(0), CopyLost(server=2)),
    ]
    assert [each for each in actions if isinstance(each, ShardAlone)] == [ShardAlone(2, 0)]
    # Nobody's place is to be taken, so nothing else would begin the next copies.
    assert sent(actions, KeepCopy) == [
        (server_id(0), KeepCopy(server=1, number=3)),
        (server_id(1), KeepCopy(server=2, number=3)),
    ]
    late = CopyFilled(server=1, number=2)
    assert takeovers.on_copy_filled(server_id(1), late) == [], "the dead one's"


def test_a_spare_that_serves_dies_and_whoever_has_the_copy_goes_on() -> None:
    takeovers = after_a_death()
    fill(takeovers, 1)
    fill(takeovers, 2)
    takeovers.on_server_lost(server_id(1), "server 1")
    takeovers.on_taken_over(SPARE, TakenOver(server=1))
    fill(takeovers, 0)
    fill(takeovers, 1, server_id(0))
    actions = takeovers.on_server_lost(SPARE, "spare 0")
    assert SpareDeath(0, "spare 0") in actions
    assert sent(actions, TakeOver) == [(server_id(0), TakeOver(server=1))]
    assert sent(actions, KeepCopy) == [], "not before the place is taken"
    assert not sent(takeovers.on_taken_over(server_id(0), TakenOver(server=1)), KeepCopy)
    assert takeovers.alone == [0, 1, 2]


def test_the_only_copy_in_a_spare_ends_the_job_with_it() -> None:
    takeovers = after_a_death()
    fill(takeovers, 1)
    takeovers.on_server_lost(server_id(1), "server 1")
    takeovers.on_taken_over(SPARE, TakenOver(server=1))
    with pytest.raises(ServersLostError, match="spare 0 and server 1 have failed"):
        takeovers.on_server_lost(SPARE, "spare 0")


def test_without_second_copies_nobody_is_asked_where_servers_are() -> None:
    without = Takeovers(num_workers=1, buddies=(), hosts=["a", "b"], racks=["", ""])
    assert (without.alive, without.alone, without.idle_spares) == ([], [], [])


def test_whose_death_nobody_knows_is_refused() -> None:
    with pytest.raises(InvariantError, match="received that spare 1 has failed"):
        with_spares(1).on_server_lost(spare_id(1), "spare 1")


def test_a_spare_goes_before_servers_of_equal_hosts_until_it_has_what_a_server_has() -> None:
    peers = [0, 1, 2, SPARE]
    hosts, load = dict.fromkeys(peers, "a"), {0: 2, 1: 1, 2: 3, SPARE: 1}
    racks = dict.fromkeys(peers, "")

    def found(**more: Any) -> int:
        return next_keeper(0, peers[1:], **({"hosts": hosts, "racks": racks, "load": load} | more))

    assert found() == SPARE
    assert found(load=load | {SPARE: 2}) == 1
    assert found(load=load | {SPARE: 2, 1: 3}) == SPARE
    assert found(hosts=hosts | {2: "b"}) == 2, "what is on another host goes first"
    assert found(hosts=hosts | {2: "b", SPARE: "b"}) == SPARE


def idle_spare() -> Any:
    schedule = Schedule(seed=3, servers=2, spares=1, iterations=(2, 2), has_buddies=True)
    return VirtualJob(schedule, is_watched=False).spares[0]


def test_a_spare_takes_nothing_that_is_a_server_s() -> None:
    loop = idle_spare()
    with pytest.raises(ProtocolError, match="spare 0: server 1 sent TakenOver, which is for"):
        loop.decide(ControlArrived(server_id(1), TakenOver(server=1)))
    assert tuple(loop.decide(PeerLost(worker_id(0), "worker 0"))) == ()


def test_a_set_is_described_to_a_spare_once_and_by_servers() -> None:
    loop = idle_spare()
    setup = Setup(partition=small_partition(2).encode(), optimizer="SGD", hyper=b"")
    for index in (0, 0, 1):
        loop.decide(ControlArrived(server_id(0), setup, index))
    assert spare_seat(loop).num_described == 2
    assert [len(each.owners) for each in replication_of(loop)._built] == [2, 2]
    assert sum(spare_seat(loop).held) == 2 * small_partition(2).num_bytes
    with pytest.raises(ProtocolError, match="server 1 described parameter set 3; 2 are known"):
        loop.decide(ControlArrived(server_id(1), setup, 3))
    with pytest.raises(ProtocolError, match="worker 0 described parameter set 2"):
        loop.decide(ControlArrived(worker_id(0), setup, 2))


def test_the_coordinator_begins_without_a_spare_that_has_died_before() -> None:
    schedule = Schedule(seed=3, servers=2, spares=2, iterations=(2, 2), has_buddies=True)
    job = VirtualJob(schedule, is_watched=False)
    loop = job.servers[COORDINATOR]
    lost: Any = loop.transport.lost
    lost.update({spare_id(0): "spare 0", server_id(1): "server 1"})
    loop._has_finished = True
    loop.run(Waiting(is_spinning=False))
    assert part_of(job.coordinator, Takeovers).idle_spares == [spare_id(1)]
    assert part_of(job.coordinator, Takeovers).alive == [server_id(0), server_id(1), spare_id(1)]


def test_spares_are_told_who_succeeds_the_coordinator_and_what_is_said_to_them_is_counted() -> None:
    schedule = Schedule(seed=3, servers=2, spares=2, iterations=(2, 2), has_buddies=True)
    job = VirtualJob(schedule, is_watched=False)
    assert job.second is not None
    told = [each.peer for each in job.second.announcements()]
    assert told[-2:] == [spare_id(0), spare_id(1)]
    assert issubclass(CopyLost, SaidByCoordinator)


class _Listening:
    """Notes what is said."""

    me = server_id(1)

    def __init__(self) -> None:
        self.said: list[tuple[int, Any, int]] = []

    def send_control(self, peer: int, message: Any, set_index: int = 0) -> None:
        self.said.append((peer, message, set_index))


@pytest.mark.parametrize("keeper", [SPARE, server_id(0)])
def test_who_fills_a_spare_describes_its_sets_first_and_those_that_come_later(keeper: int) -> None:
    schedule = Schedule(seed=3, servers=2, spares=1, iterations=(2, 2), has_buddies=True)
    replication = replication_of(VirtualJob(schedule, is_watched=False).servers[1])
    partition = small_partition(2)
    setups = [
        Setup(partition=partition.encode(), optimizer=name, hyper=b"") for name in ("SGD", "Adam")
    ]
    transport = replication._transport = _Listening()  # type: ignore[assignment]
    replication.on_moved(0)
    sets = [BuiltSet(index, partition, (0, 1), setups[min(index, 1)]) for index in range(3)]
    replication.on_built(sets[0])
    replication.fill(keeper=keeper, number=2)
    replication.on_built(sets[1])
    replication.on_copy_lost()
    replication.on_built(sets[2])
    described = [(SPARE, setups[0], 0), (SPARE, setups[1], 1)] if keeper == SPARE else []
    assert [each for each in transport.said if isinstance(each[1], Setup)] == described
    filled = (COORDINATOR, CopyFilled(server=1, number=2), 0)
    assert transport.said.index(filled) == (1 if keeper == SPARE else 0)


def test_what_a_spare_does_not_serve_it_does_not_fill() -> None:
    loop = idle_spare()
    with pytest.raises(ProtocolError, match=r"spare 0: .* CopyLost of the shard of server 1"):
        loop.decide(ControlArrived(COORDINATOR, CopyLost(server=1)))
    with pytest.raises(ProtocolError, match="server 1 sent Finish"):
        loop.decide(ControlArrived(server_id(1), Finish()))
