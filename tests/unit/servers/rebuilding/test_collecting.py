"""Out of whose values a shard is made anew, and what counts as contained then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.control import HeldValues, HeldVersions, HeldWanted
from psdist.protocol.held import Sent
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.rebuilding.collecting import Collecting, Held, rebuild

NOTHING, GRADIENT, EMPTY = Sent


def held(worker: int = 0, **changed: Any) -> Held:
    first = Held(worker, position=10, min_done=4, version=5, round=4, sent=GRADIENT)
    return first._replace(**changed)


def test_the_newest_values_are_those_of_the_highest_position() -> None:
    found = rebuild([held(0), held(3, position=12, version=6), held(4, position=11)])
    assert (found.worker, found.group) == (3, 1)
    assert (found.position, found.version) == (12, 6)


@pytest.mark.parametrize(
    ("mine", "newest", "clock", "is_lost"),
    [
        pytest.param({}, {}, 4, False, id="its own last reply is as new as any"),
        pytest.param({"sent": NOTHING}, {"position": 12, "version": 6}, 4, False, id="not sent"),
        pytest.param({}, {"position": 12, "version": 6}, 5, True, id="nobody knows"),
        pytest.param(
            {}, {"position": 12, "version": 6, "min_done": 5}, 5, False, id="all are contained"
        ),
        pytest.param(
            {"has_paused": True},
            {"position": 12, "version": 6, "min_done": 5},
            5,
            True,
            id="it did not count for a while",
        ),
        pytest.param({}, {"position": 12}, 4, False, id="no step between"),
        pytest.param({"sent": EMPTY}, {"position": 12}, 5, True, id="which it makes none of"),
    ],
)
def test_what_was_sent_and_not_answered_counts_once(
    mine: dict[str, Any], newest: dict[str, Any], clock: int, is_lost: bool
) -> None:
    """Group 0 waits for a reply to its round 4."""
    found = rebuild([held(0, **mine), held(1, round=7, sent=NOTHING, **newest)])
    assert found.clocks == (clock, 7)
    assert found.lost == ((0,) if is_lost else ())


GROUPS = ((0, 1), (2,))


def make(*, num_bytes: tuple[dict[int, int], ...] = ({1: 8, 3: 4},)) -> Collecting:
    return Collecting(server=1, groups=GROUPS, num_bytes=num_bytes)


def told(worker: int, *chunks: int, position: int = 10, **changed: Any) -> HeldVersions:
    count = len(chunks)
    message = HeldVersions(
        server=1,
        worker=worker,
        set_index=0,
        chunks=list(chunks),
        positions=[position] * count,
        min_dones=[4] * count,
        versions=[5] * count,
        rounds=[4] * count,
        sent=[0] * count,
        paused=[False] * count,
        left=-1,
        is_setting=False,
    )
    return replace(message, **changed)


def values(chunk: int, start: int, data: bytes) -> HeldValues:
    return HeldValues(server=1, set_index=0, chunk=chunk, start=start, values=data)


def tell_all(collecting: Collecting) -> list[SendControl]:
    """Worker 0 and 1 have a chunk each of group 0's, worker 2 both of its own."""
    assert collecting.on_held(worker_id(0), told(0, 1, position=12)) == []
    assert collecting.on_held(worker_id(2), told(2, 1, 3)) == []
    return collecting.on_held(worker_id(1), told(1, 3, position=9))


def test_values_are_asked_of_who_has_the_newest_when_all_have_told() -> None:
    collecting = make()
    wanted = tell_all(collecting)
    assert wanted == [
        SendControl(worker_id(0), HeldWanted(server=1, set_index=0, chunks=[1])),
        SendControl(worker_id(2), HeldWanted(server=1, set_index=0, chunks=[3])),
    ]
    assert collecting.position(0) == 12
    assert collecting.chunk(0, 3).worker == 2
    assert not collecting.is_complete
    collecting.on_values(worker_id(0), values(1, 0, b"12345"))
    collecting.on_values(worker_id(2), values(3, 0, b"1234"))
    assert not collecting.is_complete
    collecting.on_values(worker_id(0), values(1, 5, b"678"))
    assert collecting.is_complete
    assert collecting.num_lost == 0


def test_updates_that_may_be_lost_are_counted() -> None:
    collecting = make()
    collecting.on_held(worker_id(0), told(0, 1, position=12, versions=[7]))
    collecting.on_held(worker_id(1), told(1, 3, position=11, versions=[6], sent=[1]))
    collecting.on_held(worker_id(2), told(2, 1, 3, sent=[1, 1]))
    assert collecting.num_lost == 2
    assert collecting.chunk(0, 1).lost == collecting.chunk(0, 3).lost == (1,)


def test_a_server_without_chunks_is_complete_when_all_have_told() -> None:
    collecting = make(num_bytes=({}, {}))
    for index in (0, 1):
        for worker in (0, 1, 2):
            assert not collecting.is_complete
            assert collecting.on_held(worker_id(worker), told(worker, set_index=index)) == []
    assert collecting.is_complete
    assert collecting.position(0) == 0


def test_groups_that_have_left_are_known() -> None:
    collecting = make()
    collecting.on_held(worker_id(2), told(2, 1, 3, left=4))
    assert collecting.left == {(0, 1): 4}
    with pytest.raises(ProtocolError, match="worker 1 told that group 0 has left, for which it"):
        collecting.on_held(worker_id(1), told(1, 3, left=4))


def test_the_values_of_a_push_die_with_their_server() -> None:
    with pytest.raises(PeerLostError, match=r"in the middle of a job\.push, whose values nobody"):
        make().on_held(worker_id(0), told(0, 1, is_setting=True))


@pytest.mark.parametrize(
    ("peer", "message", "words"),
    [
        (worker_id(1), told(0, 1), "worker 1 told what worker 0 holds"),
        (server_id(1), told(0, 1), "server 1 told what worker 0 holds"),
        (worker_id(9), told(9, 1), "told what worker 9 holds"),
        (worker_id(0), told(0, 1, set_index=1), "of parameter set 1"),
        (worker_id(0), told(0, 1, set_index=-1), "of parameter set -1"),
        (worker_id(0), told(0, 2), "of chunk 2, which makes no sense"),
        (worker_id(0), told(0, 1, 1), "of chunk 1, which makes no sense"),
        (worker_id(0), told(0, 1, position=-1), "of chunk 1, which makes no sense"),
        (worker_id(0), told(0, 1, rounds=[-1]), "of chunk 1, which makes no sense"),
        (worker_id(0), told(0, 1, versions=[0]), "told that it holds version 0 of chunk 1"),
        (worker_id(0), told(0, 1, sent=[3]), "told that it holds version 5 of chunk 1"),
        (worker_id(0), told(0, 1, sent=[]), "and not all of it"),
    ],
)
def test_what_makes_no_sense_is_refused(peer: int, message: HeldVersions, words: str) -> None:
    with pytest.raises(ProtocolError, match=f"the shard of server 1: .*{words}"):
        make().on_held(peer, message)


def test_nobody_tells_twice_and_of_every_group_somebody_does() -> None:
    collecting = make()
    collecting.on_held(worker_id(0), told(0, 1))
    with pytest.raises(ProtocolError, match="worker 0 told twice"):
        collecting.on_held(worker_id(0), told(0, 1))
    collecting.on_held(worker_id(1), told(1))
    with pytest.raises(ProtocolError, match=r"nobody of groups \[0\] has told .* of chunk 3 of"):
        collecting.on_held(worker_id(2), told(2, 1, 3))


@pytest.mark.parametrize(
    ("peer", "message", "words"),
    [
        (worker_id(2), values(1, 0, b"1234"), "worker 2 sent values of chunk 1 of parameter set"),
        (worker_id(0), values(2, 0, b"1234"), "sent values of chunk 2"),
        (worker_id(0), values(1, 1, b"1234"), "4 bytes of chunk 1 from byte 1 on; 0 of 8 were"),
        (worker_id(0), values(1, 0, b"123456789"), "sent 9 bytes of chunk 1"),
        (worker_id(0), values(1, 0, b""), "sent 0 bytes of chunk 1"),
    ],
)
def test_values_that_were_not_asked_for_are_refused(
    peer: int, message: HeldValues, words: str
) -> None:
    collecting = make()
    with pytest.raises(ProtocolError, match="sent values of chunk"):
        collecting.on_values(worker_id(0), values(1, 0, b"1234"))
    tell_all(collecting)
    with pytest.raises(ProtocolError, match=words):
        collecting.on_values(peer, message)
    assert not collecting.is_complete
