"""An endpoint whose line to the registrar outlives the registrar (psdist.protocol.registrar_line).

    transport = LineTransport(endpoint, deputy=server_id(1))

In front of any other transport, on every rank of a job whose servers have buddies; on the registrar
itself, which has a line to everybody (psdist.servers.protocol.succession), it changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from psdist.protocol.control import Control
from psdist.protocol.events import ControlArrived, Event, Frame, PeerLost, Sent
from psdist.protocol.ids import REGISTRAR
from psdist.protocol.registrar_line import FOR_REGISTRAR, Follow, LineAction, RegistrarLine, Say
from psdist.transport.base import Transport

_OF_LINE = (ControlArrived, PeerLost)


class LineTransport:
    """A :class:`psdist.transport.base.Transport` in front of another one."""

    def __init__(
        self,
        transport: Transport,
        *,
        deputy: int,
        who_has_died: str = "",
        on_follow: Callable[[], None] = lambda: None,
    ) -> None:
        """``deputy``: its stable id; ``who_has_died``: see :class:`RegistrarLine`; ``on_follow``:
        called when the registrar is found elsewhere."""
        self._transport = transport
        self._deputy = deputy
        self._on_follow = on_follow
        self._ready: deque[Event] = deque()
        self._is_shard_elsewhere = False
        """Whether the registrar was followed to where the shard of server 0 will be served, too,
        when the registrar has said so: until then this is lost, as to any dead server."""
        self._line: RegistrarLine | None = None
        if transport.me != REGISTRAR:
            self._line = RegistrarLine(me=transport.me, deputy=deputy, who_has_died=who_has_died)

    @property
    def me(self) -> int:
        return self._transport.me

    @property
    def lost(self) -> Mapping[int, str]:
        return self._transport.lost

    @property
    def moved(self) -> Mapping[int, str]:
        return self._transport.moved

    @property
    def bytes_sent(self) -> int:
        return self._transport.bytes_sent

    def send(self, peer: int, frame: Frame) -> None:
        if self._is_shard_elsewhere and peer == REGISTRAR:
            self._ready.append(Sent(frame))
            return
        self._transport.send(peer, frame)

    def send_control(self, peer: int, message: Control, set_index: int = 0) -> None:
        if peer == REGISTRAR and self._line is not None:
            if isinstance(message, FOR_REGISTRAR):
                leaves = self._line.say(message)
            else:
                leaves = not self._is_shard_elsewhere
            if not leaves:
                return
        self._transport.send_control(peer, message, set_index)

    def accept(self, ticket: Any, frame: Frame) -> None:
        self._transport.accept(ticket, frame)

    def poll(self) -> Event | None:
        ready = self._ready
        while not ready:
            event = self._transport.poll()
            if self._line is None or not isinstance(event, _OF_LINE):
                return event
            self._do(self._line.handle(event))
        return ready.popleft()

    def _do(self, actions: Iterable[LineAction]) -> None:
        for action in actions:
            if isinstance(action, Say):
                self._transport.send_control(REGISTRAR, action.message)
            elif isinstance(action, Follow):
                if REGISTRAR in self._transport.lost:
                    self._is_shard_elsewhere = True
                self._transport.move(REGISTRAR, action.host)
                self._on_follow()
            else:
                self._ready.append(action)

    def host(self, peer: int) -> LineTransport:
        transport = self._transport
        died = transport.lost.get(REGISTRAR, "") or transport.moved.get(REGISTRAR, "")
        return LineTransport(transport.host(peer), deputy=self._deputy, who_has_died=died)

    def move(self, peer: int, host: int) -> None:
        if peer == REGISTRAR:
            self._is_shard_elsewhere = False
        self._transport.move(peer, host)

    def become(self, peer: int) -> None:
        self._transport.become(peer)

    def drain(self, timeout_s: float) -> None:
        self._transport.drain(timeout_s)
