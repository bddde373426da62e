"""A spare's wait for a dead worker's place, and a script that has been told that none is left.

    if not take_place(context): ...      # the job has ended, and this rank had no part in it
    context.replace.worker               # whose place it is; psdist.init() goes on from here

Who is asked to take a place is decided by psdist.servers.protocol.joins, on the coordinator.
"""

from __future__ import annotations

import logging

from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.control import Stop, TakePlace
from psdist.protocol.events import ControlArrived, PeerLost, Sent
from psdist.protocol.ids import COORDINATOR, describe_peer, is_worker
from psdist.ranks.context import RankContext
from psdist.ranks.lobby import wait_for_job

logger = logging.getLogger("psdist")


def take_place(context: RankContext) -> bool:
    """Returns when this rank is asked to take a worker's place in a job that goes on; False when
    no job can begin any more."""
    while wait_for_job(context, None):
        if _is_asked(context):
            return True
        context.end_job()
    context.close()
    return False


def _is_asked(context: RankContext) -> bool:
    """Whether that comes before the job's end."""
    waiting = context.waiting(has_deadline=False)
    waiting.relax()
    while True:
        event = context.transport.poll()
        if event is None:
            waiting.idle("a worker's place")
        elif isinstance(event, PeerLost):
            if not is_worker(event.peer):
                raise PeerLostError(event.who)
        elif isinstance(event, ControlArrived) and event.peer == COORDINATOR:
            if isinstance(event.message, Stop):
                return False
            if not isinstance(event.message, TakePlace):
                raise _unexpected(context, event.peer, event.message)
            context.replace = event.message
            logger.info("this rank takes the place of worker %d", event.message.worker)
            return True
        elif not isinstance(event, Sent):
            raise _unexpected(context, event.peer, event)


def _unexpected(context: RankContext, peer: int, what: object) -> ProtocolError:
    return ProtocolError(
        f"{describe_peer(context.me)}: {describe_peer(peer)} sent {type(what).__name__} to a rank "
        "that waits for a worker's place"
    )
