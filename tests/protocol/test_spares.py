"""Spares keep second copies and go on in dead servers' places: under seeded schedules, on the virtual
network, with real tensors. Whoever lives finishes, every update that was acknowledged is in the
final parameters once, and in sync the parameters are those of the run without deaths.

More by hand: ``python -m tests.protocol.test_spares FIRST LAST [registrar]``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from psdist.errors import PsdistError
from psdist.protocol.ids import is_spare, server_id, spare_id
from tests.protocol.test_refills import prove_bits
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.refills import prove_refills
from tests.support.virtual.spares import play_with_spares
from tests.support.virtual.surviving import prove_survival

SEEDS = tuple(range(12))
SEEDS_WITH_REGISTRAR = tuple(range(12))
MANY = range(1000, 1200)


def play_and_prove(seeds: Iterable[int], **broken: Any) -> Counter[str]:
    """What was met, and how often."""
    met: Counter[str] = Counter()
    for seed in seeds:
        try:
            job = play_with_spares(seed, **broken)
            prove_refills(job)
            prove_bits(job, met)
        except (AssertionError, PsdistError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        met += job.met
        met["served by a spare at the end"] += any(
            is_spare(each.host) and each.host not in job.network._dead
            for each in job.takeovers._shards
        )
    return met


if __name__ == "__main__":
    total: Counter[str] = Counter()
    num_bad = 0
    for each in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            total += play_and_prove([each], registrar_dies=sys.argv[3:] == ["registrar"])
        except Exception as error:
            num_bad += 1
            print(f"{each}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{num_bad} bad", total)
