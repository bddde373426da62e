"""Gradients that are reduced bucket by bucket: whoever is ready first, the same bits as at once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from psdist.errors import InvariantError
from psdist.protocol.ids import worker_id
from psdist.protocol.partition import Partition, Piece, buckets_of
from psdist.protocol.send_order import backward_order
from psdist.workers.group.buckets import Buckets, Opening
from psdist.workers.group.channel import GroupChannel, add_in_worker_order
from tests.support.group_operations import finish
from tests.support.process_groups import run_in_group
from tests.support.virtual.group import VirtualGroup
from tests.support.virtual.network import LinkModel, VirtualNetwork

PIECES = [
    Piece(
        name=f"p{index}",
        shape=(length,),
        stride=(1,),
        dtype="bfloat16" if index % 3 == 2 else "float32",
        optimizer_group=index % 2,
    )
    for index, length in enumerate([300, 64, 500, 128, 700, 10, 900])
]
PARTITION = Partition.cut(PIECES, chunk_bytes=512)
ORDER = backward_order(PARTITION)
ASCENDING = [*range(len(PARTITION.chunks))]
"""As they lie in memory: a worker's slice is neighbours, of a bucket all or none."""


def gradients_of(place: int, clock: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * clock + place)
    return [
        torch.randn(buffer.num_elements, generator=generator).to(getattr(torch, buffer.dtype))
        for buffer in PARTITION.buffers
    ]


def opening(weight: float = 1.0, **changed: Any) -> Opening:
    terms: dict[str, Any] = {"set_index": 0, "clock": 0, "hyper": b"hyper", "num_buckets": 99}
    return Opening(weight=weight, **{**terms, **changed})


def make(
    channel: GroupChannel, gradients: Sequence[torch.Tensor], order: Sequence[int] = ORDER
) -> tuple[Buckets, Any]:
    mine = PARTITION.slices(channel.size, order)[channel.place]
    sums = {
        chunk: torch.zeros(
            PARTITION.chunks[chunk].length, dtype=getattr(torch, PARTITION.chunks[chunk].dtype)
        )
        for chunk in mine
    }
    return Buckets(channel, PARTITION, order, gradients=gradients, sums=sums), sums


def expected(
    weights: Sequence[float], place: int, clock: int = 0, order: Sequence[int] = ORDER
) -> dict[int, torch.Tensor]:
    """As ``step()`` reduces everything at once."""
    scaled = []
    for each, weight in enumerate(weights):
        flats = gradients_of(each, clock)
        scaled.append([flat.mul_(weight / sum(weights)) for flat in flats])
    found = {}
    for index in PARTITION.slices(len(weights), order)[place]:
        chunk = PARTITION.chunks[index]
        rows = [flats[chunk.buffer][chunk.start : chunk.start + chunk.length] for flats in scaled]
        found[index] = torch.empty_like(rows[0])
        add_in_worker_order(rows, found[index])
    return found


def same(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key].view(torch.uint8), other[key].view(torch.uint8)) for key in one
    )


class Group:
    """A group on a virtual network, whose workers are driven by hand or as actors."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.network = VirtualNetwork(seed=seed)
        link = LinkModel(latency_s=1e-5, jitter_s=1e-3)
        members = [worker_id(place) for place in range(size)]
        group = VirtualGroup(self.network, members, seed=seed, link=link)
        self.channels = [group.channel(place) for place in range(size)]


def test_the_buckets_have_every_chunk_once_in_the_order() -> None:
    channel = Group(3).channels[1]
    buckets, sums = make(channel, gradients_of(1))
    assert buckets.num_buckets == len(buckets_of(ORDER, 3)) == 7
    assert [chunk for each in buckets._buckets for chunk in each.chunks] == ORDER
    assert {chunk for each in buckets._buckets for chunk in each.own} == set(sums)


@pytest.mark.parametrize("order", [ORDER, ASCENDING], ids=["backward", "memory"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_those_of_everything_at_once_whoever_is_ready_first(
    size: int, seed: int, order: Sequence[int]
) -> None:
    """Each worker has its gradients when it likes, and comes to ``step()`` with any number of its
    buckets begun; iterations follow one another on the same channel."""
    group = Group(size, seed)
    iterations = 3
    weights = [random.Random(f"{seed} {place}").choice([1.0, 0.75, 0.5]) for place in range(size)]
    results: list[list[Any]] = [[] for _ in range(size)]

    def script(place: int) -> Iterator[float | None]:
        pick = random.Random(f"{seed} {place} ready")
        channel = group.channels[place]
        beside = channel.duplicate()
        gradients = gradients_of(place)
        buckets, sums = make(beside, gradients, order)
        for clock in range(iterations):
            for flat, values in zip(gradients, gradients_of(place, clock), strict=True):
                flat.copy_(values)
            early: list[int] = []
            for ready in range(1, pick.randrange(buckets.num_buckets + 1) + 1):
                yield pick.random() * 1e-3
                if ready == 1:
                    buckets.open(opening(weights[place], clock=clock))
                buckets.num_complete = ready
                early += buckets.advance()
            told = channel.agree("optimizer.step", [buckets.num_begun])
            while not told.is_done():
                yield None
            most = int(max(begun for (begun,) in told.result()))
            if most and not buckets.num_begun:
                buckets.open(opening(weights[place], clock=clock))
            early += buckets.catch_up(most)
            while not buckets.has_caught_up(most):
                yield None
                early += buckets.catch_up(most)
            begun = buckets._buckets[: max(most - 1, 0)]
            own = [chunk for each in begun for chunk in each.own]
            wanted = expected(weights, place, clock, order)
            is_same = same({each: sums[each] for each in own}, {each: wanted[each] for each in own})
            kept = all(map(torch.equal, gradients, gradients_of(place, clock)))
            results[place].append((most, early == own, is_same, kept))
            buckets.reset()

    for place in range(size):
        group.network.spawn(worker_id(place), script(place))
    group.network.run()
    assert not group.network.unfinished
    assert all(each[1:] == (True, True, True) for result in results for each in result), results
    assert all(result == results[0] for result in results)
    assert len(results[0]) == iterations


def whole(channel: GroupChannel) -> Any:
    """All buckets, in processes."""
    weights = [1.0, 0.5, 0.75][: channel.size]
    gradients = gradients_of(channel.place)
    buckets, sums = make(channel.duplicate(), gradients)
    buckets.open(opening(weights[channel.place]))
    for number in range(1, 1 + buckets.num_buckets):
        buckets.num_complete = number
        buckets.advance()
    while not buckets.has_caught_up(1 + buckets.num_buckets):
        buckets.advance()
    finish(iter([channel.agree("barrier")]))  # type: ignore[arg-type] # one operation
    return same(sums, expected(weights, channel.place)), buckets.group_weight


@pytest.mark.parametrize("tier", ["torch", "shared_memory"])
def test_processes_get_the_same_bits(tier: Any) -> None:
    assert run_in_group(3, whole, tier=tier) == [(True, 2.25)] * 3


@pytest.mark.parametrize(
    "other",
    [
        opening(hyper=b"another lr"),
        opening(set_index=1),
        opening(clock=1),
        opening(num_buckets=0),
    ],
    ids=["hyper", "set", "clock", "unwilling"],
)
def test_nothing_leaves_early_unless_all_mean_the_same(other: Opening) -> None:
    group = Group(2)
    both = [make(channel, gradients_of(place))[0] for place, channel in enumerate(group.channels)]
    for buckets, its in zip(both, (opening(), other), strict=True):
        buckets.num_complete = 3
        buckets.open(its)
    group.network.run()
    for buckets in both:
        assert buckets.advance() == []
        assert (buckets.is_agreed, buckets.num_open, buckets.num_begun) == (True, 0, 1)
        assert buckets.has_caught_up(1)
        buckets.reset()


def test_a_worker_without_weight_takes_part_with_nothing() -> None:
    """As one whose data has ended does, whose gradients are zero."""
    group = Group(2)
    zeros = [torch.zeros_like(flat) for flat in gradients_of(1)]
    first, sums = make(group.channels[0], gradients_of(0))
    second, _ = make(group.channels[1], zeros)
    for buckets, weight in ((first, 0.5), (second, 0.0)):
        buckets.num_complete = buckets.num_buckets
        buckets.open(opening(weight, num_buckets=4))
    for _ in range(5):
        group.network.run()
        for buckets in (first, second):
            buckets.advance()
    assert (first.num_open, first.num_begun, first.group_weight) == (4, 5, 0.5)
    own = next(each.own[0] for each in first._buckets if each.own)
    chunk = PARTITION.chunks[own]
    mine = gradients_of(0)[chunk.buffer][chunk.start : chunk.start + chunk.length]
    assert torch.equal(sums[own], mine)


def test_buckets_that_are_not_complete_hold_back_all_behind_them() -> None:
    group = Group(2)
    both = [make(channel, gradients_of(place))[0] for place, channel in enumerate(group.channels)]
    for buckets, complete in zip(both, (len(buckets_of(ORDER, 2)), 2), strict=True):
        buckets.open(opening())
        buckets.num_complete = complete
    for _ in range(9):
        group.network.run()
        for buckets in both:
            buckets.advance()
    assert [buckets.num_begun for buckets in both] == [4, 3]
    assert both[0].chunks_begun == ORDER[:6]
    with pytest.raises(InvariantError, match="ends while it is being reduced"):
        both[0].reset()


def test_an_iteration_is_opened_once_and_caught_up_with_when_it_is_open() -> None:
    group = Group(2)
    buckets, _ = make(group.channels[0], gradients_of(0))
    assert buckets.has_caught_up(0)
    assert buckets.catch_up(0) == []
    with pytest.raises(InvariantError, match="caught up with that was not opened"):
        buckets.catch_up(1)
    buckets.open(opening())
    with pytest.raises(InvariantError, match="opened twice"):
        buckets.open(opening())
    with pytest.raises(InvariantError, match="ends while it is being reduced"):
        buckets.reset()
