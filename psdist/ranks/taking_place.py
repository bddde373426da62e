"""A spare waits for the place of a failed worker.

    if not take_place(context): ...      # the job has ended without this rank
    context.replace.worker               # the failed worker; psdist.init() continues

The coordinator selects the spare (psdist.servers.protocol.joins).
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
    """Wait until this rank receives a worker's place in a running job. Return False if no job can
    begin any more."""
    while wait_for_job(context, None):
        if _is_asked(context):
            return True
        context.end_job()
    context.close()
    return False


def _is_asked(context: RankContext) -> bool:
    """True if this rank receives a place before the job ends."""
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
