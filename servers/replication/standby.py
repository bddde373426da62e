"""The coordinator and its standby, as parts of the loops of two servers.

    LoggedSeat(coordinator_log, reports, replication)           # server 0
    StandbySeat(make_standby, replication, wire, standby)       # every server; one is the standby

Decisions are made in psdist.servers.protocol.failover.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from psdist.codecs.wire import Wire
from psdist.errors import ProtocolError, PsdistError
from psdist.protocol.control import FOR_COORDINATOR, Append, AppendAck, InstallSnapshot, Moved
from psdist.protocol.events import ControlArrived, Event, PeerLost
from psdist.protocol.ids import COORDINATOR, describe_peer, server_id
from psdist.servers.loop import Decided, ServerPart
from psdist.servers.parts import CoordinatorSeat, Reports, codec_sizes
from psdist.servers.protocol.coordinator import CoordinatorAction
from psdist.servers.protocol.failover.coordinator_log import (
    CoordinatorLog,
    InstallAll,
    Over,
)
from psdist.servers.protocol.takeovers import Move
from psdist.servers.replication import Replication, require_coordinator

_PART_BYTES = 16 * 2**20
"""Bytes of the coordinator's snapshot in one message."""


class LoggedSeat(CoordinatorSeat):
    """The coordinator with a log for its standby."""

    TAKES = (*FOR_COORDINATOR, Moved)

    def __init__(
        self, coordinator_log: CoordinatorLog, reports: Reports, replication: Replication
    ) -> None:
        """``replication``: that of the same loop."""
        super().__init__(coordinator_log, reports)
        self._replication = replication

    def handle(self, event: Event) -> Decided:
        if isinstance(event, ControlArrived) and isinstance(event.message, Moved):
            require_coordinator(event, self.loop.transport.me)
            # The move is known here since the coordinator decided it; another may have followed.
            self._replication.on_moved(event.message.server)
            return ()
        return super().handle(event)

    def _do_here(self, action: CoordinatorAction) -> None:
        if isinstance(action, Move):
            self.loop.transport.move(server_id(action.server), server_id(action.host))
        elif isinstance(action, InstallAll):
            self._install(action)
        elif not isinstance(action, Over):
            self._reports.on_action(action)

    def _install(self, action: InstallAll) -> None:
        """Send the coordinator's snapshot in parts. The last one adds what users have been told."""
        state, told = action.state, self._reports.to_snapshot()
        num_parts = -(-len(state) // _PART_BYTES)
        for part in range(num_parts):
            message = InstallSnapshot(
                number=action.number,
                part=part,
                num_parts=num_parts,
                state=state[part * _PART_BYTES : (part + 1) * _PART_BYTES],
                told=told if part == num_parts - 1 else b"",
            )
            self.loop.transport.send_control(action.standby, message)


class Standby(NamedTuple):
    coordinator_log: CoordinatorLog
    reports: Reports


class StandbySeat(ServerPart):
    TAKES = (Append, InstallSnapshot)

    def __init__(
        self,
        make_standby: Callable[[bytes, bytes], Standby],
        replication: Replication,
        wire: Wire,
        standby: Standby | None = None,
    ) -> None:
        """``make_standby(snapshot, told)`` makes this server the standby later, from the
        coordinator's snapshot and what users have been told; ``standby``: None if another server
        is the standby at the start."""
        self._make_standby = make_standby
        self._replication = replication
        self._wire = wire
        self._standby = standby
        self._snapshot: list[bytes] = []
        """Parts of the coordinator's snapshot, until all have arrived."""

    def handle(self, event: Event) -> Decided:
        assert isinstance(event, ControlArrived)
        if isinstance(event.message, Append):
            self._append(event.peer, event.message)
        elif isinstance(event.message, InstallSnapshot):
            self._take_snapshot(event.peer, event.message)
        return ()

    def _take_snapshot(self, peer: int, message: InstallSnapshot) -> None:
        """Store a part of the snapshot. With the last part this server becomes the standby."""
        parts = self._snapshot
        if peer != COORDINATOR or self._standby is not None or message.part != len(parts):
            raise ProtocolError(
                f"{describe_peer(self.loop.transport.me)}: {describe_peer(peer)} sent part "
                f"{message.part} of the coordinator's snapshot; {describe_peer(COORDINATOR)} sends "
                f"the parts once and in order, and {len(parts)} have arrived"
            )
        parts.append(message.state)
        if len(parts) < message.num_parts:
            return
        state = b"".join(parts)
        parts.clear()
        self._standby = self._make_standby(state, message.told)
        self.loop.transport.send_control(COORDINATOR, AppendAck(number=message.number))

    def _append(self, peer: int, entry: Append) -> None:
        """Store an entry of the coordinator's log, and acknowledge it."""
        if peer != COORDINATOR or self._standby is None:
            raise ProtocolError(
                f"{describe_peer(self.loop.transport.me)}: {describe_peer(peer)} sent Append; "
                f"{describe_peer(COORDINATOR)} sends it to its standby"
            )
        for action in self._standby.coordinator_log.note(entry):
            self._standby.reports.note(action)
        self.loop.transport.send_control(COORDINATOR, AppendAck(number=entry.number))

    def know_sizes(self, sizes: list[int]) -> None:
        """The standby computes the sizes on its own, before any decision depends on them."""
        if self._standby is not None:
            self._standby.coordinator_log.coordinator.know_sizes(sizes)

    def on_lost(self, event: PeerLost) -> None:
        standby = self._standby
        if standby is not None and event.peer == standby.coordinator_log.coordinator_at:
            self._standby = None
            self._succeed(standby, event.who)

    def _succeed(self, standby: Standby, who: str) -> None:
        """Take over from the coordinator, described by ``who``. Serve its shard at once, so that
        ranks have an endpoint to send to."""
        coordinator_log, transport = standby.coordinator_log, self.loop.transport
        failed = coordinator_log.coordinator_at
        lost = {peer: name for peer, name in transport.lost.items() if peer != failed}
        for move in coordinator_log.moves:  # Moved may not have arrived yet
            self._replication.move(move.server, move.host)
        announcements = coordinator_log.announcements()
        seat: LoggedSeat | None = None
        if not coordinator_log.is_complete:
            seat = self._host(standby)
            for move in (*coordinator_log.moves, Move(COORDINATOR, transport.me)):
                seat.loop.transport.move(server_id(move.server), server_id(move.host))
        try:
            undone, actions = coordinator_log.succeed(who, lost=lost)
        except PsdistError:
            # The job ends. This rank writes the reports, because it is the coordinator now.
            standby.reports.succeed([])
            raise
        standby.reports.succeed(undone)
        for each in announcements:
            if seat is not None or each.peer != transport.me:
                transport.send_control(each.peer, each.message)
        if seat is None:
            self.loop.finish()
        else:
            seat.do(actions)

    def _host(self, standby: Standby) -> LoggedSeat:
        """Serve the shard of the coordinator here, with the coordinator next to it."""
        num_sets = self._replication.num_sets
        seats: list[LoggedSeat] = []

        def make_seats(replication: Replication) -> Sequence[ServerPart]:
            seat = LoggedSeat(standby.coordinator_log, standby.reports, replication)
            seats.append(seat)
            return (seat, *codec_sizes(self._wire, seat.know_sizes, num_known=num_sets))

        self._replication.host(COORDINATOR, make_seats)
        return seats[0]
