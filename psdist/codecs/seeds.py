"""Where what is random in an encoding comes from: the same when a run is repeated."""

from __future__ import annotations

import hashlib
import struct

ANY_SERVER = -1
"""The sender of a reply: the same parameters get the same bytes from whoever has them."""


def sender_to(worker: int) -> int:
    """The sender of a reply that is encoded for one worker: others' are independent."""
    return ANY_SERVER - 1 - worker


def seed_of(run_seed: int, sender: int, chunk: int, clock: int) -> int:
    """63 bits that look independent for different arguments, and are the same on all machines.
    ``sender``: the group of a push, :data:`ANY_SERVER`, or that of :func:`sender_to`."""
    text = struct.pack("<4q", run_seed, sender, chunk, clock)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
