"""Workers and servers fail in one run, where servers have buddies: rules hold, every surviving rank
finishes, and what was acknowledged is in the final parameters once.

More by hand: ``python -m tests.protocol.deaths.test_both_deaths 5000``.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from psdist.errors import PsdistError
from psdist.history import EventKind
from psdist.protocol.control import Evict
from psdist.protocol.events import Frame
from psdist.protocol.ids import COORDINATOR
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.replication.records import EvictRecord, Record
from psdist.servers.protocol.replication.shard_state import ShardState
from psdist.servers.protocol.state import ServerCore
from psdist.servers.protocol.takeovers import Takeovers
from psdist.servers.protocol.views import Views
from tests.support.virtual.both_deaths import play_with_both_deaths, taken_over
from tests.support.virtual.surviving import deaths_of, prove_survival

SEEDS = range(28)
MANY = range(2000, 2300)
FOUND = (88, 250, 532, 10120, 10149)
"""Faults found: a checkpoint whose copy the failed server's replica had, but not the end of its
collective (88); a first chunk in progress that was chosen with failed groups counted (250); a
leader that had left, reported that to a server that failed, and failed as well (532); an inherited
update that no active group was left to share (10120); more answers to repeated messages at a time
than the window takes (10149)."""


def play_and_prove(seeds: Any, **broken: Any) -> Counter[str]:
    """Play the seeds; return the situations that occurred, with counts."""
    met: Counter[str] = Counter()
    for seed in seeds:
        job = play_with_both_deaths(seed, **broken)
        try:
            prove_survival(job)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        died, taken = deaths_of(job), taken_over(job)
        met[job.schedule.mode] += bool(died and taken)
        met["two servers"] += len(taken) > 1
        met["chief"] += bool(0 in died and taken)
        for each in job.sets:
            for log in each.history().servers:
                kinds = log.events["kind"]
                if (kinds == EventKind.TAKEOVER).any() and (kinds == EventKind.DEATH).any():
                    is_first = np.argmax(kinds == EventKind.TAKEOVER) > np.argmax(
                        kinds == EventKind.DEATH
                    )
                    met["worker first" if is_first else "server first"] += 1
    return met


def test_the_living_finish_and_every_rule_holds() -> None:
    met = play_and_prove(SEEDS)
    for what in ("sync", "ssp", "async", "two servers", "chief", "worker first", "server first"):
        assert met[what], met


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found(seed: int) -> None:
    play_and_prove([seed])


@pytest.mark.slow
def test_many_more() -> None:
    play_and_prove(MANY)


def forget_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerCore, "_take_out_failed", lambda _core: None)


def tell_nobody_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_again(_deaths: Views, _server: int) -> list[SendControl]:
        return []

    monkeypatch.setattr(Views, "ask_again", ask_again)


def let_nobody_depart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Takeovers, "on_done_lost", lambda _takeovers, _worker, _job: [])


def log_no_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = ShardState.apply

    def forgetful(state: ShardState, record: Record, carried: Frame) -> Any:
        changes = apply(state, record, carried)
        return [] if isinstance(record, EvictRecord) else changes

    monkeypatch.setattr(ShardState, "apply", forgetful)


def keep_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = ShardState.apply

    def forgetful(state: ShardState, record: Record, carried: Frame) -> Any:
        changes = apply(state, record, carried)
        state.is_kept = False
        return changes

    monkeypatch.setattr(ShardState, "apply", forgetful)


@pytest.mark.parametrize(
    ("plant", "seeds"),
    [
        (forget_the_dead, SEEDS),
        (tell_nobody_again, SEEDS),
        (let_nobody_depart, (532,)),
        (log_no_deaths, SEEDS),
        (keep_twice, (88,)),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_mistake_is_noticed(plant: Any, seeds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, PsdistError)):
        play_and_prove(seeds)


def test_a_generation_that_was_taken_in_is_not_taken_in_again() -> None:
    """The coordinator asks who continues for a dead server whatever that may not have heard."""
    job = play_with_both_deaths(1)
    prove_survival(job)
    for loop in job.servers:
        for hosted in loop.hosted:
            for each in hosted.sets:
                generation = each.core.generation
                again = Evict(generation=generation, dead=[0])
                assert each.core._on_evict(COORDINATOR, again) == []


if __name__ == "__main__":
    print(play_and_prove(range(int(sys.argv[1]))))
