"""Which implementation of GroupChannel carries psdist's traffic in a group: ``group_tier``.

    channel = start("auto", index=0, size=2, device=device, ...)
    ...
    stop(channel)

torch.distributed's default process group is made in any case: scripts use it. On the CPU the
workers' shared memory is the faster at every size that was measured (docs/performance.md), so
*auto* times nothing: it is taken where all workers of the group can open one another's, and
torch.distributed (gloo) elsewhere. On GPUs it is NCCL's, by torch.distributed.

A group of several hosts is one of these on each of them, and torch.distributed between
(:mod:`~psdist.workers.group.two_levels`).

Results are the same bit for bit: all of them add in worker order, and over hosts in one order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import torch

from psdist.errors import UsageError
from psdist.workers.group import process_group
from psdist.workers.group.channel import GroupChannel
from psdist.workers.group.meeting import Hosts
from psdist.workers.group.process_group import ProcessGroupChannel
from psdist.workers.group.segments import Segment
from psdist.workers.group.shared_memory import Make, SharedMemoryChannel, connect
from psdist.workers.group.two_levels import TwoLevelChannel

logger = logging.getLogger("psdist")

Tier = Literal["auto", "shared_memory", "torch"]


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
) -> GroupChannel:
    """This worker's end of its group; the rest as in :func:`process_group.start`.

    ``is_spinning``: a core is to spare for waits; ``make`` makes memory to share. Of a group on
    several ``hosts`` the choice is each host's, of what joins its own workers. Raises
    :class:`UsageError` where ``tier`` is "shared_memory", which cannot be.
    """
    over = process_group.start(
        index=index,
        size=size,
        device=device,
        timeout_s=timeout_s,
        broadcast=broadcast,
        hosts=hosts,
    )
    if not isinstance(over, ProcessGroupChannel):
        return over
    backend = "gloo" if device.type == "cpu" else "NCCL"
    if hosts is None:
        return _of_one_host(over, tier, device, backend, is_spinning=is_spinning, make=make)
    num_hosts = len(set(hosts.numbers))
    logger.info("the group's %d workers on %d hosts are joined by %s", size, num_hosts, backend)
    inner = process_group.of_host(over, hosts.numbers)
    if isinstance(inner, ProcessGroupChannel):
        inner = _of_one_host(inner, tier, device, backend, is_spinning=is_spinning, make=make)
    return TwoLevelChannel(inner, over, hosts=hosts.numbers)


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
    why_not = f"group_tier = {tier}"
    if device.type != "cpu" and tier != "torch":
        why_not = "the model is on a GPU"
    elif tier != "torch":
        channel, why_not = connect(over, is_spinning=is_spinning, make=make)
        if channel is not None:
            logger.info("the group's %d workers reduce in shared memory", size)
            return channel
    if tier == "shared_memory":
        raise UsageError(
            f"group_tier = shared_memory: {why_not}; use group_tier = auto, which takes {backend} "
            "then"
        )
    logger.info("the group's %d workers reduce over %s: %s", size, backend, why_not)
    return over


def stop(channel: GroupChannel) -> None:
    inner = channel.inner if isinstance(channel, TwoLevelChannel) else channel
    if isinstance(inner, SharedMemoryChannel):
        inner.close()
    process_group.stop()
