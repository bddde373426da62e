"""Optimizer state between the chief and the servers, part by part; pure.

One part at a time is under way at each server, so neither side holds more than one part in addition
to the state itself. The chief sends its own state when a set begins, and requests the servers'
state while all workers are in a collective.

    state = StateTransfer(seat)
    actions = state.begin_send({0: [(0, 0), (2, 0)], 1: [(1, 0)]})     # server -> (chunk, start)
    while not state.is_idle: actions = state.on_taken(peer, message)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import StateHeld, StateTaken, StateWanted
from psdist.protocol.ids import describe_peer, server_id
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import Action, KeepState, SendControl, SendState, Warn

Part: TypeAlias = tuple[int, int]
"""Chunk, and its first element in the chunk."""


class StateTransfer:
    def __init__(self, seat: Seat, *, set_index: int = 0) -> None:
        self._seat = seat
        self._set_index = set_index
        self._queues: dict[int, deque[Part]] = {}
        """By server, if a part of it is awaited: the first part is under way."""
        self._is_asking = False
        self._number = 0
        """How often all state has been asked for."""
        self._answered: dict[int, StateTaken | StateHeld] = {}
        """By server's id, its last answer: a second delivery of it is dropped."""
        self.duplicates = 0

    @property
    def is_idle(self) -> bool:
        """Whether every part that was begun is taken, or here."""
        return not self._queues

    def begin_send(self, parts: Mapping[int, Iterable[Part]]) -> list[Action]:
        """Send these parts to each server, in this order: to each one at least."""
        return self._begin(parts, is_asking=False)

    def begin_fetch(self, parts: Mapping[int, Iterable[Part]]) -> list[Action]:
        """Ask each server for these parts, in this order: for one at least."""
        self._number += 1
        return self._begin(parts, is_asking=True)

    def _begin(self, parts: Mapping[int, Iterable[Part]], *, is_asking: bool) -> list[Action]:
        if not self.is_idle:
            raise InvariantError(
                f"worker {self._seat.worker} sends or asks for optimizer state before what it "
                "began before has ended"
            )
        self._is_asking = is_asking
        self._queues = {server: deque(its) for server, its in parts.items()}
        return [self._next(server) for server in self._queues]

    def _next(self, server: int) -> Action:
        chunk, start = self._queues[server][0]
        if not self._is_asking:
            return SendState(server_id(server), chunk, start)
        wanted = StateWanted(number=self._number, chunk=chunk, start=start)
        return SendControl(server_id(server), wanted, self._set_index)

    def ask_again(self, server: int) -> list[Action]:
        """Repeat the request to ``server``, whose place another process has taken."""
        return [self._next(server)] if server in self._queues else []

    @property
    def is_sending(self) -> bool:
        """Whether parts of the chief's own are under way."""
        return bool(self._queues) and not self._is_asking

    def on_taken(self, peer: int, message: StateTaken) -> list[Action]:
        server = self._server_of(peer, (message.chunk, message.start), is_asked=False)
        if server is None:
            return self._on_late(peer, message)
        self._answered[peer] = message
        return self._go_on(server)

    def on_held(self, peer: int, message: StateHeld) -> list[Action]:
        server = self._server_of(peer, (message.chunk, message.start), is_asked=True)
        if server is None or message.number != self._number:
            return self._on_late(peer, message)
        self._answered[peer] = replace(message, described=b"", values=b"")
        return [KeepState(peer, message), *self._go_on(server)]

    def _server_of(self, peer: int, part: Part, *, is_asked: bool) -> int | None:
        """The server that this part is awaited from, if that is ``peer``."""
        if is_asked == self._is_asking:
            for server, queue in self._queues.items():
                if peer == server_id(server) and queue[0] == part:
                    return server
        return None

    def _go_on(self, server: int) -> list[Action]:
        queue = self._queues[server]
        queue.popleft()
        if queue:
            return [self._next(server)]
        del self._queues[server]
        return []

    def _on_late(self, peer: int, message: StateTaken | StateHeld) -> list[Action]:
        said = message
        if isinstance(message, StateHeld):
            said = replace(message, described=b"", values=b"")
        if said == self._answered.get(peer):
            self.duplicates += 1
            return []
        name = type(message).__name__
        raise ProtocolError(
            f"worker {self._seat.worker}: {describe_peer(peer)} sent {name} about chunk "
            f"{message.chunk} from element {message.start} on, which this worker does not "
            "wait for"
        )

    def describe(self) -> str:
        """Return what is awaited, in words."""
        if self._is_asking:
            return "servers to bring the optimizer's state"
        return "servers to take the optimizer's state"

    def warnings(self) -> list[Action]:
        """For people who have waited long."""
        return [
            Warn(f"waiting for server {server}: optimizer state of chunk {queue[0][0]}")
            for server, queue in self._queues.items()
        ]
