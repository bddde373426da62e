"""A shard's log out of a dead server's and its buddy's."""

from __future__ import annotations

import pytest

from psdist.errors import HistoryError
from psdist.history.joining import joined
from psdist.history.records import EventKind, ServerLog
from psdist.history.writers import ServerHistory


def log(
    num_steps: int, *, taken_over: int = 0, is_closed: bool = False, clock: int = 0
) -> ServerLog:
    """A group comes and makes steps; ``taken_over``: then the buddy goes on with so many."""
    history = ServerHistory(None, 1)
    history.member(EventKind.JOIN, 0, 0, 1.0)
    for step in range(num_steps):
        history.step(0, [(0, clock + step, 1.0, False)])
        history.checksum(0, 7, worker=0, clock=step)
    if taken_over:
        history.taken_over(2)
        for step in range(num_steps, num_steps + taken_over):
            history.step(0, [(0, clock + step, 1.0, False)])
    if is_closed:
        history.close()
    return history.log()


def test_what_the_dead_server_logged_beyond_its_buddy_was_told_to_nobody() -> None:
    shard = joined(log(5), log(3, taken_over=4, is_closed=True))
    assert shard.is_complete
    assert shard.events["kind"].tolist().count(EventKind.APPLY) == 7
    # Positions 2, 3, 4 are those of the server within the buddy's log, 5 and 6 beyond it.
    assert shard.checksums["position"].tolist() == [2, 3, 4, 2, 3, 4]


def test_a_server_that_lives_is_believed_and_its_buddy_agrees() -> None:
    server = log(4, is_closed=True)
    assert joined(server, log(4, is_closed=True)) is server
    assert joined(server, log(2)) is server, "the buddy's ends early"


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
        joined(server, copy)
