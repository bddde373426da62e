"""Who reports on a rank: while it is the registrar, or may become it.

duty = Duty(context)
duty.begin(registrar, office, is_active=True)       # on server 0
duty.on_action(action), duty.on_idle()              # as the job goes
"""

from __future__ import annotations

from collections.abc import Callable

from psdist.protocol.control import Setup
from psdist.protocol.partition import Partition
from psdist.ranks.context import RankContext
from psdist.ranks.coordinating import coordinator_of, office_of
from psdist.ranks.reporter import Reporter
from psdist.servers.loop import Standby
from psdist.servers.protocol.coordinator import Coordinator
from psdist.servers.protocol.succession.office import Office, OfficeAction


class Duty:
    """Who reports on this rank: while it is the registrar, or may become it, somebody does."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._reporter: Reporter | None = None
        self._built: list[tuple[int, Partition, tuple[int, ...], Setup]] = []
        self.contained: Callable[[], list[list[int]]] = list
        """By set, by group: the iterations that the chunks of this server contain."""

    def begin(self, registrar: Coordinator, office: Office | None, *, is_active: bool) -> Reporter:
        """``office``: where shards have second copies."""
        made = Reporter(self._context, registrar, office=office, is_active=is_active)
        made.contained = lambda: self.contained()
        for each in self._built:
            made.on_built(*each)
        self._reporter = made
        return made

    def make_standby(self, state: bytes, told: bytes) -> Standby:
        """This rank is a later deputy. ``state``: the snapshot of the office; ``told``: what users
        have been told (:meth:`what_was_told`)."""
        office = office_of(self._context, coordinator_of(self._context), is_active=False)
        office.from_snapshot(state)
        return self.standby(office, told)

    def standby(self, office: Office, told: bytes = b"") -> Standby:
        """This rank is the deputy; ``told``: see :meth:`make_standby`."""
        reporter = self.begin(office.registrar, office, is_active=False)
        if told:
            reporter.go_on(told)
        return Standby(
            office=office,
            on_done=reporter.note,
            on_succeed=reporter.succeed,
            on_action=reporter.on_action,
            what_was_told=reporter.standing,
        )

    def what_was_told(self) -> bytes:
        assert self._reporter is not None
        return self._reporter.standing()

    def on_built(
        self, set_index: int, partition: Partition, owners: tuple[int, ...], setup: Setup
    ) -> None:
        self._built.append((set_index, partition, owners, setup))
        if self._reporter is not None:
            self._reporter.on_built(set_index, partition, owners, setup)

    def on_action(self, action: OfficeAction) -> None:
        assert self._reporter is not None
        self._reporter.on_action(action)

    def on_idle(self) -> None:
        if self._reporter is not None:
            self._reporter.on_idle()
