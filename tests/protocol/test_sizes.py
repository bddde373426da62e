"""Servers of sizes alone: the protocol is the same, time and memory are those of a cost model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from psdist.commands.check import check
from psdist.servers.shard.executor import ShardSpec
from psdist.servers.shard.tensors import TensorShard
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.size_worker import SizeWorker
from tests.support.virtual.sizes import CostModel, SizeShard

MODEL = CostModel(
    fold_s_per_byte=1e-8, step_s_per_byte=3e-8, copy_s_per_byte=1e-9, state_bytes_per_byte=1.0
)
NUM_GROUPS = 64
ITERATIONS = 4
LARGE = Schedule(
    seed=1,
    group_sizes=(1,) * NUM_GROUPS,
    iterations=(ITERATIONS,) * NUM_GROUPS,
    collectives=((),) * NUM_GROUPS,
    compute_s=tuple(1e-3 * (1 + group % 4) for group in range(NUM_GROUPS)),
    num_chunks=4,
    servers=2,
    receive_buffers=3,
)


def play(schedule: Schedule, model: CostModel = MODEL) -> VirtualJob:
    job = VirtualJob(
        schedule, make_executor=partial(SizeShard, model=model), make_worker=SizeWorker
    )
    job.run()
    return job


def shards(job: VirtualJob) -> list[SizeShard]:
    executors = [server.sets[0].executor for server in job.servers]
    shards = [executor for executor in executors if isinstance(executor, SizeShard)]
    assert len(shards) == len(executors)
    return shards


@pytest.mark.parametrize(("mode", "bound"), [("sync", 0), ("ssp", 0), ("ssp", 2), ("async", 0)])
def test_64_groups_of_sizes_alone_keep_the_rules_and_are_busy_as_long_as_the_model_says(
    mode: str, bound: int
) -> None:
    job = play(replace(LARGE, mode=mode, staleness=bound))

    report = check(job.history())
    assert report.proved, report.violations[:5]
    assert report.num_applies == NUM_GROUPS * ITERATIONS * LARGE.num_chunks
    if mode != "async":
        assert report.max_staleness == bound
    assert report.num_checksums == 0  # there are no bytes

    for server, shard in enumerate(shards(job)):
        counts = job.servers[server].sets[0].core.statistics()
        mine = [chunk for chunk, owner in enumerate(job.owners) if owner == server]
        (num_bytes,) = {job.partition.chunks[chunk].num_bytes for chunk in mine}
        pushes = NUM_GROUPS * ITERATIONS * len(mine)
        assert counts.pushes == pushes
        if mode == "sync":
            assert counts.steps == ITERATIONS * len(mine)
            expected_s = pushes * num_bytes * MODEL.fold_s_per_byte
        else:
            assert counts.steps == pushes
            expected_s = 0.0
        expected_s += counts.steps * num_bytes * MODEL.step_s_per_byte
        expected_s += (counts.copies_on_write + len(mine)) * num_bytes * MODEL.copy_s_per_byte
        assert shard.busy_s == pytest.approx(expected_s, rel=1e-9)
        assert job.network.now_s >= shard.busy_s

        held = shard.statistics()
        assert held.parameter_bytes == held.optimizer_state_bytes == len(mine) * num_bytes


def test_replies_leave_when_the_modelled_work_is_done() -> None:
    """With nothing else that takes time, sync iterations follow one another at the model's pace."""
    schedule = Schedule(
        seed=1,
        group_sizes=(1, 1),
        iterations=(5, 5),
        compute_s=(1e-9, 1e-9),
        latency_s=1e-9,
        jitter_s=0.0,
        num_chunks=1,
    )
    free = CostModel(fold_s_per_byte=0.0, step_s_per_byte=0.0, copy_s_per_byte=0.0)
    (chunk,) = VirtualJob(schedule).partition.chunks
    slow = replace(free, step_s_per_byte=1.0 / chunk.num_bytes)  # a second for a step

    assert play(schedule, free).network.now_s < 0.001
    job = play(schedule, slow)
    assert check(job.history()).proved
    assert job.network.now_s == pytest.approx(5.0, abs=0.001)


def test_a_run_of_sizes_goes_as_the_run_of_tensors() -> None:
    """Where work costs nothing both send the same messages at the same virtual times."""
    schedule = Schedule(seed=3, mode="ssp", staleness=1, num_chunks=4, servers=2, jitter_s=1e-3)
    free = CostModel(fold_s_per_byte=0.0, step_s_per_byte=0.0, copy_s_per_byte=0.0)
    sizes = play(schedule, free)
    tensors = VirtualJob(schedule, make_executor=TensorShard)
    tensors.run()

    assert sizes.network.now_s == tensors.network.now_s
    for one, other in zip(sizes.history().servers, tensors.history().servers, strict=True):
        assert np.array_equal(one.events, other.events)
    for one, other in zip(sizes.servers, tensors.servers, strict=True):
        (counts,), (others,) = one.statistics()["sets"], other.statistics()["sets"]
        assert counts == others | {"checksums": 0}


def test_a_slow_server_is_seen_in_the_virtual_time() -> None:
    """A cost model by server: the run is as fast as its slowest server."""

    def make(spec: ShardSpec) -> SizeShard:
        is_slow = 0 in spec.chunks
        return SizeShard(spec, model=replace(MODEL, step_s_per_byte=1e-3 if is_slow else 1e-9))

    job = VirtualJob(replace(LARGE, mode="sync"), make_executor=make, make_worker=SizeWorker)
    job.run()
    busy = sorted(shard.busy_s for shard in shards(job))
    assert job.network.now_s >= busy[1] > 10 * busy[0]
