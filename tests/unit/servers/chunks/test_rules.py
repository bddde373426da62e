"""The least ``min_done`` that each rule requires, and how the mode changes at a round."""

from __future__ import annotations

import pytest

from psdist.errors import ConfigError, InvariantError, ProtocolError
from psdist.protocol.header import NEVER
from psdist.servers.protocol.actions import ChangeMode, SumMoved
from psdist.servers.protocol.assembly import rule_for
from psdist.servers.protocol.chunks.replies import BARRED
from psdist.servers.protocol.rules import RoundRule
from psdist.servers.protocol.rules.switching import Switching
from tests.support.rules import made, switching


def required(rule: RoundRule, *rounds: int) -> list[int]:
    return [rule.replies.required_min_done(each) for each in rounds]


def switcher(*modes: tuple[int, str, int]) -> Switching:
    rule = made(switching(*modes))  # type: ignore[arg-type] # modes of a table
    assert isinstance(rule, Switching)
    return rule


@pytest.mark.parametrize(
    ("mode", "staleness", "needed"),
    [
        ("sync", 3, [0, 1, 7]),
        ("ssp", 0, [0, 1, 7]),
        ("ssp", 3, [-3, -2, 4]),
        ("async", 3, [0, 0, 0]),
    ],
)
def test_what_a_mode_requires_of_rounds_0_1_and_7(
    mode: str, staleness: int, needed: list[int]
) -> None:
    assert required(made(rule_for(mode, staleness=staleness)), 0, 1, 7) == needed


def test_an_unknown_mode_or_a_negative_bound_is_an_error() -> None:
    with pytest.raises(ConfigError, match="mode = 'turbo': allowed are sync, ssp and async"):
        rule_for("turbo")
    with pytest.raises(ConfigError, match="staleness = -1: the bound must be 0 or more"):
        made(rule_for("ssp", staleness=-1))


def test_each_round_has_the_mode_that_began_last() -> None:
    rule = switcher((0, "ssp", 3), (5, "ssp", 0), (8, "async", 0))
    assert required(rule, 0, 4, 5, 7, 8, 20) == [-3, 1, 5, 7, 0, 0]


@pytest.mark.parametrize("starts", [(), (1,), (3, 0)])
def test_the_first_mode_of_a_run_begins_at_round_0(starts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="the first must begin at round 0"):
        switcher(*((start, "ssp", 1) for start in starts))


def test_a_run_with_sync_and_others_says_of_each_round_how_its_updates_are_applied() -> None:
    rule = switcher((0, "sync", 0), (2, "ssp", 1), (4, "async", 0), (6, "sync", 0))
    assert [rule.is_gathered(each) for each in range(8)] == [
        *(True, True),
        *(False, False, False, False),
        *(True, True),
    ]
    assert required(rule, *range(8)) == [0, 1, 1, 2, 0, 0, 6, 7]


def test_while_a_change_is_proposed_no_later_round_is_allowed_than_the_highest_one_sent() -> None:
    rule = switcher((0, "async", 0))
    rule.hold_rounds(4, ())
    assert required(rule, 0, 4, 5, 6) == [0, 0, BARRED, BARRED]
    assert BARRED > NEVER  # which is min_done where no group is waited for
    rule.change_mode(ChangeMode(6, "sync", 0))
    assert required(rule, 4, 5, 6, 7) == [0, 0, 6, 7]
    assert [rule.is_gathered(each) for each in (5, 6)] == [False, True]


def test_a_change_replaces_a_change_that_no_round_has_come_to() -> None:
    rule = switcher((0, "sync", 0))
    later: tuple[ChangeMode, ...] = (
        ChangeMode(6, "ssp", 3), ChangeMode(6, "async", 0), ChangeMode(9, "sync", 0),
    )  # fmt: skip
    for change in later:
        rule.hold_rounds(change.round - 1, ())
        rule.change_mode(change)
    assert required(rule, 5, 6, 8, 9) == [5, 0, 0, 9]
    rule.change_mode(ChangeMode(0, "ssp", 2))
    assert required(rule, 0, 9) == [-2, 7]
    assert required(switcher((0, "sync", 0), (6, "ssp", 1), (3, "async", 0)), 2, 3, 6) == [2, 0, 0]


def test_in_one_mode_a_hold_bars_rounds_until_its_release() -> None:
    rule = made(rule_for("sync"))
    rule.hold_rounds(4, ())
    assert required(rule, 4, 5) == [4, BARRED]
    rule.replies.release_rounds()
    assert required(rule, 4, 5) == [4, 5]


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
def test_a_rule_without_held_memory_takes_no_news_of_it(mode: str) -> None:
    with pytest.raises(InvariantError, match="chunk 3 is in held memory, and this rule holds none"):
        made(rule_for(mode)).on_held(SumMoved(3, ()))


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
def test_a_run_in_one_mode_refuses_another(mode: str) -> None:
    with pytest.raises(ProtocolError, match="which is the same for the whole run"):
        made(rule_for(mode)).change_mode(ChangeMode(3, "sync", 0))
