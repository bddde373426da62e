"""How many receive slots a server makes, and how many pushes a worker may have outstanding at it.

``receive_buffers = auto`` and ``credits = auto`` are resolved from the described model; results
never depend on them. Both give a reason.

    slots = auto_receive_buffers(shard_bytes, num_groups=4, slot_bytes=2 << 20)
    slots.number, slots.why
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CHUNKS_AHEAD = 8
"""Chunks whose pushes of all groups are received before the first of them is stepped. After a group
is told where to send, its bytes take a while, since other messages are on the link; and the first
group continues while the last one computes (docs/dev/performance.md)."""
SPARE = 3
"""Slots that pushes out of turn leave free (psdist.servers.protocol.chunks.receive_pool)."""
FEWEST_SLOTS = 8
MOST_SHARDS = 2
"""Slots take at most this multiple of the shard's bytes, or AMPLE_BYTES, or FEWEST_SLOTS."""
AMPLE_BYTES = 64 << 20
"""Memory that every server can spare for slots."""

AUTO_CREDITS = CHUNKS_AHEAD
"""Pushes that a server accepts ahead from a group."""

REPLY_WINDOW_BYTES = 1 << 20
"""Maximum bytes of replies to pushes under way to a worker from one server, or one reply alone. All
replies to a worker share its link. With fewer under way at a time the next needed one arrives
first, and replies of the other servers keep the link busy (docs/dev/performance.md)."""


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


def auto_credits(*, num_workers: int, offer_bytes: int, most_bytes: int, fewest: int) -> Choice:
    """Return the credits of a worker at each server. ``offer_bytes``: what the MPI library holds of
    a push that is offered and not yet received; ``most_bytes``: what it may hold of all workers'
    pushes, if each has more than the ``fewest`` credits."""
    allowed = most_bytes // (num_workers * offer_bytes)
    if allowed < AUTO_CREDITS:
        return Choice(
            max(fewest, allowed),
            f"{num_workers} workers offer pushes, {offer_bytes >> 10} KiB of each in MPI's memory",
        )
    return Choice(AUTO_CREDITS, "what a server takes ahead of a group")
