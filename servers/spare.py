"""A spare's loop: it serves no shard until it replaces a failed server, or leaves to replace a
failed worker.

    loop = SpareLoop(transport, make_core, options, make_executor=TensorShard, replication=...)
    loop.run(waiting)
    loop.replace, loop.heard              # the worker to replace; events for that worker

A spare is a server without its own shard. The chief sends it nothing. The coordinator asks it to
keep, take over and fill replicas, and sends all its records to a spare that is its standby. Before
a server fills a replica here, it describes its parameter sets. Each shard taken over has a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Moved, Setup, TakePlace
from psdist.protocol.events import ControlArrived, Event, PeerLost, Sent
from psdist.protocol.ids import COORDINATOR, describe_peer, is_worker
from psdist.protocol.partition import Partition
from psdist.servers.loop import ServerLoop, Standby
from psdist.servers.protocol.actions import Action
from psdist.servers.protocol.state import ServerCore
from psdist.servers.replication.replication import ReplicationOptions
from psdist.servers.set_loop import OnBuilt, ServerOptions, SetLoop
from psdist.servers.shard.executor import MakeExecutor
from psdist.transport.base import Transport


class SpareLoop(ServerLoop):
    def __init__(
        self,
        transport: Transport,
        make_core: Callable[[int, int], ServerCore],
        options: ServerOptions,
        *,
        make_executor: MakeExecutor,
        replication: ReplicationOptions,
        make_standby: Callable[[bytes, bytes], Standby],
        on_built: OnBuilt = lambda _set_index, _partition, _owners, _setup: None,
        make_set: Callable[..., SetLoop] | None = None,
    ) -> None:
        """Parameters as of :class:`ServerLoop`; ``options.server`` is the spare's id."""
        super().__init__(
            transport,
            make_core,
            options,
            make_executor=make_executor,
            make_set=make_set,
            make_standby=make_standby,
            on_built=on_built,
            replication=replication,
            has_shard=False,
        )
        self.replace: TakePlace | None = None
        """The request to replace a worker; the worker's code handles all later messages."""
        self.heard: list[PeerLost | ControlArrived] = []
        """Failures of servers and moves of shards so far, which a worker must handle too."""
        self._num_described = 0
        """Number of parameter sets that were described."""

    def _decide(self, event: Event) -> Iterable[tuple[SetLoop, Iterable[Action]]]:
        assert self._replication is not None
        if self._replication.handle(event):
            return ()
        self._note_down(event)
        if isinstance(event, Sent | PeerLost):
            is_of_worker = isinstance(event, PeerLost) and is_worker(event.peer)
            return () if is_of_worker else super()._decide(event)
        if isinstance(event, ControlArrived):
            if isinstance(event.message, Setup):
                self._take_description(event.peer, event.message, event.set_index)
                return ()
            if isinstance(event.message, TakePlace):
                self._go_as_worker(event.peer, event.message)
                return ()
            if self._handle_outside_sets(event.peer, event.message):
                return ()
        what = event.message if isinstance(event, ControlArrived) else event
        raise ProtocolError(
            f"{describe_peer(self._options.server)}: {describe_peer(event.peer)} sent "
            f"{type(what).__name__}, which is for servers; a spare has no shard of its own"
        )

    def _note_down(self, event: Event) -> None:
        is_death = isinstance(event, PeerLost) and not is_worker(event.peer)
        is_move = isinstance(event, ControlArrived) and isinstance(event.message, Moved)
        if is_death or is_move:
            assert isinstance(event, PeerLost | ControlArrived)
            self.heard.append(event)

    def _go_as_worker(self, peer: int, message: TakePlace) -> None:
        """End the loop to become a worker. This spare serves and keeps no shard."""
        assert self._replication is not None
        if peer != COORDINATOR or self._replication.kept:
            raise ProtocolError(
                f"{describe_peer(self._options.server)}: {describe_peer(peer)} sent TakePlace of "
                f"worker {message.worker}; {describe_peer(COORDINATOR)} asks spares that have no "
                f"shard, and here are those of servers {sorted(self._replication.kept)}"
            )
        self.replace = message
        self._finish()

    def _take_description(self, peer: int, setup: Setup, set_index: int) -> None:
        """Take a set's description from a server that fills a replica; all send the same."""
        assert self._replication is not None
        if set_index > self._num_described or is_worker(peer):
            raise ProtocolError(
                f"{describe_peer(self._options.server)}: {describe_peer(peer)} described parameter "
                f"set {set_index}; {self._num_described} are known, and a server describes the next"
            )
        if set_index < self._num_described:
            return
        self._num_described += 1
        partition = Partition.decode(setup.partition)
        owners = partition.shard(self._options.shard_weights, self._held)
        held = partition.bytes_by_server(owners, len(self._held))
        self._held[:] = [one + other for one, other in zip(self._held, held, strict=True)]
        self._when_built(set_index, partition, owners, setup)

    def statistics(self) -> dict[str, Any]:
        raise InvariantError("a spare was asked to finish: it is stopped")
