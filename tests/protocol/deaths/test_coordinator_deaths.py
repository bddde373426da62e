"""The coordinator fails, and its standby takes over: under seeded schedules, with real
tensors, every rank finishes, every collective has brought what it brings, every line for people was
written once, and in sync the parameters are those of the run without the death.

More by hand: ``python -m tests.protocol.deaths.test_coordinator_deaths 5000``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from psdist.errors import PeerLostError, PsdistError, ServersLostError
from psdist.protocol.coordinator_line import CoordinatorLine
from psdist.protocol.ids import COORDINATOR, server_id, worker_id
from psdist.servers.protocol.checkpoints import Checkpoints
from psdist.servers.protocol.coordinator import Complete
from psdist.servers.protocol.failover.coordinator_log import CoordinatorLog
from psdist.servers.protocol.failover.lines import Lines
from psdist.servers.protocol.takeovers import Takeovers
from psdist.servers.protocol.views import Survived
from psdist.transport.lines import LineTransport
from tests.support.coordinators import part_of
from tests.support.virtual.both_deaths import taken_over
from tests.support.virtual.coordinator_deaths import (
    play_until,
    play_with_coordinator_death,
    play_with_others,
)
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.proof import prove
from tests.support.virtual.server_deaths import with_buddies
from tests.support.virtual.surviving import deaths_of, prove_survival

SEEDS = range(14)
SEEDS_OF_OTHERS = range(200, 210)
MANY = range(3000, 3300)
FOUND = (24, 51, 45, 1288, 20153)
"""Faults found: messages to the shard of server 0 when the coordinator had moved and the shard had
not (24); a server that was asked twice whether a collective has ended (51); a coordinator that
ended before every rank had its address (45); a model whose set-up began between the failure and the
notice of the takeover (1288); a second set, described after the failure, whose next replica did not
learn that another server had taken over (20153)."""
SETTING_UP = "while a model was being set up"


def play_and_prove(seeds: Any) -> Counter[str]:
    """Play the seeds; return the situations that occurred, with counts."""
    met: Counter[str] = Counter()
    for seed in seeds:
        job, undisturbed = play_with_coordinator_death(seed)
        try:
            if job.errors:
                assert all(isinstance(error, PeerLostError) for error in job.errors.values())
                assert any(SETTING_UP in str(error) for error in job.errors.values())
                met["set up"] += 1
                continue
            assert not job.network.unfinished, f"wait for ever: {job.network.unfinished}"
            prove(job)
            if job.schedule.mode == "sync" and job.schedule.has_model:
                for mine, other in zip(job.sets, undisturbed.sets, strict=True):
                    assert torch.equal(mine.parameters(), other.parameters())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        met[job.schedule.mode] += job.has_succeeded
        met["behind the end"] += not job.has_succeeded
        met["complete"] += job.has_succeeded and not taken_over(job)
    return met


def play_others_and_prove(seeds: Any, **broken: Any) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in seeds:
        job = play_with_others(seed, **broken)
        try:
            prove_survival(job)
        except (AssertionError, ServersLostError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        taken, died = taken_over(job), deaths_of(job)
        met["registrar"] += COORDINATOR in taken
        met["and workers"] += bool(COORDINATOR in taken and died)
        met["and another server"] += len(taken) > 1
    return met


def test_the_death_of_the_coordinator_is_survived_at_any_moment() -> None:
    met = play_and_prove(SEEDS)
    for what in ("sync", "ssp", "async", "complete", "set up"):
        assert met[what], met


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found(seed: int) -> None:
    play_and_prove([seed])


def test_so_it_is_with_workers_and_another_server() -> None:
    met = play_others_and_prove(SEEDS_OF_OTHERS)
    for what in ("registrar", "and workers", "and another server"):
        assert met[what], met


@pytest.mark.slow
def test_many_more() -> None:
    play_and_prove(MANY)
    play_others_and_prove(MANY)


# -- at each phase ---------------------------------------------------------------------------------


def has_come(job: VirtualJob) -> bool:
    """True if a worker waits in a collective, after the set-up, and others are still to come."""
    coordinator = job.coordinator
    return coordinator.is_ready and any(
        each.entered and not each.is_complete for each in coordinator.collectives.values()
    )


def is_resuming(job: VirtualJob) -> bool:
    """Some server has answered Resume of a collective, and some has not."""
    coordinator = job.coordinator
    return coordinator.is_ready and any(each.answered for each in coordinator.collectives.values())


def is_writing(job: VirtualJob) -> bool:
    writing = part_of(job.coordinator, Checkpoints)._writing
    return writing is not None and bool(writing.files)


def is_finishing(job: VirtualJob) -> bool:
    return bool(job.coordinator.servers)


def is_complete(job: VirtualJob) -> bool:
    """People have been told, and some rank may not know yet."""
    return any(isinstance(each, Complete) for each in job.reported)


def has_noted(job: VirtualJob) -> bool:
    """True if the standby has nothing yet of the coordinator's last message."""
    assert job.coordinator_log is not None
    assert job.second is not None
    return job.coordinator.is_ready and job.coordinator_log._number > job.second._number


@pytest.mark.parametrize(
    "phase",
    [has_come, is_resuming, is_writing, is_finishing, is_complete, has_noted],
    ids=lambda phase: phase.__name__,
)
def test_at_this_phase(phase: Callable[[VirtualJob], bool]) -> None:
    seen = 0
    for seed in range(40):
        job = play_until(seed, phase)
        if job is None or not job.schedule.has_model:
            continue
        assert not job.errors, f"seed {seed}: {job.errors}"
        prove(job)
        seen += job.has_succeeded
        if seen == 2:
            break
    assert seen == 2


def settling(job: VirtualJob) -> bool:
    """A death was proposed, and some server has not taken it in."""
    return job.coordinator.membership.is_settling


def half_settled(job: VirtualJob) -> bool:
    """Some server has, too."""
    deaths = job.coordinator.membership
    return deaths.is_settling and len(deaths._awaited) < job.schedule.servers


def survivors_told(job: VirtualJob) -> bool:
    """Servers have, and some worker may have heard of it."""
    return any(isinstance(each, Survived) for each in job.reported)


@pytest.mark.parametrize("phase", [settling, half_settled, survivors_told])
def test_while_it_declares_a_worker_dead(phase: Callable[[VirtualJob], bool]) -> None:
    schedule = Schedule(
        seed=1,
        servers=3,
        group_sizes=(1, 2, 1),
        iterations=(8,) * 3,
        collectives=((4,),) * 3,
        compute_s=(1e-3,) * 3,
        num_chunks=6,
        has_buddies=True,
    )
    for mode in ("sync", "ssp", "async"):
        job = VirtualJob(replace(schedule, mode=mode), is_watched=False, max_deaths=9)
        job.network.run(until=lambda job=job: min(job.clocks_once_ready(), default=0) > 2)
        job.network.crash(worker_id(3))
        job.network.run(until=lambda job=job: phase(job))
        job.network.crash(COORDINATOR)
        job.run()
        assert job.has_succeeded
        prove_survival(job)
        assert deaths_of(job) == [3]


def test_while_another_server_s_place_is_taken() -> None:
    """Its replica is asked, has answered, or all ranks have the answer: no rank requests its place
    twice."""
    schedule = Schedule(
        seed=2, servers=4, iterations=(8, 8), num_chunks=8, mode="ssp", has_buddies=True
    )
    for seed in range(2):
        for behind in (0, 2, 6, 12, 20, 40):
            job = VirtualJob(replace(schedule, seed=seed), is_watched=False, max_deaths=9)
            job.network.run(until=lambda job=job: min(job.clocks_once_ready(), default=0) > 2)
            job.network.crash(server_id(2))
            job.network.run(until=lambda job=job: bool(part_of(job.coordinator, Takeovers).failed))
            for _ in range(behind):
                job.network.step()
            job.network.crash(COORDINATOR)
            job.run()
            assert job.has_succeeded
            assert taken_over(job) == [0, 2]
            prove_survival(job)


def test_what_follows_leaves_when_the_standby_knows() -> None:
    """And not at once, or this would show nothing."""
    held = 0
    for seed in range(3):
        job = VirtualJob(with_buddies(seed), is_watched=False)
        coordinator_log, second = job.coordinator_log, job.second
        assert coordinator_log is not None
        assert second is not None
        let_go = coordinator_log._let_go

        def look(number: int, second: CoordinatorLog = second, let_go: Any = let_go) -> Any:
            assert second._number >= number
            return let_go(number)

        coordinator_log._let_go = look  # type: ignore[method-assign]
        while job.network.step():
            held += len(coordinator_log._pending) > 1
        prove(job)
    assert held > 20


# -- no process has the coordinator's state
# ----------------------------------------------------------------------


def play_without_both(order: tuple[int, int], apart: int) -> VirtualJob:
    """Coordinator and standby fail, ``apart`` events one after the other."""
    schedule = Schedule(
        seed=4, servers=4, iterations=(40, 40), num_chunks=8, mode="async", has_buddies=True
    )
    job = VirtualJob(schedule, is_watched=False)
    job.network.run(until=lambda: min(job.clocks_once_ready(), default=0) > 2)
    job.dead = order[0]
    job.network.crash(server_id(order[0]))
    for _ in range(apart):
        job.network.step()
    assert len(job.network.unfinished) > 2
    job.network.crash(server_id(order[1]))
    job.run()
    return job


ORDERS = pytest.mark.parametrize(
    "order", [(0, 1), (1, 0)], ids=["coordinator first", "standby first"]
)


@ORDERS
@pytest.mark.parametrize("apart", [0, 20])
def test_without_coordinator_and_standby_the_job_ends_with_one_error_that_names_both(
    order: tuple[int, int], apart: int
) -> None:
    job = play_without_both(order, apart)
    living = {server_id(2), server_id(3), worker_id(0), worker_id(1)}
    assert job.errors.keys() == living
    for error in job.errors.values():
        assert isinstance(error, ServersLostError)
        assert "server 0" in str(error)
        assert "server 1" in str(error)
        assert "--resume" in str(error)


@ORDERS
def test_with_another_standby_it_goes_on(order: tuple[int, int]) -> None:
    job = play_without_both(order, 2000)
    assert not job.errors
    assert job.num_successions == 2 - (order == (1, 0))
    prove_survival(job)


# -- mistakes are noticed --------------------------------------------------------------------------


def say_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = CoordinatorLine._follow
    monkeypatch.setattr(CoordinatorLine, "_follow", lambda *each: follow(*each)[:2])


def say_all_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoordinatorLine, "_forget", lambda _line, _count: None)


def tell_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    follows = Lines.on_follows

    def forgetful(lines: Lines, peer: int, received: int) -> list[Any]:
        follows(lines, peer, received)
        return []

    monkeypatch.setattr(Lines, "on_follows", forgetful)


def stop_the_standby_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lines, "has_received_all", lambda _lines, _peers: True)


def forget_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    succeed = CoordinatorLog.succeed

    monkeypatch.setattr(
        CoordinatorLog, "succeed", lambda each, who, **_more: succeed(each, who, lost={})
    )


def report_all_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.virtual.job.num_done", lambda _done, _wanted: 0)


def report_nothing_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.virtual.job.num_done", lambda _done, wanted: len(wanted))


def serve_the_shard_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages to server 0 reach its successor before that has been declared."""
    never = property(lambda _: False, set_nothing)
    monkeypatch.setattr(LineTransport, "_is_shard_elsewhere", never, raising=False)


def set_nothing(_object: Any, _value: bool) -> None: ...


def ask_server_0_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    never = property(lambda _: False, set_nothing)
    monkeypatch.setattr(CoordinatorLog, "_is_shard_lost", never, raising=False)


@pytest.mark.parametrize(
    "plant",
    [
        say_nothing_again,
        say_all_again,
        tell_nothing_again,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                stop_the_standby_with_all,
                report_all_again,
                report_nothing_undone,
                serve_the_shard_too_early,
                ask_server_0_twice,
                forget_the_dead,
            )
        ),
    ],
    ids=lambda each: each.__name__,
)
def test_a_mistake_is_noticed(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, PsdistError)):
        play_and_prove(range(40)) + play_others_and_prove(range(200, 240))


if __name__ == "__main__":
    print(play_and_prove(range(int(sys.argv[1]))))
    print(play_others_and_prove(range(int(sys.argv[1]))))
