"""The coordinator's ends of its lines."""

from __future__ import annotations

import pytest

from psdist.errors import ProtocolError
from psdist.protocol.control import Control, Finish, Resume, Stop
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.failover.lines import Lines

PEER = worker_id(1)
SAID: list[Control] = [Resume(seq=1), Finish(), Stop()]


def lines_with(said: list[Control]) -> Lines:
    lines = Lines()
    for message in said:
        lines.say(PEER, message)
    return lines


def test_who_follows_is_told_what_it_lacks() -> None:
    lines = lines_with(SAID)
    assert lines.is_open(PEER)
    lines.close()
    assert not lines.is_open(PEER)
    lines.say(PEER, Stop())
    assert lines.on_follows(PEER, 1) == [*SAID[1:], Stop()]
    assert lines.is_open(PEER)
    assert lines.on_received(PEER, 3) is None
    assert not lines.has_received_all([PEER]), "there may be another standby"
    lines.close()
    assert lines.on_follows(PEER, 3) == [Stop()]
    lines.check_invariants()


def test_who_has_said_nothing_and_was_told_nothing_follows_too() -> None:
    lines = Lines()
    lines.close()
    assert not lines.is_open(PEER)
    assert lines.on_follows(PEER, 0) == []


@pytest.mark.parametrize("received", [0, 4])
def test_a_count_that_cannot_be_is_refused(received: int) -> None:
    lines = lines_with(SAID)
    lines.on_received(PEER, 1)
    with pytest.raises(ProtocolError, match=r"it was sent 3 and had reported 1"):
        lines.on_received(PEER, received)
    lines.close()
    with pytest.raises(ProtocolError, match=r"it was sent 3 and had reported 1"):
        lines.on_follows(PEER, received)


def test_nobody_follows_unasked() -> None:
    with pytest.raises(ProtocolError, match="worker 1 sent Rejoined without a failover"):
        lines_with(SAID).on_follows(PEER, 3)


def test_the_dead_are_not_waited_for() -> None:
    lines = lines_with(SAID)
    assert not lines.has_received_all([PEER])
    lines.lose(PEER)
    assert lines.has_received_all([PEER])
    lines.say(PEER, Stop())
    lines.on_received(PEER, 2)  # its last words
    assert lines.has_received_all([PEER])
    lines.check_invariants()


def test_who_takes_the_place_of_another_one_begins_from_nothing() -> None:
    lines = Lines()
    peer = server_id(2)
    lines.hear(peer)
    lines.say(peer, Finish())
    lines.reset(peer)
    assert lines.num_heard(peer) == 0
    lines.close()
    assert lines.on_follows(peer, 0) == []


def test_all_has_left_where_the_line_is_open() -> None:
    lines = lines_with(SAID)
    assert lines.has_told_all([PEER])
    lines.close()
    assert not lines.has_told_all([PEER, worker_id(2)])
    assert lines.has_told_all([worker_id(2)]), "nothing was sent to it"
    lines.on_follows(PEER, 0)
    assert lines.has_told_all([PEER])


def test_what_is_wanted_to_have_come_there_is_waited_for() -> None:
    lines = lines_with(SAID[:2])
    lines.want(PEER)
    lines.say(PEER, SAID[2])
    assert lines.has_received_wanted([worker_id(2)])
    lines.on_received(PEER, 1)
    assert not lines.has_received_wanted([worker_id(2), PEER])
    lines.on_received(PEER, 2)
    assert lines.has_received_wanted([PEER]), "later messages are not awaited"


def test_the_dead_are_not_wanted_to_have_anything() -> None:
    lines = lines_with(SAID)
    lines.want(PEER)
    lines.lose(PEER)
    lines.say(PEER, Stop())
    lines.want(PEER)
    assert lines.has_received_wanted([PEER])
    lines.check_invariants()
