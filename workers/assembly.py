"""The factory of workers: everybody who needs one gets it here.

loop = make_loop(transport, seat, waiting=waiting)
loop.take_slice(partition, owners=owners, credits=4, memory=PlainMemory(partition))
"""

from __future__ import annotations

from collections.abc import Callable

from psdist.transport.base import Transport
from psdist.transport.waiting import Waiting
from psdist.workers.loop import WorkerLoop
from psdist.workers.protocol.core import WorkerCore
from psdist.workers.protocol.seat import Seat


def make_loop(
    transport: Transport,
    seat: Seat,
    *,
    waiting: Waiting,
    describe_group: Callable[[int], str] = lambda group: f"group {group}",
) -> WorkerLoop:
    """A worker that can take part in collectives; with a slice of a model (``take_slice``) it
    pushes and pulls, too. ``describe_group(group)`` names a group to people."""
    return WorkerLoop(transport, WorkerCore(seat, describe_group=describe_group), waiting=waiting)
