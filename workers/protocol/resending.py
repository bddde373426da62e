"""Pushes and pulls that are sent again where the server that they were sent to has died; pure.

    transfers = ResendingTransfers(seat, owners=owners, ...)
    transfers.send_again(1)               # server 1 is served elsewhere from now on

What is sent again is what was sent and is not answered, in its order, marked ``Flag.AGAIN``; who
has taken the server's place knows by group, clock and chunk what it contains already. Gradients
still lie in memory: that is the worker's again only with the reply.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from psdist.protocol.header import Flag, Header
from psdist.workers.protocol.actions import Action, SendPush
from psdist.workers.protocol.transfers import Transfers


class Moves:
    """Which servers have failed, and which process serves each of them now.

    The network reports a failure, and the coordinator reports who takes the place. When both are
    known, no more messages of the failed server arrive, and messages are sent again. If the process
    that took a place fails, all servers that it served move again.
    """

    def __init__(self, before: Moves | None = None) -> None:
        """``before``: what was known when this one began."""
        self._lost: set[int] = set(before._lost) if before else set()
        """Servers whose processes have died."""
        self._told: dict[int, int] = dict(before._told) if before else {}
        """Server -> whose process serves it, as the coordinator has said last."""
        self._at: dict[int, int] = dict(before._at) if before else {}
        """Server -> to whose process what it is sent goes; its own where nothing stands here."""

    def on_lost(self, server: int) -> list[tuple[int, int]]:
        """The network says that the process of ``server`` has died. Servers that are served
        elsewhere from now on, and where."""
        self._lost.add(server)
        return self._move()

    def on_moved(self, server: int, *, host: int) -> list[tuple[int, int]]:
        """The coordinator says whose process serves ``server``; as :meth:`on_lost`."""
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
        """By chunk: what was sent about it last."""

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
        """``server`` has died and is served elsewhere: send again what it has not answered."""
        unanswered: list[Header] = []
        # Who was to be sent it again may have died as well: it waits still, and is sent once.
        waiting = {header.chunk for header in self.queues[server] if header.flags & Flag.AGAIN}
        for chunk, header in self._sent.items():
            is_awaited = self.awaited.get(chunk) == (header.clock, header.pull_number)
            if self.owners[chunk] != server or not is_awaited or chunk in waiting:
                continue
            if chunk in self.incoming:
                # A part of the reply may lie in the memory already: no version any more.
                self.incoming.discard(chunk)
                self.held.forget([chunk])
            self.received.discard(chunk)
            held = self.held.number(chunk) if header.chunk_version else 0
            again = header._replace(flags=header.flags | Flag.AGAIN, chunk_version=held)
            unanswered.append(again)
        unanswered.sort(key=self._turn)
        self.queues[server] = deque([*unanswered, *self.queues[server]])
        self.outstanding[server] = 0
        return self._send_next(server)
