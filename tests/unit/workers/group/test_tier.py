"""Which tier a group gets, and what is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from psdist.errors import UsageError
from psdist.workers.group import tier as group_tier
from psdist.workers.group.channel import GroupChannel
from psdist.workers.group.process_group import ProcessGroupChannel
from psdist.workers.group.reductions import ReducingChannel
from psdist.workers.group.segments import Segment
from psdist.workers.group.tier import GroupMpi, Tier
from tests.support.process_groups import run_in_group

GPU = torch.device("cuda", 1)


def of_one_host(tier: Tier, device: torch.device) -> GroupChannel:
    """Without a process group: nothing is exchanged to choose."""
    return group_tier._of_one_host(
        ProcessGroupChannel(place=0, size=2),
        tier,
        device,
        "gloo" if device.type == "cpu" else "NCCL",
        is_spinning=False,
        make=Segment,
    )


def test_nccl_adds_on_gpus_only_where_it_is_asked_for() -> None:
    assert type(of_one_host("nccl", GPU)) is ReducingChannel
    assert type(of_one_host("auto", GPU)) is ProcessGroupChannel
    assert type(of_one_host("torch", GPU)) is ProcessGroupChannel


@pytest.mark.parametrize(
    ("tier", "device", "said"),
    [
        (
            "nccl",
            "cpu",
            "hosts.group_tier = nccl: the model is on the CPU, whose memory NCCL does not move",
        ),
        ("shared_memory", "cuda:1", "hosts.group_tier = shared_memory: the model is on a GPU"),
    ],
)
def test_what_a_device_cannot_have_is_refused(tier: Tier, device: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        group_tier._require_possible(tier, torch.device(device))


def over_mpi(mpi: GroupMpi | None, device: torch.device) -> GroupChannel:
    return group_tier._over_mpi(mpi, 0, device, is_spinning=False, hosts=None)


def test_mpi_is_refused_where_there_is_none() -> None:
    with pytest.raises(
        UsageError, match=r"hosts.group_tier = mpi: this job has no MPI; use hosts.group_tier ="
    ):
        over_mpi(None, torch.device("cpu"))


def test_mpi_is_refused_for_memory_of_a_gpu_that_it_does_not_take() -> None:
    comm: Any = None
    said = "hosts.group_tier = mpi: the model is on cuda:1, and this MPI does not say that it takes"
    with pytest.raises(UsageError, match=said):
        over_mpi(GroupMpi(comm=comm, takes_gpu_memory=lambda: False), GPU)


def nothing(channel: GroupChannel) -> None:
    del channel


def test_a_group_of_processes_without_mpi_is_told_so() -> None:
    with pytest.raises(UsageError, match=r"hosts.group_tier = mpi: this job has no MPI"):
        run_in_group(2, nothing, tier="mpi")
