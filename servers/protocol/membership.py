"""Which groups there are, and which of them are suspended or have left; pure.

Every change is an event in the history. A group is *active* from its registration to its leave;
while it waits in a collective it is suspended: it keeps its weight, but nobody waits for it.

    membership = Membership()
    membership.join(0, [0, 1], clock=0)
    membership.suspend(0, seq=1)       # True
    membership.resume(1)               # [0]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from psdist.errors import ProtocolError
from psdist.protocol.ids import describe_peer, worker_id


@dataclass(slots=True)
class Member:
    group: int
    workers: tuple[int, ...]
    clock: int
    """Where its clock stood when it joined."""
    suspended_in: int | None = None
    """The number of the collective that it waits in."""
    has_left: bool = False


class Membership:
    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        self._group_of_peer: dict[int, int] = {}
        self._resumed_up_to = -1
        self.num_active_workers = 0
        """Workers in groups that have not left: the denominator of a group's weight."""

    def members(self) -> Iterator[Member]:
        return iter(self._members.values())

    def join(self, group: int, workers: Sequence[int], *, clock: int) -> None:
        if group in self._members:
            raise ProtocolError(f"group {group} registered twice")
        self._members[group] = Member(group, tuple(workers), clock)
        self._group_of_peer.update((worker_id(worker), group) for worker in workers)
        self.num_active_workers += len(workers)

    def group_of(self, peer: int) -> int:
        group = self._group_of_peer.get(peer)
        if group is None:
            raise ProtocolError(f"{describe_peer(peer)} sent a push before its group registered")
        return group

    def num_workers_of(self, group: int) -> int:
        return len(self._members[group].workers)

    def suspend(self, group: int, *, seq: int) -> bool:
        """False if collective ``seq`` is over already (its Resume came first)."""
        if seq <= self._resumed_up_to:
            return False
        self._member(group).suspended_in = seq
        return True

    def resume(self, seq: int) -> list[int]:
        """Collective ``seq`` is over: the groups that waited in it."""
        self._resumed_up_to = max(self._resumed_up_to, seq)
        resumed: list[int] = []
        for member in self._members.values():
            if member.suspended_in is not None and member.suspended_in <= seq:
                member.suspended_in = None
                resumed.append(member.group)
        return resumed

    def leave(self, group: int) -> None:
        member = self._member(group)
        member.has_left = True
        member.suspended_in = None
        self.num_active_workers -= len(member.workers)

    def _member(self, group: int) -> Member:
        """A registered group that has not left."""
        member = self._members.get(group)
        if member is None:
            raise ProtocolError(f"group {group} was suspended or left before it registered")
        if member.has_left:
            raise ProtocolError(f"group {group} was suspended or left after it had left")
        return member
