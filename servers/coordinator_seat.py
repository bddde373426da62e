"""The coordinator of the job, as a part of the loop of server 0.

    CoordinatorSeat(assemble(num_workers=2, num_servers=1), reports)

psdist.servers.protocol.coordinator decides. ``reports`` (psdist.ranks.reporter) writes files and
output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from psdist.protocol.coordinator_line import FOR_COORDINATOR
from psdist.protocol.events import ControlArrived, Event, PeerLost
from psdist.protocol.ids import is_spare, is_worker
from psdist.servers.loop import Decided, ServerPart
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.coordinator import Coordinator, CoordinatorAction
from psdist.servers.protocol.failover.coordinator_log import CoordinatorLog


class Reports:
    """Files and output of a coordinator and its standby. This class writes none."""

    def on_action(self, action: CoordinatorAction) -> None:
        """The coordinator of this process has decided this."""

    def note(self, action: CoordinatorAction) -> None:
        """The coordinator has done this; its standby is here."""

    def succeed(self, undone: Sequence[CoordinatorAction]) -> None:
        """The coordinator has failed and continues here; it may not have done ``undone``."""

    def to_snapshot(self) -> bytes:
        """Return what users have been told, for the next standby."""
        return b""


class CoordinatorSeat(ServerPart):
    TAKES: ClassVar[Sequence[type | int]] = FOR_COORDINATOR
    outlasts_shard = True

    def __init__(self, coordinator: Coordinator | CoordinatorLog, reports: Reports) -> None:
        self.coordinator = coordinator
        self._reports = reports

    def on_start(self) -> None:
        """Take note of ranks that failed before the job began: spares, and workers that were to
        wait for a place."""
        for peer, who in self.loop.transport.lost.items():
            if is_spare(peer) or is_worker(peer):
                self.on_lost(PeerLost(peer, who))

    def handle(self, event: Event) -> Decided:
        assert isinstance(event, ControlArrived)
        self.do(self.coordinator.handle(event.peer, event.message))
        return ()

    def on_lost(self, event: PeerLost) -> None:
        coordinator = self.coordinator
        lost = coordinator.on_lost if is_worker(event.peer) else coordinator.on_server_lost
        self.do(lost(event.peer, event.who))

    def know_sizes(self, sizes: list[int]) -> None:
        """``sizes``: by codec level, the bytes of one exchange of a parameter set."""
        self.do(self.coordinator.know_sizes(sizes))

    def do(self, actions: Iterable[CoordinatorAction]) -> None:
        for action in actions:
            if isinstance(action, SendControl):
                self.loop.transport.send_control(action.peer, action.message)
            else:
                self._do_here(action)
            if isinstance(action, self.coordinator.LAST):
                self.loop.finish()

    def _do_here(self, action: CoordinatorAction) -> None:
        self._reports.on_action(action)
