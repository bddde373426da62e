"""Another copy of a shard: who is told what, which chunk goes next, what the bytes of one are, and
what a picture takes that is told of a set that has begun."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from psdist.errors import InvariantError, ProtocolError, ServersLostError
from psdist.protocol.control import (
    CopyFilled,
    FillCopy,
    KeepCopy,
    KeepsCopy,
    TakenOver,
    TakeOver,
)
from psdist.protocol.ids import server_id
from psdist.protocol.optimizer_state import OneValue, PerElement, Whole
from psdist.protocol.partition import Partition, Piece
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.membership import GroupState
from psdist.servers.protocol.replication.pairs import next_keeper
from psdist.servers.protocol.replication.primary import MOST_FILLING, Filling, Primary
from psdist.servers.protocol.replication.records import (
    ChunkRecord,
    EvictRecord,
    MemberRecord,
    ResumedRecord,
    SnapshotBegin,
    SnapshotEnd,
    ValuesRecord,
)
from psdist.servers.protocol.replication.shard_state import ShardState
from psdist.servers.protocol.takeovers import ShardAlone, ShardWhole, Takeovers
from psdist.servers.replication.chunk_bytes import pack_regions, unpack_regions
from psdist.servers.shard.regions import Region
from tests.unit.servers.replication.test_machines import step

# -- the coordinator
# ---------------------------------------------------------------------------------


def sent(actions: list[Any], kind: type) -> list[tuple[int, Any]]:
    return [
        (each.peer, each.message)
        for each in actions
        if isinstance(each, SendControl) and isinstance(each.message, kind)
    ]


def test_server_after_server_dies_when_every_shard_has_two_copies_again() -> None:
    takeovers = Takeovers(num_workers=1, buddies=(1, 2, 3, 0))
    alive = [0, 1, 2, 3]
    for dead in (1, 2, 3):
        alive.remove(dead)
        actions = takeovers.on_server_lost(server_id(dead), f"server {dead}")
        places = sent(actions, TakeOver)
        assert dead in [message.server for _, message in places]
        for number, (peer, message) in enumerate(places):
            assert peer in alive
            actions = takeovers.on_taken_over(peer, TakenOver(server=message.server))
            is_last = number == len(places) - 1
            assert bool(sent(actions, KeepCopy)) == (is_last and len(alive) > 1)
        for peer, message in sent(actions, KeepCopy):
            answer = KeepsCopy(server=message.server, number=message.number)
            ((host, fill),) = sent(takeovers.on_keeps_copy(peer, answer), FillCopy)
            assert isinstance(fill, FillCopy)
            assert (fill.server, fill.keeper, fill.number) == (message.server, peer, message.number)
            assert host in alive
            assert host != peer
            assert message.server in takeovers.alone
            filled = CopyFilled(server=message.server, number=message.number)
            whole = takeovers.on_copy_filled(server_id(message.server), filled)
            assert whole == [ShardWhole(message.server, peer)]
        assert takeovers.alone == ([] if len(alive) > 1 else [0, 1, 2, 3])
    assert {each.host for each in takeovers.shards} == {0}


def after_one_death() -> Takeovers:
    takeovers = Takeovers(num_workers=1, buddies=(1, 2, 0))
    takeovers.on_server_lost(server_id(1), "server 1")
    takeovers.on_taken_over(server_id(2), TakenOver(server=1))
    return takeovers


@pytest.mark.parametrize("is_asked", [False, True])
def test_who_has_a_shard_alone_dies_before_its_copy_is_whole(is_asked: bool) -> None:
    takeovers = after_one_death()
    if is_asked:
        takeovers.on_keeps_copy(server_id(0), KeepsCopy(server=1, number=2))
    with pytest.raises(ServersLostError, match="server 2 and server 1 have failed"):
        takeovers.on_server_lost(server_id(2), "server 2")


def test_who_was_to_keep_a_copy_dies_and_another_one_is_asked() -> None:
    takeovers = Takeovers(num_workers=0, buddies=(1, 2, 3, 0), hosts=("a", "a", "a", "b"))
    takeovers.on_server_lost(server_id(1), "server 1")
    asked = sent(takeovers.on_taken_over(server_id(2), TakenOver(server=1)), KeepCopy)
    # The shards of 0 and 1 are alone, in servers 0 and 2: 3 is on another host.
    assert [(peer, message.server) for peer, message in asked] == [(3, 0), (3, 1)]
    actions = takeovers.on_server_lost(server_id(3), "server 3")
    assert ShardAlone(2, 2) in actions
    assert sent(actions, KeepCopy) == [], "not before all places are taken"
    again = sent(takeovers.on_taken_over(server_id(0), TakenOver(server=3)), KeepCopy)
    assert [(peer, each.server, each.number) for peer, each in again] == [
        (2, 0, 3),
        (0, 1, 3),
        (0, 2, 2),
        (2, 3, 2),
    ]
    assert takeovers.on_copy_filled(server_id(1), CopyFilled(server=1, number=2)) == [], "the first"
    for number in (1, 4):
        with pytest.raises(ProtocolError, match="has filled copy"):
            takeovers.on_copy_filled(server_id(1), CopyFilled(server=1, number=number))
    with pytest.raises(ProtocolError, match="has filled copy 3 of the shard of server 1"):
        takeovers.on_copy_filled(server_id(2), CopyFilled(server=1, number=3))
    with pytest.raises(ProtocolError, match="keeps copy 3 of the shard of server 1"):
        takeovers.on_keeps_copy(server_id(2), KeepsCopy(server=1, number=3))


def test_no_copy_is_begun_when_all_workers_are_done() -> None:
    takeovers = after_one_death()
    takeovers.is_ending = True
    assert takeovers.on_keeps_copy(server_id(0), KeepsCopy(server=1, number=2)) == []
    late = Takeovers(num_workers=1, buddies=(1, 2, 0))
    late.is_ending = True
    late.on_server_lost(server_id(1), "server 1")
    assert not sent(late.on_taken_over(server_id(2), TakenOver(server=1)), KeepCopy)


def test_the_next_keeper_is_elsewhere_and_has_little() -> None:
    hosts, racks = ["a", "a", "b", "c", "c"], ["r", "r", "r", "s", "s"]
    load = [2, 0, 0, 3, 2]
    assert next_keeper(0, [1, 2, 3, 4], hosts=hosts, racks=racks, load=load) == 4
    assert next_keeper(0, [1, 2], hosts=hosts, racks=racks, load=load) == 2
    assert next_keeper(3, [0, 1], hosts=hosts, racks=racks, load=load) == 1
    assert next_keeper(0, [1], hosts=hosts, racks=racks, load=load) == 1


# -- who fills it ----------------------------------------------------------------------------------


def test_a_few_chunks_are_under_way_and_one_that_is_not_ready_waits() -> None:
    filling = Filling(number=2, chunks=[(0, 0), (0, 3), (1, 0), (1, 1)])
    unready = {(0, 0)}
    found = []
    for number in range(1, MOST_FILLING + 1):
        found.append(filling.next(lambda *each: each not in unready))
        filling.on_sent(number)
    assert found == [(0, 3), (1, 0)]
    assert filling.next(lambda *_each: True) is None, "enough are under way"
    filling.on_ack(2)
    assert filling.next(lambda *each: each not in unready) == (1, 1)
    filling.on_sent(3)
    assert filling.next(lambda *each: each not in unready) is None
    assert not filling.is_all_sent
    unready.clear()
    assert filling.next(lambda *each: each not in unready) == (0, 0)
    filling.on_sent(4)
    assert filling.is_all_sent
    assert not filling.is_complete(99)
    filling.ends_with = 5
    assert not filling.is_complete(4)
    assert filling.is_complete(5)


def test_nothing_is_held_while_a_copy_is_filled_and_all_is_behind_it() -> None:
    first, second = server_id(2), server_id(3)
    primary = Primary(server=1, replica=first)
    primary.count_record()
    primary.on_replica_lost()
    primary.go_alone()
    assert primary.count_record() == 0
    primary.begin_fill(second)
    with pytest.raises(InvariantError, match="fill two replicas"):
        primary.begin_fill(second)
    assert primary.count_record() == 1
    assert not primary.is_settled
    assert not primary.hold("acknowledged by one")
    assert primary.on_ack(first, 1) == [], "last words of the one before"
    primary.end_fill()
    assert primary.hold("behind the fill")
    primary.check_invariants()
    assert primary.on_ack(second, 1) == ["behind the fill"]
    assert primary.is_settled
    primary.on_replica_lost()
    assert primary.hold("nobody else has it")
    assert primary.go_alone() == ["nobody else has it"]


def test_who_has_nobody_says_everything_and_the_next_one_may_die_in_a_fill() -> None:
    primary = Primary(server=1, replica=None)
    assert not primary.hold("at once")
    with pytest.raises(ProtocolError, match="no replica was sent 0"):
        primary.on_ack(server_id(2), 1)
    primary.begin_fill(server_id(2))
    assert primary.count_record() == 1
    primary.on_replica_lost()
    assert primary.count_record() == 0
    assert not primary.hold("alone all the same")
    assert primary.go_alone() == []
    primary.begin_fill(server_id(3))
    assert primary.count_record() == 1
    with pytest.raises(InvariantError, match="has filled no replica"):
        Primary(server=1, replica=None).end_fill()


# -- who keeps it ----------------------------------------------------------------------------------


def fill_record(**changed: Any) -> SnapshotBegin:
    values: dict[str, Any] = {
        "standings": ["ACTIVE", "SUSPENDED", "DEAD"], "stops": [0, 4, 0], "first": [0, 0, 0],
        "generation": 1,
        "dead": [2], "chief": 0, "resumed_up_to": 3, "is_kept": False,
    }  # fmt: skip
    return SnapshotBegin(**(values | changed))


def chunk_record(chunk: int, clocks: list[int], **changed: Any) -> ChunkRecord:
    values: dict[str, Any] = {"version": 9, "newest_load": 2, "states": b""}
    return ChunkRecord(chunk=chunk, clocks=clocks, **(values | changed))


def filling_picture() -> ShardState:
    return ShardState(chunks=(0, 2), num_groups=3, num_state_parts=5)


def test_a_picture_is_told_of_a_set_that_has_begun_chunk_by_chunk() -> None:
    picture = filling_picture()
    picture.apply(fill_record())
    assert picture.standings == [GroupState.ACTIVE, GroupState.SUSPENDED, GroupState.DEAD]
    assert (picture.stops, picture.resumed_up_to, picture.dead) == ([0, 4, 0], 3, (2,))
    with pytest.raises(ProtocolError, match="chunk 0 before the chunk itself"):
        picture.apply(step(0, groups=[0], clocks=[5]))
    picture.apply(chunk_record(0, [5, 4, 1]))
    picture.apply(step(0, groups=[0], clocks=[5]))
    picture.apply(ValuesRecord(chunk=0, group=0, clock=6, number=3))
    picture.apply(MemberRecord(kind="resume", group=1, clock=0, workers=1))
    with pytest.raises(ProtocolError, match="and 1 chunks did not"):
        picture.apply(SnapshotEnd(keeper=1, position=40, num_updates=11, num_steps=6))
    picture.apply(chunk_record(2, [6, 4, 2]))
    assert not picture.is_complete
    with pytest.raises(
        ProtocolError, match="the end of a snapshot with 22 updates; 23 updates arrived"
    ):
        picture.apply(SnapshotEnd(keeper=1, position=40, num_updates=22, num_steps=6))
    picture.apply(SnapshotEnd(keeper=1, position=40, num_updates=23, num_steps=6))
    assert picture.is_complete
    assert picture.clocks == {0: [6, 4, 1], 2: [6, 4, 2]}
    assert picture.versions == {0: 11, 2: 9}
    assert picture.newest_loads == {0: 3, 2: 2}
    assert (picture.num_updates, picture.num_steps) == (23, 6)


def with_substitute() -> ShardState:
    """Whose third group is a substitute's."""
    return ShardState(chunks=(0, 2), num_groups=3, num_state_parts=0, num_substitutes=1)


def joins(group: int, clock: int) -> MemberRecord:
    return MemberRecord(kind="join", group=group, clock=clock, workers=1)


def test_a_copy_is_complete_without_substitutes_and_goes_on_where_they_join() -> None:
    picture = with_substitute()
    for chunk in (0, 2):
        picture.apply(ValuesRecord(chunk=chunk, group=0, clock=-1, number=0))
    picture.apply(ResumedRecord(seq=1))
    for group in (0, 1):
        assert not picture.is_complete
        assert picture.has_members
        picture.apply(joins(group, 0))
    assert picture.is_complete
    picture.apply(joins(2, 7))
    assert (picture.first, picture.clocks) == ([0, 0, 7], {0: [0, 0, 7], 2: [0, 0, 7]})
    picture.apply(step(0, groups=[2], clocks=[7]))
    assert picture.num_updates == 1
    for group in (0, 1):
        picture.apply(MemberRecord(kind="leave", group=group, clock=0, workers=1))
        assert picture.has_members
    picture.apply(MemberRecord(kind="leave", group=2, clock=8, workers=1))
    assert not picture.has_members


def test_a_job_is_over_though_a_substitute_has_never_come() -> None:
    picture = with_substitute()
    for group in (0, 1):
        picture.apply(joins(group, 0))
        picture.apply(MemberRecord(kind="leave", group=group, clock=0, workers=1))
    assert not picture.has_members


@pytest.mark.parametrize(("group", "clock"), [(1, 3), (2, -1)], ids=["no substitute", "no clock"])
def test_groups_but_substitutes_join_where_they_begin(group: int, clock: int) -> None:
    with pytest.raises(ProtocolError, match=f"group {group}, which joins at clock {clock}"):
        with_substitute().apply(joins(group, clock))


def test_a_copy_that_is_made_later_knows_where_substitutes_have_begun() -> None:
    picture = with_substitute()
    standings = ["ACTIVE", "DEAD", "ACTIVE"]
    picture.apply(fill_record(standings=standings, stops=[0, 0, 7], first=[0, 0, 7]))
    picture.apply(chunk_record(0, [9, 4, 9]))
    picture.apply(chunk_record(2, [9, 4, 8]))
    picture.apply(SnapshotEnd(keeper=1, position=40, num_updates=29, num_steps=6))
    assert picture.is_complete


@pytest.mark.parametrize(
    "records",
    [
        [fill_record(standings=["ACTIVE", "ACTIVE"])],
        [fill_record(stops=[0])],
        [fill_record(first=[0, 0])],
        [fill_record(standings=["ACTIVE", "ACTIVE", "ASLEEP"])],
        [fill_record(), fill_record()],
        [ValuesRecord(chunk=0, group=0, clock=-1, number=0), fill_record()],
        [chunk_record(0, [0, 0, 0])],
        [fill_record(), chunk_record(1, [0, 0, 0])],
        [fill_record(), chunk_record(0, [0, 0])],
        [fill_record(), chunk_record(0, [0, 0, 0], version=0)],
        [fill_record(), chunk_record(0, [0, 0, 0]), chunk_record(0, [0, 0, 0])],
        [SnapshotEnd(keeper=1, position=0, num_updates=0, num_steps=0)],
    ],
)
def test_what_cannot_be_told_of_a_fill_is_refused(records: list[Any]) -> None:
    picture, (*before, last) = filling_picture(), records
    for each in before:
        picture.apply(each)
    with pytest.raises(ProtocolError, match="the records of a shard contain"):
        picture.apply(last)


def test_of_chunks_that_are_not_known_a_death_may_say_less() -> None:
    picture = filling_picture()
    picture.apply(fill_record())
    picture.apply(chunk_record(0, [5, 4, 1]))
    death = EvictRecord(
        generation=2, dead=[2, 0], chief=1,
        groups=[0], goes_on=[False], fewest=[3], workers=[1],
        chunks=[0], heirs=[0], clocks=[5],
    )  # fmt: skip
    with pytest.raises(ProtocolError, match="after 6 iterations"):
        picture.apply(dataclasses.replace(death, generation=3, fewest=[6]))
    picture = filling_picture()
    picture.apply(fill_record())
    picture.apply(chunk_record(0, [5, 4, 1]))
    picture.apply(death)
    assert picture.standings[0] is GroupState.DEAD
    assert picture.newest_loads[0] == 0, "the next chief counts from the start"


# -- the bytes of a chunk --------------------------------------------------------------------------


def regions_of(partition: Partition) -> list[Region]:
    found = []
    for number, segment in enumerate(partition.chunks[0].segments):
        values = torch.arange(float(segment.length)) + number
        found.append(
            Region(
                piece=segment.piece,
                start=0,
                values=values,
                state={
                    "step": OneValue("float32", 0, 3.0),
                    "sum": PerElement("float32"),
                    "rows": Whole("float32", (2, 3)),
                },
                elements={"sum": -values, "rows": torch.arange(6.0) * number},
            )
        )
    return found


def test_a_chunk_is_the_same_behind_the_network() -> None:
    pieces = [
        Piece(name=name, shape=(3, 5), stride=(5, 1), dtype="float32", optimizer_group=0)
        for name in "ab"
    ]
    partition = Partition.cut(pieces, chunk_bytes=4096)
    regions = regions_of(partition)
    states, carried = pack_regions(regions)
    data = memoryview(b"".join(map(bytes, carried)))
    record = chunk_record(0, [1], states=states)
    # From an odd place in memory, as behind a gradient of an odd length.
    shifted = memoryview(bytearray(b"x" + bytes(data)))[1:]
    for mine, other in zip(unpack_regions(record, shifted, partition), regions, strict=True):
        assert (mine.piece, mine.start, mine.state) == (other.piece, other.start, other.state)
        assert torch.equal(mine.values, other.values)
        assert mine.elements.keys() == other.elements.keys()
        assert all(torch.equal(mine.elements[key], other.elements[key]) for key in other.elements)
    assert unpack_regions(record, data[:0], partition) == []
    for bad, words in (
        (data[:-4], "fewer than it describes"),
        (memoryview(bytes(data) + b"\0" * 4), f"bytes, not {len(data)}"),
    ):
        with pytest.raises(ProtocolError, match=words):
            unpack_regions(record, bad, partition)
    damaged = dataclasses.replace(record, states=b"\xc1")
    with pytest.raises(ProtocolError, match="cannot be read"):
        unpack_regions(damaged, data, partition)
