"""What each mode demands of a round, and which schedules of modes there are."""

from __future__ import annotations

import pytest

from psdist.errors import ConfigError
from psdist.servers.protocol.chunks.policy import (
    Applying,
    Async,
    Policy,
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


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (((0, Sync()), (2, Ssp(0))), "from round 2 on updates would be applied on arrival instead"),
        (((0, Async()), (2, Ssp(1)), (3, Sync())), "from round 3 on .* gathered instead of on arr"),
    ],
)
def test_a_run_changes_neither_to_nor_from_sync(
    parts: tuple[tuple[int, Policy], ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Scheduled(parts)
