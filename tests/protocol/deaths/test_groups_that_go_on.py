"""Workers fail at random moments of seeded schedules, and their groups continue without them: rules
hold, every surviving worker makes every iteration, what was acknowledged is in the final parameters
once, and every value is what arithmetic says.

More by hand: ``python -m tests.protocol.deaths.test_groups_that_go_on 1000 2000``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from psdist.errors import PsdistError
from psdist.history import EventKind
from psdist.servers.protocol.chunks import ChunkState
from psdist.servers.set_loop import SetLoop
from psdist.workers.group.shrinking import Agreed
from psdist.workers.protocol.transfers import Transfers
from psdist.workers.shrinking import MemberState, Outcome
from tests.support.virtual.going_on import (
    play_with_a_death_between_two_ends,
    play_with_groups_that_go_on,
)
from tests.support.virtual.surviving import deaths_of, prove_survival

CUT = (20, 22, 25, 74, 103, 116, 119, 161, 167)
"""In these a worker fails in an iteration that is pushed in part."""
HANDED_ON = (119, 161, 167)
"""in these what a dead worker had pushed waits for others then."""
SEEDS = (*range(5), 31, *CUT)
MANY = range(2000, 2300)


def play_and_prove(seeds: Iterable[int], **broken: Any) -> Counter[str]:
    """Play the seeds; return the situations that occurred, with counts."""
    met: Counter[str] = Counter()
    for seed in seeds:
        job = play_with_groups_that_go_on(seed, **broken)
        try:
            prove_survival(job)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        died = set(deaths_of(job))
        events = [log.events["kind"] for each in job.sets for log in each.history().servers]
        met[f"{job.schedule.mode}, {min(len(died), 2)} deaths"] += 1
        met["chief"] += 0 in died
        met["leader"] += any(members[0] in died for members in job.groups)
        met["another member"] += any(died & set(members[1:]) for members in job.groups)
        met["several of a group"] += any(len(died & set(each)) > 1 for each in job.groups)
        met["several sets"] += bool(died and job.schedule.more_sets)
        met["a whole group"] += any(died.issuperset(members) for members in job.groups)
        met["iterations that count in part"] += len(job.given_up)
        met["inherited"] += sum(bool((kinds == EventKind.INHERIT).any()) for kinds in events)
        met["groups that continue"] += sum(
            bool((kinds == EventKind.REFORM).any()) for kinds in events
        )
    return met


def test_groups_go_on_and_every_rule_holds() -> None:
    met = play_and_prove(SEEDS)
    for what in ("sync, 1 deaths", "ssp, 1 deaths", "async, 1 deaths", "ssp, 2 deaths", "chief"):
        assert met[what], met
    for what in ("leader", "another member", "several of a group", "several sets"):
        assert met[what], met
    for what in ("iterations that count in part", "groups that continue"):
        assert met[what], met


def test_who_dies_before_the_others_of_its_group_is_counted_up_to_its_own_death() -> None:
    """The whole group fails, one after the other (seed 170)."""
    assert play_and_prove([170])["a whole group"]


BETWEEN = range(7)


def play_between(seeds: Iterable[int]) -> Counter[str]:
    """As :func:`play_and_prove`; how often which of the three cases was met."""
    met: Counter[str] = Counter()

    def note(standings: Sequence[MemberState]) -> Outcome:
        outcome = outcome_of(standings)
        met["values are given"] += outcome.giver is not None
        met["counts in part"] += outcome.is_given_up
        numbers = {each.agreed.number for each in standings}
        met["an agreement is handed on"] += len(numbers) > 1
        return outcome

    outcome_of = Outcome.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outcome, "of", note)
        for seed in seeds:
            try:
                prove_survival(play_with_a_death_between_two_ends(seed))
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
    return met


def test_workers_that_are_not_equally_far_go_on_as_one() -> None:
    met = play_between(BETWEEN)
    for what in ("values are given", "counts in part", "an agreement is handed on"):
        assert met[what], met


def test_who_has_not_ended_an_iteration_and_begins_it_anew_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_giver(standings: Sequence[MemberState]) -> Outcome:
        return outcome_of(standings)._replace(giver=None)

    outcome_of = Outcome.of
    monkeypatch.setattr(Outcome, "of", without_giver)
    with pytest.raises((AssertionError, PsdistError, KeyError)):
        play_between(BETWEEN)


@pytest.mark.slow
def test_many_more() -> None:
    play_between(range(100, 200))
    met = play_and_prove(MANY)
    for what in ("inherited", "a whole group"):
        assert met[what], met


class DoesNotSaySo(SetLoop):
    """Its history does not record that a group continues without a failed worker."""

    def _record_membership(self, action: Any) -> None:
        if action.kind != "reform":
            super()._record_membership(action)


def test_a_server_that_does_not_say_who_is_left_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"workers|never pushed|weight|active|checksum"):
        play_and_prove(SEEDS, make_set=DoesNotSaySo)


def test_a_worker_that_leaves_the_chunks_of_the_dead_alone_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Transfers, "push_for_the_dead", lambda _transfers: [])
    with pytest.raises((AssertionError, KeyError)):
        play_and_prove(CUT)


def test_a_server_that_answers_the_dead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkState, "hand_on", lambda *_arguments, **_more: None)
    with pytest.raises(AssertionError, match="wait for ever"):
        play_and_prove(HANDED_ON)


def test_a_group_that_begins_a_half_pushed_iteration_anew_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin_anew(standings: Sequence[MemberState]) -> Outcome:
        return Outcome(max(each.agreed for each in standings), None, is_given_up=False)

    assert Outcome.of([MemberState(Agreed(1, "optimizer.step", []), True, [])]).is_given_up
    monkeypatch.setattr(Outcome, "of", begin_anew)
    with pytest.raises((AssertionError, PsdistError, KeyError)):
        play_and_prove(CUT)


if __name__ == "__main__":
    print(play_and_prove(range(int(sys.argv[1]), int(sys.argv[2]))))
