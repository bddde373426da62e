"""A shard's log out of a dead server's and its buddy's."""

from __future__ import annotations

import pytest

from psdist.errors import HistoryError
from psdist.history import EventKind, ServerLog
from psdist.history.files import joined
from tests.support.history.memory import ServerHistory


def log(
    num_steps: int, *, taken_over: int = 0, is_closed: bool = False, clock: int = 0
) -> ServerLog:
    """A group comes and makes steps; ``taken_over``: then the buddy continues with so many."""
    history = ServerHistory(None, 1)
    history.member(EventKind.JOIN, 0, 0, 1.0)
    for step in range(num_steps):
        history.step(0, [(0, clock + step, 1.0, False, 0)])
        history.checksum(0, 7, worker=0, clock=step)
    if taken_over:
        history.taken_over(2)
        for step in range(num_steps, num_steps + taken_over):
            history.step(0, [(0, clock + step, 1.0, False, 0)])
    if is_closed:
        history.close()
    return history.log()


def test_what_the_dead_server_logged_beyond_its_buddy_was_told_to_nobody() -> None:
    shard = joined(log(5), log(3, taken_over=4, is_closed=True), name="copy-1")
    assert shard.is_complete
    assert shard.events["kind"].tolist().count(EventKind.APPLY) == 7
    # Positions 2, 3, 4 are those of the server within the buddy's log, 5 and 6 beyond it.
    assert shard.checksums["position"].tolist() == [2, 3, 4, 2, 3, 4]


def test_a_server_that_lives_is_believed_and_its_buddy_agrees() -> None:
    server = log(4, is_closed=True)
    assert joined(server, log(4, is_closed=True), name="copy-1") is server
    assert joined(server, log(2), name="copy-1") is server, "the buddy's ends early"


def test_of_a_set_that_came_behind_the_death_the_log_is_the_buddys() -> None:
    """Also if a group had registered with the failed server, and another one with its replica."""
    buddy = log(3, is_closed=True)
    for early in (ServerHistory(None, 2).log(), joined_by(1, 0)):
        shard = joined(early, buddy, name="copy-2")
        assert (shard.server, shard.is_complete, shard.has_died) == (2, True, False)
        assert shard.events is buddy.events
        assert shard.checksums is buddy.checksums


def test_what_a_server_that_died_early_had_written_counts() -> None:
    """Its events where the buddy continues, or where a copy begins later."""
    with pytest.raises(HistoryError, match="did not apply the same updates"):
        joined(joined_by(1), log(3, taken_over=1), name="copy-2")
    later = ServerHistory(None, 2, copy=2, position=1)
    later.filled(3, 1)
    later.checksum(0, 7, worker=0, clock=0)
    shard = joined(joined_by(1), later.log(), name="copy-2-2")
    assert shard.events["kind"].tolist() == [EventKind.JOIN, EventKind.FILLED]


def joined_by(*groups: int) -> ServerLog:
    history = ServerHistory(None, 2)
    for group in groups:
        history.member(EventKind.JOIN, group, 0, 1.0)
    return history.log()


def test_of_a_server_that_died_behind_the_last_event_checksums_may_be_missing() -> None:
    """Its buddy wrote its log to the end, and did not have to continue."""
    shard = joined(log(2), log(4, is_closed=True), name="copy-1")
    assert (shard.is_complete, shard.has_died) == (True, True)
    assert len(shard.events) == 5
    assert len(shard.checksums) == 2
    beyond = joined(log(5), log(4, is_closed=True), name="copy-1")
    assert (beyond.is_complete, len(beyond.events)) == (True, 5), "told to nobody"
    open_ended = joined(log(5), log(4), name="copy-1")
    assert (open_ended.is_complete, len(open_ended.events)) == (False, 6)
    early = joined(log(2), log(4), name="copy-1")
    assert (early.is_complete, early.has_died, len(early.events)) == (False, False, 5)


@pytest.mark.parametrize(
    ("server", "copy"),
    [
        (log(4), log(4, clock=1)),
        (log(4, is_closed=True), log(3, is_closed=True)),
        (log(4, clock=1), log(3, taken_over=1)),
    ],
    ids=["another update", "one less", "another before the death"],
)
def test_a_buddy_that_applied_something_else_is_damage(server: ServerLog, copy: ServerLog) -> None:
    with pytest.raises(HistoryError, match="did not apply the same updates"):
        joined(server, copy, name="copy-1")


def test_a_log_goes_from_copy_to_copy() -> None:
    """The server fails and its buddy continues; another copy is filled, and its keeper
    continues."""
    first, buddy = log(3), ServerHistory(None, 1)
    buddy.member(EventKind.JOIN, 0, 0, 1.0)
    for clock in range(3):
        buddy.step(0, [(0, clock, 1.0, False, 0)])
    buddy.taken_over(2)
    buddy.step(0, [(0, 3, 1.0, False, 0)])
    position = buddy.position
    buddy.filled(3, position)
    later = ServerHistory(None, 1, copy=2, position=position)
    later.filled(3, position)
    for each in (buddy, later):
        each.step(0, [(0, 4, 1.0, False, 0)])
    buddy.step(0, [(0, 5, 1.0, False, 0)])  # not reported
    later.taken_over(3)
    later.step(0, [(0, 5, 1.0, False, 0)])
    later.checksum(0, 7, worker=0, clock=5)
    later.close()
    shard = joined(first, buddy.log(), name="copy-1")
    shard = joined(shard, later.log(), name="copy-1-2")
    assert shard.is_complete
    kinds = shard.events["kind"].tolist()
    assert [kinds.count(kind) for kind in (EventKind.TAKEOVER, EventKind.FILLED)] == [2, 1]
    clocks = shard.events["clock"][shard.events["kind"] == EventKind.APPLY].tolist()
    assert clocks == list(range(6))
    assert shard.checksums["position"].tolist()[-1] == len(shard.events)


def copy_from(position: int, *, says: float, clock: int = 4) -> ServerLog:
    history = ServerHistory(None, 1, copy=2, position=position)
    history._event(EventKind.FILLED, 2**32 - 1, 0, 3, says, 1.0, 0)
    history.step(0, [(0, clock, 1.0, False, 0)])
    return history.log()


@pytest.mark.parametrize(
    ("copy", "words"),
    [
        (copy_from(5, says=5.5), "begins at position 5.5"),
        (copy_from(5, says=-1.0), "begins at position -1"),
        (copy_from(9, says=9.0), "did not apply the same updates"),
        (copy_from(4, says=4.0), "differ from record 4"),
    ],
)
def test_a_later_copy_that_does_not_fit_is_damage(copy: ServerLog, words: str) -> None:
    with pytest.raises(HistoryError, match=words):
        joined(log(4), copy, name="copy-1-2")
