"""How many receive slots a server makes, and how many pushes a worker may have outstanding at it.

What ``receive_buffers = auto`` and ``credits = auto`` choose, from what is known when the model is
described; results never depend on it. Both say why.

    slots = auto_receive_buffers(shard_bytes, num_groups=4, slot_bytes=2 << 20)
    slots.number, slots.why
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CHUNKS_AHEAD = 8
"""Of so many chunks all groups' pushes are received before the first of them is stepped: who has
been told where to send needs a while until bytes come, behind what else the link carries, and who
begins first goes on while the last one computes (docs/performance.md)."""
SPARE = 3
"""Slots that pushes out of turn leave free (psdist.servers.protocol.chunks.receive_pool)."""
FEWEST_SLOTS = 8
MOST_SHARDS = 2
"""Slots take at most so many times the bytes of the shard, where that is FEWEST_SLOTS or more"""
AMPLE_BYTES = 64 << 20
"""or more than what any server has to spare."""

AUTO_CREDITS = CHUNKS_AHEAD
"""What a server takes ahead of a group."""

REPLY_WINDOW_BYTES = 1 << 20
"""Of replies to pushes under way to a worker from one server, or one reply alone. All that are on
their way to it share its link: with fewer at a time the one that it wants first is there first, and
the link is kept busy by the other servers' (docs/performance.md)."""

MOST_OFFERS = 1024
"""Pushes that are offered to a server and not yet received, of all groups: the MPI library holds
the first tens of KiB of each."""
FEWEST_CREDITS = 2


class Choice(NamedTuple):
    number: int
    why: str


def auto_receive_buffers(chunk_bytes: Sequence[int], *, num_groups: int, slot_bytes: int) -> Choice:
    """``chunk_bytes``: of the chunks of this server's shard; ``slot_bytes``: of one slot."""
    everything = num_groups * len(chunk_bytes) + SPARE
    wanted = num_groups * CHUNKS_AHEAD + SPARE
    of_shard = MOST_SHARDS * sum(chunk_bytes) // slot_bytes
    allowed = max(FEWEST_SLOTS, of_shard, AMPLE_BYTES // slot_bytes)
    if everything <= min(wanted, allowed):
        return Choice(everything, "all pushes of an iteration fit")
    if wanted <= allowed:
        return Choice(
            max(wanted, min(FEWEST_SLOTS, everything)),
            f"{CHUNKS_AHEAD} chunks of each group, {num_groups} of them, and {SPARE} to spare",
        )
    if allowed == of_shard:
        return Choice(allowed, f"{MOST_SHARDS} times the shard's bytes, for memory")
    if allowed == FEWEST_SLOTS:
        return Choice(allowed, "the fewest, for memory")
    return Choice(allowed, f"{AMPLE_BYTES >> 20} MiB, for memory")


def auto_credits(*, num_groups: int) -> Choice:
    """Of a worker, at each server."""
    allowed = MOST_OFFERS // num_groups
    if allowed < AUTO_CREDITS:
        return Choice(max(FEWEST_CREDITS, allowed), f"{num_groups} groups offer pushes to a server")
    return Choice(AUTO_CREDITS, "what a server takes ahead of a group")
