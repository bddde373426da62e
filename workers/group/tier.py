"""Which implementation of GroupChannel carries psdist's traffic in a group: ``group_tier``.

    channel = start("auto", index=0, size=2, device=device, ...)
    ...
    stop(channel)

torch.distributed's default process group is made in any case: scripts use it. On the CPU the
workers' shared memory is the faster at every size that was measured (docs/performance.md), so
*auto* times nothing: it is taken where all workers of the group can open one another's, and
torch.distributed (gloo) elsewhere. On GPUs it is NCCL's, by torch.distributed.

A group of several hosts is one of these on each of them, and torch.distributed between
(:mod:`~psdist.workers.group.two_levels`); with "mpi", MPI.

Results are the same bit for bit: all of them add in worker order, and over hosts in one order. But
for "nccl", which leaves adding to NCCL: *auto* never takes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch

from psdist.errors import UsageError
from psdist.workers.group import process_group
from psdist.workers.group.channel import AloneChannel, GroupChannel
from psdist.workers.group.forming import GroupFormer
from psdist.workers.group.meeting import Hosts
from psdist.workers.group.process_group import ProcessGroupChannel
from psdist.workers.group.reductions import ReducingChannel
from psdist.workers.group.reforming import ReformingChannel
from psdist.workers.group.segments import Segment
from psdist.workers.group.shared_memory import Make, connect
from psdist.workers.group.two_levels import TwoLevelChannel

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("psdist")

Tier = Literal["auto", "shared_memory", "torch", "mpi", "nccl"]


@dataclass(frozen=True, kw_only=True)
class GroupMpi:
    """The group's workers in MPI."""

    comm: MPI.Comm
    """Of them, by place."""
    takes_gpu_memory: Callable[[], bool]
    """Whether the library says that messages may lie there."""


def start(
    tier: Tier,
    *,
    index: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    broadcast: Callable[[bytes | None], bytes],
    is_spinning: bool,
    make: Make = Segment,
    hosts: Hosts | None = None,
    mpi: GroupMpi | None = None,
    reforms: bool = False,
) -> GroupChannel:
    """This worker's end of its group; the rest as in :func:`process_group.start`.

    ``is_spinning``: a core is to spare for waits; ``make`` makes memory to share; ``mpi``: None
    where there is none. Of a group on several ``hosts`` the choice is each host's, of what joins
    its own workers. Raises :class:`UsageError`, on all workers of the group, where ``tier`` is what
    cannot be.
    """
    over = process_group.start(
        index=index,
        size=size,
        device=device,
        timeout_s=timeout_s,
        broadcast=broadcast,
        hosts=hosts,
        reforms=reforms,
    )
    if not isinstance(over, ProcessGroupChannel):
        return over
    backend = "gloo" if device.type == "cpu" else "NCCL"
    if tier == "mpi":
        return _over_mpi(mpi, index, device, is_spinning=is_spinning, hosts=hosts)
    _require_possible(tier, device)
    with process_group.joining(size, device):
        over = ProcessGroupChannel.like(over)
        if hosts is None:
            return _of_one_host(over, tier, device, backend, is_spinning=is_spinning, make=make)
        num_hosts = len(set(hosts.numbers))
        logger.info("the group's %d workers on %d hosts are joined by %s", size, num_hosts, backend)
        inner = process_group.of_host(over, hosts.numbers)
        if isinstance(inner, ProcessGroupChannel):
            inner = _of_one_host(inner, tier, device, backend, is_spinning=is_spinning, make=make)
        return TwoLevelChannel(inner, over, hosts=hosts.numbers)


def reforming(
    channel: GroupChannel,
    *,
    members: Sequence[int],
    device: torch.device,
    timeout_s: float,
    hosts: Hosts | None,
) -> tuple[ReformingChannel, GroupFormer] | None:
    """An end of the same group that goes on when others of it have died, and what makes the channel
    of those who are left; None of a group of one. ``members``: its workers, by place; the rest as
    given to :func:`start`."""
    if isinstance(channel, AloneChannel):
        return None
    former = GroupFormer(
        channel,
        members=members,
        device=device,
        timeout_s=timeout_s,
        hosts=() if hosts is None else hosts.numbers,
    )
    return ReformingChannel(channel), former


def _over_mpi(
    mpi: GroupMpi | None,
    index: int,
    device: torch.device,
    *,
    is_spinning: bool,
    hosts: Hosts | None,
) -> GroupChannel:
    why_not = ""
    if mpi is None:
        why_not = "this job has no MPI"
    elif device.type != "cpu" and not mpi.takes_gpu_memory():
        why_not = (
            f"the model is on {device}, and this MPI does not say that it takes memory of a GPU "
            "(`psdist doctor` tries it)"
        )
    if mpi is None or why_not:
        raise UsageError(
            f"hosts.group_tier = mpi: {why_not}; use hosts.group_tier = auto, which needs no MPI"
        )
    from psdist.workers.group.mpi import MpiChannel  # only now: it needs MPI to be initialised

    over = MpiChannel(mpi.comm.Dup(), is_spinning=is_spinning)
    if hosts is None:
        logger.info("the group's %d workers reduce over MPI", over.size)
        return over
    num_hosts = len(set(hosts.numbers))
    logger.info("the group's %d workers on %d hosts are joined by MPI", over.size, num_hosts)
    here = mpi.comm.Split(hosts.numbers[index], index)
    inner: GroupChannel = AloneChannel()
    if here.Get_size() > 1:
        inner = MpiChannel(here, is_spinning=is_spinning)
    else:
        here.Free()
    return TwoLevelChannel(inner, over, hosts=hosts.numbers)


def _require_possible(tier: Tier, device: torch.device) -> None:
    if tier == "nccl" and device.type == "cpu":
        raise UsageError(
            "hosts.group_tier = nccl: the model is on the CPU, of which NCCL moves nothing; use "
            "hosts.group_tier = auto"
        )
    if tier == "shared_memory" and device.type != "cpu":
        raise UsageError(
            "hosts.group_tier = shared_memory: the model is on a GPU; use hosts.group_tier = auto, "
            "which takes NCCL then"
        )


def _of_one_host(
    over: ProcessGroupChannel,
    tier: Tier,
    device: torch.device,
    backend: str,
    *,
    is_spinning: bool,
    make: Make,
) -> GroupChannel:
    size = over.size
    why_not = f"hosts.group_tier = {tier}"
    if tier == "nccl":
        logger.info("the group's %d workers reduce by NCCL, which adds in its own order", size)
        return ReducingChannel.like(over)
    if device.type != "cpu" and tier != "torch":
        why_not = "the model is on a GPU"
    elif tier != "torch":
        channel, why_not = connect(over, is_spinning=is_spinning, make=make)
        if channel is not None:
            logger.info("the group's %d workers reduce in shared memory", size)
            return channel
    if tier == "shared_memory":
        raise UsageError(
            f"hosts.group_tier = shared_memory: {why_not}; use hosts.group_tier = auto, which "
            f"takes {backend} then"
        )
    logger.info("the group's %d workers reduce over %s: %s", size, backend, why_not)
    return over


@runtime_checkable
class _Closed(Protocol):
    """What holds more than the process group does."""

    def close(self) -> None: ...


def stop(channel: GroupChannel) -> None:
    """The group is over, on all of its workers."""
    if isinstance(channel, ReformingChannel):
        channel = channel.inner
    ends = (channel.inner, channel.over) if isinstance(channel, TwoLevelChannel) else (channel,)
    for end in ends:
        if isinstance(end, _Closed):
            end.close()
    process_group.stop()
