"""Servers with buddies under seeded schedules, on the virtual network, with real tensors.

A buddy's copy is its server's shard, bit by bit, at every position that was acknowledged. A server
that fails at a random moment is survived: its buddy continues, workers send again what was not
answered, every update is contained once (``prove``), and in sync the parameters are those of the
run without the death.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from psdist.errors import PeerLostError, ServersLostError
from psdist.protocol.events import Frame
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import COORDINATOR, server_id
from psdist.servers.shard.tensors import TensorShard
from tests.support.virtual.job import Schedule, VirtualJob, play, replication_of
from tests.support.virtual.proof import prove
from tests.support.virtual.server_deaths import play_with_server_death, with_buddies

BLOCK = 10
SETTING_UP = "while a model was being set up"


def copy_of(job: VirtualJob, set_index: int, server: int) -> TensorShard:
    replication = replication_of(job.servers[job.schedule.buddies[server]])
    assert replication is not None
    executor = replication.kept[server].replicas[set_index].executor
    assert isinstance(executor, TensorShard)
    return executor


def assert_copies_are_the_shards(job: VirtualJob) -> None:
    for each in job.sets:
        for chunk, server in enumerate(each.owners):
            shard, copy = each.executor(server), copy_of(job, each.set_index, server)
            assert isinstance(shard, TensorShard)
            assert torch.equal(copy.memory[chunk].values, shard.memory[chunk].values)
            # Every part of the optimizer's state, as one server sends it to the chief.
            assert copy.state(chunk, 0) == shard.state(chunk, 0)
        for log, copied in zip(each.server_histories, each.copied_histories, strict=True):
            assert (log.log().events == copied[1].log().events).all()


@pytest.mark.parametrize("first", [0, pytest.param(BLOCK, marks=pytest.mark.slow)])
def test_a_buddy_has_the_same_bits_and_the_same_log(first: int) -> None:
    for seed in range(first, first + BLOCK):
        job = play(with_buddies(seed), is_watched=False)
        prove(job)
        assert_copies_are_the_shards(job)


def watch_replies(job: VirtualJob, server: int, held: Counter[bool]) -> None:
    """Count what the server holds; whenever a reply leaves, look how far its buddy's copy is."""
    own = replication_of(job.servers[server])
    buddy = replication_of(job.servers[job.schedule.buddies[server]])
    assert own is not None
    assert buddy is not None
    copies, primary, transport = (
        buddy.kept[server].replicas,
        own.outbox.primary,
        own.outbox._transport,
    )
    send, hold = transport.send, primary.hold

    def look_and_send(peer: int, frame: Frame) -> None:
        header = Header.unpack(frame.header)
        if header.kind == Kind.REPLY:
            position = copies[header.set_index].log.position
            assert position >= header.position, "acknowledged before the buddy had it"
        send(peer, frame)

    def count_and_hold(output: Any) -> bool:
        is_held = hold(output)
        held[is_held] += 1
        return is_held

    transport.send = look_and_send  # type: ignore[method-assign]
    primary.hold = count_and_hold  # type: ignore[method-assign]


def test_what_is_acknowledged_is_held_by_two_servers() -> None:
    """And a reply waits for that now and then, or this would show nothing."""
    held = Counter[bool]()
    for seed in range(12):
        job = VirtualJob(with_buddies(seed), is_watched=False)
        for server in range(job.schedule.servers):
            watch_replies(job, server, held)
        job.run()
    assert held[True] > 100
    assert held[False] > 100


@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
def test_bytes_to_the_buddy_are_the_folded_mean_or_each_update(mode: str) -> None:
    """Relative to the pushes and replies of G groups, the records take 1 / (2 G) in sync, else
    1 / 2; besides, some hundred bytes per record, and the initial values."""
    num_groups, iterations, num_chunks, elements = 3, 5, 4, 4096
    schedule = Schedule(
        seed=1,
        mode=mode,
        servers=2,
        group_sizes=(1,) * num_groups,
        iterations=(iterations,) * num_groups,
        collectives=((),) * num_groups,
        compute_s=(1e-3,) * num_groups,
        num_chunks=num_chunks,
        chunk_elements=elements,
        has_buddies=True,
    )
    job = play(schedule, is_watched=False)
    model = 4 * elements * num_chunks
    told = 0
    for loop in job.servers:
        told += replication_of(loop).outbox.num_bytes_recorded
    steps = iterations * (1 if mode == "sync" else num_groups)
    num_records = steps * num_chunks
    least = model * (1 + steps)
    assert least <= told <= least + 600 * (num_records + num_chunks) + 4000
    pushed_and_pulled = 2 * num_groups * iterations * model
    bound = (2 * num_groups + 1) / (2 * num_groups) if mode == "sync" else 1.5
    training = told - model
    assert (pushed_and_pulled + training) / pushed_and_pulled < 1.05 * bound


@pytest.mark.parametrize("first", [0, pytest.param(BLOCK, marks=pytest.mark.slow)])
def test_the_death_of_a_server_is_survived_at_any_moment(first: int) -> None:
    survived = 0
    for seed in range(first, first + BLOCK):
        job, undisturbed = play_with_server_death(with_buddies(seed))
        if job.errors:
            assert all(isinstance(error, PeerLostError) for error in job.errors.values())
            assert any(SETTING_UP in str(error) for error in job.errors.values()), f"seed {seed}"
            continue
        assert not job.network.unfinished, f"seed {seed}: wait for ever: {job.network.unfinished}"
        if not any(loop.hosted for loop in job.servers):
            continue  # it had failed after the end
        prove(job)
        survived += 1
        if job.schedule.mode == "sync":
            for mine, other in zip(job.sets, undisturbed.sets, strict=True):
                assert torch.equal(mine.parameters(), other.parameters()), f"seed {seed}"
    assert survived > BLOCK // 2


def test_both_servers_of_a_pair_dead_is_one_error_that_names_them() -> None:
    seen = 0
    for seed in range(8):
        schedule = replace(with_buddies(seed), servers=3)
        whole, steps = VirtualJob(schedule, is_watched=False), 0
        while whole.network.step():
            steps += 1
        job = VirtualJob(schedule, is_watched=False)
        for _ in range(steps // 2):
            job.network.step()
        if not {1, 2} <= set(job.network.unfinished):
            continue
        job.dead = 1
        job.network.crash(server_id(1))
        job.network.crash(server_id(2))
        job.run()
        error = job.errors.get(COORDINATOR)
        if isinstance(error, ServersLostError):
            seen += 1
            assert "server 1" in str(error)
            assert "server 2" in str(error)
            assert "--resume" in str(error)
        else:
            assert SETTING_UP in str(error)
    assert seen > 2
