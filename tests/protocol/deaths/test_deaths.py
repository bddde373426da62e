"""Workers fail at random moments of seeded schedules, and the others continue: rules hold, every
surviving rank finishes, and what was acknowledged is in the final parameters once.

More by hand: ``python -m tests.protocol.deaths.test_deaths 5000``.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from psdist.errors import PeerLostError
from psdist.protocol.control import Evict, MembershipChanged
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.state import ServerCore
from psdist.servers.set_loop import SetLoop
from psdist.workers.protocol.core import WorkerCore
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.surviving import (
    deaths_of,
    play_with_deaths,
    prove_survival,
    schedule_with_deaths,
)

SEEDS = range(40)
MANY = range(1000, 1400)


def play_and_prove(seeds: range, **broken: Any) -> Counter[str]:
    """Play the seeds; return the situations that occurred, with counts."""
    met: Counter[str] = Counter()
    for seed in seeds:
        job = play_with_deaths(seed, **broken)
        try:
            prove_survival(job)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        died = deaths_of(job)
        met[f"{job.schedule.mode}, {min(len(died), 2)} deaths"] += 1
        met["chief"] += 0 in died
        met["several sets"] += bool(died and job.schedule.more_sets)
        met["others of the group"] += bool(job.buried)
        met["inherited"] += sum(
            bool((log.events["kind"] == 10).any())
            for each in job.sets
            for log in each.history().servers
        )
    return met


def test_the_living_finish_and_every_rule_holds() -> None:
    met = play_and_prove(SEEDS)
    for what in ("sync, 1 deaths", "ssp, 1 deaths", "async, 1 deaths", "ssp, 2 deaths"):
        assert met[what], met
    for what in ("chief", "several sets", "others of the group", "inherited"):
        assert met[what], met


@pytest.mark.slow
def test_many_more() -> None:
    play_and_prove(MANY)


def test_with_clipping_too_the_living_finish() -> None:
    """The norm is of contributors that may differ from chunk to chunk."""
    num_deaths = 0
    for seed in range(200, 210):
        schedule = replace(schedule_with_deaths(seed), mode="sync", clipping=1.0)
        job = play_with_deaths(seed, schedule=schedule)
        assert not job.errors, seed
        assert not job.network.unfinished, f"seed {seed}: {job.network.unfinished}"
        num_deaths += len(deaths_of(job))
    assert num_deaths > 5


def test_one_death_more_than_is_allowed_ends_the_job_for_all_with_one_error() -> None:
    schedule = Schedule(seed=3, group_sizes=(1, 1, 1), iterations=(40,) * 3, collectives=((),) * 3)
    schedule = replace(schedule, compute_s=(1e-3,) * 3)
    job = VirtualJob(schedule, max_deaths=1)
    events, deaths = 0, {200: 1, 400: 2}
    while job.network.step():
        events += 1
        if events in deaths:
            job.dead = worker_id(deaths[events])
            job.network.crash(job.dead)
    error = job.errors[0]
    assert isinstance(error, PeerLostError)
    assert str(error).startswith(
        "worker 2 has failed; which is death 2, and failures.max_deaths = 1: restart"
    )


def test_a_server_that_does_nothing_about_a_death_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take_in(core: ServerCore, _peer: int, message: Evict) -> list[Any]:
        core._membership.generation = message.generation
        return []

    monkeypatch.setattr(ServerCore, "_on_evict", take_in)
    with pytest.raises(AssertionError, match="wait"):
        play_and_prove(SEEDS)


def test_a_worker_that_does_not_hear_that_its_group_is_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hear(_core: WorkerCore, _peer: int, _message: MembershipChanged) -> list[Any]:
        return []

    monkeypatch.setattr(WorkerCore, "_on_survive", hear)
    with pytest.raises(AssertionError, match="wait for ever"):
        play_and_prove(SEEDS)


class ForgetsInheritance(SetLoop):
    """Its history does not name the failed workers' updates that will be contained."""

    def _inherit(self, action: Any) -> None:
        del action


def test_a_server_that_does_not_say_what_it_inherits_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"stopped|dead|belong|before the group"):
        play_and_prove([36], make_set=ForgetsInheritance)


if __name__ == "__main__":
    print(play_and_prove(range(int(sys.argv[1]))))
