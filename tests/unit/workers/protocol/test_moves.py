"""Where a worker sends what is a server's, when servers fail one after the other."""

from __future__ import annotations

from psdist.workers.protocol.resending import Moves


def test_both_the_network_and_the_coordinator_have_spoken() -> None:
    moves = Moves()
    assert moves.on_lost(1) == []
    assert moves.on_moved(1, host=2) == [(1, 2)]
    assert moves.on_moved(3, host=0) == []
    assert moves.on_lost(3) == [(3, 0)]


def test_with_a_process_go_all_that_it_served() -> None:
    moves = Moves()
    moves.on_lost(1)
    moves.on_moved(1, host=2)
    assert moves.on_moved(2, host=3) == []
    assert moves.on_moved(1, host=0) == [], "server 2 may still say something in its place"
    assert moves.on_lost(2) == [(1, 0), (2, 3)]


def test_a_host_that_has_died_meanwhile_is_passed_over() -> None:
    moves = Moves()
    assert moves.on_lost(2) == []
    assert moves.on_lost(1) == []
    assert moves.on_moved(1, host=2) == []
    assert moves.on_moved(2, host=3) == [(2, 3)]
    assert moves.on_moved(1, host=3) == [(1, 3)]


def test_a_set_that_comes_later_knows_what_was_known() -> None:
    first = Moves()
    first.on_lost(1)
    first.on_moved(1, host=2)
    later = Moves(first)
    assert later.on_moved(1, host=3) == []
    assert later.on_lost(2) == [(1, 3)]
    assert first.on_lost(3) == []
