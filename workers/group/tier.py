"""Which implementation of GroupChannel carries psdist's traffic in a group: ``group_tier``.

    channel = start("auto", index=0, size=2, device=device, ...)
    ...
    stop(channel)

torch.distributed's default process group is made in any case: scripts use it. On the CPU the
workers' shared memory is the faster at every size that was measured (docs/performance.md), so
*auto* times nothing: it is taken where all workers of the group can open one another's, and
torch.distributed (gloo) elsewhere. On GPUs it is NCCL's, by torch.distributed.

Results are the same bit for bit: all of them add in worker order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import torch

from psdist.errors import UsageError
from psdist.workers.group import process_group
from psdist.workers.group.channel import GroupChannel
from psdist.workers.group.process_group import ProcessGroupChannel
from psdist.workers.group.segments import Segment
from psdist.workers.group.shared_memory import Make, SharedMemoryChannel, connect

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
) -> GroupChannel:
    """This worker's end of its group; the rest as in :func:`process_group.start`.

    ``is_spinning``: a core is to spare for waits; ``make`` makes memory to share. Raises
    :class:`UsageError` where ``tier`` is "shared_memory", which cannot be.
    """
    over = process_group.start(
        index=index, size=size, device=device, timeout_s=timeout_s, broadcast=broadcast
    )
    if not isinstance(over, ProcessGroupChannel):
        return over
    backend = "gloo" if device.type == "cpu" else "NCCL"
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
    if isinstance(channel, SharedMemoryChannel):
        channel.close()
    process_group.stop()
