"""The choice of the GroupChannel that carries psdist's traffic in a group: ``group_tier``.

    channel = start("auto", index=0, size=2, device=device, ...)
    ...
    stop(channel)

torch.distributed's default process group is made in any case, because scripts use it. On the CPU
shared memory was faster at every measured size (docs/dev/performance.md, Groups), so *auto* is a
fixed rule. It uses shared memory if all workers of the group can open one another's, and otherwise
torch.distributed (gloo). On GPUs it uses NCCL by torch.distributed.

A group of several hosts has one of these channels on each host, and torch.distributed between them
(:mod:`~psdist.workers.group.two_levels`); with "mpi", MPI.

Results have the same bits: all channels add in worker order, and over hosts in one order. "nccl" is
the exception, because NCCL adds; *auto* never chooses it.
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
from psdist.workers.group.meeting import Hosts
from psdist.workers.group.process_group import ProcessGroupChannel
from psdist.workers.group.rebuilding import GroupRebuilder
from psdist.workers.group.reductions import ReducingChannel
from psdist.workers.group.segments import Segment
from psdist.workers.group.shared_memory import Make, connect
from psdist.workers.group.shrinking import ShrinkingChannel
from psdist.workers.group.two_levels import TwoLevelChannel

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("psdist")

Tier = Literal["auto", "shared_memory", "torch", "mpi", "nccl"]


@dataclass(frozen=True, kw_only=True)
class GroupMpi:
    """MPI for the workers of a group."""

    comm: MPI.Comm
    """Communicator of the workers, by place."""
    takes_gpu_memory: Callable[[], bool]
    """True if the library reports that it can send memory of a GPU."""


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
    """Return this worker's end of its group; other parameters as in :func:`process_group.start`.

    ``is_spinning``: a core is to spare for waits; ``make``: makes shared memory; ``mpi``: None
    in a job without MPI. In a group on several ``hosts`` each host chooses the channel of its own
    workers. Raises :class:`UsageError`, on all workers of the group, if ``tier`` is not possible.
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


def shrinking(
    channel: GroupChannel,
    *,
    members: Sequence[int],
    device: torch.device,
    timeout_s: float,
    hosts: Hosts | None,
) -> tuple[ShrinkingChannel, GroupRebuilder] | None:
    """Return an end of the same group that survives failed members, and the maker of the channel of
    the remaining ones. Return None for a group of one. ``members``: the workers, by place; other
    parameters as in :func:`start`."""
    if isinstance(channel, AloneChannel):
        return None
    rebuilder = GroupRebuilder(
        channel,
        members=members,
        device=device,
        timeout_s=timeout_s,
        hosts=() if hosts is None else hosts.numbers,
    )
    return ShrinkingChannel(channel), rebuilder


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
            "hosts.group_tier = nccl: the model is on the CPU, whose memory NCCL does not move; "
            "use hosts.group_tier = auto"
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
    """A channel with resources of its own."""

    def close(self) -> None: ...


def stop(channel: GroupChannel) -> None:
    """End the group, on all of its workers."""
    if isinstance(channel, ShrinkingChannel):
        channel = channel.inner
    ends = (channel.inner, channel.over) if isinstance(channel, TwoLevelChannel) else (channel,)
    for end in ends:
        if isinstance(end, _Closed):
            end.close()
    process_group.stop()
