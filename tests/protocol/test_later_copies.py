"""Checkpoints whose chunks are copied after the cut, while workers continue at once: each is that
of the cut, bit by bit, for every order of copies and failures.

More by hand: ``python -m tests.protocol.test_later_copies 2000``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest

from psdist.servers.shard.chunk_memory import ChunkMemory
from psdist.servers.shard.regions import Region
from psdist.servers.shard.snapshots import ChunkCopy, SnapshotMemory
from psdist.servers.shard.tensors import TensorShard
from tests.support.virtual.both_deaths import (
    play_with_both_deaths,
    schedule_with_both,
    taken_over,
)
from tests.support.virtual.job import VirtualJob, play
from tests.support.virtual.proof import prove
from tests.support.virtual.schedule import Schedule
from tests.support.virtual.surviving import prove_survival
from tests.unit.servers.test_later_copies import same

MODES = ("sync", "ssp", "async")
SEEDS = range(9)
WITH_DEATHS = range(6)


class Taken(TensorShard):
    """Keeps what a checkpoint would be that was copied at once."""

    met: ClassVar[Counter[str]]
    at_once: ClassVar[list[tuple[list[Region], list[Region]]]]
    """Copied later, copied at once."""

    def snapshot(
        self, chunk: int, into: SnapshotMemory, *, set_index: int, is_later: bool = False
    ) -> list[Region]:
        regions = super().snapshot(chunk, into, set_index=set_index, is_later=is_later)
        if is_later:
            now = super().snapshot(chunk, SnapshotMemory(), set_index=set_index)
            self.at_once.append((regions, now))
        return regions


def watched() -> type[Taken]:
    """Return a class for the servers of one job."""
    return type("Watched", (Taken,), {"met": Counter(), "at_once": []})


def count_copies(met: Counter[str]) -> Any:
    """Count the copies that a server has to make before it changes a chunk."""
    begin_change = ChunkMemory.begin_change

    def counted(memory: ChunkMemory) -> None:
        met["by a change"] += memory._owed is not None and not memory._owed.is_made
        begin_change(memory)

    return mock.patch.object(ChunkMemory, "begin_change", counted)


def compare(job: VirtualJob, taken: type[Taken]) -> None:
    """A whole checkpoint has the values that an immediate copy would have."""
    later = {id(region) for keeper in job.keepers
             for each in keeper.checkpoints for region in each.parts.values()}  # fmt: skip
    for regions, now in taken.at_once:
        if {id(each) for each in regions} <= later:
            assert all(same(*each) for each in zip(regions, now, strict=True))
            taken.met["chunks"] += 1


def busy(schedule: Schedule) -> Schedule:
    """Checkpoints in the middle of the training, of many chunks, whose copies take long compared
    with all else."""
    num_groups = len(schedule.group_sizes)
    return replace(
        schedule,
        mode=MODES[schedule.seed % len(MODES)],
        clipping=0.0,
        middle_rate=0.0,
        iterations=(6,) * num_groups,
        collectives=((1, 2, 3, 5),) * num_groups,
        compute_s=(1e-5,) * num_groups,
        num_chunks=12,
        credits=4,
        receive_buffers=12,
        is_shuffled=True,
        has_model=True,
        checkpoint_rate=1.0,
        mistake="",
        latency_s=1e-6,
        jitter_s=1e-5,
        payload_s=0.0,
        sent_s=0.0,
        slow_pairs=0.0,
        nap_s=0.0,
        work_s=1e-2,
    )


def play_and_prove(seeds: Iterable[int]) -> Counter[str]:
    """Play the seeds; return the situations that occurred, with counts."""
    met = Counter[str]()
    for seed in seeds:
        schedule, taken = busy(replace(Schedule.from_seed(seed), death=None)), watched()
        with count_copies(taken.met):
            job = play(schedule, make_executor=taken)
        try:
            prove(job)
            compare(job, taken)
            assert all(each.checkpoints for each in job.keepers)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {schedule}") from error
        met += taken.met
        met[schedule.mode] += bool(taken.met["by a change"])
        met["sets"] += bool(taken.met["by a change"] and schedule.num_sets > 1)
    return met


def play_with_deaths(seeds: Iterable[int]) -> Counter[str]:
    """Workers and servers fail, wherever they are; buddies continue."""
    met = Counter[str]()
    for seed in seeds:
        schedule, taken = busy(schedule_with_both(seed)), watched()
        with count_copies(taken.met):
            job = play_with_both_deaths(seed, schedule=schedule, make_executor=taken)
        try:
            prove_survival(job)
            compare(job, taken)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {schedule}") from error
        met += taken.met
        met["taken over"] += bool(taken_over(job))
    return met


def test_checkpoints_are_those_of_the_cut_whoever_copies_their_chunks() -> None:
    met = play_and_prove(SEEDS)
    assert met["chunks"] > met["by a change"] > 0, met
    assert all(met[each] for each in ("sync", "ssp", "async", "sets")), met


def test_checkpoints_are_those_of_the_cut_where_servers_die() -> None:
    met = play_with_deaths(WITH_DEATHS)
    assert met["chunks"] > met["by a change"] > 0, met
    assert met["taken over"], met


def test_a_chunk_that_changed_before_its_copy_was_made_is_noticed() -> None:
    """A fault on purpose: changes know nothing of copies."""
    forgetful = mock.patch.object(ChunkMemory, "owe", lambda _memory, make: ChunkCopy(make))
    with forgetful, pytest.raises(AssertionError, match=r"seed \d"):
        play_and_prove(SEEDS)


if __name__ == "__main__":
    print(play_and_prove(range(int(sys.argv[1]))), play_with_deaths(range(int(sys.argv[1]))))
