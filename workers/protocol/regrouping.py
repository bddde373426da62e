"""A worker whose group has lost others reports its standing, and receives that of the others; pure.

regrouping = Regrouping(seat)
regrouping.num_lost += 1                  # the coordinator has reported a failure
regrouping.is_due                         # True until this worker has reported
regrouping.tell(standing)                 # Regroup, for the coordinator
regrouping.answer                         # every standing, by place; None until all are here
"""

from __future__ import annotations

from collections.abc import Collection

from psdist.errors import ProtocolError
from psdist.protocol.control import Regroup, Regrouped
from psdist.protocol.ids import COORDINATOR, describe_peer
from psdist.workers.protocol.actions import Action, SendControl
from psdist.workers.protocol.seat import Seat


class Regrouping:
    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self.num_lost = 0
        """Failed workers of the group."""
        self._told = 0
        """Their number in the last report of this worker."""
        self._answer: list[bytes] | None = None

    @property
    def is_due(self) -> bool:
        """True if the group has lost workers since the last report of this worker."""
        return self._told < self.num_lost

    def lose(self, dead: Collection[int]) -> bool:
        """The coordinator has reported these failed workers. Return True if this worker has become
        the leader of its group, which continues without them."""
        if not self._seat.group_reforms:
            return False
        was_leader = self._seat.is_leader
        self.num_lost += self._seat.lose(dead)
        return self._seat.is_leader and not was_leader

    def tell(self, standing: bytes) -> list[Action]:
        """Send ``standing``, as :class:`Regroup` describes it."""
        self._told, self._answer = self.num_lost, None
        worker, num_lost = self._seat.worker, self._told
        message = Regroup(worker=worker, num_lost=num_lost, standing=standing)
        return [SendControl(COORDINATOR, message)]

    @property
    def answer(self) -> list[bytes] | None:
        """The standings of the remaining workers, by place; None while one of them is missing."""
        return None if self.is_due else self._answer

    def on_regrouped(self, peer: int, message: Regrouped) -> list[Action]:
        if peer != COORDINATOR or not 0 < message.num_lost <= self._told:
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} sent Regrouped of a group that "
                f"has lost {message.num_lost}; this worker has reported {self._told}"
            )
        if message.num_lost == self.num_lost:
            if len(message.standings) != len(self._seat.members):
                raise ProtocolError(
                    f"worker {self._seat.worker}: {describe_peer(peer)} sent Regrouped of "
                    f"{len(message.standings)} workers; {len(self._seat.members)} are left"
                )
            self._answer = message.standings
        return []
