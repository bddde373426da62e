"""When a round closes, who has missed it, and where that group continues."""

from __future__ import annotations

import pytest

from psdist.servers.protocol.rules.closing import Closed, Closing, Misses, Rounds

ALL = [0, 1, 2]


def made(*, backup: int = 1, wait_every: int = 10) -> tuple[Rounds, Closing]:
    rounds = Rounds(first=(0, 0, 0), wait_every=wait_every)
    return rounds, Closing(rounds, backup=backup)


def close(rounds: Rounds, closing: Closing, *come: int) -> Closed:
    """The round that is open, with these groups."""
    for group in come:
        closing.come(group, rounds.decided[group])
    closed = closing.close(ALL)
    assert closed is not None
    rounds.add(closed)
    return closed


def test_a_round_closes_when_all_have_come_but_one() -> None:
    rounds, closing = made()
    assert closing.close(ALL) is None
    closing.come(2, 0)
    assert closing.close(ALL) is None
    assert close(rounds, closing, 0) == Closed(0, 0, (0, 2), (1,))
    assert rounds.has_missed(1, 0)
    assert not rounds.has_missed(0, 0)
    assert close(rounds, closing, 0, 1, 2) == Closed(1, 1, (0, 1, 2), ())


def test_not_without_anybody_and_not_without_more_than_backup_says() -> None:
    _, closing = made(backup=5)
    assert closing.close(ALL) is None
    assert closing.close([]) is None
    closing.come(1, 0)
    assert closing.close(ALL) == Closed(0, 0, (1,), (0, 2))
    _, closing = made(backup=1)
    closing.come(1, 0)
    assert closing.close(ALL) is None
    assert closing.close([1]) == Closed(0, 0, (1,), ())


def test_who_was_only_just_late_goes_on_at_once_and_who_missed_more_sits_out() -> None:
    rounds, closing = made()
    close(rounds, closing, 0, 2)
    assert not closing.sits_out(1, 0, ALL)
    close(rounds, closing, 0, 2)
    assert closing.sits_out(1, 0, ALL)
    assert not closing.sits_out(1, 1, ALL)


def test_nobody_sits_out_a_round_in_which_nobody_else_is() -> None:
    rounds, closing = made()
    close(rounds, closing, 0, 2)
    close(rounds, closing, 0, 2)
    assert not closing.sits_out(1, 0, [1])
    closing.come(0, 2)
    assert closing.sits_out(1, 0, ALL)
    assert closing.close(ALL) is None, "2 has not come, and 1 will not"
    closing.come(2, 2)
    assert closing.close(ALL) == Closed(2, 2, (0, 2), (1,))
    closing.comes_back(1)


def test_no_more_sit_out_than_may_miss_a_round() -> None:
    rounds, closing = made(backup=2)
    for _ in range(2):
        close(rounds, closing, 0)
    assert closing.sits_out(1, 0, ALL)
    assert closing.sits_out(2, 0, ALL)
    rounds, closing = made(backup=1)
    close(rounds, closing, 0, 2)
    close(rounds, closing, 0, 2)
    assert closing.sits_out(1, 0, ALL)
    assert not closing.sits_out(2, 0, ALL)


@pytest.mark.parametrize("wait_every", [2, 3, 5])
def test_who_has_missed_all_but_one_running_is_waited_for(wait_every: int) -> None:
    rounds, closing = made(wait_every=wait_every)
    for _ in range(wait_every - 1):
        assert not rounds.is_awaited(1)
        close(rounds, closing, 0, 2)
    assert rounds.is_awaited(1)
    closing.come(0, rounds.decided[0])
    closing.come(2, rounds.decided[2])
    assert closing.close(ALL) is None
    assert not closing.sits_out(1, 0, ALL)
    assert close(rounds, closing, 1).groups == (0, 1, 2)
    assert not rounds.is_awaited(1)


def test_a_group_behind_makes_its_rounds_before_the_others_go_on() -> None:
    rounds, closing = made()
    for _ in range(3):
        closing.come(0, rounds.decided[0])
        closing.come(2, rounds.decided[2])
        closed = closing.close([0, 2])  # 1 is suspended
        assert closed is not None
        assert closed.missed == ()
        rounds.add(closed)
    closing.come(0, 3)
    closing.come(2, 3)
    assert closing.close(ALL) is None
    assert close(rounds, closing, 1) == Closed(3, 0, (1,), ())


def test_the_round_is_stepped_with_the_settings_of_who_has_missed_the_fewest() -> None:
    rounds, closing = made()
    assert rounds.add(Closed(0, 0, (1, 2), (0,))) == 1
    assert rounds.add(Closed(1, 1, (0, 1, 2), ())) == 1
    assert rounds.add(Closed(2, 2, (0, 2), (1,))) == 2
    assert rounds.add(Closed(3, 3, (0, 1), (2,))) == 0
    assert closing.close(ALL) is None


def test_what_was_missed_is_forgotten_when_the_group_is_further() -> None:
    rounds, _ = made()
    rounds.add(Closed(0, 0, (0, 2), (1,)))
    rounds.add(Closed(1, 1, (0, 2), (1,)))
    rounds.has_pushed(1, 1)
    assert not rounds.has_missed(1, 0)
    assert rounds.has_missed(1, 1)


def test_no_round_is_missed_before_the_first_one() -> None:
    rounds, _ = made()
    assert rounds.misses == Misses(running=(0, 0, 0), in_all=(0, 0, 0))
    rounds.add(Closed(0, 0, (2,), (0, 1)))
    rounds.add(Closed(1, 1, (0, 2), (1,)))
    assert rounds.misses == Misses(running=(0, 2, 0), in_all=(1, 2, 0))
