"""What a worker's loop keeps of replies, and how it sends that to who makes a shard anew."""

from __future__ import annotations

from typing import Any

from psdist.protocol.control import HeldValues
from psdist.protocol.held import PART_BYTES
from psdist.protocol.ids import server_id
from psdist.workers.loop import WorkerLoop
from psdist.workers.protocol.actions import KeepReply, SendHeld
from tests.support.virtual.job import Schedule, VirtualJob


def make() -> WorkerLoop:
    schedule = Schedule(seed=3, servers=2, iterations=(1, 1), is_rebuilt=True)
    return VirtualJob(schedule, is_watched=False).workers[0].loop


def test_what_is_kept_stays_as_it_was_when_the_reply_was_whole() -> None:
    loop = make()
    chunk = loop.core.mine[0]
    place: Any = loop._parameters[chunk].payload
    for value in (1, 2):
        place[:] = bytes([value]) * len(place)
        loop._do([KeepReply(chunk)])
        place[:] = bytes(len(place))  # as a script may
        assert loop._kept[chunk] == bytes([value]) * len(place)


def test_it_is_sent_in_parts() -> None:
    loop, sent = make(), list[tuple[int, HeldValues]]()
    loop.transport.send_control = lambda peer, message, _set=0: sent.append((peer, message))  # type: ignore[method-assign, misc, assignment]
    chunk = loop.core.mine[0]
    kept = loop._kept[chunk] = bytearray(range(256)) * (10 * PART_BYTES // 1024)
    loop._do([SendHeld(server_id(0), 1, 0, chunk)])
    assert [peer for peer, _ in sent] == [server_id(0)] * 3
    messages = [message for _, message in sent]
    assert [each.start for each in messages] == [0, PART_BYTES, 2 * PART_BYTES]
    assert b"".join(each.values for each in messages) == kept
    assert {(each.server, each.set_index, each.chunk) for each in messages} == {(1, 0, chunk)}
