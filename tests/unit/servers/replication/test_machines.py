"""The machines of replicas, each by itself: pairs, the records that a primary holds, the order of
records in a replica, its state, and takeovers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from psdist.errors import ConfigError, ProtocolError, ServersLostError
from psdist.protocol.control import KeepCopy, Moved, TakenOver, TakeOver
from psdist.protocol.events import Offered
from psdist.protocol.header import Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.membership import GroupState
from psdist.servers.protocol.replication.pairs import pair
from psdist.servers.protocol.replication.primary import Primary
from psdist.servers.protocol.replication.records import (
    EvictRecord,
    MemberRecord,
    Record,
    ResumedRecord,
    StepRecord,
    ValuesRecord,
)
from psdist.servers.protocol.replication.replica import MOST_TAKEN, Replica
from psdist.servers.protocol.replication.shard_state import ShardState
from psdist.servers.protocol.takeovers import (
    Move,
    ServerDeath,
    ShardAlone,
    Takeovers,
)

BUDDY = server_id(2)


def step(chunk: int, *, groups: list[int], clocks: list[int], hyper: bytes = b"h") -> StepRecord:
    return StepRecord(
        chunk=chunk,
        is_sum=True,
        gradient_scale=0.5,
        lr_scale=1.0,
        hyper=hyper,
        absent=[],
        groups=groups,
        clocks=clocks,
        weights=[1.0] * len(groups),
        empties=[not hyper] * len(groups),
        codecs=[0] * len(groups),
        held=-1,
    )


@pytest.mark.parametrize(
    ("hosts", "racks"),
    [
        (["a", "a", "b", "b"], [""] * 4),
        (["a", "b", "c", "d"], ["r", "r", "s", "s"]),
        (["a", "b", "a", "b", "c", "c"], [""] * 6),
        (["a", "b", "c", "d", "e", "f"], ["r", "r", "r", "s", "s", "t"]),
        (["a", "b", "c"], ["r", "s", "t"]),
    ],
)
def test_a_pair_shares_neither_host_nor_rack_where_that_can_be(
    hosts: list[str], racks: list[str]
) -> None:
    pairs = pair(hosts=hosts, racks=racks)
    assert sorted(pairs.buddies) == list(range(len(hosts)))
    assert all(hosts[one] != hosts[other] for one, other in enumerate(pairs.buddies))
    if len(set(racks)) > 1:
        assert all(racks[one] != racks[other] for one, other in enumerate(pairs.buddies))
    assert not pairs.warning
    assert not those_of_each_other(pairs.buddies)


def those_of_each_other(buddies: Sequence[int]) -> list[int]:
    return [one for one, other in enumerate(buddies) if buddies[other] == one]


def test_of_more_than_two_no_two_are_each_others_buddies_and_none_comes_closer_by_that() -> None:
    assert pair(hosts=["a", "b"], racks=["r", "s"]).buddies == (1, 0)
    assert pair(hosts=["a", "a"], racks=["", ""]).buddies == (1, 0)
    # Two servers on either of two hosts: a ring that goes to and fro.
    assert pair(hosts=["a", "a", "b", "b"], racks=[""] * 4).buddies == (3, 2, 0, 1)
    for seed in range(200):
        pick = random.Random(seed)
        racks_of = {host: pick.choice("rst") for host in "abcdefg"}
        hosts = [pick.choice("abcdefg") for _ in range(pick.randint(3, 12))]
        racks = [racks_of[host] for host in hosts]
        buddies = pair(hosts=hosts, racks=racks).buddies
        assert sorted(buddies) == [*range(len(hosts))], f"seed {seed}"
        assert not those_of_each_other(buddies), f"seed {seed}"
        assert places_apart(buddies, hosts, racks) >= max(
            places_apart(each, hosts, racks) for each in shifts(hosts, racks)
        ), f"seed {seed}"


def places_apart(
    buddies: Sequence[int], hosts: Sequence[str], racks: Sequence[str]
) -> tuple[int, int]:
    """Pairs on different hosts, and in different racks."""
    return (
        sum(hosts[one] != hosts[other] for one, other in enumerate(buddies)),
        sum(racks[one] != racks[other] for one, other in enumerate(buddies)),
    )


def shifts(hosts: Sequence[str], racks: Sequence[str]) -> list[list[int]]:
    """All ways to shift the servers in the order of their places."""
    order = sorted(range(len(hosts)), key=lambda each: (racks[each], hosts[each], each))
    place = {server: at for at, server in enumerate(order)}
    return [
        [order[(place[each] + by) % len(order)] for each in range(len(order))]
        for by in range(1, len(order))
    ]


def test_a_pair_on_one_host_is_warned_of_and_a_single_server_refused() -> None:
    pairs = pair(hosts=["a", "a", "a", "b"], racks=[""] * 4)
    assert all(one != other for one, other in enumerate(pairs.buddies))
    assert "share a host" in pairs.warning
    assert "every server" in pair(hosts=["a", "a"], racks=["", ""]).warning
    with pytest.raises(ConfigError, match="needs 2 servers or more, this run has 1"):
        pair(hosts=["a"], racks=[""])


def test_what_is_said_behind_a_record_waits_for_the_buddy_in_order() -> None:
    primary = Primary(server=1, replica=BUDDY)
    assert not primary.hold("at once")
    assert [primary.count_record(), primary.count_record()] == [1, 2]
    assert primary.hold("behind 2")
    assert primary.count_record() == 3
    assert primary.hold("behind 3")
    assert primary.on_ack(BUDDY, 1) == []
    primary.check_invariants()
    assert primary.on_ack(BUDDY, 2) == ["behind 2"]
    assert primary.on_ack(BUDDY, 3) == ["behind 3"]
    assert primary.is_settled
    for peer, number in ((BUDDY, 4), (BUDDY, 3), (server_id(0), 3)):
        with pytest.raises(ProtocolError, match="acknowledged"):
            primary.on_ack(peer, number)


def test_without_its_buddy_a_server_says_nothing_until_the_coordinator_has_spoken() -> None:
    primary = Primary(server=1, replica=BUDDY)
    primary.count_record()
    assert primary.hold("first")
    primary.on_replica_lost()
    assert primary.on_ack(BUDDY, 1) == []
    assert primary.count_record() == 0, "no replica gets it any more"
    assert primary.hold("second")
    assert primary.go_alone() == ["first", "second"]
    assert not primary.hold("third")
    primary.check_invariants()


def test_what_the_buddy_had_before_it_was_lost_lets_nothing_new_go() -> None:
    primary = Primary(server=1, replica=BUDDY)
    primary.count_record()
    primary.on_ack(BUDDY, 1)
    primary.on_replica_lost()
    assert primary.count_record() == 0
    assert primary.hold("about a change that one server has")


def offered(number: int, peer: int = server_id(1)) -> Offered:
    return Offered(peer, Kind.RECORD, 0, 8, number, clock=number)


def test_a_buddy_takes_a_few_records_and_carries_them_out_in_order() -> None:
    replica = Replica(server=2, primary=1)
    assert replica.on_set_built() == []
    taken = [each for n in range(1, 7) for each in replica.on_offered(offered(n))]
    assert [each.ticket for each in taken] == [*range(1, MOST_TAKEN + 1)]
    assert replica.on_offered(offered(3)) == [], "a second delivery"
    assert replica.on_offered(offered(6)) == [], "of the newest"
    assert replica.on_arrived(server_id(1), 2, 0, "two") == []
    ready = replica.on_arrived(server_id(1), 1, 0, "one")
    assert [each.content for each in ready] == ["one", "two"]
    assert [each.ticket for each in replica.on_applied(1)] == [5]
    with pytest.raises(ProtocolError, match="offers record 9 after 6"):
        replica.on_offered(offered(9))
    with pytest.raises(ProtocolError, match="keeps the replica of server 1"):
        replica.on_offered(offered(7, server_id(0)))
    replica.close()
    assert replica.on_offered(offered(7)) == []
    assert replica.on_arrived(server_id(1), 3, 0, "three") == []


def test_records_of_a_set_wait_until_it_was_described_here() -> None:
    replica = Replica(server=2, primary=1)
    replica.on_offered(offered(1))
    assert replica.on_arrived(server_id(1), 1, 0, "one") == []
    assert [each.content for each in replica.on_set_built()] == ["one"]


def test_a_picture_contains_every_update_once_and_in_order() -> None:
    picture = ShardState(chunks=(0, 3), num_groups=2, num_state_parts=0)
    with pytest.raises(ProtocolError, match="a step of groups"):
        picture.apply(step(0, groups=[0], clocks=[0]))
    for chunk in (0, 3):
        picture.apply(ValuesRecord(chunk=chunk, group=0, clock=-1, number=0))
    for group in (0, 1):
        picture.apply(MemberRecord(kind="join", group=group, clock=0, workers=1))
    assert not picture.is_complete, "which collectives have ended is not known"
    picture.apply(ResumedRecord(seq=4))
    assert picture.is_complete
    picture.apply(step(0, groups=[0, 1], clocks=[0, 0]))
    picture.apply(step(0, groups=[1], clocks=[1], hyper=b""))
    assert (picture.clocks[0], picture.versions[0]) == ([1, 2], 2)
    assert (picture.num_updates, picture.num_steps) == (3, 1)
    for bad in (
        step(0, groups=[0], clocks=[0]),
        step(0, groups=[0], clocks=[2]),
        step(0, groups=[2], clocks=[0]),
        step(1, groups=[0], clocks=[0]),
        ResumedRecord(seq=6),
        MemberRecord(kind="resume", group=0, clock=0, workers=1),
        MemberRecord(kind="death", group=0, clock=0, workers=1),
        ValuesRecord(chunk=0, group=0, clock=-1, number=0),
    ):
        with pytest.raises(ProtocolError, match="the records of a shard contain"):
            picture.apply(bad)
    picture.apply(MemberRecord(kind="suspend", group=1, clock=2, workers=1))
    assert picture.stops == [0, 2]
    picture.apply(ResumedRecord(seq=5))
    assert picture.resumed_up_to == 5


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\xc1", "not msgpack"),
        (b"\x80", "unknown type"),
        (ResumedRecord(seq=1).encode()[:-1] + b"\xa1x", "field"),
    ],
)
def test_what_is_no_record_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        Record.decode(data)


def test_a_record_is_read_as_it_was_told() -> None:
    record = step(3, groups=[0, 2], clocks=[5, 7])
    assert Record.decode(memoryview(record.encode())) == record
    assert [each.clock for each in record.contributions] == [5, 7]
    with pytest.raises(ProtocolError, match="differ in length"):
        Record.decode(step(3, groups=[0, 2], clocks=[5]).encode())


def test_the_buddy_takes_the_place_and_then_everybody_is_told() -> None:
    takeovers = Takeovers(num_workers=1, buddies=(1, 2, 0))
    assert takeovers.on_server_lost(server_id(1), "server 1") == [
        ShardAlone(0, 0),
        SendControl(server_id(2), TakeOver(server=1)),
    ]
    with pytest.raises(ProtocolError, match="has taken the place of server 1"):
        takeovers.on_taken_over(server_id(0), TakenOver(server=1))
    moved = Moved(server=1, host=2)
    assert takeovers.on_taken_over(server_id(2), TakenOver(server=1)) == [
        Move(1, 2),
        *(SendControl(peer, moved) for peer in (server_id(0), server_id(2), worker_id(0))),
        ServerDeath(1, "server 1", 2),
        ShardAlone(1, 2),
        SendControl(server_id(2), KeepCopy(server=0, number=2)),
        SendControl(server_id(0), KeepCopy(server=1, number=2)),
    ]
    with pytest.raises(ServersLostError, match="server 2 and server 1 have failed"):
        takeovers.on_server_lost(server_id(2), "server 2")


def buried(**changed: object) -> EvictRecord:
    """Group 1, of worker 1, is out; chunk 0 contains one of its updates and will contain two more,
    chunk 2 the first."""
    values: dict[str, object] = {
        "generation": 1, "dead": [1], "chief": 0,
        "groups": [1], "goes_on": [False], "fewest": [0], "workers": [1],
        "chunks": [0, 0, 2], "heirs": [1, 1, 1], "clocks": [1, 2, 0],
    }  # fmt: skip
    return EvictRecord(**(values | changed))  # type: ignore[arg-type]


def two_groups() -> ShardState:
    picture = ShardState(chunks=(0, 2), num_groups=2, num_state_parts=0)
    for chunk in (0, 2):
        picture.apply(ValuesRecord(chunk=chunk, group=0, clock=-1, number=0))
        picture.apply(ValuesRecord(chunk=chunk, group=0, clock=0, number=7))
    for group in range(2):
        picture.apply(MemberRecord(kind="join", group=group, clock=0, workers=1))
    picture.apply(step(0, groups=[1], clocks=[0]))
    return picture


def test_a_buddy_knows_who_is_dead_by_one_record() -> None:
    picture = two_groups()
    assert Record.decode(buried().encode()) == buried()
    picture.apply(buried())
    assert picture.standings == [GroupState.ACTIVE, GroupState.DEAD]
    assert (picture.generation, picture.dead) == (1, (1,))
    assert picture.newest_loads == {0: 7, 2: 7}
    picture.apply(step(0, groups=[1], clocks=[1]))
    picture.apply(MemberRecord(kind="leave", group=0, clock=0, workers=1))
    assert not picture.has_members


def test_a_group_that_goes_on_counts_as_before() -> None:
    """Without worker 1, and then without another one."""
    picture = two_groups()
    record = buried(goes_on=[True])
    assert Record.decode(record.encode()) == record
    picture.apply(record)
    assert picture.standings == [GroupState.ACTIVE, GroupState.ACTIVE]
    picture.apply(step(0, groups=[1], clocks=[1]))
    both = {"groups": [1, 1], "goes_on": [True, True], "fewest": [0, 0], "workers": [2, 3]}
    picture.apply(buried(generation=2, dead=[1, 2, 3], chunks=[], heirs=[], clocks=[], **both))
    assert (picture.standings[1], picture.dead) == (GroupState.ACTIVE, (1, 2, 3))
    with pytest.raises(ProtocolError, match="differ in length"):
        Record.decode(buried(goes_on=[]).encode())


def test_the_next_chief_counts_what_it_sets_from_the_start() -> None:
    picture = two_groups()
    picture.apply(buried(chief=1))
    assert picture.newest_loads == {0: 0, 2: 0}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"generation": 0}, "generation 0 after 0"),
        ({"groups": [2]}, "a failure in group 2"),
        ({"fewest": [1]}, "a failure in group 1 after 1 iterations"),
        ({"heirs": [1, 1, 0]}, "iteration 0 of group 0, contained in chunk 2"),
        ({"clocks": [1, 1, 0]}, "iteration 1 of group 1, contained in chunk 0"),
        ({"clocks": [0, 1, 0]}, "iteration 0 of group 1, contained in chunk 0"),
        ({"chunks": [0, 0, 1]}, "chunk 1, which is not of its shard"),
    ],
)
def test_a_death_that_cannot_have_been_is_refused(changed: dict[str, object], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        two_groups().apply(buried(**changed))


def test_nobody_comes_back_or_dies_twice() -> None:
    picture = two_groups()
    picture.apply(buried())
    for again in (buried(generation=2), buried(generation=2, dead=[0])):
        with pytest.raises(ProtocolError):
            picture.apply(again)


@pytest.mark.parametrize("changed", [{"fewest": []}, {"clocks": [1, 2]}])
def test_a_record_of_deaths_is_told_in_full(changed: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="differ in length"):
        Record.decode(buried(**changed).encode())
