"""group_tier = nccl: the back end's own reduce-scatter and all-gather, here gloo's on the CPU.

gloo's reduce-scatter never says that it is done before it is waited for, as NCCL's does. So here it
is made of an all-reduce that does, and held against gloo's own. Numbers have sums that are exact in
any order, since that is the back end's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from psdist.protocol.partition import Span
from psdist.workers.group import reductions
from psdist.workers.group.channel import GroupChannel
from psdist.workers.group.process_group import ProcessGroupChannel
from psdist.workers.group.reductions import ReducingChannel
from tests.support.group_operations import (
    FLATS,
    NUM_ROUNDS,
    expected,
    finish,
    in_memory_of,
    operations,
    slices_of,
)
from tests.support.process_groups import run_in_group


def exact(place: int, round_: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * round_ + place)
    return [
        torch.randint(-40, 41, (length,), generator=generator).to(dtype) for length, dtype in FLATS
    ]


def reducing(over: GroupChannel) -> ReducingChannel:
    assert isinstance(over, ProcessGroupChannel)
    channel = ReducingChannel.like(over)
    assert isinstance(channel, ReducingChannel)
    return channel


class Asked:
    """Work of a reduce-scatter that can be asked whether it is done."""

    def __init__(self, output: torch.Tensor, given: torch.Tensor, group: Any) -> None:
        self._output, self._sums = output, given.clone()
        self._work: Any = dist.all_reduce(self._sums, group=group, async_op=True)
        self._place = dist.get_rank(group)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, *timeout: Any) -> None:
        self._work.wait(*timeout)
        size = len(self._output)
        self._output.copy_(self._sums[self._place * size : (self._place + 1) * size])


def reduced(output: torch.Tensor, given: torch.Tensor, *, group: Any, async_op: bool) -> Asked:
    assert async_op
    return Asked(output, given, group)


def stand_in_and_gloo(over: GroupChannel) -> Any:
    given = torch.arange(12, dtype=torch.float32) * (1.0 + over.place)
    one, other = torch.empty(4), torch.empty(4)
    reduced(one, given, group=None, async_op=True).wait()
    reductions._REDUCE(other, given, group=None, async_op=True).wait()
    return one.tolist(), other.tolist()


def test_what_stands_in_for_the_reduce_scatter_of_torch_does_the_same() -> None:
    for place, (one, other) in enumerate(run_in_group(3, stand_in_and_gloo)):
        assert one == other == [6.0 * each for each in range(4 * place, 4 * place + 4)]


def all_operations(over: GroupChannel) -> Any:
    channel = reducing(over)
    beside = channel.duplicate()
    assert type(beside) is ReducingChannel
    with (
        mock.patch("tests.support.group_operations.flats_of", exact),
        mock.patch.object(reductions, "_REDUCE", reduced),
    ):
        result = finish(operations(channel, beside))
        return result == expected(channel.place, channel.size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_sum_and_gather_agree_and_broadcast(size: int) -> None:
    assert run_in_group(size, all_operations) == [True] * size


def counting(call: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def counted(output: torch.Tensor, given: torch.Tensor, **options: Any) -> Any:
        calls.append(len(given))
        return call(output, given, **options)

    return counted


def calls_of_the_back_end(over: GroupChannel) -> Any:
    channel = reducing(over)
    slices = slices_of(channel.size, 0)
    flats = [in_memory_of(channel, flat) for flat in exact(channel.place, 0)]
    flats.append(torch.ones(5, dtype=torch.float32))  # in nobody's slice
    summed: list[int] = []
    gathered: list[int] = []
    with (
        mock.patch.object(reductions, "_REDUCE", counting(reduced, summed)),
        mock.patch.object(reductions, "_GATHER", counting(reductions._GATHER, gathered)),
        mock.patch("torch.distributed.all_to_all_single", side_effect=AssertionError),
    ):
        finish(iter([channel.reduce_scatter(flats, slices)]))  # type: ignore[arg-type] # one
        finish(iter([channel.all_gather(flats, slices)]))  # type: ignore[arg-type] # operation
    return summed, gathered


def test_the_back_end_adds_what_is_padded_to_the_longest_slice_once_for_each_dtype() -> None:
    longest = [
        max(sum(to - at for index, at, to in spans if index == flat) for spans in slices_of(3, 0))
        for flat in range(len(FLATS))
    ]
    for summed, gathered in run_in_group(3, calls_of_the_back_end):
        assert summed == [3 * each for each in longest]
        assert gathered == longest


def nothing_to_do(over: GroupChannel) -> Any:
    channel = reducing(over)
    slices: list[list[Span]] = [[], []]
    flat = torch.full((8,), 1.0 + channel.place)
    finish(iter([channel.reduce_scatter([flat], slices)]))  # type: ignore[arg-type] # one
    finish(iter([channel.all_gather([flat], slices)]))  # type: ignore[arg-type] # operation
    return flat.tolist()


def test_slices_of_nothing_change_nothing() -> None:
    assert run_in_group(2, nothing_to_do) == [[1.0] * 8, [2.0] * 8]


def test_all_rounds_have_several_dtypes_and_uneven_slices() -> None:
    """Else the tests above would prove less than they say."""
    for round_ in range(NUM_ROUNDS):
        sizes = [sum(to - at for _, at, to in spans) for spans in slices_of(3, round_)]
        assert len(set(sizes)) > 1
