"""What NCCL has apart from gloo, with gloo: workers that are joined when an end is made, and errors
that come when an operation begins (tests/gpu has NCCL itself)."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from psdist.errors import MemberLostError, TransportError, UsageError
from psdist.workers.group import process_group
from psdist.workers.group import tier as group_tier
from psdist.workers.group.addresses import At
from psdist.workers.group.channel import GroupChannel
from psdist.workers.group.process_group import Network, ProcessGroupChannel
from psdist.workers.group.reductions import ReducingChannel
from tests.support.process_groups import run_in_group

ENDED = RuntimeError("NCCL Error 6: remote process exited or there was a network error")


def number_of_joinings(channel: GroupChannel, *, device: str) -> int:
    """Of ends that are made in each way."""
    with mock.patch.object(ProcessGroupChannel, "_operate_once") as operate_once:
        over = ProcessGroupChannel.joined(
            place=channel.place, size=channel.size, device=torch.device(device)
        )
        beside = over.duplicate()
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


def join_or_not(channel: GroupChannel, *, hosts: list[str]) -> str:
    """What is said where they cannot be."""
    process_group._networks[:] = [Network(At("eth7", "10.0.0.7"), hosts)]
    over = ProcessGroupChannel(place=channel.place, size=2, device=torch.device("cuda"))
    options: dict[str, Any] = {"index": channel.place, "size": 2, "device": over.device}
    options |= {"timeout_s": 60.0, "broadcast": lambda data: data, "is_spinning": False}
    with (
        mock.patch.object(process_group, "start", return_value=over),
        mock.patch.object(ProcessGroupChannel, "_operate_once", side_effect=ENDED),
    ):
        with pytest.raises(
            UsageError, match=r"hosts.group_tier = shared_memory: the model is on a GPU"
        ):
            group_tier.start("shared_memory", **options)
        with pytest.raises(UsageError, match=r"hosts.group_tier = mpi: this job has no MPI"):
            group_tier.start("mpi", **options)
        with pytest.raises(TransportError) as raised:
            group_tier.start("auto", **options)
    return str(raised.value)


def test_gpus_that_cannot_be_joined_are_an_error_that_says_where() -> None:
    for said in run_in_group(2, partial(join_or_not, hosts=[])):
        assert said.startswith("the GPUs of the group's 2 workers could not be joined by NCCL: ")
        assert "NCCL Error 6" in said
    for said in run_in_group(2, partial(join_or_not, hosts=["n1", "n2"])):
        assert "2 workers on n1, n2 over eth7 (10.0.0.7) could not be joined" in said


def test_what_gloo_says_is_not_told_of_gpus() -> None:
    with (
        pytest.raises(RuntimeError, match="connectFullMesh failed"),
        process_group.joining(2, torch.device("cpu")),
    ):
        raise RuntimeError("connectFullMesh failed")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("2 GiB"), RuntimeError("an assertion")])
def test_what_is_no_word_of_a_worker_that_is_gone_stays_what_it_is(error: Exception) -> None:
    with (
        mock.patch.object(dist, "broadcast", side_effect=error),
        pytest.raises(type(error), match=str(error)),
    ):
        ProcessGroupChannel(place=0, size=2).broadcast(torch.zeros(4), 0)


class NeverDone(dist.Work):
    def is_completed(self) -> bool:
        return False


def test_nobody_waits_for_the_rest_of_what_could_not_be_begun() -> None:
    failed = process_group.begun(mock.Mock(side_effect=dist.DistBackendError("a remote error")))
    works = process_group.Works("sum", [NeverDone(), *failed], [], lambda: None)
    assert works.is_done()
    with pytest.raises(MemberLostError, match="a remote error"):
        works.result()


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


class Unreadable(dist.Work):
    """A finished operation of NCCL with an error, as torch 2.11 shows it on a GPU."""

    def is_completed(self) -> bool:
        return True

    def wait(self, *_timeout: Any) -> bool:
        return True

    def exception(self) -> Any:
        raise TypeError("Unable to convert function return value to a Python type!")


def test_an_error_of_nccl_that_torch_cannot_show_still_ends_the_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    on_a_gpu = mock.Mock(is_cuda=True)
    works = process_group.Works("sum", [Unreadable()], [on_a_gpu], lambda: None)
    with pytest.raises(MemberLostError, match="NCCL printed the error on stderr"):
        works.result()
