"""Groups that shrink: live workers report where they are until all have; pure.

A worker reports when it has received the new view. When all live workers of its group have
reported, each gets the reports of all. A worker that fails in the meantime is waited for until its
failure is declared. Reports for fewer failures are then dropped, and the workers report again.

    regroups = Regroups([(0, 1, 2), (3,)])
    regroups.on_settled({1})
    regroups.on_told(Regroup(worker=0, num_lost=1, standing=b"..."))     # []
    regroups.on_told(Regroup(worker=2, num_lost=1, standing=b"..."))     # Regrouped for 0 and 2
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from psdist.controller.snapshots import Fields
from psdist.errors import ProtocolError
from psdist.protocol.control import Control, Regroup, Regrouped
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.coordinator import Actions, Coordinator, CoordinatorPart
from psdist.servers.protocol.round_control import RoundControl


class Regroups(CoordinatorPart):
    NAME = "regroups"
    TAKES = (Regroup,)
    STATE = Fields(
        {
            list[tuple[int, ...]]: "_members",
            list[int]: "_lost",
            dict[int, dict[int, bytes]]: "_told",
        }
    )

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        *,
        control: RoundControl | None = None,
    ) -> None:
        self._control = control
        self._members = [tuple(each) for each in groups]
        """Live workers of each group, in the last view."""
        self._lost = [0] * len(self._members)
        """How many were lost."""
        self._group_of = {worker: at for at, each in enumerate(self._members) for worker in each}
        self._told: dict[int, dict[int, bytes]] = {}
        """By group, the reports of its workers since the last failure."""

    def handle(self, peer: int, message: Control, job: Coordinator) -> Actions:
        assert isinstance(message, Regroup)
        job.require_worker(peer, message.worker, message)
        answers = self.on_told(message)
        if answers and self._control is not None:
            self._control.go_on(self.members_with(message.worker))
        return [*answers]

    def on_membership_changed(self, job: Coordinator) -> Actions:
        self.on_settled(job.membership.dead)
        return []

    def on_settled(self, dead: Collection[int]) -> None:
        """All servers have evicted these workers."""
        for group, members in enumerate(self._members):
            left = tuple(each for each in members if each not in dead)
            if left != members:
                self._lost[group] += len(members) - len(left)
                self._members[group] = left
                self._told.pop(group, None)

    def on_told(self, message: Regroup) -> list[SendControl]:
        """Raises :class:`ProtocolError` for a report that cannot be."""
        worker, num_lost = message.worker, message.num_lost
        group = self._group_of.get(worker)
        if group is None or not 0 < num_lost <= self._lost[group]:
            known = "none" if group is None else self._lost[group]
            raise ProtocolError(
                f"the coordinator: worker {worker} sent Regroup of a group that has lost "
                f"{num_lost}; it has lost {known} and continues"
            )
        if num_lost < self._lost[group]:
            return []  # it has not received the last failure, and reports again after that
        told, members = self._told.setdefault(group, {}), self._members[group]
        if worker in told:
            raise ProtocolError(f"the coordinator: worker {worker} sent Regroup twice")
        told[worker] = message.standing
        if len(told) < len(members):
            return []
        del self._told[group]
        answer = Regrouped(num_lost=message.num_lost, standings=[told[each] for each in members])
        return [SendControl(worker_id(each), answer) for each in members]

    def members_with(self, worker: int) -> tuple[int, ...]:
        """Live workers of its group."""
        return self._members[self._group_of[worker]]
