"""What is known everywhere of substitutes, workers that join a running job; pure.

    payload = pack_join([12], "state-12-1")       # what the chief brings; others bring no state
    unpack_join(payload)                          # JoinBrought(clocks=(12,), state="state-12-1")

Who joins, when and where the coordinator decides (psdist.servers.protocol.joins).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from psdist.protocol.checkpoints import pack_clocks, unpack_clocks

JOIN: Final = "join"
"""The collective in which substitutes join; each worker brings its clocks."""
_STATE: Final = re.compile(r"[a-z0-9-]{1,80}")


class JoinBrought(NamedTuple):
    """What a worker brings to that collective."""

    clocks: tuple[int, ...]
    """Its own, by parameter set."""
    state: str
    """The name of what a substitute's script goes on with, which the chief has written; "" of the
    other workers, and where the chief could not."""


def pack_join(clocks: Sequence[int], state: str = "") -> bytes:
    return b"%s/%s" % (pack_clocks(clocks), state.encode())


def unpack_join(data: bytes) -> JoinBrought | None:
    """None for anything else."""
    packed, _, name = data.partition(b"/")
    clocks, state = unpack_clocks(packed), name.decode("ascii", "replace")
    if clocks is None or (state and not _STATE.fullmatch(state)) or data.count(b"/") != 1:
        return None
    return JoinBrought(clocks, state)
