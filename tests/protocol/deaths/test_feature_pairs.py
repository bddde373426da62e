"""Spares and shrinking groups with every feature that servers and the coordinator see: seeded
schedules on the virtual network, proved as the others of this folder.

A feature of the script alone (local steps, a pipeline, overlap, a frozen moment, checkpoints) sends
the same messages; tests/training/test_feature_pairs.py plays these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from psdist.config.modes import first_mode, has_range, mode_by, schedule_of
from psdist.config.settings import RunConfig
from psdist.ranks.wire import wire_of
from tests.support.feature_pairs import covering, features_played, together
from tests.support.virtual.going_on import (
    play_with_groups_that_go_on,
    schedule_with_larger_groups,
)
from tests.support.virtual.going_on_with_buddies import play_with_groups_and_servers
from tests.support.virtual.joining import play_with_joins
from tests.support.virtual.schedule import Schedule
from tests.support.virtual.surviving import prove_survival, schedule_with_deaths

OF_SCRIPTS = (
    *("pipeline", "freeze_step", "local_steps", "global_batch", "overlap", "rollback"),
    *("checkpoint_every", "on_nonfinite", "feedback", "error_budget", "loss_patience"),
)
OF_MACHINES = ("encode_on", "server_device", "group_tier", "trace", "backup")
SPARES = {"spares": 1, "max_deaths": 1}
SHRINKING = {"on_group_death": "reform", "max_deaths": 1}
EXAMPLES: list[Mapping[str, Any]] = [
    SPARES,
    SHRINKING,
    *(
        example
        for example in features_played(without=(*OF_SCRIPTS, *OF_MACHINES))
        if example not in (SPARES, SHRINKING)
    ),
]
RUNS = covering(EXAMPLES, first=(0, 1))


def changed(schedule: Schedule, config: RunConfig) -> Schedule:
    """Return the schedule with the mode and the rules of the settings."""
    first, *later = schedule_of(config)
    return replace(
        schedule,
        mode=first_mode(config).mode,
        staleness=first.staleness,
        later=tuple(later),
        mode_rate=1.0 if config.set_mode == "allowed" else 0.0,
        is_auto=mode_by(config) == "auto" and not has_range(config),
        highest=config.staleness_to or 0,
        stale_lr=config.stale_lr,
        compensation=config.delay_compensation,
    )


def play(run: tuple[int, ...], seed: int) -> None:
    settings = together([EXAMPLES[each] for each in run])
    assert settings is not None
    config = RunConfig(**settings)
    wire = wire_of(config)
    has_replicas = config.replication == "buddy"
    if not config.spares:
        schedule = changed(schedule_with_larger_groups(seed), config)
        if has_replicas:
            schedule = replace(schedule, servers=max(3, schedule.servers), has_buddies=True)
            job = play_with_groups_and_servers(seed, schedule=schedule, wire=wire)
        else:
            job = play_with_groups_that_go_on(seed, schedule=schedule, wire=wire)
    else:
        schedule = changed(schedule_with_deaths(seed), config)
        job = play_with_joins(seed, base=schedule, server=2 if has_replicas else None, wire=wire)
    prove_survival(job)


def prove(seed: int) -> None:
    for run in RUNS:
        try:
            play(run, seed)
        except Exception as error:  # say which features, whatever went wrong
            settings = together([EXAMPLES[each] for each in run])
            raise AssertionError(f"seed {seed}: {settings}: {error}") from error


def test_every_allowed_pair_with_spares_or_shrinking_groups_is_proved() -> None:
    prove(0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_more_seeds() -> None:
    for seed in range(1, 10):
        prove(seed)
