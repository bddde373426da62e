"""Who reports on a rank: while it is the coordinator, or may become it.

duty = Duty(context)
duty.begin(coordinator, coordinator_log, is_active=True)       # on server 0
duty.on_action(action), duty.on_idle()              # as the job goes
"""

from __future__ import annotations

from collections.abc import Callable

from psdist.protocol.control import Setup
from psdist.protocol.partition import Partition
from psdist.ranks.context import RankContext
from psdist.ranks.coordinating import coordinator_log_of, coordinator_of
from psdist.ranks.reporter import Reporter
from psdist.servers.loop import Standby
from psdist.servers.protocol.coordinator import Coordinator
from psdist.servers.protocol.failover.coordinator_log import CoordinatorLog, LogAction


class Duty:
    """Reports on this rank while it is the coordinator or the standby."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._reporter: Reporter | None = None
        self._built: list[tuple[int, Partition, tuple[int, ...], Setup]] = []
        self.contained: Callable[[], list[list[int]]] = list
        """By set, by group: the iterations that the chunks of this server contain."""

    def begin(
        self, coordinator: Coordinator, coordinator_log: CoordinatorLog | None, *, is_active: bool
    ) -> Reporter:
        """``coordinator log``: where shards have second copies."""
        made = Reporter(
            self._context, coordinator, coordinator_log=coordinator_log, is_active=is_active
        )
        made.contained = lambda: self.contained()
        for each in self._built:
            made.on_built(*each)
        self._reporter = made
        return made

    def make_standby(self, state: bytes, told: bytes) -> Standby:
        """This rank is a later standby. ``state``: the snapshot of the coordinator log; ``told``:
        what users have been told (:meth:`what_was_told`)."""
        coordinator_log = coordinator_log_of(
            self._context, coordinator_of(self._context), is_active=False
        )
        coordinator_log.from_snapshot(state)
        return self.standby(coordinator_log, told)

    def standby(self, coordinator_log: CoordinatorLog, told: bytes = b"") -> Standby:
        """This rank is the standby; ``told``: see :meth:`make_standby`."""
        reporter = self.begin(coordinator_log.coordinator, coordinator_log, is_active=False)
        if told:
            reporter.from_snapshot(told)
        return Standby(
            coordinator_log=coordinator_log,
            on_done=reporter.note,
            on_succeed=reporter.succeed,
            on_action=reporter.on_action,
            what_was_told=reporter.to_snapshot,
        )

    def what_was_told(self) -> bytes:
        assert self._reporter is not None
        return self._reporter.to_snapshot()

    def on_built(
        self, set_index: int, partition: Partition, owners: tuple[int, ...], setup: Setup
    ) -> None:
        self._built.append((set_index, partition, owners, setup))
        if self._reporter is not None:
            self._reporter.on_built(set_index, partition, owners, setup)

    def on_action(self, action: LogAction) -> None:
        assert self._reporter is not None
        self._reporter.on_action(action)

    def on_idle(self) -> None:
        if self._reporter is not None:
            self._reporter.on_idle()
