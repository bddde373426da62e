"""The mode changes, by a schedule, by the script or by the coordinator, and workers fail at random
moments, between the two phases of a change, too: rules hold, every surviving rank finishes, and
every value is what arithmetic says.

More by hand: ``python -m tests.protocol.deaths.test_mode_deaths 2000``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from psdist.controller.observed import GroupCame
from psdist.servers.protocol.chunks import ChunkState
from psdist.servers.protocol.rules import RoundRule
from tests.support.virtual.going_on import schedule_with_larger_groups
from tests.support.virtual.joining import play_with_joins
from tests.support.virtual.mode_buddies import Telling
from tests.support.virtual.mode_deaths import play_with_mode_deaths, schedule_with_mode_deaths
from tests.support.virtual.surviving import deaths_of, prove_survival

SEEDS = range(30)
GO_ON = (0, 2, 3, 4, 6, 10, 11, 28, 32, 35)
TELLS = "another worker tells"
WITH_JOINS = range(6, 19)
MANY = range(1000, 1300)


def play_and_prove(seeds: range, **broken: Any) -> Counter[str]:
    """Play the seeds; return the situations that occurred, with counts."""
    met: Counter[str] = Counter()
    for seed in seeds:
        job = play_with_mode_deaths(seed, **broken)
        try:
            prove_survival(job)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        changes, died = len(job.modes) - 1, deaths_of(job)
        met[f"by {job.schedule.mode_by}"] += bool(changes and died)
        met["to sync"] += bool(died) and any(each.mode == "sync" for each in job.modes[1:])
        met["from sync"] += bool(died and changes) and job.modes[0].mode == "sync"
        met["several sets"] += bool(changes and died and job.schedule.more_sets)
        met["two died"] += bool(changes and len(died) > 1)
        met += job.met
    return met


def test_the_living_finish_and_every_round_keeps_its_rule() -> None:
    met = play_and_prove(SEEDS)
    for what in ("by schedule", "by script", "by auto", "to sync", "from sync", "several sets"):
        assert met[what], met
    for what in ("two died", "between the phases", "proposed while a death was told"):
        assert met[what], met


def play_and_prove_joins(seeds: range) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in seeds:
        job = play_with_joins(seed, base=schedule_with_mode_deaths(seed))
        try:
            prove_survival(job)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        met[f"by {job.schedule.mode_by}"] += bool(len(job.modes) > 1 and job.joined)
    return met


def test_substitutes_that_join_find_the_mode_of_then() -> None:
    met = play_and_prove_joins(WITH_JOINS)
    for what in ("by schedule", "by auto"):
        assert met[what], met


def play_and_prove_groups_that_go_on(seeds: Iterable[int]) -> Counter[str]:
    """As :func:`play_and_prove`, where groups continue without those of theirs that fail."""
    met: Counter[str] = Counter()
    for seed in seeds:
        schedule = schedule_with_larger_groups(seed, schedule_with_mode_deaths(seed))
        if schedule.mode_by == "auto":
            longer = tuple(each + 6 for each in schedule.iterations)
            schedule = replace(schedule, is_auto=True, iterations=longer)
        job = play_with_mode_deaths(seed, schedule=schedule, reforms=True, make_worker=Telling)
        try:
            prove_survival(job)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        died = set(deaths_of(job))
        goes_on = any(died & set(each) and not died.issuperset(each) for each in job.groups)
        met[f"by {job.schedule.mode_by}"] += bool(len(job.modes) > 1 and goes_on)
        met[TELLS] += any(isinstance(each, GroupCame) for each in job.reported)
        met["a leader"] += goes_on and any(members[0] in died for members in job.groups)
        met += job.met
    return met


def test_groups_that_go_on_without_their_dead_keep_every_rounds_rule() -> None:
    met = play_and_prove_groups_that_go_on(GO_ON)
    for what in ("by schedule", "by script", "a leader", "between the phases", TELLS):
        assert met[what], met


@pytest.mark.slow
def test_many_more() -> None:
    play_and_prove(MANY)
    play_and_prove_joins(MANY)
    play_and_prove_groups_that_go_on(MANY)


def test_a_server_that_holds_nothing_back_behind_a_death_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hold = RoundRule.hold_rounds

    def hold_where_all_live(rule: RoundRule, highest: int, chunks: Iterable[ChunkState]) -> None:
        hold(rule, highest + 1000 * rule.context.membership.generation, chunks)

    monkeypatch.setattr(RoundRule, "hold_rounds", hold_where_all_live)
    with pytest.raises(AssertionError, match=r"seed \d+"):
        play_and_prove(range(45, 46))


if __name__ == "__main__":
    many = range(int(sys.argv[1]))
    print(play_and_prove(many), play_and_prove_joins(many), play_and_prove_groups_that_go_on(many))
