"""What each mode demands of a round, and which schedules of modes there are."""

from __future__ import annotations

import pytest

from psdist.errors import ConfigError
from psdist.protocol.header import NEVER
from psdist.servers.protocol.chunks.policy import (
    BARRED,
    Applying,
    Async,
    Changing,
    Scheduled,
    Ssp,
    Sync,
    policy_for,
)


@pytest.mark.parametrize(
    ("mode", "staleness", "needed", "applying"),
    [
        ("sync", 3, [0, 1, 7], Applying.GATHERED),
        ("ssp", 0, [0, 1, 7], Applying.ON_ARRIVAL),
        ("ssp", 3, [-3, -2, 4], Applying.ON_ARRIVAL),
        ("async", 3, [0, 0, 0], Applying.ON_ARRIVAL),
    ],
)
def test_what_a_mode_demands_of_rounds_0_1_and_7(
    mode: str, staleness: int, needed: list[int], applying: Applying
) -> None:
    policy = policy_for(mode, staleness=staleness)
    assert [policy.required_min_done(each) for each in (0, 1, 7)] == needed
    assert policy.applying is applying


def test_a_mode_or_a_bound_that_is_none_is_an_error() -> None:
    with pytest.raises(ConfigError, match="mode = 'turbo': allowed are sync, ssp and async"):
        policy_for("turbo", staleness=0)
    with pytest.raises(ConfigError, match="staleness = -1: the bound must be 0 or more"):
        policy_for("ssp", staleness=-1)
    assert policy_for("sync", staleness=-1) == Sync()


def test_each_round_has_the_rule_of_the_last_part_that_has_begun() -> None:
    policy = Scheduled(((0, Ssp(3)), (5, Ssp(0)), (8, Async())))
    assert [policy.required_min_done(each) for each in (0, 4, 5, 7, 8, 20)] == [-3, 1, 5, 7, 0, 0]
    assert policy.applying is Applying.ON_ARRIVAL
    assert Scheduled(((0, Sync()),)).applying is Applying.GATHERED


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 5, 3), (0, 5, 5)])
def test_a_schedule_begins_at_round_0_and_goes_on_in_order(starts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="a schedule of policies that begin at the rounds"):
        Scheduled(tuple((start, Ssp(1)) for start in starts))


def test_a_schedule_with_sync_and_others_says_of_each_round_how_its_updates_are_applied() -> None:
    policy = Scheduled(((0, Sync()), (2, Ssp(1)), (4, Async()), (6, Sync())))
    assert policy.applying is Applying.BY_ROUND
    assert [policy.is_gathered(each) for each in range(8)] == [
        *(True, True),
        *(False, False, False, False),
        *(True, True),
    ]
    assert [policy.required_min_done(each) for each in range(8)] == [0, 1, 1, 2, 0, 0, 6, 7]


def test_while_a_change_is_proposed_nothing_later_is_allowed_than_what_was_sent() -> None:
    policy = Changing(Async())
    policy.propose(highest_sent=4)
    assert [policy.required_min_done(each) for each in (0, 4, 5, 6)] == [0, 0, BARRED, BARRED]
    assert BARRED > NEVER  # which is min_done where nobody is waited for
    policy.commit(6, Sync())
    assert [policy.required_min_done(each) for each in (4, 5, 6, 7)] == [0, 0, 6, 7]
    assert [policy.is_gathered(each) for each in (5, 6)] == [False, True]


def test_a_change_takes_the_place_of_one_that_no_round_has_come_to() -> None:
    policy = Changing(Sync())
    for start, later in ((6, Ssp(3)), (6, Async()), (9, Sync())):
        policy.propose(highest_sent=start - 1)
        policy.commit(start, later)
    assert [policy.required_min_done(each) for each in (5, 6, 8, 9)] == [5, 0, 0, 9]
    policy.commit(0, Ssp(2))
    assert [policy.required_min_done(each) for each in (0, 9)] == [-2, 7]


def test_where_the_mode_stays_a_change_bars_and_lets_go() -> None:
    policy = Changing(Sync(), keeps_mode=True)
    assert policy.applying is Applying.GATHERED
    assert Changing(Sync()).applying is Applying.BY_ROUND
    policy.propose(highest_sent=4)
    assert [policy.required_min_done(each) for each in (4, 5)] == [4, BARRED]
    policy.release()
    assert [policy.required_min_done(each) for each in (4, 5)] == [4, 5]
