"""An endpoint whose line to the coordinator outlives the coordinator
(psdist.protocol.coordinator_line).

    transport = LineTransport(endpoint, standby=server_id(1))

It is in front of another transport, on every rank of a job with replication. On the coordinator it
changes nothing: the coordinator has a line to every rank (psdist.servers.protocol.failover).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from psdist.protocol.control import Control, ForCoordinator
from psdist.protocol.coordinator_line import (
    CoordinatorLine,
    Follow,
    LineAction,
    Say,
)
from psdist.protocol.events import ControlArrived, Event, Frame, PeerLost, Sent
from psdist.protocol.ids import COORDINATOR
from psdist.transport import ForwardingTransport, Transport

_OF_LINE = (ControlArrived, PeerLost)


class LineTransport(ForwardingTransport):
    """A :class:`psdist.transport.Transport` in front of another one."""

    def __init__(
        self,
        transport: Transport,
        *,
        standby: int | None,
        before: LineTransport | None = None,
        on_follow: Callable[[int], None] = lambda _died: None,
    ) -> None:
        """``standby``: stable id of the first standby; ``before``: the transport of this process,
        where a rank continues for another one; ``on_follow(died)``: called when the coordinator
        has moved because the process ``died`` has failed."""
        super().__init__(transport)
        self._on_follow = on_follow
        self._ready: deque[Event] = deque()
        self._is_shard_elsewhere = False
        """True until the coordinator's new process also serves the shard of server 0. Until then
        messages to that shard are dropped, as for any failed server."""
        self._shard_at: int = before._shard_at if before is not None else COORDINATOR
        """The rank whose process serves that shard, as reported to this rank."""
        self._is_coordinator_here = transport.me == COORDINATOR
        self._line: CoordinatorLine | None = None
        if transport.me != COORDINATOR:
            line_before = before._line if before is not None else None
            self._line = CoordinatorLine(me=transport.me, standby=standby, before=line_before)
            if before is not None:
                self._line.know_dead({**transport.lost, **transport.moved})

    @property
    def coordinator_at(self) -> int:
        """The rank whose process runs the coordinator, or ran it until it failed."""
        return (
            self.me
            if self._is_coordinator_here or self._line is None
            else self._line.coordinator_at
        )

    @property
    def standby(self) -> int | None:
        """The coordinator's standby, on all ranks except the coordinator's."""
        return self._line.standby if self._line is not None else None

    def send(self, peer: int, frame: Frame) -> None:
        if self._is_shard_elsewhere and peer == COORDINATOR:
            self._ready.append(Sent(frame))
            return
        self._transport.send(peer, frame)

    def send_control(self, peer: int, message: Control, set_index: int = 0) -> None:
        if peer == COORDINATOR and self._line is not None:
            if isinstance(message, ForCoordinator):
                leaves = self._line.say(message)
            else:
                leaves = not self._is_shard_elsewhere
            if not leaves:
                return
        self._transport.send_control(peer, message, set_index)

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
                self._transport.send_control(COORDINATOR, action.message)
            elif isinstance(action, Follow):
                self._is_shard_elsewhere = self._shard_at != action.host
                self._transport.move(COORDINATOR, action.host)
                self._on_follow(action.died)
            else:
                self._ready.append(action)

    def host(self, peer: int) -> LineTransport:
        if peer == COORDINATOR:
            self._is_coordinator_here = True
        return LineTransport(self._transport.host(peer), standby=None, before=self)

    def move(self, peer: int, host: int) -> None:
        if peer == COORDINATOR:
            self._is_shard_elsewhere, self._shard_at = False, host
        self._transport.move(peer, host)
