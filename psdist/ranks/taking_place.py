"""A spare waits for the place of a failed worker.

    if not take_place(rank): ...      # the job has ended without this rank
    rank.session.replace.worker               # the failed worker; psdist.init() continues

The coordinator selects the spare (psdist.servers.protocol.joins).
"""

from __future__ import annotations

from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.control import Stop, TakePlace
from psdist.protocol.events import ControlArrived, PeerLost, Sent
from psdist.protocol.ids import COORDINATOR, describe_peer, is_worker
from psdist.ranks.lobby import wait_for_job
from psdist.ranks.rank import Rank


def take_place(rank: Rank) -> bool:
    """Wait until this rank receives a worker's place in a running job. Return False if no job can
    begin any more."""
    while wait_for_job(rank, None):
        if _is_asked(rank):
            return True
        rank.session.end()
    rank.exit.close()
    return False


def _is_asked(rank: Rank) -> bool:
    """True if this rank receives a place before the job ends."""
    waiting = rank.waiting(has_deadline=False)
    waiting.relax()
    while True:
        event = rank.session.transport.poll()
        if event is None:
            waiting.idle("a worker's place")
        elif isinstance(event, PeerLost):
            if not is_worker(event.peer):
                raise PeerLostError(event.who)
        elif isinstance(event, ControlArrived) and event.peer == COORDINATOR:
            if isinstance(event.message, Stop):
                return False
            if not isinstance(event.message, TakePlace):
                raise _unexpected(rank, event.peer, event.message)
            rank.session.take_place(event.message)
            return True
        elif not isinstance(event, Sent):
            raise _unexpected(rank, event.peer, event)


def _unexpected(rank: Rank, peer: int, what: object) -> ProtocolError:
    return ProtocolError(
        f"{describe_peer(rank.me)}: {describe_peer(peer)} sent {type(what).__name__} to a rank "
        "that waits for a worker's place"
    )
