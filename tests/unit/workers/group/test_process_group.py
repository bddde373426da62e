"""What NCCL has apart from gloo, with gloo: workers that are joined when an end is made, and errors
that come when an operation begins (tests/gpu has NCCL itself)."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from psdist.errors import MemberLostError
from psdist.workers.group import process_group
from psdist.workers.group.channel import GroupChannel
from psdist.workers.group.process_group import ProcessGroupChannel
from psdist.workers.group.reductions import ReducingChannel
from tests.support.process_groups import run_in_group

ENDED = RuntimeError("NCCL Error 6: remote process exited or there was a network error")


def number_of_joinings(channel: GroupChannel, *, device: str) -> int:
    """Of ends that are made in each way."""
    with mock.patch.object(ProcessGroupChannel, "_operate_once") as operate_once:
        over = ProcessGroupChannel.joined(
            place=channel.place, size=channel.size, device=torch.device(device)
        )
        beside = over.beside()
        assert beside.device == over.device
        assert ProcessGroupChannel.like(beside).device == over.device
        process_group.of_host(over, [0, 0, 1])
    return operate_once.call_count


def test_workers_are_joined_when_an_end_is_made_on_a_gpu() -> None:
    """The third one is alone on its host."""
    assert run_in_group(3, partial(number_of_joinings, device="cuda:0")) == [4, 4, 3]
    assert run_in_group(3, partial(number_of_joinings, device="cpu")) == [0, 0, 0]


def kinds_of_operations(channel: GroupChannel) -> Any:
    assert isinstance(channel, ProcessGroupChannel)
    seen: list[str] = []

    def noting(name: str) -> Any:
        original = getattr(dist, name)

        def operate(*of: Any, **options: Any) -> Any:
            seen.append(name)
            return original(*of, **options)

        return mock.patch.object(dist, name, operate)

    with noting("all_to_all_single"), noting("broadcast"):
        channel._operate_once()
        mine = list(seen)
        ReducingChannel.like(channel)._operate_once()  # gloo has these, too
    return mine, seen


def test_each_kind_of_operation_is_carried_out_once() -> None:
    kinds = ["all_to_all_single", "broadcast"]
    assert run_in_group(2, kinds_of_operations) == [(kinds, 2 * kinds)] * 2


def test_who_cannot_be_joined_is_lost() -> None:
    with (
        mock.patch.object(ProcessGroupChannel, "_operate_once", side_effect=ENDED),
        pytest.raises(MemberLostError, match=r"the joining of the GPUs .* NCCL Error 6"),
    ):
        ProcessGroupChannel.joined(place=0, size=2, device=torch.device("cuda"))


def test_what_cannot_be_begun_fails_when_its_result_is_asked_for() -> None:
    channel = ProcessGroupChannel(place=0, size=2)
    flat = torch.zeros(4)
    with mock.patch.object(dist, "broadcast", side_effect=ENDED):
        pending = channel.broadcast(flat, 0)
    assert pending.is_done()
    pending.wait(0.0)
    with pytest.raises(
        MemberLostError, match=r"the broadcast of this worker's group .* NCCL Error"
    ):
        pending.result()
