"""What a worker keeps of replies, and tells of a shard whose server has died."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.control import HeldVersions, HeldWanted, Moved, TellHeld
from psdist.protocol.events import Arrived, ControlArrived, PeerLost
from psdist.protocol.header import Flag, Header
from psdist.protocol.held import Sent
from psdist.protocol.ids import REGISTRAR, server_id, worker_id
from psdist.workers.protocol.actions import (
    Action,
    KeepReply,
    SendHeld,
    SendPull,
    SendPush,
)
from psdist.workers.protocol.core import WorkerCore
from psdist.workers.protocol.seat import Seat
from tests.support.virtual.worker_machine import (
    OWNERS,
    PARTITION,
    RULE,
    collect,
    control,
    messages,
    offer,
    push,
    receipt_of,
    register,
    reply_to,
    unchanged,
)

MINE = [1, 3, 5]
"""The chunks of server 1."""
WHO = "server 1 (rank 1 on n1)"


def make(*, credits: int = 9) -> WorkerCore:
    seat = Seat(worker=0, group=7, members=(0,), num_servers=2, shards_are_rebuilt=True)
    core = WorkerCore(seat)
    core.take_slice(PARTITION, owners=OWNERS, credits=credits, replies=RULE)
    register(core)
    return core


def sent(actions: list[Action]) -> dict[int, Header]:
    return {
        each.header.chunk: each.header for each in actions if isinstance(each, SendPush | SendPull)
    }


def take(core: WorkerCore, reply: Header) -> list[Action]:
    if reply.length:
        core.handle(offer(reply))
    return core.handle(Arrived(reply.sender, reply, None))


def answer_all(core: WorkerCore, actions: list[Action], **changed: int) -> None:
    headers = sent(actions)
    while headers:
        for header in headers.values():
            more = take(core, reply_to(header, **changed))
            headers = {**headers, **sent(more)}
            del headers[header.chunk]
            break


def meet(core: WorkerCore, name: str) -> None:
    core.begin_collective(name)
    collect(core, core._collectives.seq)
    core.take_collected()


def lose(core: WorkerCore) -> HeldVersions:
    """Both words of the death; what is told, to server 0."""
    assert messages(core.handle(PeerLost(server_id(1), WHO))) == []
    ((peer, told),) = messages(control(core, REGISTRAR, TellHeld(server=1, host=0)))
    assert peer == server_id(0)
    assert isinstance(told, HeldVersions)
    return told


def test_every_reply_that_has_come_whole_is_kept() -> None:
    core = make()
    headers = sent(push(core))
    for chunk in (0, 1):
        assert take(core, reply_to(headers[chunk]))[0] == KeepReply(chunk)
    # Half of one lies in place; nothing is kept of it.
    core.handle(offer(reply_to(headers[3])))
    told = lose(core)
    assert told.chunks == MINE
    assert told.positions == [10, 0, 0]
    assert told.versions == [1, 0, 0]
    assert told.rounds == [1, 0, 0]
    assert told.sent == [Sent.NOTHING, Sent.GRADIENT, Sent.GRADIENT]
    assert (told.server, told.worker, told.set_index, told.left) == (1, 0, 0, -1)


def test_a_reply_without_bytes_is_of_the_values_that_are_kept() -> None:
    core = make()
    answer_all(core, push(core), position=10, chunk_version=4, min_done=1)
    headers = sent(push(core))
    assert KeepReply(1) not in take(core, unchanged(headers[1], position=30, min_done=2))
    told = lose(core)
    assert (told.positions[0], told.versions[0], told.min_dones[0]) == (30, 4, 2)
    assert (told.positions[1], told.versions[1], told.min_dones[1]) == (10, 4, 1)


def test_copies_and_second_deliveries_are_not_kept() -> None:
    core = make()
    headers = sent(push(core))
    for header in headers.values():
        take(core, reply_to(header))
    late = reply_to(headers[1], position=99)
    assert take(core, late._replace(length=0, flags=Flag.UNCHANGED)) == []
    copied = sent(core.begin_copy(clock=1, chunks=range(6)))
    for header in copied.values():
        assert not [each for each in take(core, reply_to(header)) if isinstance(each, KeepReply)]
    assert lose(core).positions == [10, 10, 10]


def test_what_has_not_left_is_told_apart_and_so_is_what_brings_no_gradient() -> None:
    core = make(credits=1)
    answer_all(core, push(core))
    push(core, empty=(1,))
    told = lose(core)
    assert told.rounds == [1, 1, 1]
    assert told.sent == [Sent.EMPTY, Sent.NOTHING, Sent.NOTHING]
    # They leave when there is somebody again, marked as sent before where they had been.
    actions = control(core, REGISTRAR, Moved(server=1, host=0))
    assert [bool(each.flags & Flag.AGAIN) for each in sent(actions).values()] == [True]


def test_what_is_sent_again_and_lost_again_has_been_sent() -> None:
    """It waits for a credit, marked; the next one that makes the shard may find it contained."""
    seat = Seat(worker=0, group=7, members=(0,), num_servers=3, shards_are_rebuilt=True)
    core = WorkerCore(seat)
    core.take_slice(PARTITION, owners=OWNERS, credits=1, replies=RULE)
    register(core)
    first = sent(push(core))[1]
    core.handle(Arrived(server_id(1), receipt_of(first), None))  # its credit is back, for chunk 3
    core.handle(PeerLost(server_id(1), WHO))
    control(core, REGISTRAR, TellHeld(server=1, host=2))
    again = sent(control(core, REGISTRAR, Moved(server=1, host=2)))
    assert [*again] == [1]
    assert again[1].flags & Flag.AGAIN
    core.handle(PeerLost(server_id(2), "server 2"))
    ((_, told),) = messages(control(core, REGISTRAR, TellHeld(server=1, host=0)))
    assert isinstance(told, HeldVersions)
    assert told.sent == [Sent.GRADIENT, Sent.GRADIENT, Sent.NOTHING]


def test_a_collective_since_the_reply_is_told() -> None:
    core = make()
    answer_all(core, push(core))
    meet(core, "mean")
    headers = sent(push(core))
    take(core, reply_to(headers[3]))
    assert lose(core).paused == [True, False, True]


def test_one_that_does_not_suspend_the_group_is_none() -> None:
    core = make()
    answer_all(core, push(core))
    core.expect_iteration()
    core.begin_collective("mean")
    assert lose(core).paused == [False] * 3


def test_from_a_push_of_values_until_the_next_iteration_that_is_told() -> None:
    core = make()
    meet(core, "push")
    assert lose(core).is_setting
    core = make()
    meet(core, "push")
    meet(core, "save")
    assert not lose(core).is_setting
    core = make()
    meet(core, "push")
    push(core)
    assert not lose(core).is_setting


def test_a_leader_whose_group_has_left_says_so() -> None:
    core = make()
    answer_all(core, push(core))
    core.begin_leave()
    assert lose(core).left == 1


def test_both_words_of_a_death_are_waited_for() -> None:
    """Until the network has told of it replies may come."""
    core = make()
    assert messages(control(core, REGISTRAR, TellHeld(server=1, host=0))) == []
    headers = sent(push(core))
    take(core, reply_to(headers[1]))
    ((_, told),) = messages(core.handle(PeerLost(server_id(1), WHO)))
    assert isinstance(told, HeldVersions)
    assert told.rounds == [1, 0, 0]


def test_who_makes_the_shard_gets_what_it_asks_for() -> None:
    core = make()
    answer_all(core, push(core))
    wanted = HeldWanted(server=1, set_index=0, chunks=[1, 5])
    with pytest.raises(ProtocolError, match="server 0 wants values of server 1, which has not"):
        core.handle(ControlArrived(server_id(0), wanted))
    lose(core)
    assert control(core, server_id(0), wanted) == [
        SendHeld(server_id(0), 1, 0, 1),
        SendHeld(server_id(0), 1, 0, 5),
    ]
    for peer, wrong in (
        (worker_id(1), wanted),
        (server_id(0), replace(wanted, chunks=[2])),
        (server_id(0), replace(wanted, set_index=1)),
        (server_id(0), replace(wanted, server=0)),
    ):
        with pytest.raises(ProtocolError, match="wants values of server"):
            core.handle(ControlArrived(peer, wrong))


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        (server_id(1), TellHeld(server=1, host=0)),
        (REGISTRAR, TellHeld(server=2, host=0)),
        (REGISTRAR, TellHeld(server=1, host=2)),
        (REGISTRAR, TellHeld(server=-1, host=0)),
    ],
)
def test_only_the_registrar_asks_what_is_held(peer: int, message: TellHeld) -> None:
    with pytest.raises(ProtocolError, match="sent TellHeld of server"):
        make().handle(ControlArrived(peer, message))


def test_elsewhere_nobody_is_asked() -> None:
    core = WorkerCore(Seat(worker=0, group=0, members=(0,), num_servers=2))
    with pytest.raises(ProtocolError, match="sent TellHeld of server 1 to server 0"):
        core.handle(ControlArrived(REGISTRAR, TellHeld(server=1, host=0)))


def test_the_registrar_and_workers_are_needed() -> None:
    with pytest.raises(PeerLostError, match="has died; it is the registrar, without which no"):
        make().handle(PeerLost(REGISTRAR, "server 0 (rank 0 on n1)"))
    with pytest.raises(PeerLostError, match="worker 1 has died; this job does not survive"):
        make().handle(PeerLost(worker_id(1), "worker 1"))


def test_a_death_while_a_model_is_set_up_ends_the_job() -> None:
    seat = Seat(worker=0, group=7, members=(0,), num_servers=2, shards_are_rebuilt=True)
    core = WorkerCore(seat)
    core.take_slice(PARTITION, owners=OWNERS, credits=9, replies=RULE)
    core.begin_register()
    with pytest.raises(PeerLostError, match=r"while a model was being set up"):
        core.handle(PeerLost(server_id(1), WHO))
