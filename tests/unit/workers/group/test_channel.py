"""Every implementation of GroupChannel does the same, bit for bit, and says what went wrong."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from psdist.errors import CollectiveError, InvariantError, TransportError, WaitTimeoutError
from psdist.protocol.ids import worker_id
from psdist.protocol.partition import Span
from psdist.transport.virtual import Actor
from psdist.transport.waiting import Waiting
from psdist.workers.assembly import make_loop
from psdist.workers.group.channel import AloneChannel, GroupChannel
from psdist.workers.group.tier import Tier
from psdist.workers.loop import WorkerLoop
from psdist.workers.protocol import Seat
from tests.support.group_operations import Operations, expected, finish, operations
from tests.support.process_groups import run_in_group
from tests.support.virtual.group import VirtualChannel, VirtualGroup
from tests.support.virtual.network import LinkModel, VirtualNetwork


def test_one_worker_alone_keeps_what_it_has() -> None:
    channel = AloneChannel()
    assert finish(operations(channel, channel.duplicate())) == expected(0, 1)


# -- between processes ---------------------------------------------------------------------------

both_tiers = pytest.mark.parametrize("tier", ["torch", "shared_memory"])


def all_operations(channel: GroupChannel) -> Any:
    return finish(operations(channel, channel.duplicate()))


@both_tiers
@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_sum_in_worker_order_and_gather_agree_and_broadcast(
    size: int, tier: Tier
) -> None:
    results = run_in_group(size, all_operations, tier=tier)
    for place, result in enumerate(results):
        assert result == expected(place, size), f"place {place}"


def loop_of(place: int, *, timeout_s: float) -> WorkerLoop:
    network = VirtualNetwork()  # nothing comes: the worker waits for its group only
    return make_loop(
        network.endpoint(worker_id(place)),
        Seat(worker=place, group=0, members=(place,), num_servers=1),
        waiting=Waiting(is_spinning=False, timeout_s=timeout_s),
    )


def calls_differ(channel: GroupChannel) -> Any:
    loop = loop_of(channel.place, timeout_s=60.0)
    try:
        loop.wait_for(channel.agree("pull" if channel.place == 1 else "save"), "save")
    except CollectiveError as error:
        return str(error)


def one_comes_late(channel: GroupChannel) -> Any:
    beside = dist.new_group()
    told = ""
    if channel.place == 0:
        dist.barrier(group=beside)  # when the other has given up
        pending = channel.agree("barrier")
    else:
        pending = channel.agree("barrier")
        try:
            loop_of(1, timeout_s=0.2).wait_for(pending, "barrier")
        except WaitTimeoutError as error:
            told = str(error)
        dist.barrier(group=beside)
    loop_of(channel.place, timeout_s=60.0).wait_for(pending, "barrier")
    return told


def one_ends(channel: GroupChannel) -> Any:
    if channel.place == 1:
        os._exit(7)
    slices = [[Span(0, 0, 12)], [Span(0, 12, 24)]]
    try:
        loop_of(0, timeout_s=60.0).wait_for(
            channel.reduce_scatter([torch.ones(24)], slices), "optimizer.step"
        )
    except TransportError as error:
        return str(error)


def wrong_slices(channel: GroupChannel) -> Any:
    told = []
    for spans in ([Span(0, 0, 12), Span(0, 11, 24)], [Span(0, 0, 12), Span(0, 12, 25)]):
        try:
            channel.reduce_scatter([torch.ones(24)], [[span] for span in spans])
        except InvariantError as error:
            told.append(str(error))
    loop_of(channel.place, timeout_s=60.0).wait_for(channel.agree("finish"), "finish")
    return told


@both_tiers
def test_processes_that_call_different_things_are_all_told_so(tier: Tier) -> None:
    first, *others = run_in_group(3, calls_differ, tier=tier)
    called = "the worker at place 0 of the group called save; the worker at place 1 of the group "
    assert f"{called}called pull" in first
    assert others == [first, first]


@both_tiers
def test_a_wait_for_the_group_ends_at_its_deadline_and_says_what_for(tier: Tier) -> None:
    _, told = run_in_group(2, one_comes_late, tier=tier)
    assert "for the other workers of this worker's group in barrier, longer than" in told


@both_tiers
def test_a_worker_that_ends_is_an_error_for_its_group(tier: Tier) -> None:
    told, ended = run_in_group(2, one_ends, tier=tier)
    assert ended == "exit 7"
    assert "the reduce-scatter of this worker's group failed, " in told


@both_tiers
def test_slices_that_overlap_or_leave_their_memory_are_refused(tier: Tier) -> None:
    for told in run_in_group(2, wrong_slices, tier=tier):
        assert told == [
            "slices give elements from 11 on of flat 0 twice",
            "slices end at element 25 of 24",
        ]


# -- over the virtual network --------------------------------------------------------------------


def virtual_group(size: int, *, seed: int = 0) -> tuple[VirtualNetwork, list[VirtualChannel]]:
    network = VirtualNetwork(seed=seed)
    members = [worker_id(place) for place in range(size)]
    link = LinkModel(latency_s=1e-5, jitter_s=1e-3)
    group = VirtualGroup(network, members, seed=seed, link=link)
    return network, [group.channel(place) for place in range(size)]


def act(script: Operations, results: list[Any]) -> Actor:
    while True:
        try:
            pending = next(script)
        except StopIteration as stop:
            results.append(stop.value)
            return
        while not pending.is_done():
            yield None


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_virtual_workers_get_the_same_bits_as_processes(size: int, seed: int) -> None:
    network, channels = virtual_group(size, seed=seed)
    results: list[list[Any]] = [[] for _ in channels]
    for channel in channels:
        script = operations(channel, channel.duplicate())
        network.spawn(worker_id(channel.place), act(script, results[channel.place]))
    network.run()
    assert not network.unfinished
    for place, (result,) in enumerate(results):
        assert result == expected(place, size), f"place {place}"


def test_an_operation_takes_each_virtual_worker_its_own_time() -> None:
    orders = set()
    for seed in range(20):
        network, channels = virtual_group(3, seed=seed)
        pending = [channel.agree("barrier") for channel in channels]
        done: list[int] = []
        while network.step():
            done += [p for p, each in enumerate(pending) if each.is_done() and p not in done]
        assert sorted(done) == [0, 1, 2]
        orders.add(tuple(done))
    assert len(orders) > 3


SLICES = [[Span(0, 0, 12)], [Span(0, 12, 24)]]


def test_virtual_workers_in_different_operations_are_caught() -> None:
    _, (first, second) = virtual_group(2)
    first.all_gather([torch.ones(24)], SLICES)
    with pytest.raises(InvariantError, match=r"place 0 in \('all_gather'.*place 1 in \('agree'"):
        second.agree("pull")


def test_virtual_workers_with_other_shapes_are_caught() -> None:
    _, (first, second) = virtual_group(2)
    first.reduce_scatter([torch.ones(24)], SLICES)
    with pytest.raises(InvariantError, match="different operations"):
        second.reduce_scatter([torch.ones(24, dtype=torch.float64)], SLICES)


def test_virtual_workers_that_call_different_things_are_all_told_so() -> None:
    network, channels = virtual_group(2)
    pending = [
        channel.agree(call) for channel, call in zip(channels, ("save", "pull"), strict=True)
    ]
    network.run()
    for each in pending:
        assert each.is_done()
        with pytest.raises(CollectiveError, match="the worker at place 1 of the group called pull"):
            each.result()


def test_memory_that_changes_under_a_virtual_operation_is_caught() -> None:
    _, (first, second) = virtual_group(2)
    flat = torch.ones(24)
    first.reduce_scatter([flat], SLICES)
    flat[20] = 2.0
    with pytest.raises(InvariantError, match="place 0 of a group has changed memory under its red"):
        second.reduce_scatter([torch.ones(24)], SLICES)


def test_memory_that_changes_before_all_have_begun_the_next_operation_is_caught() -> None:
    network, (first, second) = virtual_group(2)
    flats = [torch.ones(24), torch.ones(24)]
    for channel, flat in zip((first, second), flats, strict=True):
        channel.reduce_scatter([flat], SLICES)
    network.run()
    flats[0][:12] += 1.0  # its own slice is its own again
    first.agree("barrier")
    flats[1][3] = 2.0
    with pytest.raises(InvariantError, match=r"place 1 .* its reduce_scatter before all had begun"):
        second.agree("barrier")


def test_the_result_of_a_virtual_operation_that_is_not_done_is_refused() -> None:
    _, (first, _) = virtual_group(2)
    pending = first.agree("barrier")
    assert not pending.is_done()
    with pytest.raises(InvariantError, match="before it was done"):
        pending.result()
