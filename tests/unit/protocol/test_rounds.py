"""Which of several things rules which rounds."""

from __future__ import annotations

from psdist.protocol.rounds import Burst, Turns


def test_each_rules_from_its_round_until_the_next_one() -> None:
    turns = Turns([(0, 7), (3, 5), (9, 7)])
    assert [turns.at(clock) for clock in (0, 2, 3, 8, 9, 1000)] == [7, 7, 5, 5, 7, 7]


def test_changes_come_in_their_order_and_what_is_said_again_changes_nothing() -> None:
    turns = Turns([(0, 0)])
    assert turns.begin(1, 4, 2)
    assert turns.begin(2, 9, 1)
    assert turns.begin(1, 4, 2), "one server is late"
    assert [turns.at(clock) for clock in (3, 4, 8, 9)] == [0, 2, 2, 1]


def test_what_no_round_has_come_to_gives_way_to_the_next_change() -> None:
    turns = Turns([(0, 0)])
    assert turns.begin(1, 4, 2)
    assert turns.begin(2, 4, 3)
    assert [turns.at(clock) for clock in (3, 4)] == [0, 3]
    assert turns.begin(1, 4, 2)
    assert turns.at(4) == 3
    assert turns.begin(3, 4, 0)
    assert turns.begin(4, 4, 1)
    assert turns.at(900) == 1


def test_what_cannot_be_is_not_taken() -> None:
    turns = Turns([(0, 0)])
    assert turns.begin(1, 4, 2)
    for wrong in ((0, 9, 1), (1, 4, 1), (1, 5, 2), (2, 3, 1), (3, 9, 1), (-1, 9, 1)):
        assert not turns.begin(*wrong), wrong
    assert [turns.at(clock) for clock in (3, 4, 9)] == [0, 2, 2]


def test_every_so_many_rounds_of_one_another_one_rules() -> None:
    turns = Turns([(0, 0), (8, 1), (15, 2)], bursts={0: Burst(3, 3), 2: Burst(10, 4)})
    expected = [0, 0, 3, 0, 0, 3, 0, 0, *(1,) * 7, 2, 2, 2, 2, 4, 2]
    assert [turns.at(clock) for clock in range(21)] == expected
    assert [clock for clock in range(21) if turns.is_burst(clock)] == [2, 5, 19]
