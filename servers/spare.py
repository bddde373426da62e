"""A spare: it serves no shard until it replaces a failed server, or leaves to replace a failed
worker.

    spare = SpareSeat(options, replication)
    ServerLoop(transport, spare, [replication, StandbySeat(...)]).run(waiting)
    spare.replace, spare.heard            # the worker to replace; events for that worker

A spare is a server without its own shard. The chief sends it nothing. The coordinator asks it to
keep, take over and fill replicas, and sends all its records to a spare that is its standby. Before
a server fills a replica here, it describes its parameter sets. Each shard taken over has a loop.
"""

from __future__ import annotations

from typing import Any

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Moved, Setup, TakePlace
from psdist.protocol.events import Arrived, ControlArrived, Event, Offered, PeerLost
from psdist.protocol.ids import COORDINATOR, describe_peer, is_worker
from psdist.servers.loop import Decided, Served
from psdist.servers.replication import Replication
from psdist.servers.set_store import ServerOptions, describe_set


class SpareSeat(Served):
    TAKES = (Moved,)

    def __init__(self, options: ServerOptions, replication: Replication) -> None:
        """``options.server`` is the spare's id; ``replication``: that of the same loop."""
        self.replace: TakePlace | None = None
        """The request to replace a worker; the worker's code handles all later messages."""
        self.heard: list[PeerLost | ControlArrived] = []
        """Failures of servers and moves of shards so far, which a worker must handle too."""
        self.num_described = 0
        """Number of parameter sets that were described."""
        self._options = options
        self._replication = replication
        self.held = [0] * len(options.shard_weights)
        """By server: bytes of the sets that were described."""

    def handle(self, event: Event) -> Decided:
        assert isinstance(event, Offered | Arrived | ControlArrived)
        what = event.message if isinstance(event, ControlArrived) else event
        if isinstance(event, ControlArrived) and isinstance(what, Moved):
            self.heard.append(event)
            return self._replication.handle(event)
        if isinstance(event, ControlArrived) and isinstance(what, Setup):
            self._take_description(event.peer, what, event.set_index)
        elif isinstance(what, TakePlace):
            self._go_as_worker(event.peer, what)
        else:
            raise ProtocolError(
                f"{self._me}: {describe_peer(event.peer)} sent {type(what).__name__}, which is for "
                "servers; a spare has no shard of its own"
            )
        return ()

    def on_lost(self, event: PeerLost) -> None:
        if not is_worker(event.peer):
            self.heard.append(event)

    def _go_as_worker(self, peer: int, message: TakePlace) -> None:
        """End the loop to become a worker. This spare serves and keeps no shard."""
        kept = sorted(self._replication.kept)
        if peer != COORDINATOR or kept:
            raise ProtocolError(
                f"{self._me}: {describe_peer(peer)} sent TakePlace of worker {message.worker}; "
                f"{describe_peer(COORDINATOR)} asks spares that have no shard, and here are those "
                f"of servers {kept}"
            )
        self.replace = message
        self.loop.finish()

    def _take_description(self, peer: int, setup: Setup, set_index: int) -> None:
        """Take a set's description from a server that fills a replica; all send the same."""
        if set_index > self.num_described or is_worker(peer):
            raise ProtocolError(
                f"{self._me}: {describe_peer(peer)} described parameter set {set_index}; "
                f"{self.num_described} are known, and a server describes the next"
            )
        if set_index < self.num_described:
            return
        self.num_described += 1
        built = describe_set(set_index, setup, self._options.shard_weights, self.held)
        for part in self.loop.parts:
            part.on_built(built)

    @property
    def _me(self) -> str:
        return describe_peer(self._options.server)

    def statistics(self) -> list[dict[str, Any]]:
        raise InvariantError("a spare was asked to finish: it is stopped")
