"""The registrar dies, and its deputy goes on in its place: under seeded schedules, with real
tensors, every rank finishes, every collective has brought what it brings, every line for people was
written once, and in sync the parameters are those of the run without the death.

More by hand: ``python -m tests.protocol.test_registrar_deaths 5000``.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch

from psdist.errors import PeerLostError, ServersLostError
from psdist.protocol.ids import REGISTRAR
from tests.support.virtual.both_deaths import taken_over
from tests.support.virtual.proof import prove
from tests.support.virtual.registrar_deaths import (
    play_with_others,
    play_with_registrar_death,
)
from tests.support.virtual.surviving import deaths_of, prove_survival

SETTING_UP = "while a model was being set up"


def play_and_prove(seeds: Any) -> Counter[str]:
    """What was met, and how often."""
    met: Counter[str] = Counter()
    for seed in seeds:
        job, undisturbed = play_with_registrar_death(seed)
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
        met["registrar"] += REGISTRAR in taken
        met["and workers"] += bool(REGISTRAR in taken and died)
        met["and another server"] += len(taken) > 1
    return met


if __name__ == "__main__":
    print(play_and_prove(range(int(sys.argv[1]))))
    print(play_others_and_prove(range(int(sys.argv[1]))))
