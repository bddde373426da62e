"""Reactions of a worker to failed servers: it continues if they have replicas; pure.

    failover = failover_of(seat, before=None)
    failover.on_lost(event, require_set_up)     # servers that are served elsewhere from now on
    transfers = failover.transfers(seat, owners=owners, ...)
    transfers.send_again(1)                     # server 1 is served elsewhere from now on

Messages that were sent and are not answered are sent again, in their order, marked
``Flag.RETRANSMIT``. The process that has taken the server's place recognizes what it contains
already by group, clock and chunk. Gradients still lie in memory: the memory is the worker's again
only with the reply.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.control import Moved
from psdist.protocol.events import PeerLost
from psdist.protocol.header import Flag, Header
from psdist.protocol.ids import COORDINATOR, describe_peer, is_spare, is_worker, spare_of
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import Action, SendPush
from psdist.workers.protocol.transfers import Transfers

Move: TypeAlias = tuple[int, int]
"""A server, and the server or spare whose process serves it."""


class NoFailover:
    """A failed server ends the job."""

    transfers: type[Transfers] = Transfers

    def on_lost(self, event: PeerLost, require_set_up: Callable[[str], None]) -> Sequence[Move]:
        """Return the servers that are served elsewhere after the network has reported a failure.
        Raises :class:`PeerLostError`. ``require_set_up(who)`` raises it during a set-up."""
        del require_set_up
        raise PeerLostError(event.who)

    def on_moved(self, peer: int, message: Moved, seat: Seat) -> Sequence[Move]:
        """Return the servers that are served elsewhere after the coordinator's message."""
        raise ProtocolError(
            f"worker {seat.worker}: {describe_peer(peer)} sent Moved of server {message.server}; "
            "no server of this job has a replica"
        )

    def left_after(self, left: Sequence[int | None]) -> list[int]:
        """Return the iterations of each set for Done: servers may not have received Leave."""
        del left
        return []


class Failover(NoFailover):
    """Another process takes the place of a failed server, with a replica of its shard."""

    def __init__(self, moves: Moves) -> None:
        self.transfers = ResendingTransfers
        self.moves = moves

    def on_lost(self, event: PeerLost, require_set_up: Callable[[str], None]) -> Sequence[Move]:
        if is_worker(event.peer):
            raise PeerLostError(event.who)
        if not is_spare(event.peer):  # nothing was set up on a spare
            require_set_up(event.who)
        return self.moves.on_lost(event.peer)

    def on_moved(self, peer: int, message: Moved, seat: Seat) -> Sequence[Move]:
        server, host, count = message.server, message.host, seat.num_servers
        is_known = 0 <= host < count or (is_spare(host) and spare_of(host) < seat.num_spares)
        if peer != COORDINATOR or not (0 <= server < count and is_known):
            raise ProtocolError(
                f"worker {seat.worker}: {describe_peer(peer)} sent Moved of server {server} "
                f"to {describe_peer(host)}; {describe_peer(COORDINATOR)} decides that, and "
                f"there are {count} servers and {seat.num_spares} spares"
            )
        return self.moves.on_moved(server, host=host)

    def left_after(self, left: Sequence[int | None]) -> list[int]:
        told = [each for each in left if each is not None]
        return told if len(told) == len(left) else []


def failover_of(seat: Seat, before: NoFailover | None) -> NoFailover:
    """Return the failover of a set; ``before``: that of the worker's first set."""
    if not seat.servers_have_buddies:
        return NoFailover()
    return Failover(Moves(before.moves if isinstance(before, Failover) else None))


class Moves:
    """Which servers have failed, and which process serves each of them now.

    The network reports a failure, and the coordinator reports who takes the place. When both are
    known, no more messages of the failed server arrive, and messages are sent again. If the process
    that took a place fails, all servers that it served move again.
    """

    def __init__(self, before: Moves | None = None) -> None:
        """``before``: the moves until now, of another set."""
        self._lost: set[int] = set(before._lost) if before else set()
        """Servers whose processes have failed."""
        self._told: dict[int, int] = dict(before._told) if before else {}
        """Server -> the process that serves it, by the coordinator's newest message."""
        self._at: dict[int, int] = dict(before._at) if before else {}
        """Server -> the process that its messages are sent to; its own if it is not listed."""

    def on_lost(self, server: int) -> list[tuple[int, int]]:
        """The network reports that the process of ``server`` has failed. Return the servers that
        are served elsewhere from now on, and where."""
        self._lost.add(server)
        return self._move()

    def on_moved(self, server: int, *, host: int) -> list[tuple[int, int]]:
        """The coordinator reports which process serves ``server``; as :meth:`on_lost`."""
        self._told[server] = host
        return self._move()

    def _move(self) -> list[tuple[int, int]]:
        moved = [
            (server, host)
            for server, host in sorted(self._told.items())
            if self._at.get(server, server) in self._lost - {host} and host not in self._lost
        ]
        self._at.update(moved)
        return moved


class ResendingTransfers(Transfers):
    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._sent: dict[int, Header] = {}
        """Chunk -> the last header that was sent about it."""

    def _send_next(self, server: int) -> list[Action]:
        queue, sent = self.queues[server], self._sent
        waiting = list(queue)
        actions = super()._send_next(server)
        for header in waiting[: len(waiting) - len(queue)]:
            sent[header.chunk] = header
        return actions

    def push_for_the_dead(self) -> list[Action]:
        actions = super().push_for_the_dead()
        for action in actions:
            if isinstance(action, SendPush):
                self._sent[action.header.chunk] = action.header
        return actions

    def send_again(self, server: int) -> list[Action]:
        """``server`` is served elsewhere: send again what it has not answered."""
        unanswered: list[Header] = []
        # The process that was to receive it again may have failed, too: it still waits, and is
        # sent once.
        waiting = {header.chunk for header in self.queues[server] if header.flags & Flag.RETRANSMIT}
        for chunk, header in self._sent.items():
            is_awaited = self.awaited.get(chunk) == (header.clock, header.pull_number)
            if self.owners[chunk] != server or not is_awaited or chunk in waiting:
                continue
            if chunk in self.incoming:
                # A part of the reply may lie in the memory already: it has no version any more.
                self.incoming.discard(chunk)
                self.held.forget([chunk])
            self.received.discard(chunk)
            held = self.held.number(chunk) if header.chunk_version else 0
            again = header._replace(flags=header.flags | Flag.RETRANSMIT, chunk_version=held)
            unanswered.append(again)
        unanswered.sort(key=self._turn)
        self.queues[server] = deque([*unanswered, *self.queues[server]])
        self.outstanding[server] = 0
        return self._send_next(server)
