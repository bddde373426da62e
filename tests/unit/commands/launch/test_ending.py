"""A job that is asked to end gets time, stage by stage, and ends hard when asked again."""

from __future__ import annotations

import signal

import pytest

from psdist.commands.launch.ending import (
    EndByCoordinator,
    Ending,
    KillRanks,
    SignalLauncher,
    Step,
    TellRanks,
)

STAGES: list[list[Step]] = [
    [TellRanks(signal.SIGINT)],
    [EndByCoordinator(signal.SIGINT)],
    [SignalLauncher(signal.SIGTERM)],
    [SignalLauncher(signal.SIGKILL), KillRanks()],
]


def ask(ending: Ending, number: int = signal.SIGINT, **roles: bool) -> list[Step]:
    given = {"has_worker": True, "has_coordinator": True, **roles}
    return ending.on_signal(number, now_s=0.0, **given)


def test_each_further_signal_goes_one_stage_further() -> None:
    ending = Ending()
    assert [ask(ending) for _ in range(6)] == [*STAGES, [], []]
    assert ending.number == signal.SIGINT


def test_the_first_signal_is_the_one_that_counts() -> None:
    ending = Ending()
    assert ask(ending, signal.SIGTERM) == [TellRanks(signal.SIGTERM)]
    assert ask(ending, signal.SIGINT) == [EndByCoordinator(signal.SIGTERM)]
    assert ending.number == signal.SIGTERM


def test_without_further_signals_every_stage_has_its_time() -> None:
    ending = Ending()
    assert ending.deadline_s is None
    assert ending.on_time(now_s=1e9) == []
    steps = [ask(ending)]
    at_s: list[float] = []
    while ending.deadline_s is not None:
        assert ending.on_time(now_s=ending.deadline_s - 0.001) == []
        at_s.append(ending.deadline_s)
        steps.append(ending.on_time(now_s=ending.deadline_s))
    assert steps == STAGES
    assert at_s == [30.0, 33.0, 38.0]


@pytest.mark.parametrize(("grace_s", "scripts_s"), [(0.0, 30.0), (100.0, 100.0)])
def test_scripts_have_as_long_as_the_setting_says_and_at_least_as_slurm_gives(
    grace_s: float, scripts_s: float
) -> None:
    ending = Ending(grace_s=grace_s)
    ask(ending, signal.SIGTERM)
    assert ending.deadline_s == scripts_s


@pytest.mark.parametrize(
    ("has_worker", "has_coordinator", "first"),
    [
        (False, True, EndByCoordinator(signal.SIGINT)),
        (False, False, SignalLauncher(signal.SIGTERM)),
        (True, False, TellRanks(signal.SIGINT)),
    ],
)
def test_who_is_told_first_depends_on_who_is_on_this_host(
    has_worker: bool, has_coordinator: bool, first: Step
) -> None:
    assert ask(Ending(), has_worker=has_worker, has_coordinator=has_coordinator) == [first]
