"""Who of a group that has lost workers has told where it stands, until all who are left have: the
registrar's, for groups that go on without their dead; pure.

The dead are those that all servers have taken in: a worker tells when it has heard of them, and is
answered when every other one has. Who dies meanwhile is waited for until that is declared, too;
what was told for fewer dead is forgotten then, and everybody tells again.

    regroups = Regroups([(0, 1, 2), (3,)])
    regroups.on_settled({1})
    regroups.on_told(Regroup(worker=0, num_lost=1, standing=b"..."))     # []
    regroups.on_told(Regroup(worker=2, num_lost=1, standing=b"..."))     # Regrouped for 0 and 2
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from psdist.errors import ProtocolError
from psdist.protocol.control import Regroup, Regrouped
from psdist.protocol.ids import worker_id
from psdist.servers.protocol.actions import SendControl


class Regroups:
    TAKES = (Regroup,)

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._members = [tuple(each) for each in groups]
        """Who is left of each group, as all servers know."""
        self._lost = [0] * len(self._members)
        """How many were lost."""
        self._group_of = {worker: at for at, each in enumerate(self._members) for worker in each}
        self._told: dict[int, dict[int, bytes]] = {}
        """By group, what its workers have told behind its last death."""

    def on_settled(self, dead: Collection[int]) -> None:
        """All servers have taken in that these are dead."""
        for group, members in enumerate(self._members):
            left = tuple(each for each in members if each not in dead)
            if left != members:
                self._lost[group] += len(members) - len(left)
                self._members[group] = left
                self._told.pop(group, None)

    def on_told(self, message: Regroup) -> list[SendControl]:
        """Raises :class:`ProtocolError` for what no worker says."""
        worker, num_lost = message.worker, message.num_lost
        group = self._group_of.get(worker)
        if group is None or not 0 < num_lost <= self._lost[group]:
            known = "none" if group is None else self._lost[group]
            raise ProtocolError(
                f"the registrar: worker {worker} sent Regroup of a group that has lost {num_lost}; "
                f"it has lost {known} and goes on"
            )
        if num_lost < self._lost[group]:
            return []  # it has not heard of the last death, and tells again when it has
        told, members = self._told.setdefault(group, {}), self._members[group]
        if worker in told:
            raise ProtocolError(f"the registrar: worker {worker} sent Regroup twice")
        told[worker] = message.standing
        if len(told) < len(members):
            return []
        del self._told[group]
        answer = Regrouped(num_lost=message.num_lost, standings=[told[each] for each in members])
        return [SendControl(worker_id(each), answer) for each in members]

    def members_with(self, worker: int) -> tuple[int, ...]:
        """Who is left of its group."""
        return self._members[self._group_of[worker]]
